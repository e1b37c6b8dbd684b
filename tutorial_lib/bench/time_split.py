"""Where a round's time goes, and in words where a run that is slower than plain decoding loses it. Pure.

Parts of a round: drafting, verifying (one pass of the target), accepting, the drafter's reading of the prompt (which
happens once, in a request's first round, after the first token), and the host's work between rounds. On a GPU, where a
round is one graph, the record of its kernels tells accepting and the gaps between launches apart from the passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import OptionError

Record = Mapping[str, Any]
ACCEPTING = ("begin_round", "finish_round", "stamp", "memcpy")  # kinds of kernels beside the two models' passes
NEXT_TO_NOTHING = 0.02  # of a plain step
WORDS = {
    "draft": "drafting",
    "verify": "verifying",
    "accept": "accepting",
    "prompt": "the drafter's reading of the prompt",
    "gaps": "gaps between launches",
    "host": "the host",
}


@dataclass(frozen=True)
class Split:
    """Milliseconds of a mean round by part; None: not told apart, and contained in another (accepting and gaps in
    drafting and verifying, the prompt in the host's)."""

    round: float
    draft: float
    verify: float
    host: float
    accept: float | None = None
    prompt: float | None = None
    gaps: float | None = None

    def parts(self) -> dict[str, float]:
        """By name, in the order of `WORDS`; they add up to the round."""
        return {name: value for name in WORDS if (value := getattr(self, name)) is not None}


def split_of(run: Record, breakdown: Record | None = None) -> Split:
    """From a run's record. breakdown: a GPU's kernels by kind over rounds of the same setting. Raises `OptionError`
    for a run whose backend reports no rounds."""
    figures = run["figures"]
    whole, verify, overhead = (figures[name] for name in ("round_ms", "verify_ms_per_round", "overhead_ms_per_round"))
    if whole is None or verify is None or overhead is None:
        raise OptionError(f"the run of {run['method']} has no rounds", "a backend that reports them: torch")
    draft, accept, gaps, prompt = figures["draft_ms_per_round"] or 0.0, None, None, None
    if breakdown is not None:
        accept = sum(k["us_per_round"] for k in breakdown["kinds"] if k["kind"] in ACCEPTING) / 1e3
        gaps = breakdown["gap_us_per_round"] / 1e3
        in_draft = gaps * draft / (draft + verify)
        draft, verify = draft - in_draft, verify - accept - (gaps - in_draft)
    first = figures.get("first_round_overhead_ms")
    if first is not None and figures["draft_ms_per_round"] is not None:
        prompt = min(overhead, first * figures["requests"] / figures["rounds"])
    return Split(whole, draft, verify, overhead - (prompt or 0.0), accept, prompt, gaps)


def explain(run: Record, plain: Record, breakdown: Record | None = None) -> str:
    """Sentences: what a round costs and yields against plain steps, what it loses most by, and what would turn it."""
    split, step = split_of(run, breakdown), plain["figures"]["round_ms"]
    length = run["figures"]["acceptance_length"]
    gain = step * length / split.round
    parts = {name: ms / step for name, ms in split.parts().items()}
    words = WORDS | ({"host": f"{WORDS['prompt']} and the host"} if split.prompt is None and split.draft else {})
    told = ", ".join(f"{words[name]} {cost:.2f}" for name, cost in parts.items() if cost >= 0.005)
    verb = "pays" if gain > 1 else "loses"
    said = [
        f"{run['method']} at K = {run['max_draft_len']} {verb}: a round yields {length:.2f} tokens and takes "
        f"{split.round / step:.2f} plain steps ({told}), so it decodes at {gain:.2f}× plain."
    ]
    extra = parts | {"verify": max(0.0, parts["verify"] - 1.0)}  # one step is what plain decoding pays as well
    most = max(extra, key=lambda name: extra[name])
    without = length / (split.round / step - extra[most])
    what = "verifying at the price of one step" if most == "verify" else f"{words[most]} for nothing"
    if extra[most] < NEXT_TO_NOTHING:
        said.append("It adds next to nothing to a plain step.")
    else:
        said.append(f"Most of what it adds is {words[most]}: with {what} it would be {without:.2f}×.")
    if gain <= 1:
        needed = split.round / step
        most_tokens = run["figures"]["mean_draft_len"] + 1
        said.append(
            f"It needs {needed:.2f} tokens a round to break even"
            + (f", more than the {most_tokens:.0f} that a round can yield." if needed > most_tokens else ".")
        )
        if length <= parts["verify"]:
            said.append("Verifying alone costs more than the tokens it yields: no drafter, however fast, would help.")
    return " ".join(said)


def split_rows(runs: Mapping[str, Record], breakdowns: Mapping[str, Record] | None = None) -> list[dict[str, Any]]:
    """A row for every run that has rounds: its parts in milliseconds, None where a part is contained in another."""
    rows = []
    for name, run in runs.items():
        if run["figures"]["round_ms"] is None:
            continue
        split = split_of(run, (breakdowns or {}).get(name))
        rows.append({"run": name, **{WORDS[part]: getattr(split, part) for part in WORDS}, "round, ms": split.round})
    return rows
