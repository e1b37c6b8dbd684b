"""Checks that learners call on their own functions: `test_residual(my_residual)`.

A right answer prints one line. A wrong one raises `CheckFailed` with a message that names the case, what came back,
what was expected and which misunderstanding usually gives that. A function that still returns `...` (or nothing) is
reported as not attempted and fails nothing, so that a notebook with open exercises runs through in a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any


class CheckFailed(AssertionError):
    """The learner's function gave a wrong answer; the message teaches."""


class _NotAttempted(Exception):
    pass


def _call(fn: Callable[..., Any], *args: Any) -> Any:
    try:
        result = fn(*args)
    except NotImplementedError:
        raise _NotAttempted from None
    if result is None or result is ...:
        raise _NotAttempted
    return result


def _check(name: str, cases: Callable[[], None], passed: str) -> bool:
    try:
        cases()
    except _NotAttempted:
        print(f"○ {name}: not attempted yet; replace the `...` and run this cell again")
        return False
    print(f"✓ {name}: {passed}")
    return True


def _wrong(call: str, got: object, expected: object, hint: str) -> CheckFailed:
    return CheckFailed(f"{call} gave {got}, expected {expected}. {hint}")


def _close(a: float, b: float) -> bool:
    return math.isfinite(a) and abs(a - b) <= 1e-4


def test_accept_greedy(fn: Callable[[Sequence[int], Sequence[int]], Any]) -> bool:
    """`fn(drafted, argmax)`: the ids a greedy round emits. drafted: K ids; argmax: the target's K + 1 choices."""
    after_mismatch = "Matches after the first mismatch do not count: the text is another one by then"
    cases = [
        ([5, 6, 7], [5, 6, 7, 8], [5, 6, 7, 8], "All were accepted, so the target's next choice is the bonus token"),
        ([5, 6, 7, 1], [5, 9, 7, 1, 2], [5, 9], after_mismatch),
        ([5, 6, 7], [9, 6, 7, 8], [9], "The first draft is wrong: only the target's own token there comes out"),
        ([], [4], [4], "With nothing drafted a round is one plain step"),
    ]

    def run() -> None:
        for drafted, argmax, expected, hint in cases:
            got = _call(fn, list(drafted), list(argmax))
            ids = [int(token) for token in getattr(got, "emitted", got)]
            if ids == expected[:-1]:
                hint = "The bonus token is missing: verification always yields one token of the target's own"
            if ids != expected:
                raise _wrong(f"accept_greedy({drafted}, {argmax})", ids, expected, hint + ".")

    return _check("accept_greedy", run, "the leading run of agreements, then the target's own token")


def test_tree_depths(fn: Callable[[Sequence[int]], Any]) -> bool:
    """`fn(parents)`: the depth of every node of a tree, 1 behind the text; a parent of -1 is the text."""
    cases = [[-1], [-1, 0, 1], [-1, -1, 0, 0, 2, 1], []]

    def run() -> None:
        for parents in cases:
            expected: list[int] = []
            for parent in parents:
                expected.append(1 if parent < 0 else expected[parent] + 1)
            got = [int(depth) for depth in _call(fn, list(parents))]
            hint = "A node stands one deeper than its parent"
            if got == list(range(1, len(parents) + 1)):
                hint = "That is the row. Siblings stand at the same position, since only one of them can be in the text"
            elif got == [depth - 1 for depth in expected]:
                hint = "Depth counts from 1: the first draft token stands one behind the text's last"
            if got != expected:
                raise _wrong(f"tree_depths({parents})", got, expected, hint)

    return _check("tree_depths", run, "a node's position is its parent's and one more, whatever its row")


def test_accept_tree(fn: Callable[[Sequence[int], Sequence[int], Sequence[int]], Any]) -> bool:
    """`fn(drafted, parents, choices)`: the ids that a greedy round over a tree emits. choices[0]: the target's after
    the text; choices[i + 1]: its choice after node i."""
    rival = "Only children of the last accepted node count: a node on a rival branch follows another text"
    cases = [
        ([4, 5, 6, 7, 8], [-1, -1, 0, 1, 1], [5, 9, 8, 9, 9, 3], [5, 8, 3], "Walk from the text to the child chosen"),
        ([4, 5, 6], [-1, -1, 0], [5, 6, 6, 1], [5, 6], rival),
        ([4, 5], [-1, -1], [9, 1, 2], [9], "No child is the target's choice: only its own token comes out"),
        ([5, 6], [-1, 0], [5, 6, 7], [5, 6, 7], "A chain is a tree: all accepted, and the bonus token"),
    ]

    def run() -> None:
        for drafted, parents, choices, expected, hint in cases:
            got = [int(token) for token in _call(fn, list(drafted), list(parents), list(choices))]
            if got == expected[:-1]:
                hint = "The bonus token is missing: verification always yields one token of the target's own"
            if got != expected:
                raise _wrong(f"accept_tree({drafted}, {parents}, {choices})", got, expected, hint)

    return _check("accept_tree", run, "one branch is walked, and the target's next choice is the bonus token")


def test_walk_rounds(fn: Callable[[Sequence[bool], int], Any]) -> bool:
    """`fn(match, K)`: the tokens that every greedy round emits over a known text. match[i]: after token i the drafter's
    first choice is token i + 1; token 0 is there already."""
    cases = [
        (
            [True, True, False, True, False],
            2,
            "A round takes the leading run of agreements, at most K, and one token more",
        ),
        ([True] * 7, 2, "K drafted tokens and the bonus token: K + 1, then the next round begins"),
        ([False] * 3, 4, "With nothing accepted a round still emits the target's own token"),
        ([True] * 4, 8, "The text ends: the last round emits what is left"),
        ([], 3, "A text of one token needs no round"),
    ]

    def run() -> None:
        for match, k, hint in cases:
            expected, at = [], 0
            while at < len(match):
                lead = next(
                    (n for n, is_right in enumerate(match[at : at + k]) if not is_right), len(match[at : at + k])
                )
                expected.append(min(lead + 1, len(match) - at))
                at += expected[-1]
            got = [int(count) for count in _call(fn, list(match), k)]
            if got == [n - 1 for n in expected] and expected:
                hint = "The bonus token is missing: every round emits one token of the target's own"
            elif len(got) == len(match) > len(expected):
                hint = "One entry per round, not per token: a round jumps over what it has emitted"
            if got != expected:
                raise _wrong(f"walk_rounds({match}, {k})", got, expected, hint + ".")

    return _check("walk_rounds", run, "the sum over the rounds, divided by their number, is the acceptance length")


def test_best_tree(fn: Callable[[Sequence[tuple[int, ...]], int], Any]) -> bool:
    """`fn(paths, nodes)`: the `nodes` beginnings of paths that occur most often. A path: the ranks (0: first choice)
    that the drafter gave to the tokens that did come."""
    cases: list[tuple[list[tuple[int, ...]], int, list[tuple[int, ...]]]] = [
        ([(0, 0), (0, 0), (0, 1), (1, 0), (0, 0)], 2, [(0,), (0, 0)]),
        ([(0, 3), (0, 2), (1, 0), (1, 0), (1, 0), (0, 5), (0, 4)], 3, [(0,), (1,), (1, 0)]),
        ([(2, 0), (2, 0), (2, 1), (0, 0)], 1, [(2,)]),
    ]

    def run() -> None:
        for paths, nodes, expected in cases:
            got = sorted(tuple(int(rank) for rank in path) for path in _call(fn, list(paths), nodes))
            hint = "Count every beginning of every path, take the most frequent"
            if len(got) != nodes:
                hint = f"A tree of {nodes} nodes was asked for"
            elif any(path[:-1] and path[:-1] not in got for path in got):
                hint = "A node needs its parent: count the beginnings (0,), (0, 0), … and not whole paths alone"
            if got != sorted(expected):
                raise _wrong(f"best_tree({paths}, {nodes})", got, sorted(expected), hint + ".")

    return _check(
        "best_tree", run, "the most frequent beginnings are a tree by themselves: none is rarer than its child"
    )


def test_acceptance_probability(fn: Callable[[float, float], float]) -> bool:
    """`fn(p, q)` is the probability that a token drafted with probability q and wanted with probability p stays."""

    def run() -> None:
        for p, q in ((0.3, 0.5), (0.5, 0.3), (0.2, 0.2), (0.0, 0.4), (0.05, 0.8)):
            got, expected = float(_call(fn, p, q)), min(1.0, p / q)
            if _close(got, expected):
                continue
            hint = "The rule is min(1, p / q)."
            if got == float(p >= q):
                hint = (
                    "'Accept if p >= q' is only half of the rule: below that the draft still stays with probability "
                    "p / q, else likely tokens of the target would come too rarely."
                )
            elif got > 1:
                hint = "A probability cannot exceed 1: where the target wants the token more than the drafter, keep it."
            elif _close(got, min(1.0, q / p) if p else math.nan):
                hint = "Numerator and denominator are swapped: p is the target's probability, q the drafter's."
            raise _wrong(f"acceptance_probability(p={p}, q={q})", f"{got:.4g}", f"{expected:.4g}", hint)

    return _check("acceptance_probability", run, "min(1, p / q); p = 0.3 and q = 0.5 stay in 60 % of draws")


def test_residual(fn: Callable[[Any, Any], Any]) -> bool:
    """`fn(p, q)` is the distribution that replaces a rejected draft. p, q: float64 tensors [V] that sum to 1."""
    import torch

    cases = [
        ([0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [1.0, 0.0, 0.0]),
        ([0.5, 0.3, 0.2], [0.0, 1.0, 0.0], [0.5 / 0.7, 0.0, 0.2 / 0.7]),
        ([0.1, 0.4, 0.3, 0.2], [0.4, 0.1, 0.25, 0.25], [0.0, 0.3 / 0.35, 0.05 / 0.35, 0.0]),
    ]

    def run() -> None:
        for p, q, expected in cases:
            result = _call(fn, torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64))
            got = [float(x) for x in result]
            if len(got) == len(expected) and all(_close(a, b) for a, b in zip(got, expected, strict=True)):
                continue
            shown = [round(x, 4) for x in got]
            call = f"residual(p={p}, q={q})"
            raise _wrong(call, shown, [round(x, 4) for x in expected], _residual_hint(got, p, q))

    return _check("residual", run, "norm(max(0, p - q)), over the whole vocabulary")


def _residual_hint(got: list[float], p: list[float], q: list[float]) -> str:
    if len(got) != len(p):
        return "One probability per vocabulary entry, please."
    if any(x < -1e-9 for x in got):
        return "Negative probabilities: clip p - q at 0 before normalising."
    if all(_close(a, b) for a, b in zip(got, p, strict=True)):
        return "That is p itself. Tokens with q > p were already given their share when they were accepted."
    rejected = max(range(len(q)), key=lambda i: q[i] - p[i])
    zeroed = [0.0 if i == rejected else x for i, x in enumerate(p)]
    if all(_close(a, b / sum(zeroed)) for a, b in zip(got, zeroed, strict=True)):
        return "Zeroing the rejected id alone is right only where the drafter was certain (q one-hot)."
    if not _close(sum(got), 1.0):
        return f"It sums to {sum(got):.4g}: divide by the sum."
    return "Take max(0, p - q) entry by entry, then divide by the sum."


def test_expected_tokens(fn: Callable[[float, int], float]) -> bool:
    """`fn(a, K)`: expected tokens per round, bonus included, where each draft token is accepted with probability a."""

    def run() -> None:
        for a, k in ((0.8, 5), (0.5, 1), (0.0, 4), (1.0, 4), (0.6, 3)):
            expected = float(sum(a**i for i in range(k + 1)))
            try:
                got = float(_call(fn, a, k))
            except ZeroDivisionError:
                call = f"expected_tokens(a={a}, K={k})"
                hint = "At a = 1 the closed form is 0 / 0; its limit is K + 1, the whole draft and the bonus token."
                raise _wrong(call, "a division by zero", f"{expected:.4g}", hint) from None
            if _close(got, expected):
                continue
            hint = "It is 1 + a + a² + … + a^K = (1 - a^(K+1)) / (1 - a)."
            if _close(got, expected - 1):
                hint = "The bonus token is missing: every round yields at least one token."
            elif _close(got, 1 + a * k):
                hint = "1 + aK forgets that a draft token only counts if all before it were accepted."
            raise _wrong(f"expected_tokens(a={a}, K={k})", f"{got:.4g}", f"{expected:.4g}", hint)

    return _check("expected_tokens", run, "(1 - a^(K+1)) / (1 - a), and K + 1 at a = 1")


def test_break_even(fn: Callable[[float, float], float]) -> bool:
    """`fn(t_plain, t_round)`: the acceptance length above which speculation pays; both times in the same unit."""

    def run() -> None:
        for t_plain, t_round in ((40.0, 60.0), (20.0, 50.0), (10.0, 10.0)):
            got, expected = float(_call(fn, t_plain, t_round)), t_round / t_plain
            if _close(got, expected):
                continue
            hint = "Speed-up is t_plain × acceptance length / t_round: set it to 1 and solve for the length."
            if _close(got, t_plain / t_round):
                hint = "Upside down: a longer round needs more tokens to pay."
            raise _wrong(f"break_even(t_plain={t_plain}, t_round={t_round})", f"{got:.4g}", f"{expected:.4g}", hint)

    return _check("break_even", run, "t_round / t_plain tokens per round")


def test_step_ceiling(fn: Callable[[float, float], float]) -> bool:
    """`fn(weight_bytes, bytes_per_s)`: the most tokens per second that plain decoding of one text can reach."""

    def run() -> None:
        for weight_bytes, bytes_per_s in ((70.55e9, 4.8e12), (0.5e9, 20e9)):
            got, expected = float(_call(fn, weight_bytes, bytes_per_s)), bytes_per_s / weight_bytes
            if abs(got - expected) <= 1e-4 * expected:
                continue
            hint = "Every token needs all weights read once: that takes weight_bytes / bytes_per_s seconds."
            if abs(got - 1 / expected) <= 1e-4 / expected:
                hint = "That is the seconds per token; the ceiling is its inverse."
            call = f"step_ceiling({weight_bytes:g}, {bytes_per_s:g})"
            raise _wrong(call, f"{got:.4g}", f"{expected:.4g}", hint)

    return _check("step_ceiling", run, "bytes_per_s / weight_bytes; 70.55 GB at 4.8 TB/s allow 68 tokens per second")


def test_ceiling_on_gpus(fn: Callable[[float, float, int], float]) -> bool:
    """`fn(weight_bytes, bytes_per_s, gpus)`: that ceiling where `gpus` GPUs read a share of the weights each."""

    def run() -> None:
        for weight_bytes, bytes_per_s, gpus in ((410e9, 4.8e12, 4), (410e9, 4.8e12, 8), (70.55e9, 4.8e12, 1)):
            got, expected = float(_call(fn, weight_bytes, bytes_per_s, gpus)), gpus * bytes_per_s / weight_bytes
            if abs(got - expected) <= 1e-4 * expected:
                continue
            hint = "Each GPU reads weight_bytes / gpus in a step, all at the same time."
            if abs(got - expected / gpus) <= 1e-4 * expected:
                hint = "That is one GPU reading everything: with more of them, each reads only its share."
            elif abs(got - 1 / expected) <= 1e-4 / expected:
                hint = "That is the seconds per token; the ceiling is its inverse."
            call = f"ceiling_on_gpus({weight_bytes:g}, {bytes_per_s:g}, {gpus})"
            raise _wrong(call, f"{got:.4g}", f"{expected:.4g}", hint)

    return _check("ceiling_on_gpus", run, "gpus * bytes_per_s / weight_bytes; 410 GB on four H200 allow 47 tokens/s")


def test_blocks_needed(fn: Callable[[int, int, int, int], int]) -> bool:
    """`fn(prompt, output, tokens_per_block, shared)`: blocks that a request takes beside those it shares. shared:
    tokens of its prompt that another request has in full blocks."""

    def run() -> None:
        for prompt, output, size, shared in ((100, 28, 32, 0), (100, 29, 32, 0), (100, 28, 32, 64), (96, 1, 32, 96)):
            got, expected = _call(fn, prompt, output, size, shared), -(-(prompt + output) // size) - shared // size
            if got == expected:
                continue
            hint = "Prompt and output lie behind each other: divide their sum, and round up."
            if got == -(-prompt // size) + -(-output // size) - shared // size:
                hint = "The output goes on in the prompt's last block: add first, then divide and round up."
            elif got == (prompt + output) // size - shared // size:
                hint = "The last block is taken whole, however little of it is used: round up."
            elif got == expected + shared // size:
                hint = "Blocks that another request holds already are not taken again."
            call = f"blocks_needed(prompt={prompt}, output={output}, tokens_per_block={size}, shared={shared})"
            raise _wrong(call, got, expected, hint)

    return _check("blocks_needed", run, "ceil((prompt + output) / tokens_per_block) - shared / tokens_per_block")


def test_free_requests(fn: Callable[[float, int], int]) -> bool:
    """`fn(ridge, K)`: the most requests whose verification, K + 1 rows each, stays within `ridge` rows."""

    def run() -> None:
        for ridge, k in ((206.0, 3), (206.0, 10), (206.0, 0), (100.0, 4)):
            got, expected = _call(fn, ridge, k), int(ridge // (k + 1))
            if got == expected:
                continue
            hint = "Each request brings K + 1 rows: its draft and the token before it."
            if k and got == int(ridge // k):
                hint = "The token before the draft is a row too: K + 1, not K."
            elif got == expected + 1:
                hint = "Round down: one request more would be beyond the ridge."
            raise _wrong(f"free_requests(ridge={ridge:g}, K={k})", got, expected, hint)

    return _check("free_requests", run, "ridge // (K + 1); 206 rows are 51 requests at K = 3")
