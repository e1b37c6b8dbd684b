"""The workbook's own engine behind `LLM`: opens (or builds) engine directories, pairs target and drafter, decodes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..config import (
    DecodingBaseConfig,
    DraftTargetDecodingConfig,
    KvCacheConfig,
    SamplingParams,
    SimulatedAcceptance,
)
from ..drafters.base import Drafter
from ..drafters.draft_model import DraftModelDrafter
from ..engine.build import build_engine, choose_device, load_model, machine_arch
from ..engine.engine import Engine, RequestStream
from ..engine.model import ModelConfig
from ..engine.parallel import ParallelModel, Ranks, check_split, load_rank
from ..engine.reference import PAGE
from ..engine.stream.choice import check_kernel
from ..engine_dir import EngineInfo, is_engine_dir, open_engine, require
from ..errors import OptionError
from ..models import Checkpoint, check_pair, load_tokenizer, resolve
from ..results import Generation
from .torch_drafters import (
    ON_HOST,
    gpu_draft_rows,
    make_drafter,
    make_drafting,
    refuse_heads,
    refuse_unsupported,
    resolve_head,
)
from .torch_parallel import ParallelEngine, RankStream, threads_per_rank

DEFAULT_MAX_DRAFT_LEN = 16


class TorchBackend:
    """model: a checkpoint name (built into the cache if need be) or an engine directory. See `tutorial_lib.LLM`."""

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
        kernel: str = "auto",
        kernels_off: Sequence[str] = (),
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.device = choose_device(device)
        check_kernel(kernel, self.device)
        _refuse_unsupported(speculative_config, kv_cache_config, tensor_parallel_size, self.device)
        if self.device == "cpu" and (simulated_acceptance is not None or kernels_off):
            name = "kernels_off" if kernels_off else "simulated_acceptance"
            raise OptionError(f"the torch backend on a CPU cannot honour {name}", "a GPU", "leave it out")
        self._arch = machine_arch(self.device)
        self._draft_len = speculative_config.max_draft_len if speculative_config else 0
        self._build: dict[str, Any] = {
            "dtype": dtype,
            "max_batch_size": max_batch_size,
            "max_seq_len": max_seq_len,
            "say": say,
        }
        self._build |= {"device": self.device, "kernel": kernel}
        target = self._open(model)
        check_split(ModelConfig.from_hf(target.model_config), tensor_parallel_size)
        if speculative_config is not None:
            require(target, max_draft_len=speculative_config.max_draft_len)
        drafter = None
        if isinstance(speculative_config, DraftTargetDecodingConfig):
            drafter = self._open_drafter(speculative_config.speculative_model_dir, target)
            check_pair(as_checkpoint(target), as_checkpoint(drafter))
        head = resolve_head(speculative_config, say)
        start = time.perf_counter()
        self.tokenizer = load_tokenizer(as_checkpoint(target))
        self.engine: Engine | ParallelEngine | None = None
        kernels: dict[str, Any] = {}
        if self.device == "cuda":
            self.engine, kernels = _assemble_gpu(
                target,
                drafter,
                head,
                speculative_config,
                self.tokenizer,
                kv_cache_config,
                simulated_acceptance,
                kernel,
                kernels_off,
                say,
            )
        elif tensor_parallel_size > 1:
            self.engine = ParallelEngine(
                target, drafter, speculative_config, kv_cache_config, tensor_parallel_size, say
            )
        else:
            self.engine = assemble(target, drafter, head, speculative_config, self.tokenizer, kv_cache_config)
        self.is_shared = True  # calls and open streams run in one batch
        self.info: dict[str, Any] = {
            "backend": "torch",
            "target": target.checkpoint,
            "drafter": _drafter_name(speculative_config, drafter, head),
            "dtype": target.dtype,
            "drafter_dtype": drafter.dtype if drafter else None,
            "device": self.device,
            "is_simulated": simulated_acceptance is not None,
            "arch": target.arch,
            "tensor_parallel_size": tensor_parallel_size,
            "threads": threads_per_rank(tensor_parallel_size),
            "max_draft_len": self._draft_len,
            "limits": dict(target.manifest["limits"]),
            "tactics": target.tactics,
            "kernels": kernels,
            "build_s": target.manifest["build"]["seconds"] + (drafter.manifest["build"]["seconds"] if drafter else 0.0),
            "load_s": round(time.perf_counter() - start, 3),
            "engine_bytes": target.total_bytes,
            "eos_token_ids": sorted(target.eos_token_ids),
        }

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Generation]:
        return self._running().generate(prompts, params)

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Generation | None]:
        """The generation so far, whenever it has grown; None for a turn that brought this request nothing."""
        return self.open([prompt], [params])[0]

    def open(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[RequestStream] | list[RankStream]:
        """Put prompts in line of the running engine, see `Engine.open`."""
        return self._running().open(prompts, params)

    def time_steps(self, rows: Sequence[int], context: int) -> dict[int, float]:
        """Median seconds of one target pass by number of rows, see `Engine.time_steps`."""
        return self._running().time_steps(rows, context)

    def time_draft(self, max_draft_len: int, context: int) -> float:
        """Median seconds of drafting `max_draft_len` tokens, see `Engine.time_draft`."""
        return self._running().time_draft(max_draft_len, context)

    def time_rounds(self, batch: int, max_draft_len: int, context: int) -> float:
        """Median seconds of a whole round by batch size and K, see `Engine.time_rounds`."""
        engine = self._running()
        if not self.is_shared or not isinstance(engine, Engine):
            raise OptionError("rounds by batch size, of an engine whose calls do not share a batch", "a CPU, one rank")
        return engine.time_rounds(batch, max_draft_len, context)

    @property
    def server(self) -> Engine | ParallelEngine | None:
        """What a load is put on, see `bench.load.Server`; None when closed."""
        return self.engine

    def close(self) -> None:
        if isinstance(self.engine, ParallelEngine):
            self.engine.close()
        self.engine = None
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def _running(self) -> Engine | ParallelEngine:
        if self.engine is None:
            raise OptionError("this LLM was closed", "an open one", "make a new LLM")
        return self.engine

    def _open(self, model: str | Path) -> EngineInfo:
        if is_engine_dir(model):
            info = open_engine(model, backend="torch", arch=self._arch)
            asked = {k: self._build[k] for k in ("max_batch_size", "max_seq_len")}
            require(info, **asked)
            if self._build["dtype"] not in ("auto", info.dtype):
                raise OptionError(
                    f"the engine directory holds {info.dtype} weights and dtype={self._build['dtype']!r} was asked for",
                    "the engine's own dtype",
                    "leave dtype out, or build another engine",
                )
            return info
        options = {k: v for k, v in self._build.items() if v is not None}
        draft_len = max(DEFAULT_MAX_DRAFT_LEN, self._draft_len)
        info = build_engine(resolve(str(model), say=options["say"]), max_draft_len=draft_len, **options)
        return open_engine(info.path, backend="torch", arch=self._arch)

    def _open_drafter(self, model: str | Path | None, target: EngineInfo) -> EngineInfo:
        """The drafter as long as the target, or as long as its own context reaches; beyond that it does not draft."""
        if is_engine_dir(str(model)):
            info = open_engine(str(model), backend="torch", arch=self._arch)
            require(info, max_batch_size=target.max_batch_size)
            return info
        checkpoint = resolve(str(model), say=self._build["say"])
        refuse_heads(checkpoint)
        own = checkpoint.config.get("max_position_embeddings", target.max_seq_len)
        info = build_engine(
            checkpoint,
            dtype=self._drafter_dtype(checkpoint),
            max_batch_size=target.max_batch_size,
            max_seq_len=min(target.max_seq_len, own),
            max_draft_len=target.max_draft_len,
            device=self.device,
            kernel=self._build["kernel"],
            say=self._build["say"],
        )
        return open_engine(info.path, backend="torch", arch=self._arch)

    def _drafter_dtype(self, checkpoint: Checkpoint) -> str:
        """On a CPU int8 for a drafter shipped so, else the target's form; an int8 target says nothing of it."""
        if self.device == "cpu" and checkpoint.config.get("shipped_as") == "int8":
            return "int8"
        return "auto" if self._build["dtype"] == "int8" else self._build["dtype"]


def _refuse_unsupported(
    speculative: DecodingBaseConfig | None, kv: KvCacheConfig | None, tensor_parallel_size: int, device: str
) -> None:
    refuse_unsupported(speculative, device)
    honoured = {"enable_block_reuse", "max_tokens", "tokens_per_block"} | ({"dtype"} if device == "cuda" else set())
    changed = kv.changed_options() if kv else []
    if kv is not None and device == "cuda" and "tokens_per_block" in changed and kv.tokens_per_block != PAGE:
        raise OptionError(
            f"KvCacheConfig.tokens_per_block is {kv.tokens_per_block}",
            f"{PAGE} on a GPU, the tile of its attention kernel",
            "leave it out, or use device='cpu'",
        )
    refused = [name for name in changed if name not in honoured]
    if refused:
        raise OptionError(
            f"the torch backend on a {device} device cannot honour KvCacheConfig({refused[0]}=…)",
            "its default",
            "leave it out",
        )
    if isinstance(tensor_parallel_size, bool) or not isinstance(tensor_parallel_size, int) or tensor_parallel_size < 1:
        raise OptionError(f"tensor_parallel_size is {tensor_parallel_size!r}", "a whole number >= 1", "correct it")
    if tensor_parallel_size > 1 and device == "cuda":
        raise OptionError(
            f"tensor_parallel_size is {tensor_parallel_size} for the torch backend on a GPU",
            "1: its rounds run on one GPU, and it divides a model among processes on a CPU only",
            "leave it out, use device='cpu', or backend='tensorrt_llm'",
        )


def as_checkpoint(info: EngineInfo) -> Checkpoint:
    """An engine directory carries its tokenizer and config, so it can stand for its checkpoint."""
    return Checkpoint(name=info.checkpoint, folder=info.path, config=info.model_config)


def assemble(
    target: EngineInfo,
    drafter: EngineInfo | None,
    head: Checkpoint | None,
    config: DecodingBaseConfig | None,
    tokenizer: Any,
    kv: KvCacheConfig | None,
    *,
    ranks: Ranks | None = None,
) -> Engine:
    """An engine on a CPU; with `ranks`, this rank's part of one: a slice of the target and all of the drafter."""
    model = load_model(target)[0] if ranks is None else load_rank(target, ranks)
    proposer: Drafter | None
    if drafter is not None and isinstance(config, DraftTargetDecodingConfig):
        draft_model, head_ids = load_model(drafter)
        threshold, depth = config.confidence_threshold, config.max_draft_len
        proposer = DraftModelDrafter(draft_model, model.config.vocab_size, head_ids, confidence_threshold=threshold)
    else:
        proposer, depth = make_drafter(config, model, target.eos_token_ids, head)
    schedule = config.draft_len_schedule if config else None
    if config and schedule:  # lookahead's window reaches deeper than K; a full K is all of it
        schedule = {size: depth if k == config.max_draft_len else k for size, k in schedule.items()}
    return Engine(
        model.deciding() if isinstance(model, ParallelModel) else model,
        tokenizer,
        target.eos_token_ids,
        drafter=proposer,
        max_draft_len=depth,
        draft_len_schedule=schedule,
        kv_cache_config=kv,
    )


def _assemble_gpu(
    target: EngineInfo,
    drafter: EngineInfo | None,
    head: Checkpoint | None,
    config: DecodingBaseConfig | None,
    tokenizer: Any,
    kv: KvCacheConfig | None,
    simulated: SimulatedAcceptance | None,
    kernel: str,
    kernels_off: Sequence[str],
    say: Callable[[str], None],
) -> tuple[Engine, dict[str, Any]]:
    """The engine, and for each of its models which kernel runs it, why, and what the compiler said of it."""
    from ..drafters.lookahead import LookaheadDrafter
    from ..engine.drafting import ModelDrafting, OpenTree
    from ..engine.gpu_build import load_gpu_model, page_count
    from ..engine.gpu_engine import GpuEngine
    from ..engine.gpu_model import MAX_STEP_ROWS, Ops, compile_steps
    from ..engine.paged_cache import ring_positions
    from ..engine.stream.host import Loader

    is_fp8_cache = kv is not None and kv.dtype == "fp8"
    for info in (target, drafter):
        if is_fp8_cache and info is not None and info.dtype != "fp8":
            raise OptionError(
                f"KvCacheConfig(dtype='fp8') with the {info.dtype} engine of {info.checkpoint}",
                "an fp8 engine: its build calibrates the cache's scales",
                "build with dtype='fp8', or leave the cache's dtype out",
            )
    if drafter is not None and drafter.max_seq_len < target.max_seq_len:
        raise OptionError(
            f"the drafter's context ends at {drafter.max_seq_len} tokens and the target's at {target.max_seq_len}",
            "a drafter as long as the target: a round on a GPU drafts for all of its requests",
            f"use max_seq_len={drafter.max_seq_len}",
        )
    k = gpu_draft_rows(config, head, ModelConfig.from_hf(target.model_config))
    kv_dtype = torch.float8_e4m3fn if is_fp8_cache else torch.bfloat16
    ops = Ops.make(off=kernels_off)
    windows = [ModelConfig.from_hf(i.model_config).sliding_window for i in (target, drafter) if i is not None]
    pages = page_count(target, k, None if head is not None else ring_positions(windows), kv.max_tokens if kv else None)
    options: dict[str, Any] = {"max_draft_len": k, "pages": pages, "kv_dtype": kv_dtype, "ops": ops}
    loader = Loader(kernel, config, k + 1, kernels_off, say, together=target.max_batch_size)
    model, _ = loader.load(target, "target", partial(load_gpu_model, target, **options))
    if drafter is not None:
        drafting: Any = ModelDrafting(*loader.load(drafter, "drafter", partial(load_gpu_model, drafter, **options)))
    else:
        drafting = make_drafting(config, model, target.eos_token_ids, head, target.max_batch_size)
    is_on_host = isinstance(config, ON_HOST)
    host_tree = None
    if isinstance(drafting, LookaheadDrafter) and drafting.max_tokens:
        host_tree = OpenTree(drafting.max_tokens, drafting.max_depth, model.device)
    of_draft = [(drafting.model, (MAX_STEP_ROWS, 2, 1))] if isinstance(drafting, ModelDrafting) else []
    compile_steps([(model, (MAX_STEP_ROWS, 1, k + 1)), *of_draft])
    schedule = config.draft_len_schedule if config else None
    if config and schedule:  # a full K is all rows of a tree
        schedule = {size: k if length == config.max_draft_len else length for size, length in schedule.items()}
    engine = GpuEngine(
        model,
        tokenizer,
        target.eos_token_ids,
        max_slots=target.max_batch_size,
        max_seq_len=target.max_seq_len,
        drafting=None if is_on_host else drafting,
        host_drafter=drafting if is_on_host else None,
        host_tree=host_tree,
        max_draft_len=k,
        draft_len_schedule=schedule,
        kv_cache_config=kv,
        simulated_acceptance=simulated,
    )
    return engine, loader.chosen


def _drafter_name(config: DecodingBaseConfig | None, drafter: EngineInfo | None, head: Checkpoint | None) -> str | None:
    if drafter is not None:
        return drafter.checkpoint
    if head is not None:
        return head.name
    return None if config is None else config.decoding_type.lower()
