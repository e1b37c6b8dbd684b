"""Tables of what a GPU measured on another day: read from `notebooks/recorded/`, shown on any machine.

Each function takes the records of one experiment (`workbook bench --profile h200 --experiment NAME`) and returns a
`Table`. Runs of random weights say so in every row that rests on them: their acceptance was forced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import OptionError
from ..results import read_records
from .recorded import RECORDED, machine_words
from .tables import Table

Record = Mapping[str, Any]


def gpu_experiment(name: str, folder: str | Path = RECORDED / "h200") -> Sequence[Record]:
    """The records of the experiment `name`. Raises `OptionError` where there are none."""
    file = Path(folder) / f"{name}.jsonl"
    if not file.is_file():
        raise OptionError(
            f"there is no record of experiment {name!r}",
            "notebooks/recorded/h200 of a checkout",
            f"run `workbook bench --profile h200 --experiment {name}` on such a GPU",
        )
    return read_records(file)


def machine_and_day(records: Sequence[Record]) -> str:
    """Where and when, as a caption states it."""
    origin = records[0]["provenance"]
    return f"{machine_words(origin['hardware'], 'cuda')}, {origin['time_utc'][:10]}"


def products_table(records: Sequence[Record], of: str = "target", dtype: str | None = None) -> Table:
    """What `build` chose for every product of a model, and how fast it reads; the share is of the read ceiling that
    the same run measured. cuBLAS stands beside it where it was timed."""
    build = next(r for r in _kind(records, "build") if r["of"] == of and dtype in (None, r["dtype"]))
    ceiling = _ceiling(records)
    rows = []
    for product, by_rows in build["products"].items():
        tactic, one = build["tactics"][product]["1"], by_rows["1"]
        rows.append(
            {
                "product": product,
                "tile": f"{tactic['block_n']} × {tactic['block_k']}",
                "splits along K": tactic["split_k"],
                "1 row, µs": one["us"],
                "16 rows, µs": by_rows["16"]["us"],
                "cuBLAS, 1 row, µs": one.get("cublas_us"),
                "read, TB/s": one["tb_s"],
                "of the ceiling, %": None if ceiling is None else 100 * one["tb_s"] / ceiling,
            }
        )
    return Table(rows, digits=1)


def steps_table(records: Sequence[Record]) -> Table:
    """A target pass by number of rows: what verifying K drafts costs against one token."""
    steps = next(r for r in _kind(records, "steps") if r["of"] == "target")
    times = {int(rows): ms for rows, ms in steps["step_ms"].items()}
    return Table(
        [{"rows": rows, "pass, ms": ms, "against one row": ms / times[1]} for rows, ms in sorted(times.items())]
    )


def breakdown_table(records: Sequence[Record], of: str) -> Table:
    """Where the time of one pass or round goes, by kind of kernel. of: how the record names it, or how that begins."""
    found = next((r for r in _kind(records, "breakdown") if r["of"].startswith(of)), None)
    if found is None:
        known = ", ".join(repr(r["of"]) for r in _kind(records, "breakdown"))
        raise OptionError(f"no breakdown is called {of!r}", f"one of {known}")
    rows = [
        {
            "kernel": kind["kind"],
            "launches": round(kind["launches_per_round"], 1),
            "ms": kind["us_per_round"] / 1e3,
            "share, %": 100 * kind["us_per_round"] / found["us_per_round"],
        }
        for kind in found["kinds"]
        if kind["us_per_round"] >= 0.001 * found["us_per_round"]
    ]
    gap = found["gap_us_per_round"]
    rows.append({"kernel": "gaps", "launches": None, "ms": gap / 1e3, "share, %": 100 * gap / found["us_per_round"]})
    return Table(rows)


def formats_table(records: Sequence[Record]) -> Table:
    """What every number format of the target costs against float32, and how fast it runs plain."""
    found = next(r for r in _kind(records, "number_formats"))
    plain = {r["dtype"]: r["figures"]["output_tok_s"] for r in _kind(records, "run") if r["method"] == "plain"}
    differing = found.get("fp8_first_differing_token", [])
    rows = []
    for form, error in found["logits"].items():
        is_first = form == next(iter(found["logits"]))
        rows.append(
            {
                "number format": form,
                "logit error, % of their spread": 100 * error["logit_error_relative"],
                "largest logit error": error["logit_error_max"],
                "same first choice, %": 100 * error["argmax_agreement"],
                "perplexity": error["perplexity"],
                "float32's perplexity": error["reference_perplexity"],
                "answers that differ": None if is_first else f"{len(differing)} of {found.get('fp8_answers')}",
                "first differing token": None if is_first or not differing else min(differing),
                "plain, tokens/s": plain.get(form),
            }
        )
    return Table(rows)


def runs_table(records: Sequence[Record]) -> Table:
    """Every run of an experiment against its plain one: K, acceptance length, times, throughput, speed-up."""
    plain: dict[str, float] = {}
    rows = []
    for run in _kind(records, "run"):
        figures = run["figures"]
        if run["method"] == "plain":
            plain.setdefault(run["backend"], figures["output_tok_s"])
        base = plain.get(run["backend"])
        is_plain = run["method"] == "plain"
        rows.append(
            {
                "target": run["target"],
                "method": run["method"] + ("" if run["backend"] == "torch" else f" ({run['backend']})"),
                "K": None if is_plain else run["max_draft_len"],
                "acceptance length": None if is_plain else figures["acceptance_length"],
                "acceptance": "–" if is_plain else "forced" if run["is_simulated"] else "real",
                "round, ms": figures["round_ms"],
                "output throughput, tokens/s": figures["output_tok_s"],
                "speed-up": None if is_plain or not base else figures["output_tok_s"] / base,
            }
        )
    return Table(rows)


def load_table(records: Sequence[Record]) -> Table:
    """Every load beside plain decoding of the same engine; of other engines also what ours yields over theirs."""
    points = next(iter(_kind(records, "summary")))["summary"]["points"]
    ours = next(iter(_kind(records, "load")))["backend"]
    return Table(
        {
            "clients": point["concurrency"],
            "engine": backend,
            "method": name,
            "output throughput, tokens/s": found["output_tok_s"],
            "speed-up": None if name == "plain" else found["speedup"],
            f"{ours} over it": found.get("ours_over_theirs"),
            "first token, s": found["ttft_s_p50"],
            "first token, 99th percentile, s": found["ttft_s_p99"],
            "acceptance length": found["acceptance_length"],
        }
        for point in points
        for backend, methods in {ours: point["methods"], **point["peers"]}.items()
        for name, found in methods.items()
    )


def _kind(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def _ceiling(records: Sequence[Record]) -> float | None:
    card = next(iter(_kind(records, "card")), None)
    return card["read_ceiling"]["tb_s"] if card and card.get("read_ceiling") else None
