"""The engine whose rounds run on the device: `Engine`'s loop with rounds and prompts launched, and read one turn late.

The host launches a round for everybody, then reads what the one before emitted; so the GPU has its next work before it
is done with the last. What follows from a late result is late too: a round more than needed may run for a request that
has ended, and what it computes is dropped. Everything a request goes through outside the rounds comes from `Engine`:
checks, stop conditions, results, and when it joins, waits and leaves (`scheduler.py`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from ..config import KvCacheConfig, SamplingParams, SimulatedAcceptance
from ..drafters.base import Drafter, Outcome, SlotState
from ..errors import DAMAGED_LOGITS, OptionError
from ..results import Round
from .device_sampling import draw, probabilities, uniform
from .drafting import Drafting, ModelDrafting, OpenTree
from .engine import Engine, Request, _arbitrary_ids, _median_s
from .gpu_model import PAGE, GpuModel, captured, compile_steps, seconds_of, upload
from .graph import DeviceState, RoundProgram, forced_schedule, position_limit
from .model import PREFILL_CHUNK
from .paged_cache import PagedCache, Seat, ring_positions
from .sampling import Purpose
from .scheduler import Scheduler
from .verify import Verdict

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
STEPS_PER_GRAPH = 4  # when steps are timed


class Launched(NamedTuple):
    """Work whose results are on their way to the host. served: those it was launched for, and their seats then.
    program: None for the first token after a prompt, report: (damage, token). event: when the report is there."""

    served: list[tuple[Request, Seat]]
    program: RoundProgram | None
    report: torch.Tensor
    event: Any
    proposed_s: float = 0.0


class GpuEngine(Engine):
    """`Engine` with its rounds on the device. What drafts is part of the round's graph (`Drafting`), or it runs on the
    host (`Drafter`: suffix and lookahead decoding), and a round waits for the tokens of the one before.

    host_tree: the most tokens and depth of a `host_drafter`'s trees; None if it drafts chains.
    """

    target: GpuModel  # type: ignore[assignment]

    def __init__(
        self,
        target: GpuModel,
        tokenizer,
        eos_ids: Iterable[int],
        *,
        max_slots: int,
        max_seq_len: int,
        drafting: Drafting | None = None,
        host_drafter: Drafter | None = None,
        host_tree: OpenTree | None = None,
        max_draft_len: int = 0,
        draft_len_schedule: Mapping[int, int] | None = None,
        kv_cache_config: KvCacheConfig | None = None,
        simulated_acceptance: SimulatedAcceptance | None = None,
    ) -> None:
        self.target, self.tokenizer, self.eos_ids = target, tokenizer, frozenset(eos_ids)
        self.drafter, self.drafting = host_drafter, drafting
        self.max_slots, self.max_seq_len = max_slots, max_seq_len
        self.max_draft_len = max_draft_len if drafting is not None or host_drafter is not None else 0
        self._host_tree = host_tree
        tree = host_tree if drafting is None else drafting.tree
        if tree is not None:
            self.max_draft_len = tree.tokens  # every token of a tree takes a row
        reach = self.max_draft_len if tree is None else tree.reach
        if self.max_draft_len >= (most := target.round_rows):
            raise OptionError(
                f"max_draft_len is {self.max_draft_len}", f"at most {most - 1} for the GPU path by {target.kernel}"
            )
        self.draft_len_schedule = dict(sorted((draft_len_schedule or {1: self.max_draft_len}).items()))
        if tree is not None and (between := set(self.draft_len_schedule.values()) - {0, self.max_draft_len}):
            raise OptionError(
                f"draft_len_schedule asks for {min(between)} of a tree's {self.max_draft_len} tokens",
                "the whole tree, or 0",
            )
        layers = drafting.feature_layers if drafting is not None else ()
        self.state = DeviceState.make(
            max_slots, -(-position_limit(max_seq_len, reach) // PAGE), target.pages - 1, target.device,
            feature_rows=self.max_draft_len + 1, feature_width=len(layers) * target.config.hidden_size,
            tree_depth=0 if tree is None else tree.depth,
        )  # fmt: skip
        self._slack = 2 * (reach + 1) + 1  # a round in flight, the next one, a first token on its way
        kv = kv_cache_config or KvCacheConfig()
        self.cache: PagedCache = PagedCache(  # type: ignore[assignment]
            [target.cache, *(drafting.caches if drafting is not None else ())] if kv.enable_block_reuse else [],
            self.state.table,
            target.pages - 1,
            max_tokens=kv.max_tokens,
            enable_block_reuse=kv.enable_block_reuse,
            ahead=drafting.ahead if drafting is not None else 0,
            ring=ring_positions([target.config.sliding_window, *(drafting.windows if drafting is not None else ())]),
        )
        rows = {"max_rows": PREFILL_CHUNK, "pass_rows": target.prompt_rows}
        self.scheduler = Scheduler(max_slots, self.cache, slack=self._slack, **rows)
        self._free, self._is_stepping = self.scheduler.free, False
        self._launched: list[Launched] = []
        self._is_ahead = False  # a round has been launched in this turn
        self._is_following = drafting is None or drafting.is_following
        self._simulated = simulated_acceptance
        if simulated_acceptance is not None:
            if isinstance(tree, OpenTree):
                raise OptionError(
                    "simulated_acceptance and a tree that grows anew every round", "a chain or a fixed tree"
                )
            deepest = self.max_draft_len if tree is None else tree.depth
            schedule = forced_schedule(simulated_acceptance, deepest)
            self.state.forced = torch.tensor(schedule, dtype=torch.int32, device=target.device)
        self._programs: dict[tuple[int, int, bool], RoundProgram] = {}

    # --------------------------------------------------------------------------------------------------------- programs

    def program(self, batch: int, max_draft_len: int | None = None, *, is_sampled: bool = False) -> RoundProgram:
        """The round for a batch bucket and K, made (and on a GPU captured) at its first use."""
        k = self.max_draft_len if max_draft_len is None else max_draft_len
        most = self._most_together(k)
        key = (next((b for b in BATCH_BUCKETS if batch <= b <= most), most), k, is_sampled)
        if key not in self._programs:
            self._programs[key] = RoundProgram(
                self.target,
                self.drafting,
                self.state,
                batch=key[0],
                max_draft_len=k,
                is_sampled=is_sampled,
                is_forced=self._simulated is not None,
                host_tree=self._host_tree,
            )
        return self._programs[key]

    def _most_together(self, k: int) -> int:
        return min(self.max_slots, self.target.round_rows // (k + 1))

    # ----------------------------------------------------------------------------------------------------------- rounds

    def _positions(self, request: Request) -> int:
        return len(request.token_ids) + self._slack

    def _round(self, active: Sequence[Request]) -> None:
        """Launch a round of all of `active`, then read what was launched a turn ago. A batch that is too large for one
        program is divided evenly."""
        active = [r for r in active if r.remaining > _seat(r).unread]
        k = self._draft_len(len(active))
        changed = [r for r in active if _seat(r).draft_len not in (None, k)]
        if changed or self.drafter is not None:  # both take the text as it is now
            self._settle()
            active = [r for r in active if not r.is_over]
        for request in changed:
            if self.drafting is not None and not request.is_over:
                self.drafting.catch_up(self.state, request.slot, request.token_ids, _seat(request).drafted, k)
        parts = -(-len(active) // self._most_together(k))
        before, self._launched = self._launched, []
        for i in range(parts):
            self._launched.append(self._launch(active[i::parts], k))
            if self.drafter is not None:
                self._settle()
        self._is_ahead = bool(self._launched)
        for launched in before:
            self._read(launched)

    def _launch(self, active: Sequence[Request], k: int) -> Launched:
        program = self.program(len(active), k, is_sampled=any(not r.params.is_greedy for r in active))
        program.choose([r.slot for r in active])
        proposed_s = self._propose(program, active) if self.drafter is not None else 0.0
        program.launch()
        for request in active:
            seat = _seat(request)
            seat.unread, seat.draft_len = seat.unread + 1, k
        return Launched([(r, _seat(r)) for r in active], program, *_fetch(program.report), proposed_s)

    def _propose(self, program: RoundProgram, active: Sequence[Request]) -> float:
        """The host drafter's tokens into the round; the seconds it took."""
        assert self.drafter is not None
        began = time.perf_counter()
        deepest = program.k if program.tree is None else program.tree.depth
        states = [SlotState(r.slot, r.token_ids, min(deepest, r.remaining - 1), r.params, r.seed) for r in active]
        proposed, unused = self.drafter.propose(states), program.batch - len(active)
        drafts = [list(d.tokens) for d in proposed]
        lengths = [program.k if self._simulated else len(d) for d in drafts] + [0] * unused
        rows = [d + [0] * (program.k - len(d)) for d in drafts] + [[0] * program.k] * unused
        program.drafts.copy_(torch.tensor(rows, dtype=torch.int32).view(program.batch, program.k))
        upload(program.drafted_len, lengths)
        if program.is_open and program.rows is not None:
            trees = [[-1, *(parent + 1 for parent in d.tree)] for d in proposed] + [[-1]] * unused
            padded = [tree + [-2] * (program.k + 1 - len(tree)) for tree in trees]
            program.rows.parents.copy_(torch.tensor(padded, dtype=torch.int32))
        return time.perf_counter() - began

    # ---------------------------------------------------------------------------------------------------------- results

    def _settle(self) -> None:
        """Read everything that was launched."""
        while self._launched:
            self._read(self._launched.pop(0))

    def _read(self, launched: Launched) -> None:
        """Wait for the results and hand them out. Who has ended meanwhile, or lost its seat, gets none."""
        if launched.event is not None:
            launched.event.synchronize()
        served: list[tuple[int, Request, Seat]] = []
        for row, (request, seat) in enumerate(launched.served):
            if request.holding is seat and not request.is_over:
                seat.unread -= 1
                served.append((row, request, seat))
        if not served:
            return
        if launched.program is None:
            self._read_first(served[0][1], *launched.report.tolist())
        else:
            self._read_round(launched.program, served, launched)

    def _read_first(self, request: Request, damage: int, token: int, *trouble: int) -> None:
        self.target.check(trouble)
        if damage:
            raise FloatingPointError(DAMAGED_LOGITS)
        request.ttft_s = request.latency_s = time.perf_counter() - request.start_s
        self._emit(request, Verdict(0, (token,)), None)  # type: ignore[arg-type]

    def _read_round(
        self, program: RoundProgram, served: Sequence[tuple[int, Request, Seat]], launched: Launched
    ) -> None:
        batch = program.batch
        stamps, damage, lengths, out, path, parents, likeliest, trouble = launched.report.split(program.parts)
        for model, words in zip(program.watched, trouble.tensor_split(len(program.watched) or 1), strict=False):
            model.check(words.tolist())
        began, drafted, ended = stamps.view(torch.long).tolist()
        damaged = damage.tolist()
        if any(damaged[row] for row, *_ in served):
            raise FloatingPointError(DAMAGED_LOGITS)
        rows, counts, paths = out.view(batch, -1).tolist(), lengths.tolist(), path.view(batch, -1).tolist()
        trees = parents.view(batch, -1).tolist() if program.is_open else None
        choices = likeliest.view(batch, -1).tolist() if program.likeliest is not None else [[]] * batch
        now = time.perf_counter()
        outcomes = []
        for row, request, seat in served:
            accepted, token, drafts = rows[row][0], rows[row][1], rows[row][2 : 2 + counts[row]]
            walked = tuple(i - 1 for i in paths[row][:accepted]) if program.tree is not None else tuple(range(accepted))
            known = len(request.token_ids) - 1  # positions that this round found in every cache
            words = (*(drafts[i] for i in walked), token)
            emitted = self._emit(request, Verdict(accepted, words), None)  # type: ignore[arg-type]
            if program.k or self._is_following:
                seat.drafted = max(seat.drafted, known)
            self.cache.enter(request.slot, seat, request.token_ids, min(known, seat.drafted))
            outcomes.append(Outcome(request.slot, walked, tuple(choices[row][: counts[row] + 1])))
            request.latency_s = now - request.start_s
            request.rounds.append(
                Round(
                    drafted=tuple(drafts),
                    accepted=accepted,
                    emitted=emitted,
                    draft_s=(drafted - began) * 1e-9 + launched.proposed_s,
                    verify_s=(ended - drafted) * 1e-9,
                    end_s=request.latency_s,
                    parents=_parents(program, trees[row] if trees else [], counts[row]),
                    path=None if program.tree is None else walked,
                )
            )
        if self.drafter is not None:
            self.drafter.observe(outcomes)

    # ---------------------------------------------------------------------------------------------------------- prompts

    def _read_prompts(self, pieces: Sequence[tuple[Request, int]]) -> None:
        """Launch pieces of prompts; those that are read to their end get their first token, of which the host hears a
        turn later. With no round to wait for it hears of everything now.

        A draft model reads along unless nobody drafts at this load and nobody will look for the prompt's pages."""
        will_draft = self._draft_len(len(self.scheduler.running)) > 0
        is_drafter_reading = self._is_following or self.cache.is_reusing or will_draft
        for request, count in pieces:
            seat, context, start = _seat(request), request.context, request.computed
            request.computed = end = start + count
            is_last = end == len(context)
            logits = self._read_text(request.slot, request.token_ids, start, end, is_last)
            if is_drafter_reading:
                self._read_drafter(request.slot, request.token_ids, seat.drafted, end - is_last)
                seat.drafted = end - is_last
            self.cache.enter(request.slot, seat, request.token_ids, seat.drafted)
            if logits is not None:
                self._begin_rounds(request, seat, logits)
        if not self._is_ahead:
            self._settle()
        self._is_ahead = False

    def _read_text(self, slot: int, text: Sequence[int], start: int, end: int, is_last: bool) -> torch.Tensor | None:
        """Positions `start` to `end` of `text` into the target's cache, their features to the drafter. is_last: rounds
        begin behind them, at the features of the last one; then the logits float32 [1, V] of what follows."""
        state, drafting = self.state, self.drafting
        layers = drafting.feature_layers if drafting is not None else ()
        take = drafting.take(text, state.table, slot) if drafting is not None else None
        whole = end - 1 - (end - 1 - start) % self.target.prompt_rows if is_last else end  # no logits until here
        self.target.prefill(text[start:whole], state.table, slot, layers, take, start=start)
        if not is_last:
            return None
        logits, features = self.target.last_step(text[whole:end], state.table, slot, layers, take, start=whole)
        if layers:
            state.features[slot * state.feature_rows] = features[0]
        return logits

    def _read_drafter(self, slot: int, text: Sequence[int], start: int, end: int) -> None:
        if start < end and self.drafting is not None:
            self.drafting.begin(text[start:end], self.state.table, slot, start)

    def _begin_rounds(self, request: Request, seat: Seat, logits: torch.Tensor) -> None:
        """A prompt has been read: its first token, unless the request goes on after a preemption, and what the rounds
        need to know of it."""
        slot, state, params, context = request.slot, self.state, request.params, request.context
        state.params.temperature[slot] = params.temperature or 1.0
        state.params.top_k[slot] = params.top_k or 0
        state.params.top_p[slot] = 0.0 if params.is_greedy else 1.0 if params.top_p is None else params.top_p
        state.params.seed[slot] = request.seed & (2**62 - 1)
        self._begin_text(slot, request.token_ids)
        if len(request.token_ids) == len(request.prompt_ids):
            seat.unread += 1
            report = self._first_token(request, logits)
            self._launched.append(Launched([(request, seat)], None, *_fetch(report)))
        if self.drafter is not None:
            self.drafter.reset(slot, context)
        request.is_reading = False
        seat.draft_len = None if seat.drafted == len(context) - 1 else 0

    def _begin_text(self, slot: int, token_ids: Sequence[int]) -> None:
        """A slot's text; its last token has not been seen by the target."""
        state, count = self.state, len(token_ids)
        state.length[slot], state.row[slot], state.kept[slot] = count, 0, 0
        upload(state.last[slot], [*token_ids[-2:]] if count > 1 else [token_ids[-1]] * 2)
        upload(state.text[slot, :count], token_ids)

    def _first_token(self, request: Request, logits: torch.Tensor) -> torch.Tensor:
        """Choose it and append it to the slot's text, on the device. Returns int32 (damage, token, trouble...)."""
        slot, state, count, device = request.slot, self.state, len(request.prompt_ids), logits.device
        trouble = self.target.trouble
        report = torch.zeros(2 + (0 if trouble is None else trouble.numel()), dtype=torch.int32, device=device)
        damage, token = report[:1], report[1:2]
        if trouble is not None:
            report[2:] = trouble
        self.target.ops.argmax(logits, token, self.target.ops.pdl, damage=damage)
        if not request.params.is_greedy:
            own = state.params.select(torch.full((1,), slot, device=device))
            position = torch.full((1,), count, device=device)
            token.copy_(draw(probabilities(logits, own), uniform(own.seed, position, Purpose.TOKEN)))
        state.length[slot] = count + 1
        state.last[slot, 0] = request.prompt_ids[-1]
        state.last[slot, 1:] = token
        state.text[slot, count : count + 1] = token
        return report

    # ---------------------------------------------------------------------------------------------------- calibration

    def time_steps(self, rows: Sequence[int], context: int, repeats: int = 7) -> dict[int, float]:
        """Median seconds of one target pass, head and argmax included, by number of rows after `context` tokens: on a
        GPU out of a graph of several, so that starting a graph is no part of it."""
        model, most = self.target, max(rows)
        compile_steps([(model, sorted(set(rows)))])
        ids = _arbitrary_ids(model.config.vocab_size, context + most)
        slot = self._idle_slot(context + most)
        tokens, lengths, slots = (
            torch.tensor(x, dtype=torch.int32, device=model.device) for x in (ids[context:], [context], [slot])
        )
        best, damage = (torch.zeros(n, dtype=torch.int32, device=model.device) for n in (most, 1))

        def steps(count: int) -> None:
            for _ in range(STEPS_PER_GRAPH):
                model.choose(
                    tokens[:count], self.state.table, lengths, slots, count, best[:count], damage=damage,
                    needs_logits=False,
                )  # fmt: skip

        is_cuda = model.device.type == "cuda"
        with self._spare_pages(slot):
            model.prefill(ids[:context], self.state.table, slot)
            return {n: _graph_s(partial(steps, n), is_cuda, repeats) / STEPS_PER_GRAPH for n in rows}

    def time_draft(self, max_draft_len: int, context: int, repeats: int = 7) -> float:
        """Median seconds of what a round does before it verifies, for one request whose text is `context` tokens and
        one. A tree is drafted whole, whatever `max_draft_len` says."""
        drafting, state = self.drafting, self.state
        if drafting is None:
            return super().time_draft(max_draft_len, context, repeats)
        k = max_draft_len if drafting.tree is None else drafting.tree.tokens
        if drafting.feature_layers and k > self.max_draft_len:
            raise OptionError(f"{k} draft tokens are to be timed", f"at most {self.max_draft_len}, as this engine has")
        if isinstance(drafting, ModelDrafting):
            compile_steps([(drafting.model, (1, 2))])
        ids = _arbitrary_ids(self.target.config.vocab_size, context + 1)
        slot = self._idle_slot(context + k + 1)
        with self._spare_pages(slot):
            self._read_text(slot, ids, 0, context, is_last=True)
            self._read_drafter(slot, ids, 0, context - 1)
            self._begin_text(slot, ids)
            program = RoundProgram(self.target, drafting, state, batch=1, max_draft_len=k)
            program.aim([slot])
            return _graph_s(program.draft, state.length.is_cuda, repeats)

    def _disturb(self, ids: Sequence[int], slot: int, start: int) -> None:
        """Nothing: a verification on the GPU leaves the caches of the processor, where such a drafter works, alone."""

    @contextmanager
    def _spare_pages(self, slot: int) -> Iterator[None]:
        """The idle `slot` has pages for a text of any length, until the end of the block."""
        seat = self.cache.begin(slot, [], 0, self.max_seq_len + self._slack)
        if seat is None:
            raise OptionError("the cache pages are held by open streams", "free ones", "finish or close a stream")
        try:
            yield
        finally:
            self.cache.end(seat)
            self.state.table[slot] = self.target.pages - 1

    # ------------------------------------------------------------------------------------------------------ refusals

    def _requests(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Request]:
        for param in params:
            if param.repetition_penalty not in (None, 1.0):
                raise OptionError("repetition_penalty is not available on the GPU path", "None", "leave it out")
            if param.logprobs is not None:
                raise OptionError("logprobs are not available on the GPU path", "None", "leave it out")
        requests = super()._requests(prompts, params)
        for request in requests:
            request.is_simulated = self._simulated is not None
        return requests


def _parents(program: RoundProgram, rows: Sequence[int], count: int) -> tuple[int, ...] | None:
    """The parents of a round's drafts, None for a chain. rows: those of all rows, where the report has them."""
    if program.tree is None or program.tree.of_drafts is not None:
        return None if program.tree is None else program.tree.of_drafts
    return tuple(parent - 1 for parent in rows[1 : count + 1])


def _seat(request: Request) -> Seat:
    assert isinstance(request.holding, Seat)
    return request.holding


def _fetch(report: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Start copying a report to the host; the event tells when it is there."""
    if not report.is_cuda:
        return report.clone(), None
    pinned = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
    pinned.copy_(report, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return pinned, event


@torch.inference_mode()
def _graph_s(run: Callable[[], Any], is_cuda: bool, repeats: int) -> float:
    """Median seconds of `run`: replayed as a graph on a GPU."""
    if not is_cuda:
        return _median_s(run, repeats)
    return statistics.median(seconds_of(captured(run), repeats + 2)[2:])
