"""The decoder on a GPU: packed FP8 or bf16 weights, a paged KV cache, and a step that a CUDA graph can hold.

`step` is a fixed sequence of launches over fixed buffers: nothing is read back, no shape depends on data. It works for
1 to 64 rows; `prefill` is that step over and over. Which implementation each part uses is an `Ops` table: the Triton
kernels, or plain torch for those switched off by name.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch

from ..errors import OptionError
from . import reference
from .model import ModelConfig, inverse_frequencies
from .reference import Tap

MAX_STEP_ROWS = 64
PAGE = reference.PAGE
STEP_KERNELS = ("linear", "gate_up", "embed_norm", "add_norm", "quantize_rows", "attention", "argmax")
ROUND_KERNELS = ("begin_round", "finish_round", "keep_path")
DRAFT_KERNELS = ("match_ngram", "top_tokens", "gather_pairs", "grow_tree", "prune_tree", "tree_rows")
KERNELS = (*STEP_KERNELS, *ROUND_KERNELS, *DRAFT_KERNELS)


@dataclass(frozen=True)
class Ops:
    """The functions that steps and rounds are made of, each from `kernels.py` unless it is switched off."""

    linear: Callable[..., torch.Tensor]
    gate_up: Callable[..., torch.Tensor]
    embed_norm: Callable[..., Any]
    add_norm: Callable[..., Any]
    quantize_rows: Callable[..., Any]
    attention: Callable[..., torch.Tensor]
    argmax: Callable[..., None]
    begin_round: Callable[..., None]
    finish_round: Callable[..., None]
    keep_path: Callable[..., None]
    match_ngram: Callable[..., None]
    top_tokens: Callable[..., None]
    gather_pairs: Callable[..., Any]
    grow_tree: Callable[..., None]
    prune_tree: Callable[..., None]
    tree_rows: Callable[..., None]
    pdl: bool

    @classmethod
    def make(cls, *, off: Iterable[str] = (), pdl: bool | None = None) -> Ops:
        """off: names from `KERNELS` to run as plain torch instead ("all" for every one). pdl: programmatic dependent
        launch, None for what the GPU has (from compute capability 9.0 on). Raises `OptionError`."""
        if pdl is None:
            pdl = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
        off = set(KERNELS) if "all" in off else set(off)
        if unknown := off - set(KERNELS):
            raise OptionError(f"there is no kernel {sorted(unknown)[0]!r}", f"one of {', '.join(KERNELS)}, or all")
        library: ModuleType = reference
        if off != set(KERNELS):
            from . import kernels as library
        chosen = {name: getattr(reference if name in off else library, name) for name in KERNELS}
        return cls(**chosen, pdl=pdl)


@dataclass
class Weight:
    """One matrix [n, k], FP8 with a float32 scale per output row, or bf16 without. tactics: row bucket -> `Tactic`."""

    data: torch.Tensor
    scale: torch.Tensor | None
    tactics: Mapping[int, Any] = field(default_factory=dict)

    def tactic(self, rows: int) -> Any:
        return next((t for bucket, t in sorted(self.tactics.items()) if bucket >= rows), None)


@dataclass
class Layer:
    """One decoder layer. The `*_in` are calibrated activation scales (float32 scalars) of the four products, or None:
    then activations are quantized row by row (FP8 weights) or not at all (bf16 weights)."""

    config: ModelConfig
    cos: torch.Tensor
    sin: torch.Tensor
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: Weight
    o: Weight
    gate_up: Weight
    down: Weight
    qkv_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    kv_scale: torch.Tensor | None = None
    qkv_in: torch.Tensor | None = None
    o_in: torch.Tensor | None = None
    gate_up_in: torch.Tensor | None = None
    down_in: torch.Tensor | None = None

    @property
    def is_fp8(self) -> bool:
        return self.qkv.scale is not None


def rotary_tables(config: ModelConfig, positions: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [positions, head_dim / 2]."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(config)).to(device)
    return angles.cos().contiguous(), angles.sin().contiguous()


@dataclass(frozen=True)
class Taps:
    """Which hidden states a step leaves behind: of every row those of `layers` (numbered as in `drafters.base`), side
    by side, in `out` [any, len(layers) * H] bf16, row i of the step in out[rows[i]]."""

    layers: tuple[int, ...]
    out: torch.Tensor
    rows: torch.Tensor

    def of(self, layer: int, width: int, *, is_normed: bool = False) -> Tap | None:
        if layer not in self.layers:
            return None
        at = self.layers.index(layer) * width
        return Tap(self.out[:, at : at + width], self.rows, is_normed)


class FixedStep:
    """A step of `rows` rows of one sequence over fixed buffers, captured as a graph on a GPU; `logits` float32
    [rows, V] if they are wanted, `features` [rows, F * H] of `feature_layers`. The pages are copied in, so whose table
    they come from does not matter."""

    def __init__(self, model: GpuModel, rows: int, feature_layers: tuple[int, ...], *, has_logits: bool) -> None:
        device = model.device
        self.model, self.rows, self.has_logits = model, rows, has_logits
        self.logits: torch.Tensor | None = None
        self.tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        width = len(feature_layers) * model.config.hidden_size
        self.features = torch.zeros(rows, width, dtype=torch.bfloat16, device=device)
        every = torch.arange(rows, dtype=torch.int32, device=device)
        self._taps = Taps(feature_layers, self.features, every) if feature_layers else None
        self.length = torch.zeros(1, dtype=torch.int32, device=device)
        self.slot = torch.zeros(1, dtype=torch.int32, device=device)
        blocks = -(-model.max_positions // PAGE)
        self.table = torch.full((1, blocks), model.pages - 1, dtype=torch.int32, device=device)
        self._graph: Any = None
        if device.type == "cuda":
            self._graph = captured(self._step)

    def run(self, ids: Sequence[int], start: int) -> None:
        padded = list(ids) + [ids[-1]] * (self.rows - len(ids))
        upload(self.tokens, padded)
        self.length.fill_(start)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._step()

    def _step(self) -> None:
        run: Callable[..., Any] = self.model.step if self.has_logits else self.model.body
        made: Any = run(self.tokens, self.table, self.length, self.slot, self.rows, taps=self._taps)
        self.logits = made if self.has_logits else None


def upload(aim: torch.Tensor, values: Sequence[int]) -> None:
    """Numbers of the host into `aim` [n], behind what was launched before and without waiting for it."""
    aim.copy_(torch.tensor(values, dtype=aim.dtype, pin_memory=aim.is_cuda), non_blocking=True)


def compile_steps(wanted: Iterable[tuple[GpuModel, Iterable[int]]]) -> int:
    """Compile what steps of these models with these numbers of rows launch, many kernels at a time, so that captures
    find it done; returns how many kernels that were. Nothing to do without a GPU."""
    wanted = [(model, tuple(rows)) for model, rows in wanted if model.device.type == "cuda"]
    if not wanted:
        return 0
    from .compile_ahead import compile_ahead

    return compile_ahead(lambda: [model.rehearse(n) for model, rows in wanted for n in rows])


def captured(run: Callable[[], None]) -> Any:
    """A CUDA graph of `run`, which is rehearsed twice beforehand so that every kernel is compiled."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        run()
    return graph


@contextmanager
def capturing(graph: Any) -> Iterator[None]:
    """What is launched inside goes into `graph`."""
    with no_garbage_collection(), torch.cuda.graph(graph):
        yield


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Python's garbage collector runs once and then rests: freeing another model's memory or graphs would break a
    capture. One around many captures saves them theirs."""
    was_on = gc.isenabled()
    if was_on:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def seconds_of(graph: Any, repeats: int) -> list[float]:
    """How long each of `repeats` replays ran. The GPU is kept waiting until the host has launched the graph, so that
    the launch is no part of it."""
    samples = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)  # half a millisecond
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e-3)
    return samples


class GpuModel:
    """Weights, cache and step. cache: [layers, pages, 2, kv_heads, PAGE, dim]. The last page is scratch: rows of unused
    slots write there.

    kernel: what runs its steps. round_rows, prompt_rows: the most rows of a step in a round, and the rows of a step
    over a prompt. trouble: int32 words that a step which gives up writes to, see `check`; None if none can.
    """

    kernel = "triton"
    round_rows = prompt_rows = MAX_STEP_ROWS
    trouble: torch.Tensor | None = None

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[Layer],
        embed: torch.Tensor,
        norm: torch.Tensor,
        head: Weight,
        *,
        pages: int,
        max_positions: int,
        ops: Ops,
        kv_dtype: torch.dtype = torch.bfloat16,
        max_sequences: int = 1,
        scratch: Any = None,
    ) -> None:
        self.config, self.layers, self.embed, self.norm, self.head, self.ops = config, layers, embed, norm, head, ops
        self.device, self.max_positions, self.pages = embed.device, max_positions, pages
        shape = (len(layers), pages, 2, config.num_kv_heads, PAGE, config.head_dim)
        self.cache = torch.zeros(shape, dtype=kv_dtype, device=self.device)
        self._fixed_steps: dict[tuple, FixedStep] = {}
        self.scratch: Any = scratch
        if scratch is None and "kernels" in ops.attention.__module__:
            if config.head_dim & (config.head_dim - 1):
                raise OptionError(
                    f"the model has heads of {config.head_dim}",
                    "a power of two for the attention kernel",
                    "run it as plain torch with kernels_off=['attention']",
                )
            if kv_dtype == reference.FP8 and config.head_dim < 32:
                raise OptionError(
                    f"the model has heads of {config.head_dim}",
                    "at least 32 for an FP8 cache",
                    "leave the cache's dtype out, or use kernels_off=['attention']",
                )
            from .kernels import AttentionScratch

            self.scratch = AttentionScratch.for_steps(max_sequences, MAX_STEP_ROWS, config, max_positions, self.device)

    @torch.inference_mode()
    def step(
        self,
        tokens: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        rows: int,
        tree: tuple[torch.Tensor, torch.Tensor] | None = None,
        taps: Taps | None = None,
    ) -> torch.Tensor:
        """Logits float32 [sequences * rows, V] for `rows` tokens of each sequence, written behind `lengths` tokens.

        tokens: int [sequences * rows], at most 64. table: int32 [slots, blocks]. lengths, slots: int32 [sequences].
        """
        x, parts = self.body(tokens, table, lengths, slots, rows, tree, taps)
        last, width = self.config.num_layers, self.config.hidden_size
        tap = None if taps is None else taps.of(last, width) or taps.of(last + 1, width, is_normed=True)
        h, scale = self.ops.add_norm(
            x, parts, self.norm, self.config.rms_norm_eps, None, self.head.scale is not None, self.ops.pdl, tap=tap
        )
        return self._product(self.head, h, scale)[0]

    @torch.inference_mode()
    def choose(
        self,
        tokens: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        rows: int,
        out: torch.Tensor,
        *,
        damage: torch.Tensor,
        tree: tuple[torch.Tensor, torch.Tensor] | None = None,
        taps: Taps | None = None,
        needs_logits: bool = True,
    ) -> torch.Tensor | None:
        """`step`, and the likeliest token of every row into `out` int32 [sequences * rows]; `damage` as in
        `kernels.argmax`. Returns the logits, which a model may leave out unless they are needed."""
        logits = self.step(tokens, table, lengths, slots, rows, tree, taps)
        self.ops.argmax(logits, out, self.ops.pdl, damage=damage)
        return logits

    def draft_chain(
        self,
        pair: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
        *,
        ids: torch.Tensor | None = None,
        vocab_size: int,
    ) -> bool:
        """All steps of a greedy draft in one launch, for models that can: False for those that cannot.

        pair: int32 [B, 2], the texts' last two tokens, the first of them at position `lengths` [B]. out: int32 [B, K]
        of any stride; step i's likeliest token among the first `vocab_size`, or `ids` there, is what step i + 1 reads.
        """
        return False

    def check(self, trouble: Sequence[int]) -> None:
        """Raise what the words of `trouble`, read back, say; nothing if they are zeros."""

    @torch.inference_mode()
    def body(
        self, tokens, table, lengths, slots, rows: int, tree=None, taps: Taps | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """All layers. Returns the residual [sequences * rows, H] bf16 and the partials still to be added to it."""
        ops, eps = self.ops, self.config.rms_norm_eps
        x = parts = None
        for i, (layer, cache) in enumerate(zip(self.layers, self.cache, strict=True)):
            how = (layer.input_norm, eps, layer.qkv_in, layer.is_fp8, ops.pdl)
            tap = None if taps is None else taps.of(i, self.config.hidden_size)
            if x is None:
                x, h, scale = ops.embed_norm(tokens, self.embed, *how, tap=tap)
            else:
                h, scale = ops.add_norm(x, parts, *how, tap=tap)
            parts = self._product(layer.qkv, h, scale)
            h = ops.attention(
                parts, layer, cache, table, lengths, slots, rows, self.max_positions, self.scratch, layer.o_in,
                tree=tree, pdl=ops.pdl,
            )  # fmt: skip
            parts = self._product(layer.o, *self._quantized(layer, h, layer.o_in))
            h, scale = ops.add_norm(x, parts, layer.post_norm, eps, layer.gate_up_in, layer.is_fp8, ops.pdl)
            tactic = layer.gate_up.tactic(h.shape[0])
            h = ops.gate_up(h, scale, layer.gate_up.data, layer.gate_up.scale, layer.down_in, tactic, ops.pdl)
            parts = self._product(layer.down, *self._quantized(layer, h, layer.down_in))
        return x, parts  # type: ignore[return-value]

    def without_layers(self, skipped: Collection[int]) -> GpuModel:
        """A model that shares everything with this one but the layers in `skipped`, and the cache."""
        kept = [layer for i, layer in enumerate(self.layers) if i not in skipped]
        return GpuModel(
            replace(self.config, num_layers=len(kept)), kept, self.embed, self.norm, self.head, pages=self.pages,
            max_positions=self.max_positions, ops=self.ops, kv_dtype=self.cache.dtype, scratch=self.scratch,
        )  # fmt: skip

    @torch.inference_mode()
    def rehearse(self, rows: int) -> None:
        """A step of `rows` rows and its argmax, on the scratch page: launches all there is to one, changes nothing."""
        device = self.device
        table = torch.full((1, -(-self.max_positions // PAGE)), self.pages - 1, dtype=torch.int32, device=device)
        length, slot = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
        logits = self.step(torch.zeros(rows, dtype=torch.int32, device=device), table, length, slot, rows)
        self.ops.argmax(logits, torch.empty(rows, dtype=torch.int32, device=device), self.ops.pdl)

    @torch.inference_mode()
    def prefill(
        self,
        ids: Sequence[int],
        table: torch.Tensor,
        slot: int,
        feature_layers: tuple[int, ...] = (),
        take: Callable[[int, torch.Tensor], None] | None = None,
        *,
        start: int = 0,
    ) -> None:
        """Append a stretch of text to `slot`, which holds `start` tokens; `prompt_rows` a step, on a GPU one graph.

        Rows behind the text's end in the last step write positions that later steps write again. A text's last piece
        is left to `last_step`. take: gets each step's first position and features [prompt_rows, F * H], which the
        next step overwrites.
        """
        step = self._fixed_step(self.prompt_rows, feature_layers, has_logits=False)
        step.table[0, : table.shape[1]] = table[slot]
        for at in range(0, len(ids), self.prompt_rows):
            step.run(ids[at : at + self.prompt_rows], start + at)
            if take is not None:
                take(start + at, step.features)

    @torch.inference_mode()
    def last_step(
        self,
        ids: Sequence[int],
        table: torch.Tensor,
        slot: int,
        feature_layers: tuple[int, ...] = (),
        take: Callable[[int, torch.Tensor], None] | None = None,
        *,
        start: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `prefill` for the last tokens of a text, `prompt_rows` at most: logits float32 [1, V] of what follows it,
        and its last token's features [1, F * H]. Both are overwritten by the next call."""
        count = len(ids)
        step = self._fixed_step(1 if count == 1 else self.prompt_rows, feature_layers, has_logits=True)
        step.table[0, : table.shape[1]] = table[slot]
        step.run(ids, start)
        if take is not None and count > 1:
            take(start, step.features)
        assert step.logits is not None
        return step.logits[count - 1 : count], step.features[count - 1 : count]

    def _fixed_step(self, rows: int, feature_layers: tuple[int, ...], *, has_logits: bool) -> FixedStep:
        key = (rows, feature_layers, has_logits)
        if key not in self._fixed_steps:
            self._fixed_steps[key] = FixedStep(self, rows, feature_layers, has_logits=has_logits)
        return self._fixed_steps[key]

    def _product(self, weight: Weight, x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        return self.ops.linear(x, scale, weight.data, weight.scale, weight.tactic(x.shape[0]), self.ops.pdl)

    def _quantized(
        self, layer: Layer, x: torch.Tensor, scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x with the scales [rows] its product needs: calibrated (x is FP8 already), its own, or none for bf16."""
        if not layer.is_fp8:
            return x, None
        if scale is not None:
            return x, self._rows(scale)
        return self.ops.quantize_rows(x, self.ops.pdl)

    def _rows(self, scale: torch.Tensor) -> torch.Tensor:
        """A scalar scale as a vector for up to 64 rows; made once, since a graph must not make it anew."""
        known = self.__dict__.setdefault("_scale_rows", {})
        if scale.data_ptr() not in known:
            known[scale.data_ptr()] = scale.expand(MAX_STEP_ROWS).contiguous()
        return known[scale.data_ptr()]
