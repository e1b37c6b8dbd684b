"""Figures of loads and of the cache: titles say what the numbers say, and nothing that was measured is left out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from stand_ins import tiny_model
from test_plots import record

from tutorial_lib.bench.load import IN_FLIGHT, STATIC
from tutorial_lib.bench.reuse import block_map, one_then_others
from tutorial_lib.bench.schedule import choose
from tutorial_lib.config import KvCacheConfig
from tutorial_lib.engine.engine import Engine
from tutorial_lib.results import Generation
from tutorial_lib.show.cache import memory_map, plot_fp8_errors, plot_reuse, plot_ring
from tutorial_lib.show.load import plot_draft_len_by_load, plot_load, plot_timeline, run_of

MEASURED = ("ttft_s", "tpot_ms", "latency_s")


def load_record(method, concurrency, tok_s, batching=IN_FLIGHT, rate=None):
    figures = {f"{name}_p{p}": tok_s / 10 + p / 100 for name in MEASURED for p in (50, 90, 99)}
    figures |= {"requests": 2, "seconds": 80 / tok_s, "ttft_s": 8 / tok_s}
    rows = [
        {"arrival_s": 0.0, "admitted_s": 0.5, "first_token_s": 1.0, "end_s": 3.0},
        {"arrival_s": 1.0, "admitted_s": None, "first_token_s": 2.0, "end_s": 2.5},
    ]
    run = record(method, k=0 if method == "plain" else 4, tok_s=tok_s, figures=figures, batch_size=concurrency)
    return {**run, "concurrency": concurrency, "batching": batching, "rate": rate, "timeline": rows}


RUNS = [
    load_record("plain", 1, 20.0), load_record("draft_target", 1, 30.0), load_record("plain", 4, 40.0),
    load_record("plain", 4, 32.0, STATIC), load_record("draft_target", 4, 36.0),
]  # fmt: skip


def test_a_timeline_has_every_phase_of_every_request_in_its_place():
    figure = plot_timeline([RUNS[2], RUNS[3]])
    assert len(figure.data) == 2 * 3 and all(len(bar.y) == 2 for bar in figure.data)
    waiting, reading, writing = figure.data[:3]
    assert (list(waiting.base), list(waiting.x)) == ([0, 1], [0.5, 0])  # not told when it got its slot: it did not wait
    assert (list(reading.base), list(reading.x)) == ([0.5, 1], [0.5, 1])
    assert (list(writing.base), list(writing.x)) == ([1, 2], [2, 0.5])
    assert "1.25× the output throughput of static batches, first token after 0.20 s instead of 0.25 s" in title(figure)
    assert "2 requests in 2.0 s" in title(plot_timeline([RUNS[2]]))


def title(figure) -> str:
    return figure.layout.title.text.replace("<br>", " ")


def test_throughput_and_waiting_against_concurrency():
    figure = plot_load(RUNS)
    assert len(figure.data) == 2 * 4 and "draft model 1.50× at 1, 0.90× at 4 at once" in title(figure)
    throughput = figure.data[0]
    assert (list(throughput.x), list(throughput.y)) == ([1, 4], [20, 40])  # static batching is not mixed in
    ttft = figure.data[1]
    assert list(ttft.y) == [2.5, 4.5] and list(ttft.error_y.array) == pytest.approx([0.49, 0.49])
    by_rate = plot_load([load_record("plain", 8, 20.0, rate=r) for r in (0.5, 2.0)])
    assert list(by_rate.data[0].x) == [0.5, 2.0] and by_rate.layout.xaxis3.title.text == "requests per second"
    assert "20 output tokens / s at best" in title(by_rate)
    drafted = load_record("draft_target", 8, 10.0, rate=0.5)
    by_latency = plot_load([load_record("plain", 8, 20.0, rate=0.5), drafted])  # half the latency, made so
    assert "draft model 1.67× at 0.5" in title(by_latency)


def test_runs_are_found_by_name():
    assert run_of(RUNS, "plain", 4, STATIC) is RUNS[3]
    with pytest.raises(KeyError, match="ngram at 4.*plain at 1"):
        run_of(RUNS, "ngram", 4)


def test_k_by_load_is_drawn_with_its_end():
    times = {(b, k): max(1.0, b * (k + 1) / 16) + 0.05 * k for b in (1, 4, 16) for k in range(5)}
    figure = plot_draft_len_by_load(choose(times, 0.7), 16, "a machine & its models")
    assert title(figure) == "One request gains most from K = 4, 2.31×; with 16 at once drafting pays no more"
    assert [line.name for line in figure.data] == ["K = 1", "K = 2", "K = 3", "K = 4", "K that is chosen"]
    assert list(figure.data[-1].text) == ["4", "3", "0"] and figure.data[-1].y[-1] == 1
    assert figure.layout.title.subtitle.text == "a machine &amp; its models"
    assert any("3 × (K + 1) = 16 rows" in (note.text or "") for note in figure.layout.annotations)
    always = plot_draft_len_by_load(choose({k: v for k, v in times.items() if k[0] < 16}, 0.7), 16, "")
    assert "pays at every load" in title(always)


# ---- the cache ------------------------------------------------------------------------------------------------------


def test_the_map_of_a_running_engine_shows_who_holds_what(pieces):
    kv = KvCacheConfig(enable_block_reuse=True, tokens_per_block=16, max_tokens=16 * 12)
    engine = Engine(tiny_model("dummy:tiny-llama?seed=5"), pieces, (), kv_cache_config=kv)
    text = [(7 * i * i + 3) % 320 for i in range(40)]
    found = one_then_others(SimpleNamespace(engine=engine), text, [text, [*text[:35], 9]], output_len=10)
    before, during = found.moments.values()
    assert sum(b["is_known"] for b in before) == 3 and not any(b["holders"] for b in before)
    assert sorted(b["holders"] for b in during if b["holders"]) == ["A", "AB", "AB", "B"]
    assert [b["holders"] for b in during if b["is_known"] and len(b["holders"]) == 2] == ["AB", "AB"]
    assert [g.cached_tokens for g in found.generations] == [0, 39, 35] and block_map(engine)[0]["holders"] == ""
    assert [len(g.token_ids) for g in found.generations] == [10] * 3
    shown = memory_map({"before <b>": before, "during": during})
    assert "12 blocks: 0 held (0 by several), 3 kept, 9 empty" in shown and "before &lt;b&gt;" in shown
    assert "12 blocks: 4 held (2 by several)" in shown and shown.count(">AB</span>") == 3  # two blocks and the legend


def test_reuse_is_told_by_what_it_saved():
    def answer(ttft, cached):
        return Generation([1] * 200, [1], "", "length", ttft_s=ttft, cached_tokens=cached)

    figure = plot_reuse([answer(2.0, 0), answer(0.25, 192), answer(0.5, 150)], "A CPU <2>")
    assert "With 192 of 200 prompt tokens in the cache" in title(figure) and "0.12× the wait" in title(figure)
    assert list(figure.data[0].y) == [2.0, 0.25, 0.5] and "96% of the prompt known" in figure.data[0].text[1]
    assert figure.layout.title.subtitle.text == "measured on A CPU &lt;2&gt;"


def test_fp8_is_told_by_its_worst_layer():
    errors = [{"layer": i, "keys": 0.01 + 0.001 * i, "values": 0.02} for i in range(3)]
    figure = plot_fp8_errors(errors, {"positions": 50, "same_choice": 49})
    assert "at most 2.0% of their size in any layer; of 50 next tokens 49 stay the same" in title(figure)
    assert [list(line.y) for line in figure.data] == [[0.01, 0.011, 0.012], [0.02] * 3]


def test_the_ring_holds_the_window_wherever_it_is():
    figure = plot_ring(rows=12, window=8, length=30)
    held, shade = figure.data[0].customdata, figure.data[0].z
    lengths = [int(n) for n in figure.data[0].y]
    assert lengths == [3, 6, 9, 12, 15, 18, 21, 24, 27, 30]
    for length, positions, dark in zip(lengths, held, shade, strict=True):
        known = [p for p in positions if p is not None]
        assert sorted(known) == list(range(max(0, length - 12), length))
        assert all(p % 12 == row for row, p in enumerate(positions) if p is not None)
        in_window = {p for p, s in zip(positions, dark, strict=True) if s == 2}
        assert in_window == set(range(max(0, length - 8), length))
