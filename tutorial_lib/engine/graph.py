"""One CUDA graph per round: draft K tokens, verify K + 1, accept, advance. The host only launches it and, one round
late, reads what was emitted.

`RoundProgram` is the round as a fixed sequence of device operations over fixed buffers, for one batch size and one K;
captured on a GPU, run step by step without one (the tests do that on a CPU). `gpu_engine.GpuEngine` is the loop around
it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..config import SimulatedAcceptance
from ..errors import OptionError
from .device_sampling import SlotParams, accept_sampled, draw, probabilities, uniform
from .drafting import Drafting, OpenTree
from .gpu_model import MAX_STEP_ROWS, PAGE, GpuModel, Taps, captured, upload
from .sampling import Purpose


@dataclass
class DeviceState:
    """What rounds read and advance, for every slot and one scratch slot at the end that unused rows point to."""

    length: torch.Tensor  # int32 [slots + 1]: tokens of the text, the last of which the target has not seen
    last: torch.Tensor  # int32 [slots + 1, 2]: the last two of them
    text: torch.Tensor  # int32 [slots + 1, positions]: all of them
    row: torch.Tensor  # int32 [slots + 1]: which row of the last verification its last accepted token had
    kept: torch.Tensor  # int32 [slots + 1, depth]: with a tree, the rows of all accepted tokens, 0 behind them
    features: torch.Tensor  # bf16 [(slots + 1) * rows, F * H]: what the drafter asked for of every such row
    table: torch.Tensor  # int32 [slots + 1, blocks]
    params: SlotParams
    forced: torch.Tensor  # int32 [period]: accepted drafts of round i, if acceptance is simulated
    counter: torch.Tensor  # int64 [1]: rounds so far

    @classmethod
    def make(
        cls, slots: int, blocks: int, scratch_page: int, device, *, feature_rows: int = 0, feature_width: int = 0,
        tree_depth: int = 0,
    ) -> DeviceState:  # fmt: skip
        def ints(*shape: int, fill: int = 0) -> torch.Tensor:
            return torch.full(shape, fill, dtype=torch.int32, device=device)

        return cls(
            length=ints(slots + 1, fill=2),
            last=ints(slots + 1, 2),
            text=ints(slots + 1, blocks * PAGE),
            row=ints(slots + 1),
            kept=ints(slots + 1, tree_depth),
            features=torch.zeros((slots + 1) * feature_rows, feature_width, dtype=torch.bfloat16, device=device),
            table=ints(slots + 1, blocks, fill=scratch_page),
            params=SlotParams.make(slots + 1, device),
            forced=ints(1),
            counter=torch.zeros(1, dtype=torch.long, device=device),
        )

    @property
    def feature_rows(self) -> int:
        """Rows of `features` that every slot has, whatever K its rounds have."""
        return self.features.shape[0] // self.length.shape[0]

    @property
    def scratch_slot(self) -> int:
        return self.length.shape[0] - 1


class RoundProgram:
    """One round for `batch` sequences. Inputs are set before a launch: `slots` [batch], and for a drafter on the host
    `drafts` and `drafted_len`, with `host_tree` also `rows.parents`. Everything it tells the host lies in `report`, one
    int32 vector: three clock readings (start, drafted, verified), whose logits were damaged [batch], `drafted_len`
    [batch], `out` [batch, K + 2]: accepted, the token after, K drafts; for a tree `path` [batch, depth], the rows of
    the accepted ones; for an `OpenTree` the parents of all rows [batch, K + 1], and if it came from the host the
    target's most likely token in each of them [batch, K + 1]; last what is wrong with the steps of each of `watched`
    (`GpuModel.trouble`)."""

    def __init__(
        self,
        target: GpuModel,
        drafting: Drafting | None,
        state: DeviceState,
        *,
        batch: int,
        max_draft_len: int,
        is_sampled: bool = False,
        is_forced: bool = False,
        host_tree: OpenTree | None = None,
    ) -> None:
        if batch * (max_draft_len + 1) > target.round_rows:
            raise OptionError(
                f"{batch} requests with {max_draft_len} draft tokens each are {batch * (max_draft_len + 1)} rows",
                f"at most {target.round_rows}",
                "lower max_draft_len or max_batch_size",
            )
        device, k = target.device, max_draft_len
        self.target, self.drafting, self.state, self.batch, self.k = target, drafting, state, batch, k
        self.is_sampled, self.is_forced = is_sampled, is_forced and k > 0
        self.forced = state.forced.clamp(max=k) if self.is_forced else None
        self.slots = torch.full((batch,), state.scratch_slot, dtype=torch.long, device=device)
        self._chosen: list[int] = []
        self.proposed_s = 0.0  # what a drafter on the host took for the last launch

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self.tree = (host_tree if drafting is None else drafting.tree) if k else None
        depth = self.tree.depth if self.tree is not None else 0
        rows, self.is_open = batch * (k + 1), isinstance(self.tree, OpenTree)
        self.parts = [6, batch, batch, batch * (k + 2), batch * depth]
        drafts_by = getattr(drafting, "model", None)
        self.watched: list[GpuModel] = [m for m in (target, drafts_by) if m is not None and m.trouble is not None]
        self._troubles: list[torch.Tensor] = [m.trouble for m in self.watched if m.trouble is not None]
        self.parts += [rows * self.is_open, rows * (host_tree is not None), sum(t.numel() for t in self._troubles)]
        self.report = ints(sum(self.parts))
        stamps, self.damage, lengths, out, path, parents, likeliest, self.trouble = self.report.split(self.parts)
        self.stamps, self.drafted_len, self.out = stamps.view(torch.long), lengths.fill_(k), out.view(batch, k + 2)
        self.path = path.view(batch, depth) if self.tree is not None else None
        self.rows = None if self.tree is None else self.tree.over(batch)
        if self.rows is not None and self.is_open:
            self.rows = self.rows._replace(parents=parents.copy_(self.rows.parents.view(-1)).view(batch, k + 1))
        self.likeliest = likeliest.view(batch, k + 1) if host_tree is not None else None
        self.taps = None
        if drafting is not None and drafting.feature_layers:
            self.taps = Taps(drafting.feature_layers, state.features, ints(rows))
        reach = k if self.tree is None else self.tree.reach
        self.slots32, self.starts, self.pair = ints(batch), ints(reach + 2, batch), ints(batch, 2)
        self.tokens, self.choices = ints(batch, k + 1), ints(batch, k + 1)
        self.drafts = self.tokens[:, 1:]
        self._graph: Any = None

    # ------------------------------------------------------------------------------------------------------- launching

    def choose(self, slots: Sequence[int]) -> None:
        """Serve these slots from the next launch on; rows left over go to the scratch slot."""
        if slots != self._chosen:
            scratch = self.state.scratch_slot
            self.aim([*slots, *[scratch] * (self.batch - len(slots))])
            self._chosen = list(slots)

    def aim(self, slots: Sequence[int]) -> None:
        upload(self.slots, slots)
        if self.taps is not None:
            each = self.state.feature_rows
            upload(self.taps.rows, [slot * each + row for slot in slots for row in range(self.k + 1)])

    def launch(self) -> None:
        """Run the round: by its graph on a GPU (captured at the first call), directly elsewhere."""
        if self.target.device.type != "cuda":
            self._run()
        else:
            if self._graph is None:
                self.capture()
            self._graph.replay()

    @torch.inference_mode()
    def capture(self) -> None:
        """Compile every kernel by one rehearsal on the scratch slot, then record the graph. Advances nothing real."""
        keep, counter = self.slots.tolist(), self.state.counter.clone()
        self.aim([self.state.scratch_slot] * self.batch)
        self._graph = captured(self._run)
        self.state.counter.copy_(counter)
        self.aim(keep)

    @torch.inference_mode()
    def _run(self) -> None:
        state, ops = self.state, self.target.ops
        self._stamp(0)
        q = self.draft()
        self._stamp(1)
        logits = self.verify()
        decided = None
        if self.is_sampled and not self.is_forced:
            assert logits is not None
            decided = self.sampled(logits, q)
        ops.finish_round(
            self.slots, state.length, state.last, state.text, state.row, self.tokens, self.choices, self.drafted_len,
            self.forced, state.counter, self.out, decided=decided,
            parents=None if self.rows is None else self.rows.parents, path=self.path,
            kept=None if self.rows is None else state.kept, pdl=ops.pdl,
        )  # fmt: skip
        if self.path is not None:
            ops.keep_path(self.target.cache, state.table, self.slots32, self.starts[1], self.path, ops.pdl)
        if self._troubles:
            torch.cat(self._troubles, out=self.trouble)
        self._stamp(2)

    def _stamp(self, i: int) -> None:
        if self.target.device.type == "cuda":
            from .kernels import stamp

            stamp(self.stamps[i : i + 1])
        else:
            self.stamps[i] = time.perf_counter_ns()

    # ------------------------------------------------------------------------------------------------- the round itself

    @property
    def params(self) -> SlotParams:
        return self.state.params.select(self.slots)

    def draft(self) -> torch.Tensor | None:
        """What every step of the round starts from, and the drafts into `tokens`; q if they were sampled."""
        state, ops = self.state, self.target.ops
        known = self.drafting.vocab_size if self.drafting is not None else self.target.config.vocab_size
        ops.begin_round(
            self.slots, state.length, state.last, self.slots32, self.starts, self.tokens, self.pair, self.damage,
            known, ops.pdl,
        )  # fmt: skip
        q = None
        if self.drafting is not None and self.k:
            q = self.drafting.draft(self)
        elif self.drafting is not None:
            self.drafting.follow(self)
        if self.rows is not None and self.is_open:
            assert self.tree is not None
            ops.tree_rows(*self.rows, self.tree.depth, ops.pdl)
        return q

    def verify(self) -> torch.Tensor | None:
        """The target's logits, float32 [B, K + 1, V], if they are needed; its argmax goes into `choices`."""
        logits = self.target.choose(
            self.tokens.view(-1), self.state.table, self.starts[1], self.slots32, self.k + 1, self.choices.view(-1),
            damage=self.damage, tree=None if self.rows is None else (self.rows.mask, self.rows.depths), taps=self.taps,
            needs_logits=self.is_sampled and not self.is_forced,
        )  # fmt: skip
        if self.likeliest is not None:
            self.likeliest.copy_(self.choices)
        return None if logits is None else logits.view(self.batch, self.k + 1, -1)

    def sampled(self, logits: torch.Tensor, q: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(accepted [B], the token after the accepted ones [B]) by rejection sampling of drafts drawn from q.

        Drafts that were certain choices (q is None, and every tree) need no rejection: one token is drawn at every
        row with the number that plain decoding uses at its position, into `choices`, and a draft stays if it equals
        the draw. That keeps the distribution, and even plain decoding's very text; the result is None.
        """
        params, position = self.params, self.state.length[self.slots].long()
        repeated = SlotParams(*(x.repeat_interleave(self.k + 1) for x in vars(params).values()))
        p = probabilities(logits.reshape(-1, logits.shape[-1]), repeated)
        if q is not None:
            return accept_sampled(self.drafts, q, p.view_as(logits), self.drafted_len, params.seed, position)
        depths = torch.arange(self.k + 1, device=p.device)
        if self.rows is not None:
            depths = self.rows.depths.view(self.batch, -1).long()
        at = (position[:, None] + depths).view(-1)
        self.choices.copy_(draw(p, uniform(repeated.seed, at, Purpose.TOKEN)).view_as(self.choices))
        return None


def position_limit(max_seq_len: int, max_draft_len: int) -> int:
    """Cache positions a request of `max_seq_len` tokens may touch, if a round writes `max_draft_len` behind the text:
    results are read a round late, so up to two rounds run past its end, and prefill fills its last step up."""
    return max_seq_len + max(2 * (max_draft_len + 1) + 1, MAX_STEP_ROWS)


def forced_schedule(simulated: SimulatedAcceptance, max_draft_len: int) -> list[int]:
    """Accepted drafts of round after round, over and over. Raises `OptionError` for more than can be drafted."""
    if (rates := simulated.acceptance_by_position) is None:
        return _of_least_variance(simulated.mean, max_draft_len)
    if len(rates) > max_draft_len:
        raise OptionError(
            f"acceptance_by_position has {len(rates)} shares", f"at most {max_draft_len}, the draft tokens of a round"
        )
    period, stride = 1000, 617  # without a common factor: every quantile comes once, and neighbours lie far apart
    quantiles = [(i * stride % period + 0.5) / period for i in range(period)]
    return [sum(u < rate for rate in rates) for u in quantiles]


def _of_least_variance(acceptance_length: float, max_draft_len: int, period: int = 100) -> list[int]:
    """For a mean of `acceptance_length` tokens per round, bonus included: floor(mean) always, one more as often as the
    fraction asks, spread evenly."""
    if not 1.0 <= acceptance_length <= max_draft_len + 1:
        raise OptionError(
            f"acceptance_length is {acceptance_length:g}",
            f"from 1 to {max_draft_len + 1} with max_draft_len {max_draft_len}",
        )
    mean = acceptance_length - 1
    return [int((i + 1) * mean + 1e-9) - int(i * mean + 1e-9) for i in range(period)]
