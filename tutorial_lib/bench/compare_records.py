"""Two sets of records side by side: what changed, by run and figure, and whether that is beyond noise. Pure.

Noise is what the repeats of each run differ by. A change counts as beyond it if no repeat of the one lies among those
of the other and the medians differ by more than either run's own range; a run of one repeat knows no noise, and says
so. Runs of different machines, models, prompts or sampling are put side by side with that said, and without a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from ..errors import OptionError
from .energy import energy_of

Record = Mapping[str, Any]
FIGURES = {  # name: (what it is called, unit, whether more is better; None: neither)
    "output_tok_s": ("output throughput", "tokens/s", True),
    "decode_tok_s": ("decode throughput", "tokens/s", True),
    "ttft_s": ("TTFT", "s", False),
    "tpot_ms": ("TPOT", "ms", False),
    "round_ms": ("time of a round", "ms", False),
    "draft_ms_per_round": ("drafting in a round", "ms", False),
    "verify_ms_per_round": ("verifying in a round", "ms", False),
    "overhead_ms_per_round": ("overhead of a round", "ms", False),
    "acceptance_length": ("acceptance length", "tokens", True),
    "acceptance_rate": ("acceptance rate", "", True),
}
WITHIN, BEYOND, UNKNOWN, SAME = "within noise", "beyond noise", "noise not known", "the same"


def compare_records(before: Sequence[Record], after: Sequence[Record]) -> dict[str, Any]:
    """{"kind": "record comparison", "pairs": […], "only_before": […], "only_after": […]}: runs are paired by
    experiment, backend, method, K, batch size and forced acceptance, then by their order. `OptionError` for a run that
    no workbook wrote so."""
    pairs, left, right = _paired(_runs(before), _runs(after))
    return {
        "kind": "record comparison",
        "rule": "beyond noise: no repeat of one run lies among the other's, and the medians differ by more than either "
        "run's range",
        "pairs": [_pair(old, new) for old, new in pairs],
        "only_before": [label_of(r) for r in left],
        "only_after": [label_of(r) for r in right],
    }


_KINDS: dict[str, type | tuple[type, ...]] = {
    "method": str, "max_draft_len": int, "batch_size": int, "sampling": Mapping, "prompt_set": Mapping,
    "repeat_figures": list, "provenance": Mapping, "energy": Mapping,
}  # fmt: skip


def _runs(records: Sequence[Record]) -> list[Record]:
    runs = [r for r in records if r.get("kind") == "run" and isinstance(r.get("figures"), Mapping)]
    for run in runs:
        if wrong := _wrong(run):
            raise OptionError(
                f"a run of {run.get('experiment') or 'no experiment'} has {wrong}"[:200],
                "records as workbook wrote them",
            )
    return runs


def _wrong(run: Record) -> str:
    """What in a run is of another kind than what is read of it, or ''. All but the method may be missing."""
    if not isinstance(run.get("method"), str):
        return f"method {run.get('method')!r}"
    for name, kind in _KINDS.items():
        if run.get(name) is not None and not isinstance(run[name], kind):
            return f"{name} {run[name]!r}"
    if not all(isinstance(figures, Mapping) for figures in run.get("repeat_figures") or []):
        return "repeat_figures that are none"
    origin = run.get("provenance") or {}
    for name in ("hardware", "versions"):
        if not isinstance(origin.get(name) or {}, Mapping):
            return f"{name} {origin[name]!r}"
    gpus = (origin.get("hardware") or {}).get("gpus") or []
    if not isinstance(gpus, list) or not all(isinstance(gpu, Mapping) and "name" in gpu for gpu in gpus):
        return f"gpus {gpus!r}"
    return ""


def _key(record: Record) -> tuple[Any, ...]:
    forced = record.get("simulated_acceptance")
    return (
        record.get("experiment"), record.get("backend"), record["method"], record.get("max_draft_len"),
        record.get("batch_size"), str(sorted(forced.items())) if isinstance(forced, Mapping) else forced,
    )  # fmt: skip


def _paired(
    before: list[Record], after: list[Record]
) -> tuple[list[tuple[Record, Record]], list[Record], list[Record]]:
    pairs, left, rest = [], [], list(after)
    for old in before:
        new = next((record for record in rest if _key(record) == _key(old)), None)
        if new is None:
            left.append(old)
        else:
            pairs.append((old, new))
            rest = [record for record in rest if record is not new]
    return pairs, left, rest


def label_of(record: Record) -> str:
    """A run in a few words."""
    parts = [str(record.get("experiment") or ""), f"{record.get('backend')} {record['method']}"]
    if record.get("max_draft_len"):
        parts.append(f"K = {record['max_draft_len']}")
    if (record.get("batch_size") or 1) > 1:
        parts.append(f"batch {record['batch_size']}")
    return ", ".join(part for part in parts if part)


# ---- one pair -------------------------------------------------------------------------------------------------------


def _pair(old: Record, new: Record) -> dict[str, Any]:
    settings = _differences(_settings(old), _settings(new))
    figures = [f for name in FIGURES if (f := _figure(name, old, new, is_comparable=not settings)) is not None]
    figures += [f for f in [_energy(old, new, is_comparable=not settings)] if f is not None]
    hashes = old.get("tokens_sha256"), new.get("tokens_sha256")
    return {
        "run": label_of(old),
        "is_simulated": bool(old.get("is_simulated") or new.get("is_simulated")),
        "other_settings": settings,
        "other_software": _differences(_software(old), _software(new)),
        "same_tokens": None if None in hashes or settings else hashes[0] == hashes[1],
        "figures": figures,
    }


def _settings(record: Record) -> dict[str, Any]:
    """What must be equal for times to mean the same."""
    hardware = (record.get("provenance") or {}).get("hardware") or {}
    prompts, device = record.get("prompt_set") or {}, record.get("device")
    gpus = [gpu["name"] for gpu in hardware.get("gpus") or []]
    on_cpu = device == "cpu" or not gpus
    return {
        "machine": f"{hardware.get('cpu')}, {hardware.get('cores')} cores" if on_cpu else ", ".join(gpus),
        "threads": hardware.get("threads") if on_cpu else None,
        "device": device,
        "target": record.get("target"),
        "drafter": record.get("drafter"),
        "number format": record.get("dtype"),
        "prompts": f"{prompts.get('name')}, {prompts.get('count')}, {str(prompts.get('sha256'))[:12]}",
        **{f"sampling {name}": value for name, value in (record.get("sampling") or {}).items()},
        "forced acceptance": record.get("simulated_acceptance"),
        "kind of run": "simulated" if record.get("is_simulated") else "real",
    }


def _software(record: Record) -> dict[str, Any]:
    """What may differ, and is perhaps why figures do."""
    origin = record.get("provenance") or {}
    drivers = [gpu.get("driver") for gpu in (origin.get("hardware") or {}).get("gpus") or []]
    return {"git revision": origin.get("git_revision"), "driver": drivers, **(origin.get("versions") or {})}


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = dict.fromkeys([*old, *new])
    return [
        {"what": name, "before": old.get(name), "after": new.get(name)}
        for name in names
        if old.get(name) != new.get(name)
    ]


def _figure(name: str, old: Record, new: Record, *, is_comparable: bool) -> dict[str, Any] | None:
    before, after = old["figures"].get(name), new["figures"].get(name)
    if not _is_number(before) or not _is_number(after):
        return None
    verdict = _verdict(before, after, _repeats(name, old), _repeats(name, new))
    return _changed(name, *FIGURES[name], before, after) | {
        "range_before": _range(_repeats(name, old)),
        "range_after": _range(_repeats(name, new)),
        "verdict": verdict if is_comparable else None,
    }


def _energy(old: Record, new: Record, *, is_comparable: bool) -> dict[str, Any] | None:
    before, after = (energy_of(record).get("energy_j_per_output_token") for record in (old, new))
    if not _is_number(before) or not _is_number(after):
        return None
    found = _changed("energy_j_per_output_token", "energy per output token", "J", False, before, after)
    return found | {"range_before": None, "range_after": None, "verdict": UNKNOWN if is_comparable else None}


def _changed(name: str, words: str, unit: str, is_more_better: bool, before: float, after: float) -> dict[str, Any]:
    change = after / before - 1 if before else None
    is_better = None if not change else (change > 0) == is_more_better
    return {
        "figure": name, "words": words, "unit": unit, "before": before, "after": after, "change": change,
        "is_better": is_better,
    }  # fmt: skip


def _repeats(name: str, record: Record) -> list[float]:
    """The figure in every repeat that counted."""
    repeats = [f for f in record.get("repeat_figures") or [] if not f.get("is_warm")]
    return [f[name] for f in repeats if _is_number(f.get(name))]


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _range(values: Sequence[float]) -> list[float] | None:
    return [min(values), max(values)] if len(values) > 1 else None


def _verdict(before: float, after: float, old: Sequence[float], new: Sequence[float]) -> str:
    if before == after:
        return SAME
    if len(old) < 2 or len(new) < 2:
        return UNKNOWN
    is_apart = max(old) < min(new) or max(new) < min(old)
    own = max(max(old) - min(old), max(new) - min(new))
    return BEYOND if is_apart and abs(after - before) > own else WITHIN


# ---- in words -------------------------------------------------------------------------------------------------------


def describe(comparison: Mapping[str, Any]) -> list[str]:
    """The comparison in lines of plain words."""
    lines: list[str] = []
    for pair in comparison["pairs"]:
        lines.append(f"{pair['run']}{' (simulated)' if pair['is_simulated'] else ''}")
        lines += [f"  no verdict, {d['what']} differs: {_shown(d['before'])} -> {_shown(d['after'])}"
                  for d in pair["other_settings"]]  # fmt: skip
        if pair["other_software"]:
            changed = ", ".join(
                f"{d['what']} {_shown(d['before'])} -> {_shown(d['after'])}" for d in pair["other_software"]
            )
            lines.append(f"  other software: {changed}")
        lines += [f"  {figure_words(figure)}" for figure in pair["figures"]]
        if pair["same_tokens"] is not None:
            lines.append(f"  text: {'the same tokens' if pair['same_tokens'] else 'other tokens'}")
    lines += [f"only before: {label}" for label in comparison["only_before"]]
    lines += [f"only after: {label}" for label in comparison["only_after"]]
    return lines or ["nothing to compare: no runs"]


def figure_words(figure: Mapping[str, Any]) -> str:
    unit = f" {figure['unit']}" if figure["unit"] else ""
    text = f"{figure['words']}: {figure['before']:.4g} -> {figure['after']:.4g}{unit}"
    if figure["change"] is not None:
        text += f" ({figure['change']:+.1%})"
    if figure["verdict"] is None:
        return text
    if figure["verdict"] == BEYOND:
        return f"{text}, {BEYOND}: {'better' if figure['is_better'] else 'worse'}"
    return f"{text}, {figure['verdict']}"


def _shown(value: Any) -> str:
    return "none" if value in (None, "", []) else str(value)
