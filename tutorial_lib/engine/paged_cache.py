"""The KV cache on a GPU: a block is a page of every cache, and attention reads keys through the block table.

One table serves the target and whatever drafts with a cache of its own, so a page that is reused holds the keys of
all of them. Everything here is launched on one stream with the rounds: what a round in flight still writes for a
request that has left comes before anything that is launched for the page's next holder.

Keys that a round in flight may still rewrite are no part of an entered block, so pages are shared without locks: who
holds one with others only reads it. A text that parts from a known one in mid-page gets a copy of that page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import OptionError
from .gpu_model import MAX_STEP_ROWS, PAGE, upload
from .kv_cache import NO_REUSE_WITH_A_WINDOW, BlockCache, BlockPool, Holding, block_count


def ring_positions(windows: Sequence[int | None]) -> int | None:
    """How many positions a text needs at most, if all models that share its table look at a window of so many. A step's
    rows are written before the first of them looks back, so they come on top. None: all positions."""
    known = [window for window in windows if window is not None]
    return max(known) + MAX_STEP_ROWS if known and len(known) == len(windows) else None


@dataclass
class Seat(Holding):
    """What a request holds while it has `slot`, and how far the device is ahead of the host.

    unread: launches whose results the host has not read; each of them gives at least one token. draft_len: K of the
    last of its rounds, None before the first. drafted: positions that are right in the drafter's cache too.
    """

    slot: int = -1
    unread: int = 0
    draft_len: int | None = None
    drafted: int = 0


class PagedCache(BlockCache):
    """caches: of every model that reads `table`, [layers, pages, ...]; page number `pages` is scratch. max_tokens: in
    all pages together, None for all there are. ring: positions after which a text's pages go round, see
    `ring_positions`. ahead: see `BlockPool`. Raises `OptionError`."""

    holding_type = Seat

    def __init__(
        self,
        caches: Sequence[torch.Tensor],
        table: torch.Tensor,
        pages: int,
        *,
        max_tokens: int | None = None,
        enable_block_reuse: bool = False,
        ahead: int = 0,
        ring: int | None = None,
    ) -> None:
        if enable_block_reuse and ring is not None:
            raise OptionError(*NO_REUSE_WITH_A_WINDOW)
        positions = min(table.shape[1] * PAGE, ring or table.shape[1] * PAGE)
        pool = BlockPool(block_count(pages, max_tokens, PAGE), PAGE, ahead)
        super().__init__(pool, rows_per_slot=positions, enable_block_reuse=enable_block_reuse)
        self.caches, self.table, self.scratch_page = caches, table, pages

    def begin(self, slot: int, text: Sequence[int], most_reused: int, positions: int) -> Seat | None:
        """As in `BlockCache`; the last position is computed in any case, for what the rounds take from it."""
        return super().begin(slot, text, min(most_reused, max(0, len(text) - 1)), positions)

    def _load(self, slot: int, shared: Sequence[int], holding: Seat) -> None:
        holding.slot, holding.drafted, whole = slot, holding.reused, len(holding.keys)
        for source in shared[whole:]:  # what follows in that page is written anew, so it is copied whole
            for cache in self.caches:
                cache[:, holding.table[whole]].copy_(cache[:, source])
        self._place(holding, 0)

    def _place(self, holding: Seat, first: int) -> None:
        blocks, pages = self.table.shape[1], holding.table
        if first == 0:
            upload(self.table[holding.slot], pages + [self.scratch_page] * (blocks - len(pages)))
        else:
            upload(self.table[holding.slot, first : len(pages)], pages[first:])
        ring = self.blocks_for(blocks * PAGE)
        if ring < blocks and len(pages) == ring:
            upload(self.table[holding.slot], [pages[i % ring] for i in range(blocks)])

    def _keep(self, slot: int, holding: Seat, index: int, is_new: bool) -> None:
        if not is_new:
            upload(self.table[slot, index : index + 1], [holding.table[index]])
