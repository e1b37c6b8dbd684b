"""Tensor parallelism: several processes ("ranks") run one model, each with a slice of every matrix and of the cache.

Megatron-LM's cut (Shoeybi et al. 2019, arXiv 1909.08053): q, k, v, gate and up by output rows, so that every rank has
whole heads and its own KV cache; o and down by input columns, so that a rank's products are parts of one sum. That
sum, an all-reduce, comes twice per layer. The output head is cut by vocabulary: for a greedy choice the ranks exchange
their best token and its logit, whole rows are gathered only where somebody asks for one. The embedding table is looked
up, not multiplied, and stays whole on every rank.

`Model.forward` runs as it is: with a rank's share of the heads, and with o and down that end in the sum. A slice is
taken when an engine is loaded, from the same files that one process would read: one engine directory serves every
number of ranks, with the same (also the same quantized) weights. Nothing here is about CPUs but the name "gloo".
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open

from ..engine_dir import EngineInfo
from ..errors import OptionError
from .build import WEIGHTS, make_model
from .model import Linear, Model, ModelConfig

ROW_PARALLEL = (".o", ".down")  # cut by input columns: what these compute must be summed


class PeerLost(RuntimeError):
    """Another rank ended, or did not come to a collective in time."""


# ------------------------------------------------------------------------------------------------------------ the ranks


class Ranks:
    """This process's place among those that run a model together, and the two things they exchange.

    Every rank calls the same collectives in the same order. seconds: what they took here, waiting for others included.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.seconds = rank, size, 0.0

    @classmethod
    def join(cls, rank: int, size: int, store: Path, *, timeout_s: float, backend: str = "gloo") -> Ranks:
        """Meet the other ranks through the file `store`; `timeout_s` bounds this and every later collective."""
        limit = timedelta(seconds=timeout_s)
        try:
            dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
        except RuntimeError as error:
            raise PeerLost(str(error)) from error
        return cls(rank, size)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, in place; the same bits on every rank."""
        start = time.perf_counter()
        try:
            dist.all_reduce(x)
        except RuntimeError as error:
            raise PeerLost(str(error)) from error
        self.seconds += time.perf_counter() - start
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' `x`, by rank."""
        start = time.perf_counter()
        found = [torch.empty_like(x) for _ in range(self.size)]
        try:
            dist.all_gather(found, x.contiguous())
        except RuntimeError as error:
            raise PeerLost(str(error)) from error
        self.seconds += time.perf_counter() - start
        return found

    def leave(self) -> None:
        dist.destroy_process_group()


# ----------------------------------------------------------------------------------------------------------- the slices


def sizes_that_split(config: ModelConfig) -> list[int]:
    """Numbers of ranks among which the KV heads, and with them the query heads, and the MLP divide evenly."""
    shared = math.gcd(config.num_kv_heads, config.num_heads, config.intermediate_size)
    return [n for n in range(1, shared + 1) if shared % n == 0]


def check_split(config: ModelConfig, size: int) -> None:
    """`OptionError` naming the sizes that do for one that does not."""
    sizes = sizes_that_split(config)
    if size not in sizes:
        raise OptionError(
            f"tensor_parallel_size is {size} and the target has {config.num_heads} heads, {config.num_kv_heads} KV "
            f"heads and {config.intermediate_size} MLP columns",
            f"a size that divides them all: {', '.join(map(str, sizes))}",
            "choose one of these",
        )


def rank_config(config: ModelConfig, size: int) -> ModelConfig:
    """The model as one rank computes it: its share of the heads and of the MLP, the same width."""
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=config.num_kv_heads // size,
        intermediate_size=config.intermediate_size // size,
    )


def rank_vocabulary(vocab_size: int, rank: int, size: int) -> slice:
    """The ids whose logits `rank` computes. The last rank has fewer where they do not divide evenly."""
    most = -(-vocab_size // size)
    return slice(min(rank * most, vocab_size), min((rank + 1) * most, vocab_size))


def shard(
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]], config: ModelConfig, rank: int, size: int
) -> dict[str, torch.Tensor]:
    """`rank`'s share of packed tensors (`model.pack`), which may be safetensors' slices: only the share is read.

    They may also come as pairs that are made on the way: of a tensor that is cut only the share stays in memory.
    """
    blocks = {
        "qkv": [n * config.head_dim for n in (config.num_heads, config.num_kv_heads, config.num_kv_heads)],
        "gate_up": [config.intermediate_size] * 2,
    }
    columns = {"o": config.num_heads * config.head_dim, "down": config.intermediate_size}
    vocabulary = rank_vocabulary(config.vocab_size, rank, size)
    own: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        kind, part = _kind_and_part(name)
        if part == "in":  # the scale of all activations of a product, which no rank has a share of
            own[name] = tensor[...]
        elif kind in blocks:
            own[name] = torch.cat([tensor[rows] for rows in _rows(blocks[kind], rank, size)])
        elif kind == "head":
            own[name] = _alone(tensor[vocabulary])
        elif kind in columns and part == "weight":
            own[name] = _alone(tensor[:, _share(columns[kind], rank, size)])
        elif kind in columns and part == "bias" and rank > 0:
            continue  # the bias of a sum is added once
        else:
            own[name] = tensor[...]
    if "head" not in own:
        own["head"] = own["embed"][vocabulary]
    return {name: tensor.contiguous() for name, tensor in own.items()}


def _alone(part: torch.Tensor) -> torch.Tensor:
    """`part` without the rest of the tensor that it is a view of."""
    return part.clone(memory_format=torch.contiguous_format) if part._is_view() else part


def _kind_and_part(name: str) -> tuple[str, str]:
    """ "3.qkv.bias" -> ("qkv", "bias"); "head" -> ("head", "weight")."""
    words = [word for word in name.split(".") if not word.isdigit()]
    return words[0], words[1] if len(words) > 1 else "weight"


def _share(count: int, rank: int, size: int) -> slice:
    return slice(rank * (count // size), (rank + 1) * (count // size))


def _rows(blocks: Sequence[int], rank: int, size: int) -> list[slice]:
    """`rank`'s rows of a fused matrix: its share of each block."""
    starts = [sum(blocks[:i]) for i in range(len(blocks))]
    shares = [_share(count, rank, size) for count in blocks]
    return [slice(at + share.start, at + share.stop) for at, share in zip(starts, shares, strict=True)]


# ------------------------------------------------------------------------------------------------------------ the model


class RowParallel:
    """A product whose input columns are divided among the ranks. x [rows, in / ranks] -> [rows, out], on every rank."""

    def __init__(self, product: Linear, ranks: Ranks) -> None:
        self.product, self.ranks = product, ranks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ranks.sum(self.product(x))


class ParallelModel(Model):
    """One rank's part of a model: its heads, its columns of the MLP, its rows of the output head.

    Hidden states, features and logits are whole and the same on every rank; the cache holds the rank's heads.
    """

    def __init__(
        self,
        config: ModelConfig,
        linears: Mapping[str, Linear],
        vectors: Mapping[str, torch.Tensor],
        embed: torch.Tensor,
        *,
        ranks: Ranks,
        **limits: Any,
    ) -> None:
        summed = {n: RowParallel(f, ranks) if n.endswith(ROW_PARALLEL) else f for n, f in linears.items()}
        super().__init__(rank_config(config, ranks.size), summed, vectors, embed, **limits)
        self.ranks = ranks

    def scores(self, hidden: torch.Tensor) -> ShardedLogits:
        """The logits of [rows, H], left on the ranks that computed them."""
        return ShardedLogits(super().logits(hidden), self.config.vocab_size, self.ranks)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, V]."""
        return self.scores(hidden).whole()

    def deciding(self) -> ParallelModel:
        """The same model and cache for the decode loop: its `logits` are `scores`."""
        view = _Deciding.__new__(_Deciding)
        view.__dict__ = self.__dict__.copy()
        return view


class _Deciding(ParallelModel):
    def logits(self, hidden: torch.Tensor) -> ShardedLogits:  # type: ignore[override]
        return self.scores(hidden)


def gather_vocabulary(own: torch.Tensor, vocab_size: int, ranks: Ranks) -> torch.Tensor:
    """Logits [rows, V] from every rank's logits of its own ids."""
    return torch.cat(ranks.gather(_filled(own, vocab_size, ranks)), -1)[:, :vocab_size]


def _filled(own: torch.Tensor, vocab_size: int, ranks: Ranks) -> torch.Tensor:
    """As wide on the last rank as on the others: -inf for ids that do not exist."""
    missing = rank_vocabulary(vocab_size, 0, ranks.size).stop - own.shape[-1]
    return F.pad(own, (0, missing), value=-math.inf) if missing else own


class ShardedLogits:
    """Logits [rows, V], every rank holding those of its own ids (`own`), with what the decode loop asks of them.

    `max` exchanges one pair per row and rank; indexing by a row gathers all rows, once. Both are collectives: every
    rank asks the same, because it decides the same.
    """

    def __init__(self, own: torch.Tensor, vocab_size: int, ranks: Ranks) -> None:
        self.own, self.vocab_size, self.ranks = _filled(own, vocab_size, ranks), vocab_size, ranks
        self._whole: torch.Tensor | None = None

    def max(self, dim: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
        """The greatest logit of every row and its id, the lowest of equals; NaN where any rank has one."""
        values, ids = self.own.max(-1)
        pairs = torch.stack([values, (ids + self.ranks.rank * self.own.shape[-1]).float()])  # exact: ids below 2**24
        found = torch.stack(self.ranks.gather(pairs))
        best, rank = found[:, 0].max(0)  # the first of equals, whose ids are lower
        return best, found[:, 1].gather(0, rank[None])[0].long()

    def whole(self) -> torch.Tensor:
        """float32 [rows, V]."""
        if self._whole is None:
            self._whole = gather_vocabulary(self.own, self.vocab_size, self.ranks)
        return self._whole

    def __getitem__(self, rows: Any) -> Any:
        return _Rows(self, range(self.own.shape[0])[rows]) if isinstance(rows, slice) else self.whole()[rows]


class _Rows:
    """Some rows of `ShardedLogits`, not gathered before one is asked for."""

    def __init__(self, logits: ShardedLogits, rows: range) -> None:
        self._logits, self._rows = logits, rows

    def __getitem__(self, row: int) -> torch.Tensor:
        return self._logits[self._rows[row]]


def load_rank(info: EngineInfo, ranks: Ranks) -> ParallelModel:
    """This rank's part of an engine directory's model. Raises `OptionError` if the model does not divide so."""
    config = ModelConfig.from_hf(info.model_config)
    check_split(config, ranks.size)
    with safe_open(info.path / WEIGHTS, "pt") as file:
        own = shard({name: file.get_slice(name) for name in file.keys()}, config, ranks.rank, ranks.size)
    return make_model(info, config, own, partial(ParallelModel, ranks=ranks))
