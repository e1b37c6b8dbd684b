"""The engine whose rounds run on the device: the loop around `graph.RoundProgram`.

The host launches rounds and, one round late, reads what was emitted. Everything a request goes through outside the
round comes from `Engine`: checks, stop conditions, results.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ..config import SamplingParams, SimulatedAcceptance
from ..drafters.base import Drafter, Outcome, SlotState
from ..errors import DAMAGED_LOGITS, OptionError
from ..results import Round
from .device_sampling import draw, probabilities, uniform
from .drafting import Drafting, ModelDrafting
from .engine import Engine, Request, _arbitrary_ids, _median_s
from .gpu_model import MAX_STEP_ROWS, PAGE, GpuModel, captured, compile_steps, seconds_of
from .graph import DeviceState, RoundProgram, forced_schedule, position_limit
from .sampling import Purpose
from .verify import Verdict

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
STEPS_PER_GRAPH = 4  # when steps are timed


class GpuEngine(Engine):
    """`Engine` with its rounds on the device. What drafts is part of the round's graph (`Drafting`), or it runs on the
    host (`Drafter`: suffix decoding), and a round waits for the tokens of the one before."""

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
        max_draft_len: int = 0,
        simulated_acceptance: SimulatedAcceptance | None = None,
    ) -> None:
        self.target, self.tokenizer, self.eos_ids = target, tokenizer, frozenset(eos_ids)
        self.drafter, self.drafting = host_drafter, drafting
        self.max_slots, self.max_seq_len = max_slots, max_seq_len
        self.max_draft_len = max_draft_len if drafting is not None or host_drafter is not None else 0
        tree = None if drafting is None else drafting.tree
        if tree is not None:
            self.max_draft_len = len(tree.of_drafts)  # every token of a tree takes a row
        if self.max_draft_len >= MAX_STEP_ROWS:
            raise OptionError(f"max_draft_len is {self.max_draft_len}", f"at most {MAX_STEP_ROWS - 1} on the GPU path")
        self._most_active = min(max_slots, MAX_STEP_ROWS // (self.max_draft_len + 1))
        self._free = list(range(max_slots))[::-1]
        self._blocks = -(-position_limit(max_seq_len, self.max_draft_len) // PAGE)
        self._pages = list(range(target.pages - 1))[::-1]
        layers = drafting.feature_layers if drafting is not None else ()
        self.state = DeviceState.make(
            max_slots, self._blocks, target.pages - 1, target.device,
            feature_rows=self.max_draft_len + 1, feature_width=len(layers) * target.config.hidden_size,
            tree_depth=0 if tree is None else tree.depth,
        )  # fmt: skip
        self._simulated = simulated_acceptance
        if simulated_acceptance is not None:
            deepest = self.max_draft_len if tree is None else tree.depth
            schedule = forced_schedule(simulated_acceptance.acceptance_length, deepest)
            self.state.forced = torch.tensor(schedule, dtype=torch.int32, device=target.device)
        self._programs: dict[tuple[int, bool], RoundProgram] = {}

    # --------------------------------------------------------------------------------------------------------- programs

    def program(self, batch: int, *, is_sampled: bool = False) -> RoundProgram:
        """The round for a batch bucket, made (and on a GPU captured) at its first use."""
        bucket = next((b for b in BATCH_BUCKETS if batch <= b <= self._most_active), self._most_active)
        key = (bucket, is_sampled)
        if key not in self._programs:
            self._programs[key] = RoundProgram(
                self.target,
                self.drafting,
                self.state,
                batch=bucket,
                max_draft_len=self.max_draft_len,
                is_sampled=is_sampled,
                is_forced=self._simulated is not None,
            )
        return self._programs[key]

    # ------------------------------------------------------------------------------------------------------------- loop

    def _run(self, requests: Sequence[Request]) -> Iterator[None]:
        waiting: deque[Request] = deque(requests)
        active: list[Request] = []
        try:
            while waiting or active:
                while waiting and len(active) < self._most_active and self._free and self._has_pages(waiting[0]):
                    request = waiting.popleft()
                    request.slot = self._free.pop()
                    active.append(request)
                    self._prefill(request)
                    yield
                self._release(active)
                if active:
                    yield from self._rounds(active, bool(waiting))
                elif waiting and not (self._free and self._has_pages(waiting[0])):
                    raise OptionError(
                        "every slot or cache page is held by streams that were not read to their end",
                        "free ones",
                        "finish or close those streams",
                    )
        finally:
            for request in active:
                self._give_back(request)

    def _has_pages(self, request: Request) -> bool:
        return len(self._pages) >= self._page_count(request)

    def _page_count(self, request: Request) -> int:
        tokens = position_limit(len(request.prompt_ids) + request.params.max_tokens, self.max_draft_len)
        return -(-tokens // PAGE)

    def _release(self, active: list[Request]) -> None:
        for request in active:
            if request.finish_reason:
                self._give_back(request)
        active[:] = [r for r in active if not r.finish_reason]

    def _give_back(self, request: Request) -> None:
        table = self.state.table[request.slot].tolist()
        self._pages.extend(p for p in dict.fromkeys(table) if p != self.target.pages - 1)
        self.state.table[request.slot] = self.target.pages - 1
        self._free.append(request.slot)

    def _prefill(self, request: Request) -> None:
        slot, state, params = request.slot, self.state, request.params
        pages = [self._pages.pop() for _ in range(self._page_count(request))]
        state.table[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int32, device=state.table.device)
        state.params.temperature[slot] = params.temperature or 1.0
        state.params.top_k[slot] = params.top_k or 0
        state.params.top_p[slot] = 1.0 if params.top_p is None else params.top_p
        state.params.seed[slot] = request.seed & (2**62 - 1)
        device, prompt = state.length.device, request.prompt_ids
        logits = self._read_prompt(slot, prompt)
        self._argmax(logits)
        if params.is_greedy:
            token = int(logits.argmax())
        else:
            own = state.params.select(torch.tensor([slot], device=device))
            position = torch.tensor([len(prompt)], device=device)
            token = int(draw(probabilities(logits, own), uniform(own.seed, position, Purpose.TOKEN)))
        request.ttft_s = request.latency_s = time.perf_counter() - request.start_s
        self._emit(request, Verdict(0, (token,)), logits)
        self._begin_text(slot, request.token_ids)
        if request.finish_reason:
            return
        if self.drafting is not None:
            self.drafting.begin(prompt[:-1], state.table, slot)
        elif self.drafter is not None:
            self.drafter.reset(slot, request.prompt_ids)

    def _read_prompt(self, slot: int, prompt: Sequence[int]) -> torch.Tensor:
        """The prompt into the target's cache and its features to the drafter; logits float32 [1, V] of what follows."""
        state, drafting = self.state, self.drafting
        layers = drafting.feature_layers if drafting is not None else ()
        take = drafting.take(prompt, state.table, slot) if drafting is not None else None
        self.target.prefill(prompt[:-1], state.table, slot, layers, take)
        logits, features = self.target.one_step(prompt[-1], len(prompt) - 1, state.table, slot, layers)
        if layers:
            state.features[slot * (self.max_draft_len + 1)] = features[0]
        return logits

    def _begin_text(self, slot: int, token_ids: Sequence[int]) -> None:
        """A slot's text after prefill; its last token has not been seen by the target."""
        state, count = self.state, len(token_ids)
        ids = torch.tensor(token_ids, dtype=torch.int32, device=state.length.device)
        state.length[slot], state.last[slot], state.row[slot], state.kept[slot] = count, ids[-2:], 0, 0
        state.text[slot, :count] = ids

    def _rounds(self, active: list[Request], is_one_round: bool) -> Iterator[None]:
        """Rounds until a request ends (or just one, while others wait for a slot). Results are read one launch late,
        so a round more than needed may run; what it computes for an ended request is dropped."""
        is_sampled = any(not r.params.is_greedy for r in active)
        if is_sampled and any(r.params.is_greedy for r in active):
            for request in active:
                if request.params.is_greedy:
                    self.state.params.top_p[request.slot] = 0.0
        program = self.program(len(active), is_sampled=is_sampled)
        if self.drafter is not None or is_one_round:
            self._launch(program, active)
            self._read(program, active, self._fetch(program))
            yield
            return
        in_flight: deque[Any] = deque()
        try:
            while True:
                self._launch(program, active)
                in_flight.append(self._fetch(program))
                if len(in_flight) > 1:
                    self._read(program, active, in_flight.popleft())
                    yield
                    if any(r.finish_reason for r in active):
                        break
            while in_flight:
                self._read(program, active, in_flight.popleft())
        finally:
            if program.report.is_cuda:
                torch.cuda.current_stream().synchronize()

    def _launch(self, program: RoundProgram, active: Sequence[Request]) -> None:
        program.choose([r.slot for r in active])
        if self.drafter is not None:
            began = time.perf_counter()
            states = [
                SlotState(r.slot, r.token_ids, min(self.max_draft_len, r.remaining - 1), r.params, r.seed)
                for r in active
            ]
            drafts = [list(d.tokens) for d in self.drafter.propose(states)]
            lengths = [program.k if self._simulated else len(d) for d in drafts] + [0] * (program.batch - len(active))
            rows = [d + [0] * (program.k - len(d)) for d in drafts] + [[0] * program.k] * (program.batch - len(active))
            program.drafts.copy_(torch.tensor(rows, dtype=torch.int32).view(program.batch, program.k))
            program.drafted_len.copy_(torch.tensor(lengths))
            program.proposed_s = time.perf_counter() - began
        program.launch()

    @staticmethod
    def _fetch(program: RoundProgram) -> tuple[torch.Tensor, Any]:
        """Start copying a round's report to the host; the event tells when it is there."""
        if not program.report.is_cuda:
            return program.report.clone(), None
        pinned = torch.empty(program.report.shape, dtype=torch.int32, pin_memory=True)
        pinned.copy_(program.report, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return pinned, event

    def _read(self, program: RoundProgram, active: Sequence[Request], fetched: tuple[torch.Tensor, Any]) -> None:
        report, event = fetched
        if event is not None:
            event.synchronize()
        batch = program.batch
        stamps, damage, lengths, out, path = report.split(program.parts)
        paths: list[list[int]] = path.view(batch, -1).tolist()
        began, drafted, ended = stamps.view(torch.long).tolist()
        if bool(damage[: len(active)].any()):
            raise FloatingPointError(DAMAGED_LOGITS)
        now = time.perf_counter()
        outcomes = []
        each = zip(active, out.view(batch, -1).tolist(), lengths.tolist(), paths, strict=False)
        for request, row, length, own in each:
            if request.finish_reason:
                continue
            accepted, token, drafts = row[0], row[1], row[2 : 2 + length]
            walked = tuple(i - 1 for i in own[:accepted]) if program.tree is not None else tuple(range(accepted))
            words = (*(drafts[i] for i in walked), token)
            emitted = self._emit(request, Verdict(accepted, words), None)  # type: ignore[arg-type]
            outcomes.append(Outcome(request.slot, walked))
            request.latency_s = now - request.start_s
            request.rounds.append(
                Round(
                    drafted=tuple(drafts),
                    accepted=accepted,
                    emitted=emitted,
                    draft_s=(drafted - began) * 1e-9 + program.proposed_s,
                    verify_s=(ended - drafted) * 1e-9,
                    end_s=request.latency_s,
                    parents=None if program.tree is None else program.tree.of_drafts,
                    path=None if program.tree is None else walked,
                )
            )
        if self.drafter is not None:
            self.drafter.observe(outcomes)

    # ---------------------------------------------------------------------------------------------------- calibration

    def time_steps(self, rows: Sequence[int], context: int, repeats: int = 7) -> dict[int, float]:
        """Median seconds of one target pass, head and argmax included, by number of rows after `context` tokens: on a
        GPU out of a graph of several, so that starting a graph is no part of it."""
        model, most = self.target, max(rows)
        compile_steps([(model, sorted(set(rows)))])
        ids = _arbitrary_ids(model.config.vocab_size, context + most)
        slot, table = self._idle_slot(context + most), self.state.table.clone()
        table[slot] = self._spare_pages()
        model.prefill(ids[:context], table, slot)
        tokens, lengths, slots = (
            torch.tensor(x, dtype=torch.int32, device=model.device) for x in (ids[context:], [context], [slot])
        )
        best = torch.empty(most, dtype=torch.int32, device=model.device)

        def steps(count: int) -> None:
            for _ in range(STEPS_PER_GRAPH):
                logits = model.step(tokens[:count], table, lengths, slots, count)
                model.ops.argmax(logits, best[:count], model.ops.pdl)

        is_cuda = model.device.type == "cuda"
        return {n: _graph_s(partial(steps, n), is_cuda, repeats) / STEPS_PER_GRAPH for n in rows}

    def time_draft(self, max_draft_len: int, context: int, repeats: int = 7) -> float:
        """Median seconds of what a round does before it verifies, for one request whose text is `context` tokens and
        one. A tree is drafted whole, whatever `max_draft_len` says."""
        drafting, state = self.drafting, self.state
        if drafting is None:
            return super().time_draft(max_draft_len, context, repeats)
        k = max_draft_len if drafting.tree is None else len(drafting.tree.of_drafts)
        if drafting.feature_layers and k > self.max_draft_len:
            raise OptionError(f"{k} draft tokens are to be timed", f"at most {self.max_draft_len}, as this engine has")
        if isinstance(drafting, ModelDrafting):
            compile_steps([(drafting.model, (1, 2))])
        ids = _arbitrary_ids(self.target.config.vocab_size, context + 1)
        slot = self._idle_slot(context + k + 1)
        state.table[slot] = self._spare_pages()
        try:
            self._read_prompt(slot, ids[:-1])
            self._begin_text(slot, ids)
            drafting.begin(ids[:-2], state.table, slot)
            program = RoundProgram(self.target, drafting, state, batch=1, max_draft_len=k)
            program.aim([slot])
            return _graph_s(program.draft, state.length.is_cuda, repeats)
        finally:
            state.table[slot] = self.target.pages - 1

    def _spare_pages(self) -> torch.Tensor:
        """Pages for one slot that no request holds."""
        if len(self._pages) < self._blocks:
            raise OptionError("the cache pages are held by open streams", "free ones", "finish or close a stream")
        return torch.tensor(self._pages[-self._blocks :], dtype=torch.int32, device=self.state.table.device)

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


@torch.inference_mode()
def _graph_s(run: Callable[[], Any], is_cuda: bool, repeats: int) -> float:
    """Median seconds of `run`: replayed as a graph on a GPU."""
    if not is_cuda:
        return _median_s(run, repeats)
    return statistics.median(seconds_of(captured(run), repeats + 2)[2:])
