"""One CUDA graph per round: draft K tokens, verify K + 1, accept, advance. The host only launches it and, one round
late, reads what was emitted.

`RoundProgram` is the round as a fixed sequence of device operations over fixed buffers, for one batch size and one K;
captured on a GPU, run step by step without one (the tests do that on a CPU). `GpuEngine` is the loop around it and
takes everything a request goes through outside the round from `Engine`: checks, stop conditions, results.

The first draft step feeds each sequence's last two tokens. The one before last is new to the drafter only if
everything was accepted in the round before; otherwise its keys are written again as they are. So no round needs to
know how the one before ended.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..config import SamplingParams, SimulatedAcceptance
from ..drafters.base import Drafter, Outcome, SlotState
from ..errors import OptionError
from ..results import Round
from .device_sampling import SlotParams, accept_greedy, accept_sampled, draw, probabilities, uniform
from .engine import Engine, Request, _arbitrary_ids, _median_s
from .gpu_model import MAX_STEP_ROWS, PAGE, GpuModel, captured, compile_steps
from .sampling import Purpose
from .verify import Verdict

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
STEPS_PER_GRAPH = 4  # when steps are timed


@dataclass
class DeviceState:
    """What rounds read and advance, for every slot and one scratch slot at the end that unused rows point to."""

    length: torch.Tensor  # int32 [slots + 1]: tokens of the text, the last of which the target has not seen
    last: torch.Tensor  # int32 [slots + 1, 2]: the last two of them
    table: torch.Tensor  # int32 [slots + 1, blocks]
    params: SlotParams
    forced: torch.Tensor  # int32 [period]: accepted drafts of round i, if acceptance is simulated
    counter: torch.Tensor  # int64 [1]: rounds so far

    @classmethod
    def make(cls, slots: int, blocks: int, scratch_page: int, device) -> DeviceState:
        def ints(*shape: int, fill: int = 0) -> torch.Tensor:
            return torch.full(shape, fill, dtype=torch.int32, device=device)

        return cls(
            length=ints(slots + 1, fill=2),
            last=ints(slots + 1, 2),
            table=ints(slots + 1, blocks, fill=scratch_page),
            params=SlotParams.make(slots + 1, device),
            forced=ints(1),
            counter=torch.zeros(1, dtype=torch.long, device=device),
        )


class RoundProgram:
    """One round for `batch` sequences. Inputs are set before a launch: `slots` [batch], and for a drafter on the host
    `drafts` and `drafted_len`. Output: `out` int64 [batch, 2 K + 3]: accepted, the token after, K drafts, three clock
    readings (start, drafted, verified), in `out` and `stamps`."""

    def __init__(
        self,
        target: GpuModel,
        drafter: GpuModel | None,
        state: DeviceState,
        *,
        batch: int,
        max_draft_len: int,
        is_sampled: bool = False,
        is_forced: bool = False,
        draft_ids: torch.Tensor | None = None,
    ) -> None:
        if batch * (max_draft_len + 1) > MAX_STEP_ROWS:
            raise OptionError(
                f"{batch} requests with {max_draft_len} draft tokens each are {batch * (max_draft_len + 1)} rows",
                f"at most {MAX_STEP_ROWS}",
                "lower max_draft_len or max_batch_size",
            )
        device = target.device
        self.target, self.drafter, self.state, self.batch, self.k = target, drafter, state, batch, max_draft_len
        self.is_sampled, self.is_forced, self.draft_ids = is_sampled, is_forced, draft_ids
        self.slots = torch.full((batch,), state.length.shape[0] - 1, dtype=torch.long, device=device)
        self._chosen: list[int] = []
        self.proposed_s = 0.0  # what a drafter on the host took for the last launch
        self.drafts = torch.zeros(batch, max_draft_len, dtype=torch.int32, device=device)
        self.drafted_len = torch.full((batch,), max_draft_len, dtype=torch.long, device=device)
        self.choices = torch.zeros(batch, max_draft_len + 1, dtype=torch.int32, device=device)
        self.out = torch.zeros(batch, max_draft_len + 2, dtype=torch.int32, device=device)
        self.stamps = torch.zeros(3, dtype=torch.long, device=device)
        self._graph: Any = None

    # ------------------------------------------------------------------------------------------------------- launching

    def choose(self, slots: Sequence[int]) -> None:
        """Serve these slots from the next launch on; rows left over go to the scratch slot."""
        if slots != self._chosen:
            scratch = self.state.length.shape[0] - 1
            self.slots.copy_(torch.tensor([*slots, *[scratch] * (self.batch - len(slots))]))
            self._chosen = list(slots)

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
        keep = self.slots.clone()
        self.slots.fill_(self.state.length.shape[0] - 1)
        counter = self.state.counter.clone()
        self._graph = captured(self._run)
        self.state.counter.copy_(counter)
        self.state.length[-1] = 2
        self.slots.copy_(keep)

    @torch.inference_mode()
    def _run(self) -> None:
        self._stamp(0)
        q = self.draft(self.drafter) if self.drafter is not None else None
        self._stamp(1)
        logits = self.verify()
        accepted, token = self.accept(logits, q)
        self.advance(accepted, token)
        self._stamp(2)

    def _stamp(self, i: int) -> None:
        if self.target.device.type == "cuda":
            from .kernels import stamp

            stamp(self.stamps[i : i + 1])
        else:
            self.stamps[i] = time.perf_counter_ns()

    # ------------------------------------------------------------------------------------------------- the round itself

    def draft(self, drafter: GpuModel) -> torch.Tensor | None:
        """K tokens into `drafts`; returns q [B, K, V] if they were sampled."""
        state, q = self.state, []
        length = state.length[self.slots]
        slots = self.slots.int()
        tokens = state.last[self.slots].reshape(-1)
        common = min(drafter.config.vocab_size, self.target.config.vocab_size)
        if common < self.target.config.vocab_size:
            tokens = torch.where(tokens < common, tokens, 0)  # an id that the drafter lacks: a guess costs speed only
        for i in range(self.k):
            rows = 2 if i == 0 else 1
            start = length - 2 if i == 0 else length - 1 + i
            logits = drafter.step(tokens, state.table, start, slots, rows)[rows - 1 :: rows]
            if self.draft_ids is None:
                logits = logits[:, :common]
            if self.is_sampled:
                params = state.params.select(self.slots)
                probs = probabilities(logits, params)
                token = draw(probs, uniform(params.seed, length.long() + i, Purpose.DRAFT))
                self.drafts[:, i] = self._target_id(token).int()
                q.append(self._over_target_vocabulary(probs))
            elif self.draft_ids is None:
                self.target.ops.argmax(logits, self.drafts[:, i], self.target.ops.pdl)
            else:
                best = torch.empty(self.batch, dtype=torch.int32, device=logits.device)
                self.target.ops.argmax(logits, best, self.target.ops.pdl)
                self.drafts[:, i] = self._target_id(best).int()
            tokens = self.drafts[:, i]
        return torch.stack(q, 1) if q else None

    def verify(self) -> torch.Tensor:
        """The target's logits, float32 [B, K + 1, V]; its argmax goes into `choices`."""
        state = self.state
        start = state.length[self.slots] - 1
        tokens = torch.cat([state.last[self.slots, 1:], self.drafts], 1).reshape(-1)
        logits = self.target.step(tokens, state.table, start, self.slots.int(), self.k + 1)
        self.target.ops.argmax(logits, self.choices.view(-1), self.target.ops.pdl)
        return logits.view(self.batch, self.k + 1, -1)

    def accept(self, logits: torch.Tensor, q: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(accepted [B], the token after the accepted ones [B])."""
        state = self.state
        if self.is_forced:
            accepted = state.forced[state.counter % state.forced.shape[0]].long().expand(self.batch)
        elif self.is_sampled:
            params = state.params.select(self.slots)
            repeated = SlotParams(*(x.repeat_interleave(self.k + 1) for x in vars(params).values()))
            p = probabilities(logits.reshape(-1, logits.shape[-1]), repeated).view_as(logits)
            position = state.length[self.slots].long()
            return accept_sampled(self.drafts, q, p, self.drafted_len, params.seed, position)
        else:
            accepted = accept_greedy(self.drafts, self.choices, self.drafted_len)
        return accepted, self.choices.gather(1, accepted[:, None])[:, 0].long()

    def advance(self, accepted: torch.Tensor, token: torch.Tensor) -> None:
        """Write the outcome, move lengths and last tokens on. The scratch slot stays where it is."""
        state = self.state
        self.out[:, 0], self.out[:, 1], self.out[:, 2:] = accepted.int(), token.int(), self.drafts
        window = torch.cat([state.last[self.slots, 1:], self.drafts], 1)  # window[a] is the token before the bonus
        before = window.gather(1, accepted[:, None])[:, 0]
        is_real = self.slots < state.length.shape[0] - 1
        state.length[self.slots] += torch.where(is_real, accepted + 1, 0).int()
        state.last[self.slots] = torch.stack([before, token.int()], 1)
        state.counter += 1

    def _target_id(self, token: torch.Tensor) -> torch.Tensor:
        return token if self.draft_ids is None else self.draft_ids[token.long()]

    def _over_target_vocabulary(self, probs: torch.Tensor) -> torch.Tensor:
        missing = self.target.config.vocab_size - probs.shape[-1]
        if self.draft_ids is not None:
            full = torch.zeros(probs.shape[0], self.target.config.vocab_size, device=probs.device)
            return full.index_copy_(1, self.draft_ids, probs)
        return F.pad(probs, (0, missing)) if missing else probs


def position_limit(max_seq_len: int, max_draft_len: int) -> int:
    """Cache positions a request of `max_seq_len` tokens may touch: results are read a round late, so up to two rounds
    run past its end, and prefill fills its last step up."""
    return max_seq_len + max(2 * (max_draft_len + 1) + 1, MAX_STEP_ROWS)


def forced_schedule(acceptance_length: float, max_draft_len: int, period: int = 100) -> list[int]:
    """Accepted drafts per round for a mean of `acceptance_length` tokens per round, bonus included, with the least
    variance: floor(mean) always, one more as often as the fraction asks, spread evenly. Raises `OptionError`."""
    if not 1.0 <= acceptance_length <= max_draft_len + 1:
        raise OptionError(
            f"acceptance_length is {acceptance_length:g}",
            f"from 1 to {max_draft_len + 1} with max_draft_len {max_draft_len}",
        )
    mean = acceptance_length - 1
    return [int((i + 1) * mean + 1e-9) - int(i * mean + 1e-9) for i in range(period)]


# ------------------------------------------------------------------------------------------------------------- engine


class GpuEngine(Engine):
    """`Engine` with its rounds on the device. A drafter is another `GpuModel`, or a host `Drafter` (n-gram), whose
    rounds wait for the tokens of the round before."""

    target: GpuModel  # type: ignore[assignment]

    def __init__(
        self,
        target: GpuModel,
        tokenizer,
        eos_ids: Iterable[int],
        *,
        max_slots: int,
        max_seq_len: int,
        draft_model: GpuModel | None = None,
        draft_ids: torch.Tensor | None = None,
        host_drafter: Drafter | None = None,
        max_draft_len: int = 0,
        simulated_acceptance: SimulatedAcceptance | None = None,
    ) -> None:
        self.target, self.tokenizer, self.eos_ids = target, tokenizer, frozenset(eos_ids)
        self.drafter, self.draft_model, self.draft_ids = host_drafter, draft_model, draft_ids
        self.max_slots, self.max_seq_len = max_slots, max_seq_len
        self.max_draft_len = max_draft_len if draft_model is not None or host_drafter is not None else 0
        if self.max_draft_len >= MAX_STEP_ROWS:
            raise OptionError(f"max_draft_len is {self.max_draft_len}", f"at most {MAX_STEP_ROWS - 1} on the GPU path")
        self._most_active = min(max_slots, MAX_STEP_ROWS // (self.max_draft_len + 1))
        self._free = list(range(max_slots))[::-1]
        self._blocks = -(-position_limit(max_seq_len, self.max_draft_len) // PAGE)
        self._pages = list(range(target.pages - 1))[::-1]
        self.state = DeviceState.make(max_slots, self._blocks, target.pages - 1, target.device)
        self._simulated = simulated_acceptance
        if simulated_acceptance is not None:
            schedule = forced_schedule(simulated_acceptance.acceptance_length, self.max_draft_len)
            self.state.forced = torch.tensor(schedule, dtype=torch.int32, device=target.device)
        self._programs: dict[tuple, RoundProgram] = {}

    # --------------------------------------------------------------------------------------------------------- programs

    def program(self, batch: int, *, is_sampled: bool = False) -> RoundProgram:
        """The round for a batch bucket, made (and on a GPU captured) at its first use."""
        bucket = next((b for b in BATCH_BUCKETS if batch <= b <= self._most_active), self._most_active)
        key = (bucket, self.max_draft_len, is_sampled)
        if key not in self._programs:
            self._programs[key] = RoundProgram(
                self.target,
                self.draft_model,
                self.state,
                batch=bucket,
                max_draft_len=self.max_draft_len,
                is_sampled=is_sampled,
                is_forced=self._simulated is not None,
                draft_ids=self.draft_ids,
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
        device, last = state.length.device, request.prompt_ids[-1]
        self.target.prefill(request.prompt_ids[:-1], state.table, slot)
        logits = self.target.step(
            torch.tensor([last], device=device),
            state.table,
            torch.tensor([len(request.prompt_ids) - 1], dtype=torch.int32, device=device),
            torch.tensor([slot], dtype=torch.int32, device=device),
            1,
        )
        self._argmax(logits)
        if params.is_greedy:
            token = int(logits.argmax())
        else:
            own = state.params.select(torch.tensor([slot], device=device))
            position = torch.tensor([len(request.prompt_ids)], device=device)
            token = int(draw(probabilities(logits, own), uniform(own.seed, position, Purpose.TOKEN)))
        request.ttft_s = request.latency_s = time.perf_counter() - request.start_s
        self._emit(request, Verdict(0, (token,)), logits)
        state.length[slot] = len(request.token_ids)
        state.last[slot] = torch.tensor(request.token_ids[-2:], dtype=torch.int32, device=device)
        if request.finish_reason:
            return
        if self.draft_model is not None:
            size = self.draft_model.config.vocab_size
            readable = [t if t < size else 0 for t in request.prompt_ids[:-1]]
            self.draft_model.prefill(readable, state.table, slot)
        elif self.drafter is not None:
            self.drafter.reset(slot, request.prompt_ids)

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
            if program.out.is_cuda:
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
    def _fetch(program: RoundProgram) -> tuple[Any, ...]:
        """Start copying a round's outcome to the host; the event tells when it is there."""
        if not program.out.is_cuda:
            return program.out.clone(), program.stamps.clone(), program.drafted_len.clone(), None
        copies = []
        for source in (program.out, program.stamps, program.drafted_len):
            pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            copies.append(pinned.copy_(source, non_blocking=True))
        event = torch.cuda.Event()
        event.record()
        return (*copies, event)

    def _read(self, program: RoundProgram, active: Sequence[Request], fetched: tuple) -> None:
        out, stamps, lengths, event = fetched
        if event is not None:
            event.synchronize()
        began, drafted, ended = stamps.tolist()
        now = time.perf_counter()
        outcomes = []
        for request, row, length in zip(active, out.tolist(), lengths.tolist(), strict=False):
            if request.finish_reason:
                continue
            accepted, token, drafts = row[0], row[1], row[2 : 2 + length]
            emitted = self._emit(request, Verdict(accepted, (*drafts[:accepted], token)), None)  # type: ignore[arg-type]
            outcomes.append(Outcome(request.slot, tuple(range(accepted))))
            request.latency_s = now - request.start_s
            request.rounds.append(
                Round(
                    drafted=tuple(drafts),
                    accepted=accepted,
                    emitted=emitted,
                    draft_s=(drafted - began) * 1e-9 + program.proposed_s,
                    verify_s=(ended - drafted) * 1e-9,
                    end_s=request.latency_s,
                )
            )
        if self.drafter is not None:
            self.drafter.observe(outcomes)

    # ---------------------------------------------------------------------------------------------------- calibration

    def time_steps(self, rows: Sequence[int], context: int, repeats: int = 7) -> dict[int, float]:
        """Median seconds of one target pass, head and argmax included, by number of rows after `context` tokens: on a
        GPU out of a graph of several, so that starting a graph is no part of it."""
        ids = _arbitrary_ids(self.target.config.vocab_size, context + max(rows))
        times = {n: self._time_chain(self.target, ids, [n] * STEPS_PER_GRAPH, context, repeats) for n in rows}
        return {n: seconds / STEPS_PER_GRAPH for n, seconds in times.items()}

    def time_draft(self, max_draft_len: int, context: int, repeats: int = 7) -> float:
        """Median seconds of drafting `max_draft_len` tokens for one request: K draft steps one after another, the
        first over two rows."""
        if self.draft_model is None:
            return super().time_draft(max_draft_len, context, repeats)
        ids = _arbitrary_ids(self.draft_model.config.vocab_size, context + 2)
        return self._time_chain(self.draft_model, ids, [2] + [1] * (max_draft_len - 1), context, repeats)

    def _time_chain(
        self, model: GpuModel, ids: Sequence[int], chain: Sequence[int], context: int, repeats: int
    ) -> float:
        """Median seconds of steps with these numbers of rows one after another, each after `context` tokens."""
        device, most = model.device, max(chain)
        compile_steps([(model, sorted(set(chain)))])
        slot, table = self._idle_slot(context + most), self.state.table.clone()
        if len(self._pages) < self._blocks:
            raise OptionError("the cache pages are held by open streams", "free ones", "finish or close a stream")
        table[slot] = torch.tensor(self._pages[-self._blocks :], dtype=torch.int32, device=device)
        model.prefill(ids[:context], table, slot)
        tokens = torch.tensor(ids[context : context + most], device=device)
        lengths = torch.tensor([context], dtype=torch.int32, device=device)
        slots = torch.tensor([slot], dtype=torch.int32, device=device)
        best = torch.empty(most, dtype=torch.int32, device=device)

        def steps() -> None:
            for rows in chain:
                logits = model.step(tokens[:rows], table, lengths, slots, rows)
                model.ops.argmax(logits, best[:rows], model.ops.pdl)

        if device.type != "cuda":
            return _median_s(steps, repeats)
        graph, samples = captured(steps), []
        for _ in range(repeats + 2):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) * 1e-3)
        return statistics.median(samples[2:])

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
