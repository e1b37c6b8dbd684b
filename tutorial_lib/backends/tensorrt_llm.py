"""NVIDIA TensorRT-LLM behind `LLM`: the only module that imports the library.

One adapter per flow, chosen by the installed release and the method asked for: `_LlmFlow` calls `tensorrt_llm.LLM`
(PyTorch, 1.0 on) or `tensorrt_llm._tensorrt_engine.LLM` (engines, 1.0 to 1.2), `EngineFlow` runs engines that
`trtllm-build` made with the release's own `examples/run.py` (0.14 to 1.2). What a release cannot do is refused by name
before anything is loaded. The library is first imported in a process of its own with a time limit (`trtllm/probe.py`).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from ..config import (
    DecodingBaseConfig,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    SamplingParams,
    SimulatedAcceptance,
)
from ..engine_dir import is_engine_dir
from ..errors import BackendUnavailable, EngineDirError, OptionError
from ..models import Checkpoint, check_pair, load_tokenizer, resolve
from ..results import Generation
from .trtllm import calls, commands, outputs, steps
from .trtllm.engine_flow import EngineFlow
from .trtllm.probe import ProbeResult, probe
from .trtllm.shared import STAND_IN_NOTE, Setup, check_length, drafter_label, refused
from .trtllm.support import choose_flow, method_of, parse_version, refuse_own_options

Say = Callable[[str], None]
PROBE_LIMIT_S = 180.0  # a first import from a cold disk takes its time; the doctor waits 8 s
GIB = 2**30


class TensorRTLLMBackend:
    """model: a checkpoint, or an engine directory that a plan's build steps made. See `tutorial_lib.LLM`.

    flow: `pytorch`, `engine_api` or `engine`; None takes what the release and the method call for. An engine
    directory is always run by `engine`. simulated_acceptance: a whole number of tokens comes out of every round (1.2
    on, PyTorch flow), right or wrong: speed is real, text is meaningless, every result is marked `is_simulated`; so is
    everything from a `dummy:` model and from a stand-in of the library.
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
        flow: str | None = None,
        simulated_acceptance: SimulatedAcceptance | None = None,
        say: Say = lambda line: None,
    ) -> None:
        if device != "auto" and not device.startswith("cuda"):
            raise OptionError(f"device is {device!r}", "'auto' or 'cuda' for TensorRT-LLM", "leave it out")
        library = _need_library()
        version = parse_version(library.version or "")
        is_engine = is_engine_dir(model)
        if is_engine and flow not in (None, "engine"):
            raise OptionError(f"flow {flow!r} was asked of an engine directory", "flow 'engine'", "leave flow out")
        asked = flow or ("engine" if is_engine or version.release < (1, 0) else None)
        flow = choose_flow(version, method_of(speculative_config, asked), asked)
        refuse_own_options(speculative_config, version, flow)
        if flow == "engine" and not is_engine:
            raise EngineDirError(
                f"{model} is a checkpoint, and TensorRT-LLM {version} runs engines in this flow",
                "an engine directory",
                "build one: workbook bench --profile tensorrt_llm --experiment NAME, or take 1.0 or newer",
            )
        setup = Setup(
            version, library.is_stand_in, speculative_config, kv_cache_config, dtype, max_batch_size, max_seq_len,
            tensor_parallel_size, _forced_tokens(simulated_acceptance), say,
        )  # fmt: skip
        start = time.perf_counter()
        self._flow: _Flow | None = (
            EngineFlow(Path(model), setup) if flow == "engine" else _LlmFlow(model, setup, flow == "engine_api")
        )
        self.tokenizer = self._flow.tokenizer
        self.info: dict[str, Any] = {
            "backend": "tensorrt_llm",
            "tensorrt_llm": str(version),
            "flow": flow,
            "is_stand_in": library.is_stand_in,
            "method": method_of(speculative_config, flow),
            "device": _device_name(library, tensor_parallel_size),
            "max_draft_len": calls.most_accepted(speculative_config),
            "tensor_parallel_size": tensor_parallel_size,
            "kv_cache": {} if kv_cache_config is None else {n: getattr(kv_cache_config, n) for n in _KV_OPTIONS},
            **self._flow.info,
            "load_s": round(time.perf_counter() - start, 3),
        }

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Generation]:
        flow = self._running()
        for prompt, one in zip(prompts, params, strict=True):
            flow.check(prompt, one)
        return flow.generate(prompts, params)

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Generation]:
        flow = self._running()
        flow.check(prompt, params)
        return flow.stream(prompt, params)

    def close(self) -> None:
        if self._flow is not None:
            self._flow.close()
        self._flow = None
        gc.collect()

    def _running(self) -> _Flow:
        if self._flow is None:
            raise OptionError("this LLM was closed", "an open one", "make a new LLM")
        return self._flow


_KV_OPTIONS = tuple(option.name for option in fields(KvCacheConfig))


class _Flow(Protocol):
    tokenizer: Any
    info: dict[str, Any]

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None: ...
    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Generation]: ...
    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Generation]: ...
    def close(self) -> None: ...


@cache
def _need_library() -> ProbeResult:
    """Asked once per process: an installed library stays what it is."""
    found = probe(PROBE_LIMIT_S)
    if not found.is_usable:
        raise BackendUnavailable(f"TensorRT-LLM is not usable here: {found.reason}", "", found.remedy)
    return found


def _device_name(library: ProbeResult, count: int) -> str:
    if library.is_stand_in:
        return "stand-in"
    here = steps.gpus()
    return f"{count}x {here[0].name}" if here else "gpu"


# ---- tensorrt_llm.LLM -----------------------------------------------------------------------------------------------


class _LlmFlow:
    """The library's own LLM classes. Tokens are read as they stream in, so that every round has its time."""

    def __init__(self, model: str | Path, setup: Setup, is_engine_api: bool) -> None:
        self._setup, self._is_engine_api = setup, is_engine_api
        self._folders = contextlib.ExitStack()
        target = _checkpoint(model, setup.say)
        drafter = _drafter(setup)
        if drafter is not None and isinstance(setup.speculative, DraftTargetDecodingConfig):
            check_pair(target, drafter)
        self.tokenizer = load_tokenizer(target)
        self.eos = target.eos_token_ids()
        self.is_simulated = setup.is_stand_in or target.is_dummy or _forced(setup) is not None
        self._limit = setup.max_seq_len or int(target.config.get("max_position_embeddings", 2**31))
        self.info: dict[str, Any] = {
            "target": target.name,
            "drafter": drafter_label(setup.speculative, drafter),
            "dtype": _dtype_of(target, setup.dtype),
            "drafter_dtype": _dtype_of(drafter, "auto") if drafter else None,
            "arch": _arch(setup),
            "limits": {"max_batch_size": setup.max_batch_size, "max_seq_len": setup.max_seq_len},
            "tactics": {},
            "eos_token_ids": sorted(self.eos),
            "is_simulated": self.is_simulated,
            "notes": self._notes(),
        }
        try:
            call = self._call(target, drafter)
            if not setup.is_stand_in:
                _check_gpu_memory(target, drafter, setup.tp)
            self._folders.enter_context(_environment(_force_environment(setup)))
            self._llm = self._load(call)
        except BaseException:
            self._folders.close()
            raise

    def _call(self, target: Checkpoint, drafter: Checkpoint | None) -> calls.Call:
        setup = self._setup
        model = self._folder_of(target)
        config = setup.speculative
        if drafter is not None:
            config = _with_folder(config, self._folder_of(drafter))
        if self._is_engine_api:
            limits = commands.Limits(setup.max_batch_size or 1, *_split(setup.max_seq_len or 2048))
            return calls.engine_llm(
                model, speculative=config, kv_cache=setup.kv, limits=limits, is_fp8=_wants_fp8(setup),
                tensor_parallel_size=setup.tp, is_dummy=target.is_dummy,
            )  # fmt: skip
        return calls.pytorch_llm(
            setup.version, model, speculative=config, kv_cache=setup.kv, dtype=setup.dtype,
            max_batch_size=setup.max_batch_size, max_seq_len=setup.max_seq_len, tensor_parallel_size=setup.tp,
            is_dummy=target.is_dummy, is_drafter_dummy=drafter is not None and drafter.is_dummy,
        )  # fmt: skip

    def _folder_of(self, checkpoint: Checkpoint) -> str:
        """A dummy has no folder: one is made that holds its configuration, from which the library makes weights."""
        if checkpoint.folder is not None:
            return str(checkpoint.folder)
        folder = self._folders.enter_context(tempfile.TemporaryDirectory(prefix="workbook-dummy-"))
        (Path(folder) / "config.json").write_text(json.dumps(checkpoint.config), "utf-8")
        return folder

    def _load(self, call: calls.Call) -> Any:
        try:
            return make(call)
        except RuntimeError as error:
            first = str(error).strip().splitlines()
            raise BackendUnavailable(
                f"TensorRT-LLM {self._setup.version} could not load {call['kwargs']['model']}: "
                f"{first[-1] if first else type(error).__name__}",
                "a model that fits",
                "see its messages above; a smaller max_seq_len or free_gpu_memory_fraction leaves more room",
            ) from error

    def _notes(self) -> list[str]:
        notes = ["drafting and verifying are one step inside the library: all of a round's time counts as verifying"]
        if self._setup.speculative is not None:
            notes.append("rejected draft tokens are not reported; drafted counts are max_draft_len in every round")
        if self._setup.is_stand_in:
            notes.append(STAND_IN_NOTE)
        return notes

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        check_length(prompt, params, self._limit, "max_seq_len")
        is_speculative = self._setup.speculative is not None
        if params.logprobs is not None and is_speculative:
            raise refused("logprobs with a drafter", "they are not returned for accepted draft tokens")
        if params.repetition_penalty not in (None, 1.0):
            raise refused("repetition_penalty", "the PyTorch flow's default sampler ignores penalties")
        one_model = (
            isinstance(self._setup.speculative, EagleDecodingConfig) and self._setup.speculative.eagle3_one_model
        )
        if one_model and not params.is_greedy:
            raise refused(
                "temperature with EAGLE-3 in one model", "it verifies greedily; eagle3_one_model=False samples"
            )

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Generation]:
        start = time.perf_counter()
        handles = [self._submit(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        if len(handles) == 1:
            return [self._finish(list(prompts[0]), params[0], handles[0], start)]
        with ThreadPoolExecutor(len(handles)) as readers:  # one reader each, or late readers would time too late
            rows = [list(prompt) for prompt in prompts]
            return list(readers.map(self._finish, rows, params, handles, [start] * len(rows)))

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Generation]:
        start = time.perf_counter()
        arrivals: list[outputs.Arrival] = []
        for output in self._submit(prompt, params):
            count = len(output.outputs[0].token_ids)
            if not arrivals or count > arrivals[-1].count:
                arrivals.append(outputs.Arrival(time.perf_counter() - start, count))
                yield self._generation(list(prompt), params, output, arrivals)

    def _submit(self, prompt: Sequence[int], params: SamplingParams) -> Any:
        call = calls.sampling_params(params, sorted(self.eos), can_use_text=not self.info["is_simulated"])
        return self._llm.generate_async(inputs=list(prompt), sampling_params=make(call), streaming=True)

    def _finish(self, prompt: list[int], params: SamplingParams, handle: Any, start: float) -> Generation:
        arrivals: list[outputs.Arrival] = []
        output = None
        for output in handle:
            count = len(output.outputs[0].token_ids)
            if not arrivals or count > arrivals[-1].count:
                arrivals.append(outputs.Arrival(time.perf_counter() - start, count))
        if output is None:
            raise BackendUnavailable("TensorRT-LLM returned nothing for a request", "an answer", "try again")
        return self._generation(prompt, params, output, arrivals)

    def _generation(
        self, prompt: list[int], params: SamplingParams, output: Any, arrivals: Sequence[outputs.Arrival]
    ) -> Generation:
        return outputs.from_request_output(
            prompt,
            output,
            arrivals,
            params,
            max_draft_len=calls.most_accepted(self._setup.speculative),
            eos_token_ids=self.eos,
            tokenizer=self.tokenizer,
            is_simulated=self.is_simulated,
        )

    def close(self) -> None:
        shutdown = getattr(self._llm, "shutdown", None)
        if shutdown is not None:
            shutdown()
        del self._llm
        self._folders.close()


def make(call: Mapping[str, Any]) -> Any:
    """The library's object that a call describes (see `trtllm/calls.py`)."""
    module, _, name = call["import"].rpartition(".")
    kwargs = {key: make(value) if _is_call(value) else value for key, value in call["kwargs"].items()}
    return getattr(import_module(module), name)(**kwargs)


def _is_call(value: Any) -> bool:
    return isinstance(value, Mapping) and "class" in value


def _checkpoint(model: str | Path, say: Say) -> Checkpoint:
    """As `models.resolve`, and also quantized folders, which only this backend can run."""
    folder = Path(model).expanduser()
    if folder.is_dir() and _quantization(folder) is not None:
        return Checkpoint(str(model), folder.absolute(), json.loads((folder / "config.json").read_text("utf-8")))
    return resolve(str(model), say=say)


def _quantization(folder: Path) -> str | None:
    """'FP8' and the like, as Model Optimizer wrote it; None for a folder in half or full precision."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((folder / "hf_quant_config.json").read_text("utf-8"))["quantization"]["quant_algo"]
    return None


def _drafter(setup: Setup) -> Checkpoint | None:
    """A draft model is a checkpoint of its own. Heads (EAGLE, Medusa) are folders that only the library reads."""
    if not isinstance(setup.speculative, DraftTargetDecodingConfig):
        return None
    return _checkpoint(str(setup.speculative.speculative_model_dir), setup.say)


def _with_folder(config: DecodingBaseConfig | None, folder: str) -> DecodingBaseConfig:
    assert config is not None
    return DraftTargetDecodingConfig(max_draft_len=config.max_draft_len, speculative_model_dir=folder)


def _dtype_of(checkpoint: Checkpoint, asked: str) -> str:
    if checkpoint.folder is not None and (algorithm := _quantization(checkpoint.folder)) is not None:
        return algorithm.lower()
    return (
        asked
        if asked != "auto"
        else str(checkpoint.config.get("torch_dtype") or checkpoint.config.get("dtype", "auto"))
    )


def _wants_fp8(setup: Setup) -> bool:
    return setup.kv is not None and setup.kv.dtype == "fp8"


def _split(max_seq_len: int) -> tuple[int, int]:
    """(prompt, output) of an engine for texts up to `max_seq_len`."""
    return max_seq_len - max_seq_len // 2, max_seq_len // 2


def _arch(setup: Setup) -> str:
    here = steps.gpus()
    return "stand-in" if setup.is_stand_in else (here[0].arch if here else "unknown")


def _forced(setup: Setup) -> int | None:
    """Accepted draft tokens per round, forced by us or by the environment that this process was started in."""
    if setup.forced is not None:
        return setup.forced
    said = os.environ.get(calls.FORCE_VARIABLE, "")
    return int(said) if said.isdigit() and int(said) > 0 else None


def _forced_tokens(simulated: SimulatedAcceptance | None) -> int | None:
    """The library counts accepted draft tokens, the bonus token not, and knows whole numbers only; 0 would be off."""
    if simulated is None:
        return None
    if simulated.acceptance_by_position is not None:
        raise OptionError(
            "SimulatedAcceptance(acceptance_by_position=…) on TensorRT-LLM", "acceptance_length", "or the torch backend"
        )
    if simulated.mean < 2 or simulated.mean != int(simulated.mean):
        raise OptionError(
            f"SimulatedAcceptance(acceptance_length={simulated.mean:g}) on TensorRT-LLM",
            "a whole number >= 2",
            "round it, or use the torch backend",
        )
    return int(simulated.mean) - 1


def _force_environment(setup: Setup) -> dict[str, str]:
    if setup.forced is None:
        return {}
    if setup.speculative is None:
        raise OptionError("simulated_acceptance without a drafter", "a speculative_config", "give one")
    if setup.forced > setup.speculative.max_draft_len:
        raise OptionError(
            f"simulated acceptance length is {setup.forced + 1}",
            f"at most max_draft_len + 1 = {setup.speculative.max_draft_len + 1}",
        )
    if setup.version.release < (1, 2):
        raise OptionError(f"forced acceptance on TensorRT-LLM {setup.version}", "1.2 or newer", "leave it out")
    return {calls.FORCE_VARIABLE: str(setup.forced)}


@contextlib.contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the library's workers, which inherit them; put back what was there."""
    before = {key: os.environ.get(key) for key in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def _check_gpu_memory(target: Checkpoint, drafter: Checkpoint | None, count: int) -> None:
    """Weights against free memory, before the library loads anything."""
    here = steps.gpus()
    if len(here) < count:
        raise BackendUnavailable(f"{len(here)} GPU(s) here", f"{count}, as tensor_parallel_size says", "ask for fewer")
    size = sum(_weight_bytes(c) for c in (target, drafter) if c is not None) / count / GIB
    free = min(gpu.free_gib for gpu in here[:count])
    if size > free:
        raise BackendUnavailable(
            f"the weights need {size:.1f} GiB on each of {count} GPU(s)",
            f"at most the {free:.1f} GiB that are free",
            "free memory, take an FP8 checkpoint or more GPUs",
        )


def _weight_bytes(checkpoint: Checkpoint) -> int:
    if checkpoint.folder is None:
        from ..models import parameter_bytes

        return parameter_bytes(checkpoint.config)
    return sum(file.stat().st_size for file in checkpoint.folder.glob("*.safetensors"))
