"""`LLM` and `build`: the two calls that notebooks and commands make.

They choose a backend, turn text into token ids and hand over. Names and arguments are TensorRT-LLM's, so swapping
`from tutorial_lib import LLM` for `from tensorrt_llm import LLM` is the porting step. What a backend cannot honour it
refuses by name; nothing is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from importlib import import_module
from operator import index
from pathlib import Path
from typing import Any, overload

from .config import DecodingBaseConfig, Fp8Config, KvCacheConfig, SamplingParams, SimulatedAcceptance
from .errors import OptionError, PromptError
from .live_metrics import LiveMetrics
from .results import Generation, without_folders
from .turns import Turns

BACKENDS = {
    "torch": ("torch_backend", "TorchBackend"),
    "transformers": ("transformers", "TransformersBackend"),
    "tensorrt_llm": ("tensorrt_llm", "TensorRTLLMBackend"),
    "vllm": ("vllm", "VllmBackend"),
}

Prompt = str | Sequence[int]
Say = Callable[[str], None]


def build(
    checkpoint: str | Path,
    output_dir: str | Path | None = None,
    *,
    backend: str = "torch",
    dtype: str = "auto",
    max_batch_size: int = 8,
    max_seq_len: int | None = None,
    max_draft_len: int = 16,
    device: str = "auto",
    fp8: Fp8Config | None = None,
    kernel: str = "auto",
    overwrite: bool = False,
    say: Say = print,
) -> Path:
    """Compile a checkpoint into an engine directory and return its path.

    backend: "torch" (`engine.build.build_engine`) or "tensorrt_llm" (`backends.trtllm.experiment.build_engine`, its
    engine flow). fp8: how an engine of dtype "fp8" is made; kernel: what is to run it on a GPU ("auto" times both
    paths, see `engine.stream.choice`); both on the torch backend. Without `output_dir` it goes to the cache and is
    reused next time. Raises `ModelError`, `OptionError`, `EngineDirError`.
    """
    limits: dict[str, Any] = {
        "max_batch_size": max_batch_size,
        "max_seq_len": max_seq_len,
        "max_draft_len": max_draft_len,
    }
    if backend == "tensorrt_llm":
        if device not in ("auto", "cuda"):
            raise OptionError(f"device is {device!r}", "'cuda' for TensorRT-LLM", "leave it out")
        if fp8 is not None:
            raise OptionError("FP8 options were given for TensorRT-LLM", "its own quantization", "leave them out")
        if kernel != "auto":
            raise OptionError(f"kernel is {kernel!r} for TensorRT-LLM", "its own kernels", "leave it out")
        from .backends.trtllm.experiment import build_engine as build_trtllm

        return build_trtllm(checkpoint, output_dir, dtype=dtype, **limits, overwrite=overwrite, say=say)
    if backend != "torch":
        raise OptionError(f"build() was asked for backend {backend!r}", "'torch' or 'tensorrt_llm'", "choose one")
    from .engine.build import build_engine
    from .models import resolve

    return build_engine(
        resolve(str(checkpoint), say=say),
        output_dir,
        dtype=dtype,
        **limits,
        device=device,
        fp8=fp8,
        kernel=kernel,
        overwrite=overwrite,
        say=say,
    ).path


class LLM:
    """A target, perhaps with a drafter, ready to generate.

    model: a checkpoint (local folder, Hub id, "embedded:target", "dummy:<name>") or an engine directory; a checkpoint
    is built into the cache first. speculative_config: the drafting method, None for plain decoding. device: "auto"
    takes a GPU of compute capability 8.0 or newer, else the CPU. dtype: "auto" is float32 on a CPU, bfloat16 on a GPU.
    max_batch_size and max_seq_len: needed limits; None takes the engine's own, or the defaults of `build`.
    tensor_parallel_size: how many processes (torch, on a CPU) or GPUs (TensorRT-LLM, vLLM) share every matrix of it.
    simulated_acceptance forces how many drafts are accepted (torch on a GPU, TensorRT-LLM, vLLM); kernel ("auto",
    "stream", "triton": what runs a model's steps, see `engine.stream.choice`) and kernels_off (names from
    `engine.gpu_model.KERNELS`, run as plain torch instead) are the torch backend's own, on a GPU. metrics_port: answer
    Prometheus on this port of 127.0.0.1 until `close`, see `live_metrics`; 0 takes a free one, see `metrics_url`. Use
    it as a context manager, or `close()` it, to free its memory. Raises `WorkbookError`s.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        backend: str = "torch",
        speculative_config: DecodingBaseConfig | None = None,
        kv_cache_config: KvCacheConfig | None = None,
        dtype: str = "auto",
        max_batch_size: int | None = None,
        max_seq_len: int | None = None,
        device: str = "auto",
        tensor_parallel_size: int = 1,
        simulated_acceptance: SimulatedAcceptance | None = None,
        kernel: str = "auto",
        kernels_off: Sequence[str] = (),
        metrics_port: int | None = None,
        say: Say = lambda line: None,
    ) -> None:
        if not isinstance(model, (str, Path)):
            raise OptionError(f"model is {model!r}"[:200], "a name or a folder", "give for example 'embedded:target'")
        if not isinstance(backend, str) or backend not in BACKENDS:
            raise OptionError(f"backend is {backend!r}", f"one of {', '.join(BACKENDS)}", "choose one of these")
        own: dict[str, Any] = {"simulated_acceptance": simulated_acceptance, "kernels_off": kernels_off}
        own |= {"kernel": None if kernel == "auto" else kernel}
        own = {name: value for name, value in own.items() if value}
        forces = {"simulated_acceptance"}
        knows = {"torch": forces | {"kernel", "kernels_off"}, "tensorrt_llm": forces, "vllm": forces}
        if unknown := sorted(set(own) - knows.get(backend, set())):
            raise OptionError(f"{unknown[0]} was given for backend {backend!r}", "backend 'torch'", "leave it out")
        module, name = BACKENDS[backend]
        make = getattr(import_module(f".backends.{module}", __package__), name)
        with ExitStack() as unless_open:
            self._metrics: LiveMetrics | None = None
            if metrics_port is not None:  # a port that is taken is told before anything is loaded
                self._metrics = LiveMetrics(metrics_port, without_folders([str(model)]))
                unless_open.callback(self._metrics.close)
            self._backend = make(
                model,
                speculative_config=speculative_config,
                kv_cache_config=kv_cache_config,
                dtype=dtype,
                max_batch_size=max_batch_size,
                max_seq_len=max_seq_len,
                device=device,
                tensor_parallel_size=tensor_parallel_size,
                say=say,
                **own,
            )
            unless_open.pop_all()
        if self._metrics is not None:
            self._metrics.watch(getattr(self._backend, "engine", None))
        self.speculative_config = speculative_config
        self._turn = Turns()  # readers step in threads; the engine serves one at a time

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer (a `transformers` fast tokenizer)."""
        return self._backend.tokenizer

    @property
    def info(self) -> dict[str, Any]:
        """What runs: backend, target, drafter, dtype, device, limits, tactics, build and load seconds."""
        return self._backend.info

    @property
    def metrics_url(self) -> str | None:
        """Where its Prometheus metrics are, if it was made with a `metrics_port`; see `live_metrics`."""
        return self._metrics.url if self._metrics is not None else None

    @property
    def engine(self) -> Any:
        """What a load is put on turn by turn (`bench.load.Server`): of the torch backend its `engine.engine.Engine`."""
        server = getattr(self._backend, "server", None)
        if server is None:
            where = f"{self.info['backend']!r} on {self.info['device']}"
            raise OptionError(f"backend {where} shows no engine whose calls share a batch", "backend 'torch', open")
        return server

    @overload
    def generate(  # type: ignore[overload-overlap]
        self, inputs: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generation: ...
    @overload
    def generate(
        self, inputs: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Generation]: ...
    def generate(self, inputs, sampling_params=None):
        """Decode one prompt (text or token ids) or a list of them, in order; as many at once as the engine has slots.
        With the torch backend, streams that are open and calls in other threads share the batch.

        Text gets the special tokens that the tokenizer adds by itself; a chat template is the caller's
        (`tutorial_lib.bench.prompts.render`). sampling_params: one for all, or one for each; default greedy.
        """
        if not isinstance(inputs, str):
            inputs = _as_list(inputs)
            if not inputs:
                raise PromptError("the list of prompts is empty", "at least one prompt")
        is_single = isinstance(inputs, str) or _is_id(inputs[0])
        prompts = [self._ids(p) for p in ([inputs] if is_single else inputs)]
        params = sampling_params if isinstance(sampling_params, (list, tuple)) else [sampling_params] * len(prompts)
        if len(params) != len(prompts):
            raise OptionError(f"{len(params)} sampling_params for {len(prompts)} prompts", "one, or one for each")
        generations = self._generate(prompts, [_params(p) for p in params])
        return generations[0] if is_single else generations

    def _generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Generation]:
        if not getattr(self._backend, "is_shared", False):
            with self._turn:
                generations = self._backend.generate(prompts, params)
            for generation in generations if self._metrics is not None else ():
                self._metrics.observe(generation)  # type: ignore[union-attr]
            return generations
        with self._turn:
            opened = self._backend.open(prompts, params)
        streams = [GenerationStream(stream, False, self._turn, self._metrics) for stream in opened]
        try:
            return [stream.result() for stream in streams]
        finally:
            for stream in streams:
                stream.abort()

    def generate_async(
        self, inputs: Prompt, sampling_params: SamplingParams | None = None, streaming: bool = False
    ) -> GenerationStream:
        """One prompt, bit by bit. Iterate (also with `async for`, inside a running event loop) over the generation so
        far after every round; without `streaming` only the finished one comes. `.result()` waits for the end,
        `.abort()` ends it now.

        With the torch backend the request is in line from this call on, and whoever reads one moves all of them;
        elsewhere its work begins when it is read."""
        ids, params = self._ids(inputs), _params(sampling_params)
        with self._turn:
            return GenerationStream(self._backend.stream(ids, params), streaming, self._turn, self._metrics)

    def time_steps(self, rows: Sequence[int], context: int = 128) -> dict[int, float]:
        """Median seconds of one target pass with each number of rows, after `context` tokens (torch backend)."""
        return self._timer("time_steps")(rows, context)

    def time_draft(self, max_draft_len: int, context: int = 128) -> float:
        """Median seconds of drafting `max_draft_len` tokens, after `context` tokens (torch backend)."""
        return self._timer("time_draft")(max_draft_len, context)

    def time_rounds(self, batch: int, max_draft_len: int, context: int = 128) -> float:
        """Median seconds of a whole round that serves `batch` requests at K = `max_draft_len` (torch backend)."""
        return self._timer("time_rounds")(batch, max_draft_len, context)

    def close(self) -> None:
        """Free weights and caches, and the port of the metrics."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None  # its gauges refer to the engine
        self._backend.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ids(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            ids = _as_list(prompt)
            if wrong := [token for token in ids if not _is_id(token)]:
                raise PromptError(f"a prompt holds {wrong[0]!r}"[:200], f"{_PROMPTS}; ids are whole numbers")
            return [index(token) for token in ids]
        if not prompt.isascii() and any("\ud800" <= char <= "\udfff" for char in prompt):
            raise PromptError(
                "a prompt holds half a character (a lone surrogate)", "valid Unicode text", "mend the text"
            )
        ids, bos = list(self.tokenizer(prompt).input_ids) if prompt else [], self.tokenizer.bos_token_id
        is_doubled = bos is not None and ids[:2] == [bos, bos]  # text from a chat template has its own already
        return ids[1:] if is_doubled else ids

    def _timer(self, name: str) -> Callable[..., Any]:
        timer = getattr(self._backend, name, None)
        if timer is None:
            raise OptionError(f"backend {self.info['backend']!r} cannot time its steps apart", "backend 'torch'")
        return timer


_PROMPTS = "text, a list of token ids, or a list of such prompts"


def _as_list(value: Any) -> list[Any]:
    """A list, a tuple or an array (which gives its elements as Python's own numbers) as a list; else `PromptError`."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise PromptError(f"a prompt is {value!r}"[:200], _PROMPTS)
    return list(value)


def _is_id(value: Any) -> bool:
    """Whether `value` is a whole number, of NumPy or torch too. True and False are none."""
    return hasattr(value, "__index__") and not isinstance(value, bool) and not getattr(value, "ndim", 0)


def _params(given: Any) -> SamplingParams:
    if given is not None and not isinstance(given, SamplingParams):
        raise OptionError(
            f"sampling_params is {given!r}"[:200], "SamplingParams", "write SamplingParams(max_tokens=64)"
        )
    return given or SamplingParams()


class GenerationStream:
    """The result of `LLM.generate_async`. Every item is a `Generation` whose text and tokens have grown; a reader that
    comes late gets what has grown meanwhile at once.

    Leaving an iteration early ends the request and gives its slot back.
    """

    def __init__(self, stream: Any, streaming: bool, turn: Turns, metrics: LiveMetrics | None = None) -> None:
        self._stream, self._streaming, self._turn, self._metrics = stream, streaming, turn, metrics
        self._last: Generation | None = None

    def __iter__(self) -> Iterator[Generation]:
        if not self._streaming:
            yield self.result()
            return
        try:
            while (item := self._read()) is not None:
                yield item
        finally:
            self.abort()

    async def __aiter__(self) -> AsyncIterator[Generation]:
        iterator = iter(self)
        while (item := await asyncio.to_thread(next, iterator, None)) is not None:
            yield item

    def result(self) -> Generation:
        """Run to the end and return the finished generation."""
        while self._read() is not None:
            pass
        if self._last is None or not self._last.finish_reason:
            raise OptionError("this stream was left before its end", "a fresh one", "call generate_async again")
        return self._last

    def abort(self) -> None:
        """End the request and give its slot back; nothing happens to a finished one."""
        if hasattr(self._stream, "abandon"):
            self._stream.abandon()
            if not self._turn.try_enter():
                return  # a turn is going on: the engine takes the request out by itself
            try:
                self._stream.close()
            finally:
                self._turn.__exit__()
        else:
            self._stream.close()

    def _read(self) -> Generation | None:
        while True:
            with self._turn:
                try:
                    item: Generation | None = next(self._stream)
                except StopIteration:
                    return None
            if item is not None:  # None: a turn that brought this request nothing
                if self._metrics is not None:
                    self._metrics.observe(item, self._last)
                self._last = item
                return item
