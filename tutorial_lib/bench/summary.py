"""What a session of several methods comes to: speed-up, identity, where it pays less and why. Pure.

Everything is computed from records and generations of one session, so that each figure can be traced to a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..results import Generation

Record = Mapping[str, Any]
PLAIN, TRANSFORMERS = "plain", "transformers"
RIVAL_KEYS = (
    "transformers_plain_tok_s",
    "transformers_categories",
    "plain_tok_s_same_prompts",
    "plain_vs_transformers",
    "identical_to_transformers",
)


def summarize(
    records: Mapping[str, Record],
    generations: Mapping[str, Sequence[Mapping[str, Generation]]],
    speculative: Sequence[str],
    predictions: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """What a bench is asked for, of the first speculative method; of the others in `by_method`.

    records: by name, "plain" and perhaps "transformers" among them. generations: by name, repeat and request.
    predictions: `predict_speedup` of every speculative method. Text of simulated and of sampled runs is compared with
    nothing; if there is no other, `identical_text` is None and `text_not_compared` says why.
    """
    plain, chosen = records[PLAIN], records[speculative[0]]
    plain_tok_s = plain["figures"]["output_tok_s"]
    predicted = predictions[speculative[0]]
    speedup = chosen["figures"]["output_tok_s"] / plain_tok_s
    real = [name for name in speculative if not records[name]["is_simulated"] and not is_sampled(records[name])]
    differences = [
        {"method": name, **difference}
        for name in real
        for difference in first_differences(generations[PLAIN], generations[name])
    ]
    by_category = {
        category: {
            "plain_tok_s": plain["by_category"][category]["output_tok_s"],
            "speculative_tok_s": found["output_tok_s"],
            "speedup": found["output_tok_s"] / plain["by_category"][category]["output_tok_s"],
            "predicted_speedup": predicted["by_category"][category],
            "acceptance_length": found["acceptance_length"],
        }
        for category, found in chosen["by_category"].items()
    }
    return {
        "method": speculative[0],
        "plain_tok_s": plain_tok_s,
        "speculative_tok_s": chosen["figures"]["output_tok_s"],
        "speedup": speedup,
        "speedup_of_repeats": paired_speedups(plain, chosen),
        "acceptance_length": chosen["figures"]["acceptance_length"],
        "identical_text": not differences if real else None,
        "text_not_compared": None if real else "texts are sampled" if is_sampled(plain) else "acceptance was forced",
        "differences": differences,
        "predicted_speedup": predicted["speedup"],
        "prediction_error": predicted["speedup"] / speedup - 1 if predicted["speedup"] is not None else None,
        "predicted_round_ms": predicted["round_ms"],
        "by_method": {
            name: {
                "output_tok_s": records[name]["figures"]["output_tok_s"],
                "speedup": records[name]["figures"]["output_tok_s"] / plain_tok_s,
                "predicted_speedup": predictions[name]["speedup"],
                "acceptance_length": records[name]["figures"]["acceptance_length"],
            }
            for name in speculative
        },
        "by_category": by_category,
        "pays_less": _pays_less(plain, chosen, speedup),
        **_against_rival(records, generations),
        "notes": [f"{name}: {note}" for name, record in records.items() for note in record["notes"]],
    }


def is_sampled(record: Record) -> bool:
    """Whether every engine draws tokens of its own, so that texts may differ and all be right."""
    return bool(record["sampling"].get("temperature"))


def paired_speedups(plain: Record, chosen: Record) -> list[float]:
    """The speed-up repeat by repeat: what the machine's drift leaves of it."""
    pairs = zip(plain["repeat_figures"], chosen["repeat_figures"], strict=True)
    return [ours["output_tok_s"] / theirs["output_tok_s"] for theirs, ours in pairs]


def _pays_less(plain: Record, chosen: Record, overall: float) -> list[dict[str, Any]]:
    """Categories below the overall speed-up, the worst first, with what the record says of the reason."""
    whole = chosen["figures"]
    found = []
    for category, figures in chosen["by_category"].items():
        gain = figures["output_tok_s"] / plain["by_category"][category]["output_tok_s"]
        if gain >= overall:
            continue
        reasons = []
        if (figures["acceptance_length"] or 0.0) < (whole["acceptance_length"] or 0.0):
            reasons.append(
                f"acceptance length {figures['acceptance_length']:.2f} against {whole['acceptance_length']:.2f} overall"
            )
        share, typical = (f["ttft_s"] / f["latency_s"] for f in (figures, whole))
        if share > typical:
            reasons.append(
                f"prefill, which drafting cannot shorten, takes {share:.0%} against {typical:.0%} of the time"
            )
        found.append(
            {
                "category": category,
                "speedup": gain,
                "why": "; ".join(reasons) or "neither acceptance nor prefill explains it",
            }
        )
    return sorted(found, key=lambda entry: entry["speedup"])


def _against_rival(
    records: Mapping[str, Record], generations: Mapping[str, Sequence[Mapping[str, Generation]]]
) -> dict[str, Any]:
    """Plain `transformers` beside our plain run, over the prompts that both answered; None where it did not run."""
    if TRANSFORMERS not in records:
        return dict.fromkeys(RIVAL_KEYS)
    rival, rivals = records[TRANSFORMERS], generations[TRANSFORMERS]
    shared = set(rival["by_category"])
    ours, theirs = _tok_s_over(records[PLAIN], shared), rival["figures"]["output_tok_s"]
    same_requests = [{key: repeat[key] for key in rivals[0]} for repeat in generations[PLAIN]]
    is_same = None if is_sampled(rival) else not first_differences(same_requests, rivals)
    values = (theirs, sorted(shared), ours, ours / theirs, is_same)
    return dict(zip(RIVAL_KEYS, values, strict=True))


def _tok_s_over(record: Record, categories: set[str]) -> float:
    found = [figures for category, figures in record["by_category"].items() if category in categories]
    return sum(f["output_tokens"] for f in found) / sum(f["requests"] * f["latency_s"] for f in found)


def first_differences(
    reference: Sequence[Mapping[str, Generation]], other: Sequence[Mapping[str, Generation]]
) -> list[dict[str, Any]]:
    """Where the token ids of `other`, in any repeat, or of `reference` itself leave the first reference repeat: one
    entry per request and repeat with the index of the first token that differs. Empty means identical text."""
    found = []
    for repeats in (reference, other):
        for number, repeat in enumerate(repeats, start=1):
            for key, generation in repeat.items():
                ours, theirs = reference[0][key].token_ids, generation.token_ids
                if ours != theirs:
                    same = next(
                        (i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None
                    )
                    first = min(len(ours), len(theirs)) if same is None else same
                    found.append({"request": key, "repeat": number, "first_difference": first})
    return found


def describe(summary: Mapping[str, Any]) -> list[str]:
    """The summary in a few lines of plain words."""
    length = summary["acceptance_length"]
    accepted = "unknown" if length is None else f"{length:.2f}"
    lines = [
        f"plain {summary['plain_tok_s']:.1f}, {summary['method']} {summary['speculative_tok_s']:.1f} output tokens/s "
        f"(end to end): {summary['speedup']:.2f}x at acceptance length {accepted}"
    ]
    if summary["predicted_speedup"] is not None:
        lines.append(f"predicted {summary['predicted_speedup']:.2f}x, off by {summary['prediction_error']:+.1%}")
    if summary["transformers_plain_tok_s"] is not None:
        lines.append(
            f"plain transformers {summary['transformers_plain_tok_s']:.1f} output tokens/s; ours over the same prompts "
            f"{summary['plain_tok_s_same_prompts']:.1f} ({summary['plain_vs_transformers']:.2f}x)"
        )
    if summary["identical_text"] is None:
        lines.append(f"text: not compared, {summary['text_not_compared']}")
    elif summary["identical_text"]:
        lines.append("text: identical in every prompt and repeat")
    else:
        first = summary["differences"][0]
        lines.append(
            f"text: differs in {len(summary['differences'])} answers, first at token {first['first_difference']} of "
            f"{first['request']}"
        )
    lines += [f"pays less: {e['category']} {e['speedup']:.2f}x ({e['why']})" for e in summary["pays_less"]]
    return lines + [f"note: {note}" for note in summary["notes"]]
