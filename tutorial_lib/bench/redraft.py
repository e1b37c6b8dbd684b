"""What a smaller K would have made of rounds that ran at a large one: one speculative run answers for all K. Pure.

Greedy rounds say of almost every token of the answer whether the drafter would have got it right after the tokens
before it: right where a draft was accepted, wrong at the first rejection. Only the bonus token after a draft that was
accepted whole was never drafted; such tokens are taken to be right as often as the last position of a draft was, in
the schedule of least variance. A drafter's guess depends on the text alone, so for chains the replay is the run at the
smaller K; look-ups, whose draft depends on how far their match reached, are drafted no longer than it reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import OptionError
from ..results import Generation, Round


@dataclass(frozen=True)
class Outcome:
    """One round as it would have been: depth drafted, tokens emitted."""

    depth: int
    emitted: int


@dataclass(frozen=True)
class _Token:
    """is_right: would the drafter have drafted it? None: unknown. reach: how deep a draft beginning here was."""

    is_right: bool | None
    reach: int


def redraft(
    generation: Generation, max_draft_len: int, *, asked: int, is_lookup: bool, unknown_right: float
) -> list[Outcome]:
    """The rounds of one answer at K = `max_draft_len`, from its chains of K = `asked`. is_lookup: a draft ends where
    its match ends, and a round may draft nothing. unknown_right: see `unknown_rate`."""
    if max_draft_len > asked:
        raise OptionError(f"K = {max_draft_len} from a run at K = {asked}", "a smaller K", "run the largest K")
    tokens = [token for r in generation.rounds for token in _tokens_of(r, asked)]
    outcomes, at, owed = [], 0, 0.5
    while at < len(tokens):
        depth = min(max_draft_len, tokens[at].reach) if is_lookup else max_draft_len
        accepted = 0
        while accepted < depth and at + accepted < len(tokens):
            is_right = tokens[at + accepted].is_right
            if is_right is None:
                owed += unknown_right
                is_right = owed >= 1
                owed -= is_right
            if not is_right:
                break
            accepted += 1
        emitted = min(accepted + 1, len(tokens) - at)
        outcomes.append(Outcome(depth, emitted))
        at += emitted
    return outcomes


def unknown_rate(generations: Sequence[Generation], asked: int) -> float:
    """How often the last of `asked` draft tokens was right where those before it were: the guess for the next one."""
    rounds = [r for g in generations for r in g.rounds if r.depth == asked and r.accepted >= asked - 1]
    return sum(r.accepted == asked for r in rounds) / len(rounds) if rounds else 0.0


def _tokens_of(r: Round, asked: int) -> list[_Token]:
    is_whole = r.depth > 0 and r.accepted == r.depth
    found = []
    for i in range(len(r.emitted)):
        if i < r.accepted:
            found.append(_Token(True, r.depth - i))
        elif is_whole and r.depth == asked:
            found.append(_Token(None, asked))
        else:  # the first rejection, a round without a draft, or the end of a look-up's match
            found.append(_Token(False, r.depth - i))
    return found
