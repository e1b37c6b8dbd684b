"""The learner's checks: right answers pass, each common mistake is named, an untouched exercise fails nothing."""

from __future__ import annotations

from collections import Counter

import pytest

from tutorial_lib.engine import verify
from tutorial_lib.show import checks


def depths(parents):
    found = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def walk(drafted, parents, choices, is_child=lambda parent, at: parent == at):
    emitted, at = [], -1
    while True:
        emitted.append(choices[at + 1])
        behind = [i for i, p in enumerate(parents) if i > at and is_child(p, at) and drafted[i] == choices[at + 1]]
        if not behind:
            return emitted
        at = behind[0]


def leading_run(drafted, argmax):
    n = 0
    while n < len(drafted) and drafted[n] == argmax[n]:
        n += 1
    return n


def emitted_by_round(match, k, bonus=1):
    emitted, at = [], 0
    while at < len(match):
        lead = 0
        while lead < k and at + lead < len(match) and match[at + lead]:
            lead += 1
        step = min(lead + 1, len(match) - at)
        emitted.append(step - 1 + bonus)
        at += step
    return emitted


def most_frequent(paths, nodes, is_beginning=True):
    counts = Counter()
    for path in paths:
        counts.update(path[:end] for end in range(1 if is_beginning else len(path), len(path) + 1))
    return sorted(counts, key=lambda path: (-counts[path], len(path), path))[:nodes]


RIGHT = {
    checks.test_walk_rounds: emitted_by_round,
    checks.test_best_tree: most_frequent,
    checks.test_accept_greedy: lambda d, a: d[: leading_run(d, a)] + [a[leading_run(d, a)]],
    checks.test_tree_depths: depths,
    checks.test_accept_tree: walk,
    checks.test_acceptance_probability: lambda p, q: min(1, p / q),
    checks.test_residual: lambda p, q: (p - q).clamp(min=0) / (p - q).clamp(min=0).sum(),
    checks.test_expected_tokens: lambda a, k: sum(a**i for i in range(k + 1)),
    checks.test_break_even: lambda t_plain, t_round: t_round / t_plain,
    checks.test_step_ceiling: lambda weight_bytes, bytes_per_s: bytes_per_s / weight_bytes,
    checks.test_ceiling_on_gpus: lambda weight_bytes, bytes_per_s, gpus: gpus * bytes_per_s / weight_bytes,
    checks.test_blocks_needed: lambda prompt, output, size, shared: -(-(prompt + output) // size) - shared // size,
    checks.test_free_requests: lambda ridge, k: int(ridge // (k + 1)),
}

WRONG = [
    (checks.test_blocks_needed, lambda p, o, size, shared: -(-p // size) - (-o // size) - shared // size, "add first"),
    (checks.test_blocks_needed, lambda p, o, size, shared: (p + o) // size - shared // size, "round up"),
    (checks.test_blocks_needed, lambda p, o, size, shared: -(-(p + o) // size), "not taken again"),
    (checks.test_free_requests, lambda ridge, k: int(ridge // k) if k else 206, "K + 1, not K"),
    (checks.test_free_requests, lambda ridge, k: -int(-ridge // (k + 1)), "Round down"),
    (checks.test_free_requests, lambda ridge, k: ridge * (k + 1), "brings K + 1 rows"),
    (checks.test_walk_rounds, lambda m, k: emitted_by_round(m, k, bonus=0), "bonus token is missing"),
    (checks.test_walk_rounds, lambda m, k: [1 + is_right for is_right in m], "per round, not per token"),
    (checks.test_best_tree, lambda paths, n: most_frequent(paths, n, is_beginning=False), "needs its parent"),
    (checks.test_best_tree, lambda paths, n: most_frequent(paths, n + 1), "nodes was asked for"),
    (checks.test_accept_greedy, lambda d, a: d[: leading_run(d, a)], "bonus token is missing"),
    (
        checks.test_accept_greedy,
        lambda d, a: [x for x, y in zip(d, a, strict=False) if x == y] + a[-1:],
        "do not count",
    ),
    (checks.test_tree_depths, lambda parents: list(range(1, len(parents) + 1)), "That is the row"),
    (checks.test_tree_depths, lambda parents: [d - 1 for d in depths(parents)], "counts from 1"),
    (checks.test_tree_depths, lambda parents: [p + 2 for p in parents], "one deeper than its parent"),
    (checks.test_accept_tree, lambda d, p, c: walk(d, p, c)[:-1], "bonus token is missing"),
    (checks.test_accept_tree, lambda d, p, c: walk(d, p, c, lambda parent, at: True), "rival branch"),
    (checks.test_acceptance_probability, lambda p, q: float(p >= q), "only half of the rule"),
    (checks.test_acceptance_probability, lambda p, q: p / q, "cannot exceed 1"),
    (checks.test_acceptance_probability, lambda p, q: min(1, q / p) if p else 1, "swapped"),
    (checks.test_residual, lambda p, q: p, "p itself"),
    (checks.test_residual, lambda p, q: p - q, "Negative"),
    (checks.test_residual, lambda p, q: (p - q).clamp(min=0), "divide by the sum"),
    (checks.test_residual, lambda p, q: [1.0], "One probability per"),
    (checks.test_expected_tokens, lambda a, k: sum(a**i for i in range(1, k + 1)), "bonus token is missing"),
    (checks.test_expected_tokens, lambda a, k: 1 + a * k, "forgets that"),
    (checks.test_expected_tokens, lambda a, k: (1 - a ** (k + 1)) / (1 - a), "0 / 0"),
    (checks.test_break_even, lambda t_plain, t_round: t_plain / t_round, "Upside down"),
    (checks.test_step_ceiling, lambda weight_bytes, bytes_per_s: weight_bytes / bytes_per_s, "inverse"),
    (checks.test_ceiling_on_gpus, lambda weight_bytes, bytes_per_s, gpus: bytes_per_s / weight_bytes, "only its share"),
    (checks.test_ceiling_on_gpus, lambda weight_bytes, rate, gpus: weight_bytes / gpus / rate, "inverse"),
]


def only_rejected_zeroed(p, q):
    left = p.clone()
    left[(q - p).argmax()] = 0
    return left / left.sum()


@pytest.mark.parametrize("check", RIGHT)
def test_a_right_answer_passes(check, capsys):
    assert check(RIGHT[check]) is True
    assert capsys.readouterr().out.startswith("✓ ")


@pytest.mark.parametrize(("check", "fn", "hint"), [*WRONG, (checks.test_residual, only_rejected_zeroed, "one-hot")])
def test_a_wrong_answer_is_told_what_is_wrong(check, fn, hint):
    with pytest.raises(checks.CheckFailed, match="expected") as raised:
        check(fn)
    assert hint in str(raised.value)


def not_written(*args):
    raise NotImplementedError


@pytest.mark.parametrize("check", RIGHT)
@pytest.mark.parametrize("stub", [lambda *args: ..., lambda *args: None, not_written])
def test_an_untouched_exercise_is_reported_and_fails_nothing(check, stub, capsys):
    assert check(stub) is False
    assert "not attempted" in capsys.readouterr().out


def test_the_engine_passes_its_own_checks():
    assert checks.test_accept_greedy(verify.accept_greedy)
    assert checks.test_residual(verify.residual)
