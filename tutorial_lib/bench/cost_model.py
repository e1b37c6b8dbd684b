"""Why speculation pays or not: expected tokens per round, time per round, speed-up, break-even, ceilings. Pure.

The whole model is one line, speed-up = t_plain x acceptance length / t_round. Expected tokens per round follow
Leviathan et al. 2023 (arXiv 2211.17192): (1 - a^(K+1)) / (1 - a) for a per-token acceptance probability a, or the
product of measured rates position by position, which needs no assumption that they are equal. Times are seconds,
sizes bytes; K is `max_draft_len`. Accepted / drafted is not a: what follows the first rejected token counts as drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import OptionError
from ..plan import GPUS


def expected_tokens(alpha: float, max_draft_len: int) -> float:
    """Mean tokens per round, bonus included, if every draft token is accepted with probability `alpha`.

    1 + a + a^2 + ... + a^K: the geometric sum, written out so that a = 1 gives K + 1 without a division by zero.
    """
    _check_share("alpha", alpha)
    return sum(alpha**k for k in range(max_draft_len + 1))


def expected_tokens_by_position(conditional_rates: Sequence[float]) -> float:
    """The same from measured rates: element k-1 is the share of k-th draft tokens accepted where the earlier ones
    were (`conditional_acceptance_by_position`); their number is K."""
    total = reached = 1.0
    for rate in conditional_rates:
        _check_share("acceptance rate", rate)
        reached *= rate
        total += reached
    return total


def expected_tokens_of_tree(parents: Sequence[int], rates: Sequence[float]) -> float:
    """Mean tokens per round of a tree: `rates[i]` is the share of rounds that accepted node i among those that
    accepted its parent `parents[i]` (-1: the text; parents stand before their children). Of siblings at most one is
    accepted, so their rates add up to 1 at most. A chain gives `expected_tokens_by_position`."""
    reached: list[float] = []
    below: dict[int, float] = {}
    for node, (parent, rate) in enumerate(zip(parents, rates, strict=True)):
        _check_share("acceptance rate", rate)
        if not -1 <= parent < node:
            raise OptionError(f"node {node} of the tree has parent {parent}", "one before it, or -1")
        below[parent] = below.get(parent, 0.0) + rate
        if below[parent] > 1 + 1e-9:
            raise OptionError(f"the children of node {parent} are accepted {below[parent]:g} times", "at most once")
        reached.append(rate * (1.0 if parent < 0 else reached[parent]))
    return 1.0 + sum(reached)


def expected_acceptance_rate(alpha: float, max_draft_len: int) -> float:
    """Accepted / drafted that a per-token probability `alpha` leads to; below alpha for K > 1."""
    return (expected_tokens(alpha, max_draft_len) - 1) / max_draft_len


def alpha_from_acceptance_length(acceptance_length: float, max_draft_len: int) -> float:
    """The per-token probability that would give this acceptance length at this K (inverse of `expected_tokens`)."""
    if not 1 <= acceptance_length <= max_draft_len + 1:
        raise OptionError(f"acceptance length is {acceptance_length}", f"1 to K + 1 = {max_draft_len + 1}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, max_draft_len) < acceptance_length else (low, middle)
    return (low + high) / 2


def speedup(t_plain_s: float, acceptance_length: float, t_round_s: float) -> float:
    """Speed-up over plain decoding, of the decode phase: a round yields what `acceptance_length` plain steps yield."""
    return t_plain_s * acceptance_length / t_round_s


def speedup_from_cost_ratio(alpha: float, max_draft_len: int, cost_ratio: float) -> float:
    """The paper's form: a draft step costs `cost_ratio` target steps and verification costs one, whatever K is."""
    return expected_tokens(alpha, max_draft_len) / (cost_ratio * max_draft_len + 1)


def break_even_acceptance_length(t_plain_s: float, t_round_s: float) -> float:
    """The acceptance length from which a round is worth its time; above K + 1 it never is."""
    return t_round_s / t_plain_s


def break_even_alpha(t_plain_s: float, t_round_s: float, max_draft_len: int) -> float | None:
    """The per-token acceptance probability from which speculation pays; None if it cannot pay at this K."""
    needed = break_even_acceptance_length(t_plain_s, t_round_s)
    if needed > max_draft_len + 1:
        return None
    return alpha_from_acceptance_length(max(needed, 1.0), max_draft_len)


@dataclass(frozen=True)
class DraftLengthChoice:
    """One K with what the model expects of it. K = 0 is plain decoding."""

    max_draft_len: int
    acceptance_length: float
    round_s: float
    speedup: float


def draft_length_choices(
    acceptance: float | Sequence[float],
    *,
    draft_s: Callable[[int], float],
    verify_s: Callable[[int], float],
    max_draft_len: int,
    overhead_s: float = 0.0,
) -> list[DraftLengthChoice]:
    """What every K from 0 to `max_draft_len` would yield.

    acceptance: one alpha, or conditional rates by position (K stops at their number). draft_s(K): seconds to draft K
    tokens. verify_s(rows): seconds of a target step over so many rows; `verify_s(1)` is the plain step. overhead_s:
    seconds per round outside both, in plain decoding too.
    """
    t_plain = verify_s(1) + overhead_s
    choices = [DraftLengthChoice(0, 1.0, t_plain, 1.0)]
    deepest = max_draft_len if isinstance(acceptance, (int, float)) else min(max_draft_len, len(acceptance))
    for k in range(1, deepest + 1):
        if isinstance(acceptance, (int, float)):
            length = expected_tokens(acceptance, k)
        else:
            length = expected_tokens_by_position(acceptance[:k])
        round_s = draft_s(k) + verify_s(k + 1) + overhead_s
        choices.append(DraftLengthChoice(k, length, round_s, speedup(t_plain, length, round_s)))
    return choices


def best_draft_len(
    acceptance: float | Sequence[float],
    *,
    draft_s: Callable[[int], float],
    verify_s: Callable[[int], float],
    max_draft_len: int,
    overhead_s: float = 0.0,
) -> DraftLengthChoice:
    """The K of the greatest expected speed-up, the smaller one of equals; K = 0 if drafting does not pay."""
    choices = draft_length_choices(
        acceptance, draft_s=draft_s, verify_s=verify_s, max_draft_len=max_draft_len, overhead_s=overhead_s
    )
    return max(choices, key=lambda choice: choice.speedup)


H200 = GPUS["H200"]


def step_floor_s(weight_bytes: float, bytes_per_s: float, kv_bytes: float = 0.0) -> float:
    """No step of a model can be faster than reading its weights and its KV cache once."""
    return (weight_bytes + kv_bytes) / bytes_per_s


def ridge_tokens(flops_per_s: float, bytes_per_s: float, bytes_per_weight: float) -> float:
    """Tokens per step at which arithmetic takes as long as reading the weights (two flops per weight and token).

    On an H200, dense: bf16 989.5e12 x 2 / (2 x 4.8e12) = 206, and the same 206 for FP8, where half the bytes meet
    twice the flops. Beyond it further rows are no longer free.
    """
    return flops_per_s * bytes_per_weight / (2 * bytes_per_s)


def compute_bound_batch(max_draft_len: int, ridge: float) -> float:
    """The batch at which verification of K + 1 rows per request reaches the ridge: speculation gains less above it."""
    return ridge / (max_draft_len + 1)


@dataclass(frozen=True)
class Components:
    """Times measured apart from the speculative run that they shall predict, and the acceptance per category.

    plain_step_s: a target step over one row. verify_step_s: over K + 1 rows. draft_s: drafting K tokens. draft_step_s:
    drafting one; from it follows how long the drafter reads the prompt (0: it has nothing to read). host_turn_s: what a
    round takes beside them by category, where the device waits for the host between rounds.
    """

    max_draft_len: int
    plain_step_s: float
    verify_step_s: float
    draft_s: float
    draft_step_s: float
    acceptance_length: Mapping[str, float]
    host_turn_s: Mapping[str, float] = field(default_factory=dict)


def round_s(plain_figures: Mapping[str, Any], components: Components) -> float:
    """Seconds of a speculative round, the host's turn not counted: the step of the plain run, whose figures of one
    category these are, x (draft + verify) / plain step, plus the plain run's overhead."""
    step_ms, overhead_ms = _step_and_overhead_ms(plain_figures)
    relative = (components.draft_s + components.verify_step_s) / components.plain_step_s
    return (step_ms * relative + overhead_ms) / 1e3


def predict_speedup(plain_record: Mapping[str, Any], components: Components) -> dict[str, Any]:
    """Speed-up in output throughput that a speculative run should show over the plain run in `plain_record`.

    Per category: its requests wait the plain run's TTFT, and the drafter's prefill beside it (the same share of the
    target's that its step is of the target's step), then need (output tokens - requests) / acceptance length rounds
    instead of as many steps. A round takes `round_s`, where drift of the machine between calibration and run cancels,
    and the host's turn.
    Returns {"speedup", "round_ms", "by_category": {category: speedup}, "seconds_by_category": what the speculative run
    should take}; slow categories weigh more in the first.
    """
    prefills = 1 + components.draft_step_s / components.plain_step_s
    plain_s: dict[str, float] = {}
    predicted_s: dict[str, float] = {}
    total_rounds = total_round_s = 0.0
    for category, found in plain_record["by_category"].items():
        if category not in components.acceptance_length:
            raise OptionError(f"no acceptance length of category {category!r}", "one for every category of the record")
        requests, decoded = found["requests"], found["output_tokens"] - found["requests"]
        one_s = round_s(found, components) + components.host_turn_s.get(category, 0.0)
        rounds = decoded / components.acceptance_length[category]
        plain_s[category] = requests * found["ttft_s"] + decoded * sum(_step_and_overhead_ms(found)) / 1e3
        predicted_s[category] = requests * found["ttft_s"] * prefills + rounds * one_s
        total_rounds, total_round_s = total_rounds + rounds, total_round_s + rounds * one_s
    if not sum(predicted_s.values()) > 0:
        raise OptionError("the plain record holds no times", "one with by_category figures")
    return {
        "speedup": sum(plain_s.values()) / sum(predicted_s.values()),
        "round_ms": 1e3 * total_round_s / total_rounds if total_rounds else None,
        "by_category": {c: plain_s[c] / predicted_s[c] for c in plain_s},
        "seconds_by_category": predicted_s,
    }


def _step_and_overhead_ms(plain_figures: Mapping[str, Any]) -> tuple[float, float]:
    """Of a plain run. Where the backend reports no rounds the whole time per token scales."""
    step_ms = plain_figures.get("verify_ms_per_round")
    if step_ms is None:
        return plain_figures["tpot_ms"] or 0.0, 0.0
    return step_ms, plain_figures["overhead_ms_per_round"]


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise OptionError(f"{name} is {value}", "a share from 0 to 1")
