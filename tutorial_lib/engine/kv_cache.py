"""The KV cache by blocks: who holds which, what can be used again, what goes first when there is no room.

A request's text is cut into blocks of `tokens_per_block` positions, and its block table names one block of the cache
for each (Kwon et al. 2023, PagedAttention, arXiv 2309.06180). A full block is known by a hash of its tokens and of
everything before them, so a later request with the same beginning finds it (as TensorRT-LLM's and vLLM's block reuse).
Blocks that no request holds stay findable until their room is needed; the longest unused goes first.

A CPU has no kernel that reads keys through a table, and gathering them would cost every layer of every round: at
1,500 tokens a tenth of the pass of a small model. So attention reads one contiguous stretch for each slot, and blocks
are copied once, out of it when they fill and into it when a request begins with them. A copy is thousands of times
cheaper than computing its tokens, and a request that diverges in mid-block already writes to a copy of its own.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..errors import OptionError
from .model import Model

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
    """Counts references to `count` blocks and remembers the content of full ones. Knows nothing of tensors."""

    def __init__(self, count: int, tokens_per_block: int) -> None:
        self.tokens_per_block = tokens_per_block
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
        size, key = self.tokens_per_block, START
        blocks: list[int] = []
        keys: list[bytes] = []
        for start in range(0, len(text) - size + 1, size):
            following = block_key(key, text[start : start + size])
            if following not in self._by_key:
                break
            key = following
            blocks.append(self._by_key[key])
            keys.append(key)
        rest = text[len(blocks) * size : (len(blocks) + 1) * size]
        shared = {b: _common(self.blocks[b].tokens, rest) for b in self._behind.get(key, ())}
        best = max(shared, key=lambda b: shared[b], default=None)
        if best is None or shared[best] == 0:
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
        """Make a full block findable. Where its content is known already the known block is held instead of this one.
        Returns the block to keep in the table, and its key."""
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


class KvCache:
    """The blocks of one engine and, with reuse, what is in them.

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
        self._rows_per_slot = model.cache_rows
        whole = model.max_slots * -(-model.cache_rows // tokens_per_block)
        count = whole if max_tokens is None else min(whole, max_tokens // tokens_per_block)
        if count == 0:
            raise OptionError(f"KvCacheConfig.max_tokens is {max_tokens}", f"at least one block, {tokens_per_block}")
        self.model, self.is_reusing = model, enable_block_reuse
        self.pool = BlockPool(count, tokens_per_block)
        if enable_block_reuse:
            if model.config.sliding_window is not None:
                raise OptionError(
                    "enable_block_reuse with a model that has a sliding window",
                    "a model that keeps its whole text",
                    "leave enable_block_reuse out",
                )
            layers, _, heads, _, dim = model.cache.shape  # memory that was never written is never taken
            self._rows = model.cache.new_empty(count, layers, heads, tokens_per_block, dim)
            self._features = model.embed.new_empty(count, tokens_per_block, feature_width)

    @property
    def max_tokens(self) -> int:
        return len(self.pool.blocks) * self.pool.tokens_per_block

    def blocks_for(self, positions: int) -> int:
        """A ring takes no more, however long the text."""
        return -(-min(positions, self._rows_per_slot) // self.pool.tokens_per_block)

    def begin(self, slot: int, text: Sequence[int], most_reused: int, positions: int) -> Holding | None:
        """Blocks for `positions` positions of a request whose text so far is `text`; None if there is no room now.

        Of the text at most `most_reused` positions come from the cache: they are copied into the slot's rows.
        """
        pool, size = self.pool, self.pool.tokens_per_block
        found = pool.find(text[:most_reused]) if self.is_reusing else Found()
        shared = [*found.blocks, *([] if found.partial is None else [found.partial])]
        pool.hold(shared)  # so that taking new ones evicts none of these
        fresh = pool.take(self.blocks_for(positions) - len(found.blocks))
        if fresh is None:
            pool.give_back(shared)
            return None
        whole = len(found.blocks)
        holding = Holding([*found.blocks, *fresh], list(found.keys), whole * size + found.rows)
        self._load(slot, shared, holding)
        pool.give_back(shared[whole:])
        return holding

    def _load(self, slot: int, blocks: Sequence[int], holding: Holding) -> None:
        size, parts = self.pool.tokens_per_block, []
        for index, number in enumerate(blocks):
            start, rows = index * size, min(size, holding.reused - index * size)
            self.model.cache[:, slot, :, start : start + rows] = self._rows[number][:, :, :rows]
            parts.append(self._features[number, :rows])
        if parts and self._features.shape[-1]:
            holding.prefix = torch.cat(parts)
            holding.tail = holding.prefix[len(holding.keys) * size :]

    def grow(self, holding: Holding, positions: int) -> bool:
        """Room for a text of `positions`; False, and nothing changes, if blocks ran out."""
        fresh = self.pool.take(max(0, self.blocks_for(positions) - len(holding.table)))
        holding.table += fresh or []
        return fresh is not None

    def enter(
        self, slot: int, holding: Holding, text: Sequence[int], known: int, features: torch.Tensor | None
    ) -> None:
        """The slot now holds the first `known` positions of `text`: keep the blocks that have become full.

        features: [n, F * H] of the positions that are new since the call before.
        """
        if not self.is_reusing:
            return
        size = self.pool.tokens_per_block
        if features is not None:
            holding.tail = features if holding.tail is None else torch.cat([holding.tail, features])
        while (len(holding.keys) + 1) * size <= known:
            index = len(holding.keys)
            own, number = slice(index * size, (index + 1) * size), holding.table[index]
            before = holding.keys[-1] if holding.keys else START
            holding.table[index], key = self.pool.enter(number, before, text[own])
            holding.keys.append(key)
            if holding.table[index] == number:
                self._rows[number] = self.model.cache[:, slot, :, own]
                if holding.tail is not None:
                    self._features[number] = holding.tail[:size]
            if holding.tail is not None:
                holding.tail = holding.tail[size:]

    def end(self, holding: Holding) -> None:
        """The request holds nothing any more; what it entered stays findable."""
        self.pool.give_back(holding.table)
        holding.table, holding.keys, holding.prefix, holding.tail = [], [], None, None
