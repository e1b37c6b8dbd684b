"""The decode loop: admit, draft, verify, accept, emit. One round serves every active request at once.

    while requests wait or run:
        admit waiting requests into free slots (prefill, first token)
        drafts  = drafter.propose(active)                      # nothing, without a drafter
        logits  = target.forward(last token + drafts, ragged)   # one pass, K + 1 rows for each request
        verdict = accept(drafts, logits)                        # verify.py
        keep the accepted branch, where the draft was a tree
        emit the accepted tokens and the bonus token, stop where the request says so

Each request keeps its own length, so requests that accept differently never disturb each other, and rolling back is
not moving anything: the next forward simply starts at the request's length. A chain is the tree without branches;
its accepted tokens already lie where the text continues, those of a tree are moved there. Stop conditions are applied
to every emitted token in turn, never to a whole block.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from ..config import SamplingParams
from ..drafters.base import ROOT, Draft, Drafter, Outcome, SlotState
from ..errors import DAMAGED_LOGITS, OptionError, PromptError
from ..results import Generation, Round
from .detokenize import Detokenizer
from .model import Model, Segment, prefill
from .sampling import Purpose, penalize_repetition, probabilities, uniform
from .verify import Rows, Verdict, accept_greedy, accept_sampled

T = TypeVar("T")


@dataclass
class Request:
    """One request on its way through the engine. `token_ids` is prompt + output; the target's cache holds all of it
    but the last token."""

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
        )


class Engine:
    """A target, perhaps a drafter, and the loop around them. Not thread-safe: one call at a time."""

    def __init__(
        self,
        target: Model,
        tokenizer: Any,
        eos_ids: Iterable[int],
        *,
        drafter: Drafter | None = None,
        max_draft_len: int = 0,
    ) -> None:
        self.target, self.tokenizer, self.eos_ids = target, tokenizer, frozenset(eos_ids)
        self.drafter, self.max_draft_len = drafter, max_draft_len if drafter else 0
        self.max_seq_len = target.max_seq_len
        self._free = list(range(target.max_slots))[::-1]
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
        request.start_s = time.perf_counter()
        for _ in self._run([request]):
            yield request.generation()

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
        """Serve the requests in order of arrival; yields after every admission and every round. Abandoning the
        iterator, or an interrupt, gives the slots back."""
        waiting: deque[Request] = deque(requests)
        active: list[Request] = []
        try:
            while waiting or active:
                while waiting and self._free:
                    request = waiting.popleft()
                    request.slot = self._free.pop()
                    active.append(request)
                    self._prefill(request)
                    yield
                self._release(active)
                if active:
                    self._round(active)
                    yield
                    self._release(active)
                elif not self._free:
                    raise OptionError(
                        f"all {self.target.max_slots} slots are held by streams that were not read to their end",
                        "a free slot",
                        "finish or close those streams, or build with a larger max_batch_size",
                    )
        finally:
            self._free.extend(r.slot for r in active)

    def _release(self, active: list[Request]) -> None:
        self._free.extend(r.slot for r in active if r.finish_reason)
        active[:] = [r for r in active if not r.finish_reason]

    def _prefill(self, request: Request) -> None:
        ids = request.prompt_ids
        hidden = prefill(self.target, ids, request.slot, self._feature_layers)
        features = self.target.features
        logits = self.target.logits(hidden[-1:])
        verdict = self._judge(request, Draft(), logits, self._argmax(logits))
        now = time.perf_counter() - request.start_s
        request.ttft_s = request.latency_s = now
        self._emit(request, verdict, logits)
        if self.drafter and not request.finish_reason:
            self.drafter.reset(request.slot, ids, features)

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
        states = [
            SlotState(r.slot, r.token_ids, min(self.max_draft_len, r.remaining - 1), r.params, r.seed) for r in active
        ]
        drafts = self.drafter.propose(states)
        return [self._fitting(draft, state) for draft, state in zip(drafts, states, strict=True)]

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
        room = self.max_seq_len - len(state.token_ids)
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

    def time_draft(self, max_draft_len: int, context: int, repeats: int = 9) -> float:
        """Median seconds of drafting `max_draft_len` tokens for one greedy request after `context` tokens."""
        if not self.drafter:
            return 0.0
        drafter, calls = self.drafter, repeats + 1
        slot = self._idle_slot(context + calls + max_draft_len)
        ids = _arbitrary_ids(self.target.config.vocab_size, context + calls)
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

        return _median_s(draft, repeats)

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


def _median_s(step, repeats: int) -> float:
    step()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)
