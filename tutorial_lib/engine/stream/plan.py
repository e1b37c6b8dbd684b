"""How one model's matrices are divided among the blocks (CTAs) of the whole-step kernel, one block on each processor.

A block owns whole rows of every matrix, so no sum crosses blocks. Rows go out in groups: of 64 where each block gets
(nearly) the same number of those, else of 16. A tile is one shared-memory slot of 64 x at most 256 bytes: a group of
64 fills it with 64 rows; a group of 16 makes it "diagonal", four neighbouring pieces of K of the same 16 rows. Tiles
are as narrow as it takes to need no padding, if some width does. This knows shapes only: no weights, no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import WorkbookError
from ..model import ModelConfig
from .launch import GO_ON

TILE_ROWS = 64
TILE_BYTES = 256  # of K in one row of a tile, at most
STEP_BYTES = 32  # of K that one tensor-core instruction takes: 32 FP8 or 16 bf16 values
GROUP_ROWS = 16
EVEN_ENOUGH = 1.03  # the largest share of whole 64s to the mean: groups of 16 cost more than what that leaves idle
BUSY_ENOUGH = 7 / 8  # of the processors: predicted to draw the memory's full rate, not measured below 128 of 132


class Unfit(WorkbookError):
    """The whole-step kernel does not fit the model; the Triton path serves."""


@dataclass(frozen=True)
class Matrix:
    """rows, k_bytes: natural. group: rows that go to a block together, 64 or 16. width: bytes of K of a tile's row.
    tiles: of one group. blocks: among which the groups go out, group g to block g % blocks."""

    name: str
    rows: int
    k_bytes: int
    group: int
    width: int
    tiles: int
    blocks: int

    @property
    def pieces(self) -> int:
        """Neighbouring pieces of K in one tile."""
        return TILE_ROWS // self.group

    @property
    def groups(self) -> int:
        return -(-self.rows // self.group)

    @property
    def padded_k_bytes(self) -> int:
        return self.tiles * self.pieces * self.width

    @property
    def packed_bytes(self) -> int:
        return self.groups * self.group * self.padded_k_bytes

    def share(self, block: int) -> int:
        """Groups of one block; 0 if it has none and passes."""
        return max(0, -(-(self.groups - block) // self.blocks))

    def first(self, block: int) -> int:
        """Groups in the stream before those of `block`."""
        return block * (self.groups // self.blocks) + min(block, self.groups % self.blocks)


@dataclass(frozen=True)
class Plan:
    """blocks: of the grid. matrices: of each layer, in the order of the stream. head: after all layers."""

    blocks: int
    matrices: tuple[Matrix, ...]
    head: Matrix


def plan(
    config: ModelConfig, processors: int, *, weight_bytes: int, head_bytes: int, head_rows: int | None = None
) -> Plan:
    """weight_bytes, head_bytes: of one weight, 1 (FP8) or 2 (bf16). head_rows: of a shortlist; None: the vocabulary.

    Raises `Unfit` where rows or K do not divide into what a tensor-core instruction takes.
    """
    query, each = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "qkv": (query + 2 * each, config.hidden_size),
        "o": (config.hidden_size, query),
        "gate_up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
    }
    if config.head_dim % GROUP_ROWS:
        raise Unfit(f"the model has heads of {config.head_dim}", f"a multiple of {GROUP_ROWS}", GO_ON)
    for name, (rows, k) in shapes.items():
        if rows % GROUP_ROWS or k * weight_bytes % STEP_BYTES:
            needed = f"rows by {GROUP_ROWS} and columns by {STEP_BYTES // weight_bytes}"
            raise Unfit(f"its {name} is {rows} x {k}", needed, GO_ON)
    if config.hidden_size * head_bytes % STEP_BYTES:
        raise Unfit(f"its head has {config.hidden_size} columns", f"a multiple of {STEP_BYTES // head_bytes}", GO_ON)
    blocks = _blocks([(rows, k * weight_bytes) for rows, k in shapes.values()], processors)
    layer = tuple(_matrix(name, rows, k * weight_bytes, blocks) for name, (rows, k) in shapes.items())
    head = _matrix("head", head_rows or config.vocab_size, config.hidden_size * head_bytes, blocks)
    return Plan(blocks, layer, head)


def _blocks(shapes: list[tuple[int, int]], processors: int) -> int:
    """The most blocks among which a layer divides evenly, if they leave few processors idle: all end together, and
    groups of 64 are possible. Else the fewest whose largest share is as small as it can be: fewer to wait for."""
    if processors < 1:
        raise Unfit(f"{processors} processors", "at least 1", GO_ON)
    groups = [(rows // GROUP_ROWS, k_bytes) for rows, k_bytes in shapes]
    even = max(n for n in range(1, processors + 1) if all(count % n == 0 for count, _ in groups))
    if even >= BUSY_ENOUGH * processors:
        return even

    def largest(blocks: int) -> int:
        return sum(-(-count // blocks) * k_bytes for count, k_bytes in groups)

    return min(range(1, processors + 1), key=lambda blocks: (largest(blocks), blocks))


def _matrix(name: str, rows: int, k_bytes: int, blocks: int) -> Matrix:
    share = -(-rows // (TILE_ROWS * blocks)) * TILE_ROWS * blocks  # of the largest of the blocks, times all
    group = TILE_ROWS if share <= EVEN_ENOUGH * rows else GROUP_ROWS
    pieces = TILE_ROWS // group
    widths = range(STEP_BYTES, TILE_BYTES + 1, STEP_BYTES)
    width = min(widths, key=lambda w: (-(-k_bytes // (pieces * w)) * w, -w))  # least padding, then fewest tiles
    return Matrix(name, rows, k_bytes, group, width, -(-k_bytes // (pieces * width)), blocks)
