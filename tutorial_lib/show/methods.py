"""The page of one drafting method in notebook 03: its options and costs, its trace, its acceptance.

`Pages` holds what was measured (`bench.methods.bench_methods`) and traced (`trace_methods`); each of its views is pure
and returns something that a notebook shows. A method that could not run here answers with the reason instead.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from ..results import Generation, Round
from . import plots
from .tables import Table
from .trace import Decoder, trace_html

TREE_METHODS = ("eagle3_tree", "medusa", "lookahead")


class Html(str):
    """Finished HTML that a notebook shows as it is."""

    def _repr_html_(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"HTML, {len(self)} characters"


class Pages:
    """document: of `bench_methods`. traced: of `trace_methods`. tokenizer: the target's."""

    def __init__(self, document: Mapping[str, Any], traced: Mapping[str, Any], tokenizer: Decoder) -> None:
        self.runs: list[Mapping[str, Any]] = list(document["runs"])
        self.entries = {entry["name"]: entry for entry in document["summary"]["methods"]}
        self.generations: Mapping[str, Generation] = traced["generations"]
        self.tokenizer = tokenizer
        self.left_out = {**traced["left_out"], **{e["name"]: e["why"] for e in document["summary"]["left_out"]}}

    def costs(self, name: str) -> Table | Html:
        """Its options, what a round drafts and costs, and what it yields."""
        if name not in self.entries:
            return self._missing(name)
        entry = self.entries[name]
        options = ", ".join(f"{key}={value}" for key, value in entry["options"].items() if key != "class")
        facts = {
            "configuration": f"{entry['options']['class']}({options})",
            "why so": entry["why"],
            "tokens drafted in a round": entry["mean_draft_len"],
            "drafting, ms a round": entry["draft_ms"],
            "verifying, ms a round": entry["verify_ms"],
            "acceptance length": entry["acceptance_length"],
            "speed-up": entry["speedup"],
        }
        return Table({"what": what, "value": _in_words(value)} for what, value in facts.items())

    def trace(self, name: str) -> Html:
        if name not in self.generations:
            return self._missing(name, is_short=True)
        return Html(trace_html(self.generations[name], self.tokenizer))

    def acceptance(self, name: str) -> go.Figure | Html:
        run = next((run for run in self.runs if run["method"] == name), None)
        return self._missing(name, is_short=True) if run is None else plots.plot_acceptance_of(run)

    def table(self) -> Table:
        """All methods side by side, the fastest first; plain decoding and what was left out at the end."""
        rows: list[dict[str, Any]] = []
        for name, e in sorted(self.entries.items(), key=lambda item: -item[1]["speedup"]):
            rows.append(
                {
                    "method": plots.method_style(name).label,
                    "drafted": e["mean_draft_len"],
                    "acceptance length": e["acceptance_length"],
                    "draft ms": e["draft_ms"],
                    "verify ms": e["verify_ms"],
                    "speed-up": e["speedup"],
                    "predicted": e["predicted_speedup"],
                    "same text": "yes" if e["identical_text"] else f"{e['differences']} answers differ",
                }
            )
        plain = next(run for run in self.runs if run["method"] == "plain")
        plain_ms = plain["figures"]["verify_ms_per_round"]
        rows.append({"method": plots.method_style("plain").label, "verify ms": plain_ms, "speed-up": 1.0})
        rows += [{"method": plots.method_style(name).label, "same text": "not run here"} for name in self.left_out]
        return Table(rows)

    def _missing(self, name: str, is_short: bool = False) -> Html:
        label, why = plots.method_style(name).label, self.left_out.get(name, "it was not asked for")
        why = "the reason stands above" if is_short else why
        return Html(f"<p><b>{html.escape(label)} not run here</b>: {html.escape(why)}</p>")

    def tree_round(self) -> tuple[str, Round] | None:
        """A round worth looking at, of the first method here that drafts trees; None if there is no such round."""
        for name in TREE_METHODS:
            if name in self.generations and (found := telling_round(self.generations[name].rounds)) is not None:
                return name, found
        return None


def telling_round(rounds: Sequence[Round]) -> Round | None:
    """The tree with most accepted tokens that also has a branch; of equals the smallest."""
    trees = [r for r in rounds if r.parents is not None and len(r.drafted) > r.depth]
    return max(trees, key=lambda r: (r.accepted, -len(r.drafted)), default=None)


def _in_words(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else "–" if value is None else str(value)
