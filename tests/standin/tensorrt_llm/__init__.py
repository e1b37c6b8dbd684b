"""A STAND-IN for NVIDIA's tensorrt_llm, for tests only: it computes nothing. See ../README.md.

Classes take exactly the arguments that the record of the played release has, and `LLM` answers with results of the
recorded form. Tokens come out of the prompt itself, acceptance follows a fixed pattern.
"""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

from tutorial_lib.backends.trtllm import contract
from tutorial_lib.backends.trtllm.support import parse_version

IS_STAND_IN = True
__version__ = os.environ.get("STAND_IN_TENSORRT_LLM", "1.2.1")
_VERSION = parse_version(__version__)
RECORD = contract.record_for(_VERSION)
STEP_S = 0.0005
CALLS: list[dict] = []  # every object that was made, for tests


class Recorded:
    """An object whose constructor takes what the record says and nothing else."""

    record_name = ""

    def __init__(self, **kwargs) -> None:
        self.call = {"class": self.record_name, "kwargs": {key: _as_data(value) for key, value in kwargs.items()}}
        contract.check_call(RECORD, self.call)
        CALLS.append(self.call)
        self.__dict__.update(kwargs)


def _as_data(value):
    return value.call if isinstance(value, Recorded) else value


def recorded_class(name: str, record_name: str | None = None, base: type = Recorded) -> type:
    if (record_name or name) not in RECORD.classes:
        raise AttributeError(f"tensorrt_llm {__version__} has no {name}")
    return type(name, (base,), {"record_name": record_name or name})


class BaseLLM(Recorded):
    """Both LLM classes: `generate`, `generate_async`, `tokenizer`."""

    def generate(self, inputs, sampling_params=None, **kwargs):
        _check_method("generate", kwargs)
        is_single = isinstance(inputs, str) or isinstance(inputs[0], int)
        found = [self.generate_async(one, sampling_params).result() for one in ([inputs] if is_single else inputs)]
        return found[0] if is_single else found

    def generate_async(self, inputs, sampling_params=None, streaming=False, **kwargs):
        _check_method("generate_async", kwargs)
        drafting = self.call["kwargs"].get("speculative_config")
        return RequestOutput(list(inputs), sampling_params, drafting, streaming)


def _check_method(name: str, kwargs: dict) -> None:
    unknown = [key for key in kwargs if key not in RECORD.methods[name]]
    if unknown:
        raise contract.ContractViolation(f"LLM.{name} has no argument {unknown[0]!r}")


class RequestOutput:
    """Attributes of the record, no others. Iterating waits for the next round, as the library's does."""

    def __init__(self, prompt_ids, params, drafting, streaming) -> None:
        self.request_id, self.prompt, self.prompt_token_ids = 1, None, prompt_ids
        self.outputs = [CompletionOutput()]
        self.context_logits, self.finished = None, False
        self.decoding_iter, self.cached_tokens = 0, 0
        self.avg_decoded_tokens_per_iter, self.metrics_dict = None, {}
        self._steps = _steps(self, params, drafting)
        self._streaming = streaming

    def __iter__(self):
        return self

    def __next__(self):
        if not self._streaming:
            if self.finished:
                raise StopIteration
            return self.result()
        next(self._steps)
        return self

    def result(self, timeout=None):
        for _ in self._steps:
            pass
        return self

    def abort(self) -> None:
        self.finished = True

    def aborted(self) -> bool:
        return False


class CompletionOutput:
    def __init__(self) -> None:
        self.index, self.text, self.token_ids = 0, "", []
        self.cumulative_logprob, self.logprobs, self.prompt_logprobs = None, [], None
        self.finish_reason, self.stop_reason = None, None
        self.generation_logits = self.additional_context_outputs = self.additional_generation_outputs = None
        self.disaggregated_params = self.request_perf_metrics = None
        self.text_diff, self.token_ids_diff, self.logprobs_diff = "", [], []

    @property
    def length(self) -> int:
        return len(self.token_ids)


def _steps(request: RequestOutput, params, drafting):
    """Prefill, then one step per round. The answer depends on the prompt alone, never on the drafting."""
    completion = request.outputs[0]
    wanted = params.call["kwargs"]
    stops = set(wanted.get("stop_token_ids") or ())
    text = _answer(request.prompt_token_ids, wanted.get("max_tokens", 32), stops)
    at, round_number = 0, 0
    while not completion.finish_reason:
        time.sleep(STEP_S)
        size = 1 if round_number == 0 else 1 + _accepted(round_number, drafting)
        completion.token_ids_diff = text[at : at + size]
        completion.token_ids = completion.token_ids + completion.token_ids_diff
        if wanted.get("logprobs") is not None:
            completion.logprobs += [{t: SimpleNamespace(logprob=-0.5, rank=1)} for t in completion.token_ids_diff]
        at += size
        if at >= len(text):
            is_stop = bool(completion.token_ids) and completion.token_ids[-1] in stops
            completion.finish_reason = "stop" if is_stop else "length"
            completion.stop_reason = completion.token_ids[-1] if is_stop else None
            request.finished = True
        request.decoding_iter = round_number  # prefill is iteration 0
        request.avg_decoded_tokens_per_iter = len(completion.token_ids) / (round_number + 1)
        round_number += 1
        yield


def _answer(prompt_ids: list[int], count: int, stops: set[int]) -> list[int]:
    words = [token for token in prompt_ids if token not in stops] or [1]
    text = [words[(7 * i + 3) % len(words)] for i in range(count)]
    stop_after = os.environ.get("STAND_IN_STOP_AFTER")
    if stop_after and stops and int(stop_after) < count:
        text = [*text[: int(stop_after)], min(stops)]
    return text


def _accepted(round_number: int, drafting) -> int:
    if drafting is None:
        return 0
    forced = os.environ.get("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "")
    if forced.isdigit():
        return int(forced)
    longest = min(drafting["kwargs"].get("max_draft_len", 4), 4)
    return (3 * round_number + 1) % (longest + 1)


def __getattr__(name: str):
    if name == "LLM" and _VERSION.release >= (1, 0):
        return recorded_class("LLM", base=BaseLLM)
    if name == "SamplingParams" and _VERSION.release >= (1, 0):
        return recorded_class(name)
    raise AttributeError(f"module 'tensorrt_llm' (stand-in, {__version__}) has no attribute {name!r}")
