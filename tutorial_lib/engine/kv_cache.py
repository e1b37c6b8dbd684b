"""The KV cache by blocks: who holds which, what can be used again, what goes first when there is no room.

A request's text is cut into blocks of `tokens_per_block` positions, and its block table names one block of the cache
for each (Kwon et al. 2023, PagedAttention, arXiv 2309.06180). A full block is known by a hash of its tokens and of
everything before them, so a later request with the same beginning finds it (as TensorRT-LLM's and vLLM's block reuse).
Blocks that no request holds stay findable until their room is needed; the longest unused goes first.

On a GPU attention reads keys through that table (`paged_cache.py`). A CPU has no such kernel, and gathering keys would
cost every layer of every round: at 1,500 tokens a tenth of the pass of a small model. So attention reads one contiguous
stretch for each slot there, and blocks are copied once (`KvCache`), out of it when they fill and into it when a request
begins with them. A copy is thousands of times cheaper than computing its tokens, and a request that diverges in
mid-block already writes to a copy of its own.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import OptionError
from .model import Model

NO_REUSE_WITH_A_WINDOW = (
    "enable_block_reuse with a model that has a sliding window",
    "a model that keeps its whole text",
    "leave enable_block_reuse out",
)
BLOCK_SIZES = (16, 64)  # smallest and largest: smaller ones are mostly bookkeeping, larger ones are seldom full
START = b""  # the key before a text's first block


def block_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a full block: its tokens and, through the key of the block before it, all tokens before them."""
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


@dataclass
class Block:
    """refs: how many requests hold it. key, before, tokens: set once it is full and can be found."""

    refs: int = 0
    key: bytes | None = None
    before: bytes = START
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Found:
    """What the pool has of a text's beginning: whole blocks, and of one more the first `rows` positions."""

    blocks: tuple[int, ...] = ()
    keys: tuple[bytes, ...] = ()
    partial: int | None = None
    rows: int = 0


class BlockPool:
    """Counts references to `count` blocks and remembers the content of full ones. Knows nothing of tensors.

    ahead: how many tokens behind a position what is kept for it depends on. An EAGLE head's keys come from pairs, a
    hidden state and the token after; with ahead 1 a block is known by its own tokens and that one.
    """

    def __init__(self, count: int, tokens_per_block: int, ahead: int = 0) -> None:
        self.tokens_per_block, self.ahead = tokens_per_block, ahead
        self.blocks = [Block() for _ in range(count)]
        self._empty = list(range(count))[::-1]
        self._unheld: OrderedDict[int, None] = OrderedDict()  # findable, held by nobody; the longest unused first
        self._by_key: dict[bytes, int] = {}
        self._behind: dict[bytes, set[int]] = {}  # key -> the blocks that follow it

    @property
    def available(self) -> int:
        """Blocks that `take` can give: empty ones, and those it may evict."""
        return len(self._empty) + len(self._unheld)

    @property
    def held(self) -> int:
        """Blocks that requests hold."""
        return len(self.blocks) - self.available

    @property
    def findable(self) -> int:
        """Blocks with known content, held or not."""
        return len(self._by_key)

    def find(self, text: Sequence[int]) -> Found:
        """The longest known beginning of `text`. Nothing is held by this."""
        size, ahead, key = self.tokens_per_block, self.ahead, START
        blocks: list[int] = []
        keys: list[bytes] = []
        for start in range(0, len(text) - size - ahead + 1, size):
            following = block_key(key, text[start : start + size + ahead])
            if following not in self._by_key:
                break
            key = following
            blocks.append(self._by_key[key])
            keys.append(key)
        rest = text[len(blocks) * size : (len(blocks) + 1) * size + ahead]
        shared = {b: _common(self.blocks[b].tokens, rest) - ahead for b in self._behind.get(key, ())}
        best = max(shared, key=lambda b: shared[b], default=None)
        if best is None or shared[best] <= 0:
            return Found(tuple(blocks), tuple(keys))
        return Found(tuple(blocks), tuple(keys), best, shared[best])

    def hold(self, blocks: Sequence[int]) -> None:
        for number in blocks:
            self.blocks[number].refs += 1
            self._unheld.pop(number, None)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks without content, held once; None, and nothing changes, if there are fewer."""
        if count > self.available:
            return None
        taken = []
        for _ in range(count):
            if not self._empty:
                self._forget(next(iter(self._unheld)))
            taken.append(self._empty.pop())
        self.hold(taken)
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each. The end of a text is forgotten before its beginning, which more texts share."""
        for number in reversed(blocks):
            block = self.blocks[number]
            block.refs -= 1
            if block.refs == 0:
                if block.key is None:
                    self._empty.append(number)
                else:
                    self._unheld[number] = None

    def enter(self, number: int, before: bytes, tokens: Sequence[int]) -> tuple[int, bytes]:
        """Make a full block of `tokens` (and those `ahead`) findable. Where its content is known already the known
        block is held instead of this one. Returns the block to keep in the table, and its key."""
        key = block_key(before, tokens)
        known = self._by_key.get(key)
        if known is not None:
            self.hold([known])
            self.give_back([number])
            return known, key
        block = self.blocks[number]
        block.key, block.before, block.tokens = key, before, tuple(tokens)
        self._by_key[key] = number
        self._behind.setdefault(before, set()).add(number)
        return number, key

    def forget_all(self) -> None:
        """Drop the content of every block that nobody holds."""
        while self._unheld:
            self._forget(next(iter(self._unheld)))

    def _forget(self, number: int) -> None:
        block = self.blocks[number]
        del self._unheld[number]
        del self._by_key[block.key]  # type: ignore[arg-type]
        self._behind[block.before].discard(number)
        if not self._behind[block.before]:
            del self._behind[block.before]
        self.blocks[number] = Block()
        self._empty.append(number)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts begin with together."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# ------------------------------------------------------------------------------------------------- what a request holds


@dataclass
class Holding:
    """A request's part of the cache. table: its blocks, in the order of the text; keys: of those entered so far.
    reused: positions that need no computing. prefix: the target's hidden states [reused, F * H] there; tail: those of
    the positions from the first block not entered yet on. Both None if the drafter asks for none."""

    table: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    reused: int = 0
    prefix: torch.Tensor | None = None
    tail: torch.Tensor | None = None


class BlockCache:
    """Who holds which blocks, in both forms of the cache; where keys lie is the business of `_load`, `_place`, `_keep`.

    rows_per_slot: positions after which a text goes round (a ring); no text takes more.
    """

    holding_type = Holding

    def __init__(self, pool: BlockPool, *, rows_per_slot: int, enable_block_reuse: bool) -> None:
        self.pool, self.is_reusing, self._rows_per_slot = pool, enable_block_reuse, rows_per_slot

    @property
    def max_tokens(self) -> int:
        return len(self.pool.blocks) * self.pool.tokens_per_block

    def blocks_for(self, positions: int) -> int:
        """A ring takes no more, however long the text."""
        return -(-min(positions, self._rows_per_slot) // self.pool.tokens_per_block)

    def begin(self, slot: int, text: Sequence[int], most_reused: int, positions: int) -> Any:
        """Blocks for `positions` positions of a request whose text so far is `text`; None if there is no room now.

        Of the text at most `most_reused` positions come from the cache.
        """
        pool, size = self.pool, self.pool.tokens_per_block
        found = pool.find(text[: most_reused + pool.ahead]) if self.is_reusing else Found()
        shared = [*found.blocks, *([] if found.partial is None else [found.partial])]
        pool.hold(shared)  # so that taking new ones evicts none of these
        fresh = pool.take(self.blocks_for(positions) - len(found.blocks))
        if fresh is None:
            pool.give_back(shared)
            return None
        whole = len(found.blocks)
        holding = self.holding_type([*found.blocks, *fresh], list(found.keys), whole * size + found.rows)
        self._load(slot, shared, holding)
        pool.give_back(shared[whole:])
        return holding

    def grow(self, holding: Holding, positions: int) -> bool:
        """Room for a text of `positions`; False, and nothing changes, if blocks ran out."""
        missing = self.blocks_for(positions) - len(holding.table)
        if missing <= 0:
            return True
        fresh = self.pool.take(missing)
        if fresh is None:
            return False
        holding.table += fresh
        self._place(holding, len(holding.table) - missing)
        return True

    def enter(
        self, slot: int, holding: Holding, text: Sequence[int], known: int, features: torch.Tensor | None = None
    ) -> None:
        """The first `known` positions of `text` are in the slot: make the blocks that have become full findable.

        features: [n, F * H] of the positions that are new since the call before.
        """
        if not self.is_reusing:
            return
        size, ahead = self.pool.tokens_per_block, self.pool.ahead
        if features is not None:
            holding.tail = features if holding.tail is None else torch.cat([holding.tail, features])
        while (end := (len(holding.keys) + 1) * size) <= min(known, len(text) - ahead):
            index = len(holding.keys)
            number, before = holding.table[index], holding.keys[-1] if holding.keys else START
            holding.table[index], key = self.pool.enter(number, before, text[end - size : end + ahead])
            holding.keys.append(key)
            self._keep(slot, holding, index, is_new=holding.table[index] == number)

    def end(self, holding: Holding) -> None:
        """The request holds nothing any more; what it entered stays findable."""
        self.pool.give_back(holding.table)
        holding.table, holding.keys, holding.prefix, holding.tail = [], [], None, None

    def _load(self, slot: int, shared: Sequence[int], holding: Any) -> None:
        """A request begins in `slot` with `holding`; shared: the blocks with its reused positions, the last of them
        perhaps only in part."""

    def _place(self, holding: Any, first: int) -> None:
        """The blocks of `holding` from number `first` on are new."""

    def _keep(self, slot: int, holding: Any, index: int, is_new: bool) -> None:
        """Block number `index` has been entered; not is_new: another one with the same content has taken its place."""


class KvCache(BlockCache):
    """The blocks of an engine on a CPU: with reuse, copies of what fills them.

    max_tokens: positions in all blocks together; None has room for every slot at full length. A block belongs to the
    text; the rows that a draft needs until it is judged are scratch rows of the slot. Raises `OptionError`.
    """

    def __init__(
        self,
        model: Model,
        *,
        tokens_per_block: int = 32,
        max_tokens: int | None = None,
        enable_block_reuse: bool = False,
        feature_width: int = 0,
    ) -> None:
        smallest, largest = BLOCK_SIZES
        if not smallest <= tokens_per_block <= largest:
            raise OptionError(f"KvCacheConfig.tokens_per_block is {tokens_per_block}", f"{smallest} to {largest}")
        count = block_count(model.max_slots * -(-model.cache_rows // tokens_per_block), max_tokens, tokens_per_block)
        pool = BlockPool(count, tokens_per_block)
        super().__init__(pool, rows_per_slot=model.cache_rows, enable_block_reuse=enable_block_reuse)
        self.model = model
        if enable_block_reuse:
            if model.config.sliding_window is not None:
                raise OptionError(*NO_REUSE_WITH_A_WINDOW)
            layers, _, heads, _, dim = model.cache.shape  # memory that was never written is never taken
            self._rows = model.cache.new_empty(count, layers, heads, tokens_per_block, dim)
            self._features = model.embed.new_empty(count, tokens_per_block, feature_width)

    def _load(self, slot: int, shared: Sequence[int], holding: Holding) -> None:
        size, parts = self.pool.tokens_per_block, []
        for index, number in enumerate(shared):
            start, rows = index * size, min(size, holding.reused - index * size)
            self.model.cache[:, slot, :, start : start + rows] = self._rows[number][:, :, :rows]
            parts.append(self._features[number, :rows])
        if parts and self._features.shape[-1]:
            holding.prefix = torch.cat(parts)
            holding.tail = holding.prefix[len(holding.keys) * size :]

    def _keep(self, slot: int, holding: Holding, index: int, is_new: bool) -> None:
        size, number = self.pool.tokens_per_block, holding.table[index]
        if is_new:
            self._rows[number] = self.model.cache[:, slot, :, index * size : (index + 1) * size]
            if holding.tail is not None:
                self._features[number] = holding.tail[:size]
        if holding.tail is not None:
            holding.tail = holding.tail[size:]


def block_count(whole: int, max_tokens: int | None, tokens_per_block: int) -> int:
    """How many blocks: `whole` for every slot at full length, or fewer by `KvCacheConfig.max_tokens`."""
    count = whole if max_tokens is None else min(whole, max_tokens // tokens_per_block)
    if count == 0:
        raise OptionError(f"KvCacheConfig.max_tokens is {max_tokens}", f"at least one block, {tokens_per_block}")
    return count
