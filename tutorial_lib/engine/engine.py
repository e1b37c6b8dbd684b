"""The decode loop: admit, read, draft, verify, accept, emit. One round serves every running request at once.

    while requests wait or run:
        admit waiting requests into free slots                 # scheduler.py
        drafts  = drafter.propose(active)                      # nothing, without a drafter
        logits  = target.forward(last token + drafts, ragged)   # one pass, K + 1 rows for each request
        verdict = accept(drafts, logits)                        # verify.py
        keep the accepted branch, where the draft was a tree
        emit the accepted tokens and the bonus token, stop where the request says so
        read a piece of the prompts that were admitted; the last piece gives the first token

Each request keeps its own length, so requests that accept differently never disturb each other, and rolling back is
not moving anything: the next forward simply starts at the request's length. A chain is the tree without branches;
its accepted tokens already lie where the text continues, those of a tree are moved there. Stop conditions are applied
to every emitted token in turn, never to a whole block.
"""

from __future__ import annotations

import secrets
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from ..config import KvCacheConfig, SamplingParams
from ..drafters.base import ROOT, Draft, Drafter, Outcome, SlotState
from ..errors import DAMAGED_LOGITS, OptionError, PromptError
from ..results import Generation, Round
from .detokenize import Detokenizer
from .kv_cache import Holding, KvCache
from .model import PREFILL_CHUNK, Model, Segment, prefill
from .sampling import Purpose, penalize_repetition, probabilities, uniform
from .scheduler import PIECE, Scheduler
from .verify import Rows, Verdict, accept_greedy, accept_sampled

T = TypeVar("T")


@dataclass
class Request:
    """One request on its way through the engine. `token_ids` is prompt + output; the target's cache holds all of it
    but the last token.

    While it runs it has a `slot` and what it holds of the cache; `computed` positions are there, and `features` keeps
    the hidden states of what was read for the drafter.
    """

    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    start_s: float
    detokenizer: Detokenizer
    slot: int = -1
    token_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    ttft_s: float = 0.0
    latency_s: float = 0.0
    finish_reason: str = ""
    stop_reason: int | str | None = None
    is_simulated: bool = False
    cached_tokens: int = 0
    admitted_s: float | None = None
    preemptions: int = 0
    is_cancelled: bool = False
    is_reading: bool = False
    computed: int = 0
    holding: Holding = field(default_factory=Holding)
    features: list[torch.Tensor] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return bool(self.finish_reason) or self.is_cancelled

    @property
    def context(self) -> list[int]:
        """What the cache must hold before rounds begin: the prompt, or after a preemption all but the last token."""
        return self.token_ids[:-1] if len(self.token_ids) > len(self.prompt_ids) else self.prompt_ids

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def remaining(self) -> int:
        return self.params.max_tokens - (len(self.token_ids) - len(self.prompt_ids))

    def generation(self) -> Generation:
        """What is known so far; complete once `finish_reason` is set."""
        is_done = bool(self.finish_reason)
        return Generation(
            prompt_token_ids=self.prompt_ids,
            token_ids=self.output_ids,
            text=self.detokenizer.finish() if is_done else self.detokenizer.streamable,
            finish_reason=self.finish_reason,
            rounds=list(self.rounds),
            ttft_s=self.ttft_s,
            latency_s=self.latency_s,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            stop_reason=self.stop_reason,
            is_simulated=self.is_simulated,
            cached_tokens=self.cached_tokens,
            queued_s=None if self.admitted_s is None else self.admitted_s - self.start_s,
            preemptions=self.preemptions,
        )


class RequestStream:
    """A request that is in the running engine, read while it goes on. `next` gives the generation so far if it has
    grown; else it lets the engine do one turn for everybody, and gives None if that brought this request nothing."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine, self._request, self._seen = engine, request, -1

    def __iter__(self) -> Iterator[Generation | None]:
        return self

    def __next__(self) -> Generation | None:
        request = self._request
        if request.is_cancelled or (request.finish_reason and self._is_read):
            raise StopIteration
        if self._is_read:
            self._engine.step()
        if self._is_read:
            return None
        self._seen = len(request.token_ids)
        return request.generation()

    @property
    def is_over(self) -> bool:
        """Finished or cancelled. Reading this, and `generation`, moves nothing."""
        return self._request.is_over

    @property
    def start_s(self) -> float:
        """When its clock began, by `time.perf_counter`."""
        return self._request.start_s

    def generation(self) -> Generation:
        """What is known so far."""
        return self._request.generation()

    @property
    def _is_read(self) -> bool:
        return len(self._request.token_ids) == max(self._seen, len(self._request.prompt_ids))

    def close(self) -> None:
        """End the request, wherever it is. Not while the engine is in the middle of a turn: see `abandon`."""
        self._engine.cancel([self._request])

    def abandon(self) -> None:
        """Mark the request; the engine takes it out at its next turn."""
        self._request.is_cancelled = True

    __del__ = abandon


class Engine:
    """A target, perhaps a drafter, and the loop around them. Calls share one batch. Not thread-safe: one call, or one
    turn of one, at a time. `gpu_engine.GpuEngine` is the same loop with rounds and prompts on the device.

    draft_len_schedule: the number of active requests from which on -> draft tokens per round; None: always
    `max_draft_len`.
    """

    _slack = 0  # positions behind a text's end that its blocks must hold too

    def __init__(
        self,
        target: Model,
        tokenizer: Any,
        eos_ids: Iterable[int],
        *,
        drafter: Drafter | None = None,
        max_draft_len: int = 0,
        draft_len_schedule: Mapping[int, int] | None = None,
        kv_cache_config: KvCacheConfig | None = None,
    ) -> None:
        self.target, self.tokenizer, self.eos_ids = target, tokenizer, frozenset(eos_ids)
        self.drafter, self.max_draft_len = drafter, max_draft_len if drafter else 0
        self.draft_len_schedule = dict(sorted((draft_len_schedule or {1: self.max_draft_len}).items()))
        self.max_seq_len = target.max_seq_len
        kv = kv_cache_config or KvCacheConfig()
        self.cache = KvCache(
            target,
            tokens_per_block=kv.tokens_per_block,
            max_tokens=kv.max_tokens,
            enable_block_reuse=kv.enable_block_reuse,
            feature_width=len(self._feature_layers) * target.config.hidden_size,
        )
        self.scheduler = Scheduler(target.max_slots, self.cache, max_rows=target.max_rows)
        self._free, self._is_stepping = self.scheduler.free, False
        last = target.config.num_layers + 1
        if bad := [n for n in self._feature_layers if not 0 <= n <= last]:
            raise OptionError(f"the drafter reads layer {bad[0]} of the target", f"layers from 0 to {last}")

    @property
    def _feature_layers(self) -> tuple[int, ...]:
        return self.drafter.feature_layers if self.drafter else ()

    # ------------------------------------------------------------------------------------------------------- requests

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Generation]:
        """Decode every prompt (token ids) with its own params. Order is kept. Raises `PromptError` before any work."""
        requests = self._requests(prompts, params)
        for _ in self._run(requests):
            pass
        return [r.generation() for r in requests]

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Generation]:
        """The generation so far after prefill and after every round; the last one is complete.

        Raises `PromptError` at once; the work and its clock begin when the first item is read.
        """
        return self._stream(self._requests([prompt], [params])[0])

    def _stream(self, request: Request) -> Iterator[Generation]:
        request.start_s, seen = time.perf_counter(), 0
        for _ in self._run([request]):
            if len(request.token_ids) > max(seen, len(request.prompt_ids)):
                seen = len(request.token_ids)
                yield request.generation()
        if len(request.token_ids) > seen:  # others' turns brought it to its end
            yield request.generation()

    def open(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[RequestStream]:
        """Put the prompts in line, to be read as they go. Their clocks begin now. Raises `PromptError`."""
        requests = self._requests(prompts, params)
        self.submit(requests)
        return [RequestStream(self, request) for request in requests]

    def submit(self, requests: Sequence[Request]) -> None:
        """Put requests in line, all of them or, if one cannot ever fit the cache, none (`PromptError`)."""
        most = self.cache.max_tokens - self._slack
        for request in requests:
            needed = len(request.prompt_ids) + request.params.max_tokens
            if self.cache.blocks_for(needed + self._slack) > len(self.cache.pool.blocks):
                raise PromptError(
                    f"prompt and max_tokens of a request are {needed} tokens",
                    f"at most {most}, the KV cache's room (KvCacheConfig.max_tokens, in whole blocks)",
                    "shorten it, or give the cache more room",
                )
        for request in requests:
            self.scheduler.submit(request)

    def cancel(self, requests: Sequence[Request]) -> None:
        """End requests wherever they are; nothing happens to one that is finished."""
        for request in requests:
            request.is_cancelled = request.is_cancelled or not request.finish_reason
        if not self._is_stepping:
            self.scheduler.retire()

    def _requests(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Request]:
        for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            self._check(prompt, param, f"prompt {index + 1} of {len(prompts)}" if len(prompts) > 1 else "the prompt")
        start = time.perf_counter()
        return [
            Request(
                prompt_ids=list(prompt),
                params=param,
                seed=secrets.randbits(63) if param.seed is None else param.seed,
                start_s=start,
                detokenizer=Detokenizer(self.tokenizer, param.stop_strings),
                token_ids=list(prompt),
                logprobs=None if param.logprobs is None else [],
            )
            for prompt, param in zip(prompts, params, strict=True)
        ]

    def _check(self, prompt: Sequence[int], params: SamplingParams, which: str) -> None:
        vocab, limit = self.target.config.vocab_size, self.max_seq_len
        if not prompt:
            raise PromptError(f"{which} is empty", "at least one token", "write something, or begin with the BOS token")
        if bad := [t for t in prompt if not 0 <= t < vocab]:
            raise PromptError(f"{which} holds id {bad[0]}", f"ids from 0 to {vocab - 1}", "use this model's tokenizer")
        if len(prompt) >= limit:
            raise PromptError(
                f"{which} has {len(prompt)} tokens",
                f"fewer than {limit}, the engine's max_seq_len",
                "shorten it, or build with a larger max_seq_len",
            )
        if len(prompt) + params.max_tokens > limit:
            raise PromptError(
                f"{which} has {len(prompt)} tokens and max_tokens asks for {params.max_tokens} more",
                f"together at most {limit}, the engine's max_seq_len",
                f"ask for at most {limit - len(prompt)} tokens, or build with a larger max_seq_len",
            )

    # ----------------------------------------------------------------------------------------------------------- loop

    def _run(self, requests: Sequence[Request]) -> Iterator[None]:
        """Serve these requests, and whoever else is in line, until these are over; yields after every turn. Abandoning
        the iterator, or an interrupt, takes them out."""
        self.submit(requests)
        try:
            while not all(r.is_over for r in requests):
                self.step()
                yield
        finally:
            self.cancel(requests)

    def step(self) -> None:
        """One turn: fill free slots, one round of all whose prompts are read, a piece of the prompts that are not."""
        scheduler, self._is_stepping = self.scheduler, True
        try:
            scheduler.retire()
            scheduler.admit()
            decoding = scheduler.decoding(self._positions)
            if decoding:
                self._round(decoding)
            self._read_prompts(scheduler.reading(PIECE if decoding else PREFILL_CHUNK))
        except BaseException:
            scheduler.restart()
            raise
        finally:
            scheduler.retire()
            self._is_stepping = False

    def _read_prompts(self, pieces: Sequence[tuple[Request, int]]) -> None:
        """Run pieces of prompts, all in one pass; those that are read to their end get their first token."""
        rows: list[int] = []
        segments = []
        for request, count in pieces:
            if count:
                rows += request.context[request.computed : request.computed + count]
                segments.append(Segment(request.slot, request.computed, count))
        if rows:
            hidden = self.target.forward(rows, segments, feature_layers=self._feature_layers)
        features, row = self.target.features, 0
        for request, count in pieces:
            own = slice(row, row + count)
            fresh = features[own] if features is not None and count else None
            request.features += [] if fresh is None else [fresh]
            request.computed += count
            row += count
            self.cache.enter(request.slot, request.holding, request.context, request.computed, fresh)
            if request.computed == len(request.context):
                self._begin(request, hidden[own][-1:] if count else None)

    def _begin(self, request: Request, hidden: torch.Tensor | None) -> None:
        """A prompt has been read: its first token, unless the request goes on after a preemption, and the drafter's
        turn. hidden: [1, H] of the last position."""
        ids, features = request.context, request.features
        if len(request.token_ids) == len(request.prompt_ids) and hidden is not None:
            logits = self.target.logits(hidden)
            verdict = self._judge(request, Draft(), logits, self._argmax(logits))
            request.ttft_s = request.latency_s = time.perf_counter() - request.start_s
            self._emit(request, verdict, logits)
        if self.drafter and not request.finish_reason:
            self.drafter.reset(request.slot, ids, torch.cat(features) if features else None)
        request.is_reading, request.features = False, []

    def _round(self, active: Sequence[Request]) -> None:
        began = time.perf_counter()
        drafts = self._draft(active)
        drafted = time.perf_counter()
        rows, segments = [], []
        for request, draft in zip(active, drafts, strict=True):
            block = [request.token_ids[-1], *draft.tokens]
            segments.append(Segment(request.slot, len(request.token_ids) - 1, len(block), draft.parents))
            rows += block
        logits = self.target.logits(self.target.forward(rows, segments, feature_layers=self._feature_layers))
        features, choices = self.target.features, self._argmax(logits)
        outcomes, row = [], 0
        for request, draft, segment in zip(active, drafts, segments, strict=True):
            own = slice(row, row + segment.rows)
            verdict = self._judge(request, draft, logits[own], choices[own])
            self.target.keep(request.slot, segment.start, verdict.rows[1:])
            emitted = self._emit(request, verdict, logits[own])
            seen = None if features is None else features[own][list(verdict.rows)]
            entered = None if seen is None else seen[: len(emitted)]
            self.cache.enter(request.slot, request.holding, request.token_ids, len(request.token_ids) - 1, entered)
            outcomes.append(Outcome(request.slot, verdict.path, tuple(choices[own]), seen))
            ended = time.perf_counter()
            request.latency_s = ended - request.start_s
            request.rounds.append(
                Round(
                    drafted=tuple(draft.tokens),
                    accepted=verdict.accepted,
                    emitted=emitted,
                    draft_s=drafted - began,
                    verify_s=ended - drafted,
                    end_s=request.latency_s,
                    parents=draft.parents,
                    path=None if draft.parents is None else verdict.path,
                )
            )
            row += segment.rows
        if self.drafter:
            self.drafter.observe(outcomes)

    def _draft(self, active: Sequence[Request]) -> list[Draft]:
        if not self.drafter:
            return [Draft()] * len(active)
        k = self._draft_len(len(active))
        states = [SlotState(r.slot, r.token_ids, min(k, r.remaining - 1), r.params, r.seed) for r in active]
        drafts = self.drafter.propose(states)
        return [self._fitting(draft, state) for draft, state in zip(drafts, states, strict=True)]

    def _draft_len(self, active: int) -> int:
        """K for a round of so many requests: the schedule's entry for the largest number that is not larger."""
        sizes = list(self.draft_len_schedule)
        return self.draft_len_schedule[sizes[max(0, bisect_right(sizes, active) - 1)]]

    def _positions(self, request: Request) -> int:
        """How long the request's text in the cache may be after the next round."""
        return len(request.token_ids) + max(0, min(self.max_draft_len, request.remaining - 1))

    def _fitting(self, draft: Draft, state: SlotState) -> Draft:
        """The draft, cut at its end where the cache has no row for all of it: a wide tree can take more rows than the
        text has positions left. Tokens come after their parents, so what remains is whole."""
        if draft.parents is not None and (
            len(draft.parents) != len(draft.tokens)
            or any(not ROOT <= parent < index for index, parent in enumerate(draft.parents))
        ):
            raise OptionError(
                f"the drafter proposed {len(draft.tokens)} tokens with parents {draft.parents}",
                f"for every token the index of an earlier one, or {ROOT} for the text",
            )
        room = min(self.max_seq_len - len(state.token_ids), self.target.max_rows - 1)
        if len(draft.tokens) <= room:
            return draft
        return Draft(
            draft.tokens[:room],
            None if draft.parents is None else draft.parents[:room],
            None if draft.probs is None else draft.probs[:room],
        )

    # ---------------------------------------------------------------------------------------------- accept, emit, stop

    @staticmethod
    def _argmax(logits: torch.Tensor) -> list[int]:
        values, ids = logits.max(-1)
        if not bool(torch.isfinite(values).all()):
            raise FloatingPointError(DAMAGED_LOGITS)
        return ids.tolist()

    def _judge(self, request: Request, draft: Draft, logits: torch.Tensor, choices: Rows[int]) -> Verdict:
        """Apply the acceptance rule to one request's rows. logits: [len(draft) + 1, V], choices: their argmax."""
        params, penalty, text = request.params, request.params.repetition_penalty or 1.0, request.token_ids
        shaped: Rows[torch.Tensor] = logits
        if penalty != 1.0:  # what a row's token repeats hangs on the branch that leads to it
            shaped = _Lazy(lambda row: penalize_repetition(logits[row], text + _branch(draft, row), penalty))
            choices = _Lazy(lambda row: int(shaped[row].argmax()))
        if params.is_greedy:
            return accept_greedy(draft.tokens, choices, draft.parents)
        return accept_sampled(
            draft.tokens,
            draft.probs,
            _Lazy(lambda row: probabilities(shaped[row], params)),
            lambda i, purpose: uniform(request.seed, len(text) + i, Purpose(purpose)),
            draft.parents,
        )

    def _emit(self, request: Request, verdict: Verdict, logits: torch.Tensor) -> tuple[int, ...]:
        """Append the verdict's tokens one by one until one of them ends the request. Returns those appended."""
        emitted = []
        for row, token in zip(verdict.rows, verdict.emitted, strict=True):
            emitted.append(token)
            request.token_ids.append(token)
            if request.logprobs is not None:
                request.logprobs.append(_logprobs(logits[row], token, request.params.logprobs or 0))
            is_end = self._is_end_token(request, token)
            if not is_end and request.detokenizer.push(token):
                request.finish_reason, request.stop_reason = "stop", request.detokenizer.stopped_by
            if not request.finish_reason and request.remaining == 0:
                request.finish_reason = "length"
            if request.finish_reason:
                break
        return tuple(emitted)

    def _is_end_token(self, request: Request, token: int) -> bool:
        params = request.params
        if token in (params.stop_token_ids or ()):
            request.finish_reason, request.stop_reason = "stop", token
        elif token in self.eos_ids and not params.ignore_eos:
            request.finish_reason = "stop"
        return bool(request.finish_reason)

    # --------------------------------------------------------------------------------------------------- calibration

    def time_steps(self, rows: Sequence[int], context: int, repeats: int = 9) -> dict[int, float]:
        """Median seconds of one target pass, head and argmax included, by number of rows after `context` tokens."""
        slot = self._idle_slot(context + max(rows))
        ids = _arbitrary_ids(self.target.config.vocab_size, context + max(rows))
        prefill(self.target, ids[:context], slot)

        def step(n: int) -> None:
            self._argmax(self.target.logits(self.target.forward(ids[:n], [Segment(slot, context, n)])))

        return {n: _median_s(lambda n=n: step(n), repeats) for n in rows}

    def occupancy(self) -> tuple[int, int, float]:
        """Requests that have a slot, requests that wait for one, and the share of the cache's blocks that is held."""
        pool = self.cache.pool
        return len(self.scheduler.running), len(self.scheduler.waiting), pool.held / len(pool.blocks)

    def time_draft(self, max_draft_len: int, context: int, repeats: int = 9) -> float:
        """Median seconds of drafting `max_draft_len` tokens for one greedy request after `context` tokens, each time
        behind a verification, as in a round: a small drafter would else be read from the processor's cache."""
        if not self.drafter:
            return 0.0
        drafter, calls = self.drafter, repeats + 1
        slot = self._idle_slot(context + calls + max_draft_len)
        ids = _arbitrary_ids(self.target.config.vocab_size, context + calls + max_draft_len)
        features = None
        if drafter.feature_layers:
            prefill(self.target, ids, slot, drafter.feature_layers)
            features = self.target.features
        drafter.reset(slot, ids[:context], None if features is None else features[:context])
        lengths = iter(range(context + 1, context + calls + 1))

        def draft() -> None:
            length = next(lengths)
            (found,) = drafter.propose([SlotState(slot, ids[:length], max_draft_len, SamplingParams(), 0)])
            root = None if features is None else features[length - 1 : length]
            drafter.observe([Outcome(slot, (), (0, *found.tokens), root)])

        def verify() -> None:
            self._disturb(ids[: max_draft_len + 1], slot, context)

        return _median_s(draft, repeats, before=verify)

    def _disturb(self, ids: Sequence[int], slot: int, start: int) -> None:
        """What a verification of `ids` does to the processor's caches."""
        self.target.logits(self.target.forward(ids, [Segment(slot, start, len(ids))]))

    def time_rounds(self, batch: int, max_draft_len: int, context: int, repeats: int = 5) -> float:
        """Median seconds of a whole round (draft, verify, accept) that serves `batch` requests at K = `max_draft_len`,
        whose texts are `context` tokens and grow. Nobody else may be served meanwhile."""
        if not 0 <= max_draft_len <= self.max_draft_len:
            raise OptionError(f"rounds at K = {max_draft_len} are to be timed", f"0 to {self.max_draft_len}")
        if batch > len(self._free) or not self.scheduler.is_idle:
            raise OptionError(
                f"rounds of {batch} requests are to be timed", f"at most {len(self._free)}, and nobody else served"
            )
        count = (repeats + 2) * (max_draft_len + 1) + 1
        ids = _arbitrary_ids(self.target.config.vocab_size, batch * context)
        prompts = [ids[i * context : (i + 1) * context] for i in range(batch)]
        requests = self._requests(prompts, [SamplingParams(max_tokens=count, ignore_eos=True)] * batch)
        kept, self.draft_len_schedule = self.draft_len_schedule, {1: max_draft_len}
        try:
            self.submit(requests)
            while any(not r.rounds for r in requests):
                self.step()
            taken = _median_s(self.step, repeats)
        finally:
            self.draft_len_schedule = kept
            self.cancel(requests)
        drafted = max(r.depth for request in requests for r in request.rounds)
        if drafted > max_draft_len:
            raise OptionError(f"this engine drafted {drafted} tokens", f"at most {max_draft_len}, as it was told")
        return taken

    def _idle_slot(self, positions: int) -> int:
        """A slot that no request holds; `OptionError` if it has too few positions or there is none."""
        limit = self.max_seq_len
        if positions > limit:
            raise OptionError(f"timing this takes {positions} positions", f"at most {limit}, the engine's max_seq_len")
        if not self._free:
            raise OptionError("every slot is held by an open stream", "a free one", "finish or close a stream")
        return self._free[-1]


class _Lazy(Generic[T]):
    """Rows that are computed when they are asked for: acceptance walks past few rows of a wide tree."""

    def __init__(self, compute: Callable[[int], T]) -> None:
        self._compute = compute

    def __getitem__(self, row: int) -> T:
        return self._compute(row)


def _branch(draft: Draft, row: int) -> list[int]:
    """The draft tokens that lead to target row `row`: of token row - 1 its ancestors and itself."""
    tokens: list[int] = []
    tree, index = draft.tree, row - 1
    while index != ROOT:
        tokens.insert(0, draft.tokens[index])
        index = tree[index]
    return tokens


def _logprobs(logits: torch.Tensor, token: int, top: int) -> dict[int, float]:
    """Raw log-probabilities (before penalty, temperature and filters) of `token` and the `top` most likely ids."""
    values = torch.log_softmax(logits.float(), dim=-1)
    best = torch.topk(values, min(top, values.shape[-1])).indices.tolist()
    return {t: float(values[t]) for t in dict.fromkeys([token, *best])}


def _arbitrary_ids(vocab_size: int, count: int) -> list[int]:
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(0)).tolist()


def _median_s(step, repeats: int, before=lambda: None) -> float:
    """Median seconds of `step` over `repeats` calls; what `before` each of them does is not timed."""
    before()
    step()
    samples = []
    for _ in range(repeats):
        before()
        start = time.perf_counter()
        step()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)
