"""The report of records: all in one file, nothing from outside, and drawn in a real browser where there is one."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import headless
import pytest

from tutorial_lib import cli, record_report
from tutorial_lib.bench.record_files import find
from tutorial_lib.errors import OptionError
from tutorial_lib.record_report import figures_of, sections_of, write_record_report
from tutorial_lib.results import read_records, write_records

RECORDED = Path(__file__).parents[1] / "notebooks" / "recorded"
EVIL = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Records of a CPU, of a GPU with forced acceptance, of an answer that would like to be a script; and rubbish."""
    place = tmp_path_factory.mktemp("records")
    runs = read_records(RECORDED / "amd-epyc-2-cores" / "bench.jsonl")
    document = {"runs": runs, "summary": {"method": "draft_target", "notes": [f"a note {EVIL}"], "by_category": {}}}
    (place / "bench.json").write_text(json.dumps(document))
    large = read_records(RECORDED / "h200" / "70b-1b.jsonl")
    write_records(place / "70b.jsonl", [r for r in large if r["kind"] != "build"])
    answer = {
        "kind": "generation", "prompt": EVIL, "text": f"model text {EVIL}", "figures": {"output_tok_s": 3.5},
        "provenance": runs[0]["provenance"],
    }  # fmt: skip
    load = runs[0] | {"kind": "load", "experiment": "load", "batching": "in flight", "concurrency": 1, "rate": None}
    waits = {
        f"{name}_{p}": 0.5 for name in ("ttft_s", "tpot_ms", "latency_s", "queued_s") for p in ("p50", "p90", "p99")
    }
    loads = [
        load | {"method": m, "arrival": "closed", "figures": {"output_tok_s": 9.0, **waits}} for m in ("plain", "ngram")
    ]
    write_records(place / "load.jsonl", loads)
    (place / "deep").mkdir()
    (place / "deep" / "answer.json").write_text(json.dumps(answer))
    (place / "other.json").write_text('{"name": "no record"}')
    (place / "broken.jsonl").write_text('{"kind": "run"\n')
    return place


@pytest.fixture(scope="module")
def page(folder, tmp_path_factory):
    return write_record_report(folder, tmp_path_factory.mktemp("out") / "report.html")


def test_one_file_holds_every_experiment_and_asks_nobody(page):
    text = page.read_text("utf-8")
    assert len(text.encode()) < 8e6 and text.count("<section id=") == 4
    outside = re.sub(r"<script>(?:(?!</script>).)*plotly\.js v.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", outside)
    assert "default-src 'none'" in text and "connect-src" not in text
    for name in (
        "70b.jsonl",
        "bench.json",
        "deep/answer.json",
        "other.json: it holds no record",
        "broken.jsonl: it cannot",
    ):
        assert name in text, name
    assert EVIL not in text and "model text &lt;/script&gt;" in text
    origin = read_records(RECORDED / "h200" / "70b-1b.jsonl")[0]["provenance"]
    assert origin["git_revision"][:12] in text and "NVIDIA H200" in text


def test_simulated_runs_are_marked_and_tables_say_what_was_forced(folder):
    by_file = {file.name: sections_of(file) for file in find(folder)}
    (large,), (bench,) = by_file["70b.jsonl"], by_file["bench.json"]
    assert large.is_simulated and not bench.is_simulated
    rows = dict(large.tables)["runs"].rows
    assert {row["acceptance"] for row in rows} == {None, "forced"} and len({row["run"] for row in rows}) == len(rows)
    assert all("simulated acceptance" in f.layout.title.subtitle.text for f in large.figures[:3])
    assert [heading for heading, _ in large.details][:2] == ["where this is from", "energy"]


def test_runs_of_other_prompts_stand_in_groups_of_their_own(folder):
    runs = read_records(RECORDED / "amd-epyc-2-cores" / "bench.jsonl")
    groups = record_report.comparable(runs)
    assert [[r["backend"] for r in group] for group in groups] == [["torch"] * 3, ["transformers"]]
    titles = [figure.layout.title.text for figure in figures_of(groups[0])]
    assert len(titles) == 7 and len(set(titles)) == 7


def test_nothing_to_report_and_too_much_are_refused(tmp_path, folder, monkeypatch, capsys):
    with pytest.raises(OptionError, match=r"holds no \.json"):
        write_record_report(tmp_path, tmp_path / "r.html")
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(OptionError, match="no record in"):
        write_record_report(tmp_path, tmp_path / "r.html")
    monkeypatch.setattr(record_report, "MOST_MB", 1.0)
    with pytest.raises(OptionError, match="would have .* MB"):
        write_record_report(folder, tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()
    assert cli._run(["report", str(folder), "--out", str(tmp_path / "no" / "r.html")]) == 2
    assert "no folder" in capsys.readouterr().err


def test_the_command_writes_it(folder, tmp_path, capsys):
    shutil.copy(folder / "deep" / "answer.json", tmp_path)
    assert cli._run(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 0
    text = (tmp_path / "r.html").read_text()
    assert "r.html" in capsys.readouterr().out and "Plotly.react" in text and len(text) < 1e5  # no figure, no plotly.js


LOOK = """(() => {
  const plots = [...document.querySelectorAll(".plot")];
  const rgb = element => getComputedStyle(element).backgroundColor;
  const tick = document.querySelector(".plot .xtick text");
  return {
    figures: document.querySelectorAll("figure").length,
    drawn: plots.filter(p => p.querySelector(".main-svg .points path, .main-svg .point path, .js-line")).length,
    wide: plots.filter(p => p.querySelector(".main-svg").getBoundingClientRect().width > innerWidth).length,
    page: document.documentElement.scrollWidth, screen: innerWidth,
    sheet: rgb(document.querySelector("main")), ink: getComputedStyle(tick).fill, hacked: window.hacked || 0,
  };
})()"""


@pytest.mark.skipif(headless.find() is None, reason=headless.WHY_NOT)
def test_a_browser_without_network_draws_every_figure_light_dark_and_on_a_phone(page, tmp_path):
    async def look():
        found = {}
        async with headless.browser(tmp_path / "profile") as new_page:
            for width, is_dark in ((1000, False), (1000, True), (400, False), (400, True)):
                tab = await new_page()
                await tab.open(page, width=width, is_dark=is_dark)
                found[width, is_dark] = await tab.evaluate(LOOK)
                await tab.picture(tmp_path / f"{width}-{is_dark}.png", height=1500)
                assert tab.requests == [] and tab.problems == [], (tab.requests, tab.problems)
        return found

    found = asyncio.run(look())
    for (width, is_dark), seen in found.items():
        assert seen["figures"] == seen["drawn"] > 10 and seen["wide"] == 0, seen
        assert seen["screen"] == width and seen["page"] <= width, "the page scrolls sideways"
        sheet, ink = (sum(map(int, re.findall(r"\d+", seen[part])[:3])) for part in ("sheet", "ink"))
        assert (sheet < 200 and ink > 500) if is_dark else (sheet > 700 and ink < 200), seen
        assert seen["hacked"] == 0
    sizes = {file.name: file.stat().st_size for file in tmp_path.glob("*.png")}
    assert len(sizes) == 4 and min(sizes.values()) > 20_000, sizes  # an empty page compresses to less
