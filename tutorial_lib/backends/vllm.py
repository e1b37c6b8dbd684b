"""vLLM behind `LLM`, for comparison and for models over several machines: the only module that imports the library.

Written for vLLM 0.24.0 (`vllm_calls.FOLLOWS`). Drives its `LLMEngine` step by step, so that every round has its time.
What a step drafted and accepted comes from the engine's own statistics, through a stat logger; where they cannot tell
(several requests drafting different numbers of tokens in one step) the request has no rounds, and its acceptance
figures are None: not available.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any

from ..config import (
    DecodingBaseConfig,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    NGramDecodingConfig,
    SamplingParams,
    SimulatedAcceptance,
)
from ..engine.detokenize import Detokenizer
from ..errors import BackendUnavailable, OptionError, PromptError
from ..models import Checkpoint, check_pair, load_tokenizer, resolve
from ..results import Generation, Round
from . import vllm_calls as calls

Say = Callable[[str], None]
UNKNOWN_TOKEN = -1  # a draft token that was proposed and rejected: vLLM counts them and does not name them
INSTALL = f"on Linux with an NVIDIA GPU, in an environment of its own: pip install vllm=={calls.FOLLOWS}"


class VllmBackend:
    """model: a checkpoint or its name. See `tutorial_lib.LLM` and `vllm_calls.engine_args`.

    simulated_acceptance: vLLM's synthetic rejection sampling accepts as many tokens as are asked for, right or wrong:
    speed is real, text is meaningless and left out, and every result is marked `is_simulated`.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        speculative_config: DecodingBaseConfig | None = None,
        kv_cache_config: KvCacheConfig | None = None,
        dtype: str = "auto",
        max_batch_size: int | None = None,
        max_seq_len: int | None = None,
        device: str = "auto",
        tensor_parallel_size: int = 1,
        simulated_acceptance: SimulatedAcceptance | None = None,
        say: Say = lambda line: None,
    ) -> None:
        calls.refuse_unsupported(speculative_config, kv_cache_config, dtype, simulated_acceptance)
        self._library = library()
        if device not in ("auto", "cuda"):
            raise OptionError(f"device is {device!r}", "'auto' or 'cuda' for vLLM", "leave it out")
        self._folders = contextlib.ExitStack()
        self._dtype = dtype
        start = time.perf_counter()
        target, drafter = resolve(str(model), say=say), _drafter(speculative_config, say)
        if drafter is not None and isinstance(speculative_config, DraftTargetDecodingConfig):
            check_pair(target, drafter)
            _need_equal_vocabulary(target, drafter)
        elif drafter is not None:
            calls.refuse_head(drafter.name, drafter.config)
        self.tokenizer = load_tokenizer(target)
        self._eos = target.eos_token_ids()
        self._vocab = int(target.config["vocab_size"])
        self._limit = max_seq_len or int(target.config.get("max_position_embeddings", 2**31))
        self._fixed_k = speculative_config is not None and not isinstance(speculative_config, NGramDecodingConfig)
        self._k = speculative_config.max_draft_len if speculative_config else 0
        is_stand_in = bool(getattr(self._library, "IS_STAND_IN", False))
        self._is_simulated = simulated_acceptance is not None or target.is_dummy or is_stand_in
        self._stats = StepStats()
        self._number = 0
        self._running: dict[str, _Request] = {}
        arguments = calls.engine_args(
            self._folder_of(target),
            config=target.config,
            speculative=speculative_config,
            drafter=None if drafter is None else self._folder_of(drafter),
            drafter_config=None if drafter is None else drafter.config,
            simulated=simulated_acceptance,
            kv=kv_cache_config,
            dtype=dtype,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            tensor_parallel_size=tensor_parallel_size,
            free_share=_free_share(tensor_parallel_size, is_stand_in),
            is_dummy=target.is_dummy,
        )
        try:
            self._engine: Any = self._load(arguments)
        except BaseException:
            self._folders.close()
            raise
        self.info: dict[str, Any] = {
            "backend": "vllm",
            "vllm": self._library.__version__,
            "is_stand_in": is_stand_in,
            "target": target.name,
            "drafter": drafter.name if drafter else speculative_config and speculative_config.decoding_type.lower(),
            "dtype": "fp8" if dtype == "fp8" else arguments["dtype"],
            "drafter_dtype": arguments.get("speculative_config", {}).get("quantization") or arguments["dtype"],
            "device": "stand-in" if is_stand_in else _device_type(),
            "tensor_parallel_size": tensor_parallel_size,
            "max_draft_len": self._k,
            "limits": {"max_batch_size": max_batch_size, "max_seq_len": self._limit},
            "tactics": {},
            "build_s": 0.0,
            "load_s": round(time.perf_counter() - start, 3),
            "eos_token_ids": sorted(self._eos),
            "is_simulated": self._is_simulated,
            "notes": self._notes(is_stand_in),
        }

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Generation]:
        requests = self._open(prompts, params)
        for _ in self._run(requests):
            pass
        return [request.generation() for request in requests]

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Generation]:
        requests = self._open([prompt], [params])
        return (requests[0].generation() for _ in self._run(requests))

    @property
    def server(self) -> VllmServer:
        return VllmServer(self._open, self._step, self._stats)

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.engine_core.shutdown()
        self._folders.close()
        gc.collect()

    # ---- one call -------------------------------------------------------------------------------------------------

    def _open(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[_Request]:
        """Hand requests over; `_step` brings them on."""
        if self._engine is None:
            raise OptionError("this LLM was closed", "an open one", "make a new LLM")
        for prompt, one in zip(prompts, params, strict=True):
            self._check(prompt, one)
        requests = [
            _Request(list(prompt), one, self._eos, self.tokenizer, self._is_simulated, time.perf_counter())
            for prompt, one in zip(prompts, params, strict=True)
        ]
        kind = import_module("vllm.sampling_params").RequestOutputKind.DELTA
        try:
            for request in requests:
                self._number += 1
                arguments = calls.sampling_params(request.params, sorted(self._eos))
                sampling = self._library.SamplingParams(**arguments, output_kind=kind)
                self._engine.add_request(
                    str(self._number), {"type": "token", "prompt_token_ids": request.prompt_ids}, sampling
                )
                self._running[str(self._number)] = request
        except BaseException:
            self._end(requests)
            raise
        return requests

    def _step(self) -> None:
        """One step of everything that runs, and what it brought each request."""
        is_alone = len(self._running) == 1
        self._stats.clear()
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            request = self._running.get(output.request_id)
            if request is None:
                continue
            request.take(output.outputs[0], now - request.start_s, self._drafted(is_alone))
            if request.is_over:
                del self._running[output.request_id]
                if not output.finished:  # by a stop string, which vLLM was not told of
                    self._engine.abort_request([output.request_id])

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        if not prompt:
            raise PromptError("the prompt is empty", "at least one token", "give it text")
        if bad := [token for token in prompt if not 0 <= token < self._vocab]:
            raise PromptError(f"the prompt holds id {bad[0]}", f"ids from 0 to {self._vocab - 1}")
        if len(prompt) + params.max_tokens > self._limit:
            raise PromptError(
                f"prompt of {len(prompt)} tokens and {params.max_tokens} new ones",
                f"at most {self._limit} together",
                "shorten the prompt or ask for fewer tokens",
            )

    def _run(self, requests: Sequence[_Request]) -> Iterator[None]:
        """Step until all of these are done; a turn after every step. Left early, they are ended."""
        try:
            while not all(request.is_over for request in requests):
                self._step()
                yield
        finally:
            self._end(requests)

    def _end(self, requests: Sequence[_Request]) -> None:
        """Those of them that still run: nobody reads them any more."""
        left = [name for name, request in self._running.items() if any(request is one for one in requests)]
        for name in left:
            del self._running[name]
        if left and self._engine is not None:
            self._engine.abort_request(left)

    def _drafted(self, is_alone: bool) -> tuple[int, int | None] | None:
        """Of one request in this step: draft tokens verified, and how many of them were accepted (None: as many as its
        new tokens say). None altogether where the statistics are of several requests that may draft differently."""
        if is_alone:
            return self._stats.draft_tokens, self._stats.accepted_tokens
        return (self._k, None) if self._fixed_k or self._k == 0 else None

    # ---- loading --------------------------------------------------------------------------------------------------

    def _folder_of(self, checkpoint: Checkpoint) -> str:
        """A dummy has no folder: one is made that holds its configuration, from which vLLM makes weights of its own, in
        FP8 from the start if asked: of a checkpoint in more bits it would first hold all of them."""
        if checkpoint.folder is not None:
            return str(checkpoint.folder)
        config = dict(checkpoint.config)
        if self._dtype == "fp8":
            config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
        folder = self._folders.enter_context(tempfile.TemporaryDirectory(prefix="workbook-dummy-"))
        (Path(folder) / "config.json").write_text(json.dumps(config), "utf-8")
        return folder

    def _load(self, arguments: dict[str, Any]) -> Any:
        version = self._library.__version__
        try:
            made = self._library.EngineArgs(**arguments)
        except TypeError as error:
            raise BackendUnavailable(
                f"vLLM {version} does not know an option of this backend ({error})", f"vLLM {calls.FOLLOWS}", INSTALL
            ) from error
        try:
            return self._library.LLMEngine.from_engine_args(made, stat_loggers=[lambda *_, **__: self._stats])
        except (ValueError, RuntimeError, ImportError, OSError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise BackendUnavailable(
                f"vLLM {version} could not load {arguments['model']}: {lines[-1]}",
                "a model and options that it accepts",
                "see its messages above; smaller limits or free_gpu_memory_fraction leave more room",
            ) from error

    def _notes(self, is_stand_in: bool) -> list[str]:
        notes = ["drafting and verifying are one step inside the library: all of a round's time counts as verifying"]
        if self._k:
            notes.append("rejected draft tokens are counted by vLLM and not named")
        if self._library.__version__.split("+")[0] != calls.FOLLOWS:
            notes.append(f"vLLM {self._library.__version__} runs; this backend was written for {calls.FOLLOWS}")
        if is_stand_in:
            notes.append("a stand-in of the library answered: nothing was computed, no figure means anything")
        return notes


def library() -> Any:
    """vLLM, imported. Raises `BackendUnavailable` with one line where it is missing or does not import."""
    if util.find_spec("vllm") is None:
        raise BackendUnavailable("vLLM is not installed", "", INSTALL)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # it would report to its makers
    try:
        found = import_module("vllm")
        found.EngineArgs, found.LLMEngine, found.SamplingParams  # noqa: B018 - loaded on first use
        return found
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        said = " ".join(str(error).split())[:200]
        raise BackendUnavailable(f"importing vLLM {_installed()} fails: {said}", "", INSTALL) from error


def _installed() -> str:
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return "(not known to pip)"


def _device_type() -> str:
    return str(import_module("vllm.platforms").current_platform.device_type)


def _drafter(config: DecodingBaseConfig | None, say: Say) -> Checkpoint | None:
    if isinstance(config, DraftTargetDecodingConfig):
        return resolve(str(config.speculative_model_dir), say=say)
    if isinstance(config, EagleDecodingConfig):
        if config.speculative_model_dir is None:
            raise OptionError("EagleDecodingConfig has no head", "speculative_model_dir", "name one")
        return resolve(str(config.speculative_model_dir), say=say)
    return None


def _need_equal_vocabulary(target: Checkpoint, drafter: Checkpoint) -> None:
    sizes = [checkpoint.config["vocab_size"] for checkpoint in (target, drafter)]
    if sizes[0] != sizes[1]:
        raise OptionError(
            f"vocabulary sizes are {sizes[0]} (target) and {sizes[1]} (drafter)",
            "the same size: vLLM refuses others",
            "choose the torch backend, which runs this pair",
        )


def _free_share(count: int, is_stand_in: bool) -> float:
    """Free memory / memory of the fullest of the first `count` GPUs."""
    from .trtllm.steps import gpus

    if is_stand_in:
        return 1.0
    here = gpus()
    if here and len(here) < count:
        raise BackendUnavailable(f"{len(here)} GPU(s) here", f"{count}, as tensor_parallel_size says", "ask for fewer")
    return min((gpu.free_gib / gpu.total_gib for gpu in here[:count]), default=1.0)


@dataclass(frozen=True)
class VllmServer:
    """What a load is put on, see `bench.load.Server`."""

    open: Callable[[Sequence[Sequence[int]], Sequence[SamplingParams]], list[_Request]]
    step: Callable[[], None]
    stats: StepStats

    def occupancy(self) -> tuple[int, int, float]:
        """As vLLM's own scheduler had it in the last step."""
        return self.stats.running, self.stats.waiting, self.stats.kv_use


# ---- what a step was ------------------------------------------------------------------------------------------------


class StepStats:
    """A stat logger, as vLLM calls one after every step: keeps what the last one drafted, and who was served."""

    def __init__(self) -> None:
        self.running, self.waiting, self.kv_use = 0, 0, 0.0
        self.clear()

    def clear(self) -> None:
        self.draft_tokens = self.accepted_tokens = 0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self.running = int(getattr(scheduler_stats, "num_running_reqs", 0))
            self.waiting = int(getattr(scheduler_stats, "num_waiting_reqs", 0))
            self.kv_use = float(getattr(scheduler_stats, "kv_cache_usage", 0.0))
        spec = getattr(scheduler_stats, "spec_decoding_stats", None)
        if spec is not None:
            self.draft_tokens += int(spec.num_draft_tokens)
            self.accepted_tokens += int(spec.num_accepted_tokens)

    def log(self) -> None:
        """vLLM's own loggers print."""

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """This engine is never put to sleep."""


@dataclass
class _Request:
    """One request while it runs: what every step brought, and when. start_s: by `time.perf_counter`."""

    prompt_ids: list[int]
    params: SamplingParams
    eos: frozenset[int]
    tokenizer: Any
    is_simulated: bool
    start_s: float
    token_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: int | str | None = None
    ttft_s: float = 0.0
    latency_s: float = 0.0
    logprobs: list[dict[int, float]] = field(default_factory=list)
    knows_drafts: bool = True

    def __post_init__(self) -> None:
        stops = () if self.is_simulated else self.params.stop_strings
        self._reader = Detokenizer(self.tokenizer, stops)
        self._read = 0

    @property
    def is_over(self) -> bool:
        return bool(self.finish_reason)

    def take(self, completion: Any, now: float, drafted: tuple[int, int | None] | None) -> None:
        """The new tokens of a step that ended `now` seconds after the start; drafted: see `VllmBackend._drafted`."""
        there, before, self.latency_s = len(self.token_ids), self.latency_s, now
        self.token_ids += [int(token) for token in completion.token_ids]
        if completion.logprobs:
            self.logprobs += [{int(t): float(v.logprob) for t, v in row.items()} for row in completion.logprobs]
        self._find_end(completion)
        emitted = tuple(self.token_ids[there:])
        if there == 0 and emitted:
            self.ttft_s = now
            self.knows_drafts = len(emitted) == 1  # the first token is prefill's, and comes alone
        elif emitted:
            count, accepted = drafted or (0, None)
            accepted = len(emitted) - 1 if accepted is None else accepted
            self.knows_drafts &= drafted is not None and len(emitted) - 1 <= accepted <= count
            ids = (emitted + (UNKNOWN_TOKEN,) * count)[:accepted] + (UNKNOWN_TOKEN,) * (count - accepted)
            self.rounds.append(Round(ids, accepted, emitted, 0.0, now - before, now))

    def _find_end(self, completion: Any) -> None:
        if completion.finish_reason not in ("stop", "length", None):
            raise BackendUnavailable(
                f"vLLM ended a request by {completion.finish_reason!r}", "'stop' or 'length'", "see its messages"
            )
        self.finish_reason = completion.finish_reason or ""
        if self.finish_reason == "stop":
            stop = completion.stop_reason
            self.stop_reason = stop if stop in (self.params.stop_token_ids or ()) else None
        if self.params.stop_strings and not self.is_simulated and self._read_text():
            self.token_ids, self.logprobs = self.token_ids[: self._read], self.logprobs[: self._read]
            self.finish_reason, self.stop_reason = "stop", self._reader.stopped_by

    def _read_text(self) -> bool:
        """Detokenize what is new, a token that ended the request aside; True if a stop string is complete."""
        is_end_token = self.finish_reason == "stop" and not isinstance(self.stop_reason, str)
        for token in self.token_ids[self._read : len(self.token_ids) - is_end_token]:
            self._read += 1
            if self._reader.push(token):
                return True
        return False

    def generation(self) -> Generation:
        """What is known so far. Text is decoded here, after the timed steps."""
        text = ""
        if not self.is_simulated:
            self._read_text()
            text = self._reader.finish() if self.finish_reason else self._reader.streamable
        return Generation(
            prompt_token_ids=self.prompt_ids,
            token_ids=list(self.token_ids),
            text=text,
            finish_reason=self.finish_reason,
            rounds=list(self.rounds) if self.knows_drafts else [],
            ttft_s=self.ttft_s,
            latency_s=self.latency_s,
            logprobs=list(self.logprobs) if self.params.logprobs is not None else None,
            stop_reason=self.stop_reason,
            is_simulated=self.is_simulated,
        )
