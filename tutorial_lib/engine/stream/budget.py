"""What the whole-step kernel of one model takes of shared memory and of scratch, as the macros it is compiled with.

Rows come in buckets, and every bucket is a kernel of its own: the more rows, the more of shared memory is taken by
their activations and sums, and the fewer tiles the ring holds. The input of a product lies in shared memory as a whole
if that has room for it beside a ring of `FEWEST_STAGES`; else it is `streamed`, each tile with its part, at the cost of
a barrier.
This knows shapes only: no weights, no GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..gpu_model import PAGE
from ..model import ModelConfig
from .choice import STREAM_ROWS
from .launch import GO_ON
from .plan import TILE_ROWS, Matrix, Plan, Unfit

ROW_BUCKETS = (2, 4, 8, 12, STREAM_ROWS)  # rows of a kernel, and columns of its tensor-core instructions, or a quarter
THREADS = 640
SHARED_BYTES = 227 << 10  # of a block on Hopper
FEWEST_STAGES, MOST_STAGES = 2, 16
MOST_STEPS = 64  # of a draft in one launch
MOST_SCRATCH_BYTES = 1 << 30
LONGEST_WAIT_MS = 2000
KNOWN_UNITS = 16  # of attention, that a block looks up once a step
GRID_WORDS, PAIR_WORDS = 32, 8  # of a counter: on a cache line of its own

MATRICES = ("qkv", "o", "gate_up", "down", "head")  # as the kernel numbers them


@dataclass(frozen=True)
class Formats:
    """Which of the weights, the head and the cache are FP8 (else bf16), and whether queries and keys have norms."""

    weights: bool
    head: bool
    cache: bool
    qk_norm: bool


@dataclass(frozen=True)
class Bucket:
    """rows: at most. stages: tiles that the ring holds, each in slot_bytes: a tile of tile_bytes, and its activations.
    area_bytes: of the input of a product, or of attention. slabs: of partial sums. streamed: names of matrices."""

    rows: int
    stages: int
    slot_bytes: int
    tile_bytes: int
    area_bytes: int
    slabs: int
    streamed: frozenset[str]


@dataclass(frozen=True)
class Memory:
    """In device memory. at: name -> byte of scratch. counters: words. pairs_at, choices_at: words of those."""

    at: Mapping[str, int]
    scratch_bytes: int
    counters: int
    pairs_at: int
    choices_at: int
    pages: int


def _matrices(plan: Plan) -> dict[str, Matrix]:
    return dict(zip(MATRICES, (*plan.matrices, plan.head), strict=True))


def input_bytes(matrix: Matrix, rows: int) -> int:
    """Of all rows' input of a product, padded as its tiles are."""
    return matrix.padded_k_bytes * rows


def attention_bytes(config: ModelConfig, rows: int) -> int:
    """Of the queries of `rows` rows that share one head of keys, and of a page of keys and of values, in bf16."""
    lines = -(-rows * (config.num_heads // config.num_kv_heads) // 16) * 16
    return (lines + 2 * PAGE) * (2 * config.head_dim + 16)


def bucket(plan: Plan, config: ModelConfig, formats: Formats, rows: int) -> Bucket:
    """The division of shared memory for up to `rows` rows. Raises `Unfit`."""
    matrices = _matrices(plan)
    attention = attention_bytes(config, rows)
    inputs = {name: input_bytes(matrices[name], rows) for name in ("qkv", "gate_up", "head")}
    always = frozenset({"o", "down"})
    head_fits = inputs["head"] <= max(attention, inputs["qkv"], inputs["gate_up"])
    choices = [always, always | {"head"}] if head_fits else [always | {"head"}, always]
    for streamed in (*choices, always | {"head", "qkv", "gate_up"}):
        if formats.head and "head" in streamed:
            continue  # a row's scale needs the whole row
        area = max(attention, *(inputs[name] for name in inputs if name not in streamed), 0)
        found = _divide(plan, rows, -(-area // 128) * 128, streamed)
        if found.stages >= FEWEST_STAGES:
            return replace(found, stages=min(found.stages, MOST_STAGES))
    raise Unfit(
        f"{rows} rows of the model leave room for {found.stages} tiles in the ring",
        f"{FEWEST_STAGES} at least",
        GO_ON,
    )


def _divide(plan: Plan, rows: int, area: int, streamed: frozenset[str]) -> Bucket:
    matrices = _matrices(plan)
    tile = max(TILE_ROWS * matrix.width for matrix in matrices.values())
    slot = tile + max(matrices[name].pieces * matrices[name].width * rows for name in streamed)
    slabs, slab_bytes = (2 if rows <= 12 else 1), 16 * rows * 80
    own = plan.matrices[1].share(0) * plan.matrices[1].group // 16  # blocks of 16 rows of h
    fixed = 1216 + own * 64 + own * (-(-rows // 8)) * 32 * 16 + 16 * MOST_STAGES
    stages = (SHARED_BYTES - area - slabs * slab_bytes - fixed) // slot
    return Bucket(rows, stages, slot, tile, area, slabs, streamed)


def memory(plan: Plan, config: ModelConfig, max_positions: int) -> Memory:
    """Scratch and counters for launches of up to `STREAM_ROWS` rows. Raises `Unfit`."""
    matrices, rows, pages = _matrices(plan), STREAM_ROWS, -(-max_positions // PAGE)
    lines = rows * config.num_heads * pages
    sizes = {
        "H": 2 * rows * config.hidden_size,
        "SQUARES": 4 * rows * plan.blocks,
        "QKV": 4 * rows * config.qkv_rows,
        "ATTENDED": input_bytes(matrices["o"], rows),
        "GATED": input_bytes(matrices["down"], rows),
        "NORMED": max(input_bytes(matrices[name], rows) for name in ("qkv", "gate_up", "head")),
        "PEAKS": 4 * lines,
        "TOTALS": 4 * lines,
        "VALUES": 4 * lines * config.head_dim,
    }
    at, end = {}, 0
    for name, size in sizes.items():
        at[name], end = end, end + -(-size // 256) * 256
    if end > MOST_SCRATCH_BYTES:
        needed = f"at most {MOST_SCRATCH_BYTES >> 20} MiB of partial results of attention"
        raise Unfit(f"a context of {max_positions} takes {end >> 20} MiB", needed, f"shorten the context, or {GO_ON}")
    choices_at = GRID_WORDS + rows * config.num_kv_heads * PAIR_WORDS
    return Memory(at, end, choices_at + MOST_STEPS * STREAM_ROWS * 2, GRID_WORDS, choices_at, pages)


def defines(plan: Plan, config: ModelConfig, formats: Formats, bucket: Bucket, memory: Memory) -> dict[str, int | str]:
    """The macros of `step.cu` for one bucket."""
    shapes: dict[str, int | str] = {}
    for name, m in _matrices(plan).items():
        fields = {
            "ROWS": m.rows, "K_BYTES": m.k_bytes, "GROUP": m.group, "GROUPS": m.groups, "WIDTH": m.width,
            "TILES": m.tiles, "STREAMED": int(name in bucket.streamed),
        }  # fmt: skip
        shapes |= {f"SHAPE_{name.upper()}_{field}": value for field, value in fields.items()}
    return {
        "ROWS": bucket.rows,
        "BLOCKS": plan.blocks,
        "THREADS": THREADS,
        **shapes,
        "STAGES": bucket.stages,
        "SLOT_BYTES": bucket.slot_bytes,
        "TILE_BYTES": bucket.tile_bytes,
        "AREA_BYTES": bucket.area_bytes,
        "SLABS": bucket.slabs,
        "SHARED_BYTES": SHARED_BYTES,
        "HIDDEN": config.hidden_size,
        "HEADS": config.num_heads,
        "KV_HEADS": config.num_kv_heads,
        "HEAD_DIM": config.head_dim,
        "QUERY_FACTOR": f"{config.head_dim**-0.5:.9g}f",
        "PAGE": PAGE,
        "MAX_PAGES": memory.pages,
        "KNOWN_UNITS": KNOWN_UNITS,
        "IS_FP8": int(formats.weights),
        "IS_FP8_HEAD": int(formats.head),
        "IS_FP8_CACHE": int(formats.cache),
        "HAS_QK_NORM": int(formats.qk_norm),
        "LONGEST_WAIT_MS": LONGEST_WAIT_MS,
        "PAIRS_AT": memory.pairs_at,
        "CHOICES_AT": memory.choices_at,
        **{f"AT_{name}": at for name, at in memory.at.items()},
    }
