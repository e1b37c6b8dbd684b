"""A STAND-IN for vLLM, for tests only: it computes nothing. See ../README.md.

`LLMEngine` answers step by step as the real one does: new tokens only, the statistics of a step to the stat loggers
first. What it is called with is checked against ../contract.json.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

CONTRACT = json.loads((Path(__file__).parents[1] / "contract.json").read_text("utf-8"))
IS_STAND_IN = True
__version__ = CONTRACT["version"]
STEP_S = 0.0005
CALLS: list[tuple[str, dict]] = []  # what was made and called, for tests
SETTINGS = {"stop_after": None}  # an answer ends with a stop token behind so many tokens, if one was asked for


def checked(known: list[str], given: dict, what: str) -> None:
    if unknown := [name for name in given if name not in known]:
        raise TypeError(f"{what} got an unexpected keyword argument {unknown[0]!r}")


class Recorded:
    """Takes the fields that the contract has for its class, and no others."""

    def __init__(self, **kwargs) -> None:
        name = type(self).__name__
        checked(CONTRACT["fields"][name], kwargs, name)
        CALLS.append((name, kwargs))
        self.__dict__.update(kwargs)


class SamplingParams(Recorded):
    pass


class EngineArgs(Recorded):
    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        checked(CONTRACT["fields"]["SpeculativeConfig"], kwargs.get("speculative_config") or {}, "SpeculativeConfig")
        if not (Path(kwargs["model"]) / "config.json").is_file():
            raise ValueError(f"no config.json in {kwargs['model']}")


class LLMEngine:
    def __init__(self, arguments: EngineArgs, loggers: list) -> None:
        self.speculative = getattr(arguments, "speculative_config", None) or {}
        self.loggers = [make(None, 0) for make in loggers]
        for logger in self.loggers:
            logger.log_engine_initialized()
        self.running: dict[str, SimpleNamespace] = {}
        self.engine_core = SimpleNamespace(shutdown=lambda: CALLS.append(("shutdown", {})))

    @classmethod
    def from_engine_args(cls, engine_args, **kwargs):
        checked(CONTRACT["arguments"]["LLMEngine"]["from_engine_args"], kwargs, "from_engine_args")
        return cls(engine_args, kwargs.get("stat_loggers") or [])

    def add_request(self, request_id, prompt, params, **kwargs):
        checked(CONTRACT["arguments"]["LLMEngine"]["add_request"], kwargs, "add_request")
        assert prompt.keys() == {"type", "prompt_token_ids"} and prompt["type"] == "token"
        assert isinstance(request_id, str) and params.output_kind.name == "DELTA"
        stops = set(params.stop_token_ids)
        words = [token for token in prompt["prompt_token_ids"] if token not in stops] or [1]
        answer = [words[(7 * i + 3) % len(words)] for i in range(params.max_tokens)]
        if SETTINGS["stop_after"] is not None and stops:
            answer = [*answer[: SETTINGS["stop_after"]], min(stops)][: params.max_tokens]
        self.running[request_id] = SimpleNamespace(answer=answer, at=0, round=0, params=params, stops=stops)
        return request_id

    def abort_request(self, request_ids, internal=False):
        CALLS.append(("abort_request", {"request_ids": request_ids}))
        for name in request_ids:
            self.running.pop(name, None)

    def step(self):
        time.sleep(STEP_S)
        sums = {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}
        outputs = [self._advance(name, sums) for name in list(self.running)]
        spec = SimpleNamespace(**sums) if sums["num_drafts"] else None
        checked(CONTRACT["fields"]["SpecDecodingStats"], sums, "SpecDecodingStats")
        of_step = {"spec_decoding_stats": spec, "num_running_reqs": len(outputs), "num_waiting_reqs": 0}
        of_step["kv_cache_usage"] = len(outputs) / 100
        checked(CONTRACT["fields"]["SchedulerStats"], of_step, "SchedulerStats")
        for logger in self.loggers:
            logger.record(SimpleNamespace(**of_step), None, mm_cache_stats=None, engine_idx=0)
        return outputs

    def _advance(self, name, sums):
        request = self.running[name]
        drafted = accepted = 0
        if request.round and self.speculative:
            drafted, accepted = self._draft(request)
        if drafted:
            sums["num_drafts"] += 1
            sums["num_draft_tokens"] += drafted
            sums["num_accepted_tokens"] += accepted
        new = request.answer[request.at : request.at + 1 + accepted]
        request.at += len(new)
        request.round += 1
        is_done = request.at >= len(request.answer)
        is_stop = is_done and new[-1] in request.stops
        logprobs = None
        if getattr(request.params, "logprobs", None) is not None:
            logprobs = [{token: SimpleNamespace(logprob=-0.5, rank=1)} for token in new]
        fields = {
            "index": 0, "text": "", "token_ids": new, "cumulative_logprob": None, "logprobs": logprobs,
            "finish_reason": ("stop" if is_stop else "length") if is_done else None,
            "stop_reason": new[-1] if is_stop else None,
        }  # fmt: skip
        checked(CONTRACT["fields"]["CompletionOutput"], fields, "CompletionOutput")
        if is_done:
            del self.running[name]
        return SimpleNamespace(request_id=name, outputs=[SimpleNamespace(**fields)], finished=is_done)

    def _draft(self, request):
        k = self.speculative["num_speculative_tokens"]
        if self.speculative.get("rejection_sample_method") == "synthetic":
            return k, round(self.speculative["synthetic_acceptance_length"]) - 1
        if self.speculative["method"] == "ngram" and request.round % 3 == 0:
            return 0, 0  # nothing was found
        return k, (3 * request.round + 1) % (k + 1)
