"""The bench over all drafting methods: what is left out and why, predictions for trees, the same code on a GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
from test_measure import PROMPTS, Clock, FakeLLM

from tutorial_lib.bench import methods
from tutorial_lib.bench.measure import RoundShapes
from tutorial_lib.bench.methods import METHODS, bench_methods, options_of
from tutorial_lib.config import PROFILES, LookaheadDecodingConfig
from tutorial_lib.errors import ModelError, OptionError
from tutorial_lib.results import Generation, Round, read_records

PARENTS = (-1, -1, 0, 0, 2, 3)  # six nodes, three deep
ENTRY_KEYS = {
    "name", "acceptance_length", "acceptance_by_position", "mean_draft_len", "draft_ms", "verify_ms", "speedup",
    "identical_text", "by_category", "predicted_speedup", "options", "why",
}  # fmt: skip


def step_s(rows: int) -> float:
    return 0.040 + 0.003 * (rows - 1)


@dataclass
class RowLLM(FakeLLM):
    """A `FakeLLM` whose verification costs by the row; with `parents` its drafts are trees of that form."""

    parents: tuple[int, ...] | None = None

    def _answer(self, ids, params, start):
        chain = super()._answer(ids, params, start)
        return chain if self.parents is None else replace(chain, rounds=[self._as_tree(r) for r in chain.rounds])

    def _as_tree(self, r: Round) -> Round:
        nodes = tuple(i for i in range(len(self.parents)) if self._depth(i) <= len(r.drafted))
        branch = (0, 2, 4)
        return replace(r, drafted=(0,) * len(nodes), parents=self.parents[: len(nodes)], path=branch[: r.accepted])

    def _depth(self, node: int) -> int:
        return 1 if self.parents[node] < 0 else 1 + self._depth(self.parents[node])

    def time_steps(self, rows, context=128):
        for count in rows:
            self.clock.work(step_s(count))
        return {count: step_s(count) for count in rows}


def a_bench(names=("draft_target", "ngram", "eagle3_tree"), missing=(), profile="cpu", said=None, changes=None):
    """`bench_methods` on fakes: a chain of five, one that drafts every third round, and a tree of six nodes."""
    clock = Clock()
    fakes = {
        "plain": {},
        "draft_target": {"max_draft_len": 5, "verify_s": step_s(6)},
        "ngram": {"max_draft_len": 5, "verify_s": step_s(6), "draft_s": 0.0, "drafts": lambda number: number % 3 == 0},
        "eagle3_tree": {"max_draft_len": 3, "verify_s": step_s(7), "draft_s": 0.006, "parents": PARENTS},
    }
    opened = {}

    def make_llm(name, config, on):
        if name in missing:
            raise ModelError(f"{name} is not here", "its weights", "train them")
        opened[name] = (RowLLM(clock, name, **fakes[name], **(changes or {}).get(name, {})), config, on)
        return opened[name][0]

    on = replace(PROFILES[profile], max_tokens=40)
    say = (lambda line: None) if said is None else said.append
    document = bench_methods(on, methods=names, prompts=PROMPTS, say=say, make_llm=make_llm, clock=clock)
    return document, opened


# ---- the document ----------------------------------------------------------------------------------------------------


def test_every_method_has_its_entry_and_the_summary_is_that_of_a_bench():
    said = []
    document, opened = a_bench(said=said)
    summary = document["summary"]
    assert json.dumps(document, allow_nan=False) and document["experiment"] == "methods"
    assert [run["method"] for run in document["runs"]] == ["plain", "draft_target", "ngram", "eagle3_tree"]
    assert [entry["name"] for entry in summary["methods"]] == ["draft_target", "ngram", "eagle3_tree"]
    for entry, run in zip(summary["methods"], document["runs"][1:], strict=True):
        assert ENTRY_KEYS <= set(entry) and set(entry["by_category"]) == {"easy", "hard", "talk", "other"}
        assert entry["draft_ms"] == run["figures"]["draft_ms_per_round"] and entry["identical_text"] is True
        assert entry["speedup"] == run["figures"]["output_tok_s"] / summary["plain_tok_s"]
        assert run["options"] == entry["options"]
    assert summary["method"] == "draft_target" and summary["speedup"] == summary["methods"][0]["speedup"]
    assert summary["best_speedup"] == max(entry["speedup"] for entry in summary["methods"])
    assert summary["methods"][2]["acceptance_length"] > 2 and len(summary["methods"][2]["acceptance_by_position"]) == 3
    assert 5 < summary["methods"][2]["mean_draft_len"] <= 6 < 6.1  # nodes, not depth
    assert summary["left_out"] == [] and all(llm.is_closed for llm, _, _ in opened.values())
    assert any(line.startswith("eagle3_tree: ") and "text identical" in line for line in said)


def test_a_wrong_text_belongs_to_its_method():
    summary = a_bench(changes={"ngram": {"wrong_from": 7}})[0]["summary"]
    assert [entry["identical_text"] for entry in summary["methods"]] == [True, False, True]
    assert summary["identical_text"] is False and summary["methods"][1]["differences"] == 5 * 3


def test_what_cannot_run_is_left_out_with_its_reason():
    said = []
    document, _ = a_bench(("draft_target", "medusa", "eagle3"), missing=("medusa", "eagle3"), said=said)
    summary = document["summary"]
    assert [entry["name"] for entry in summary["methods"]] == ["draft_target"]
    assert [entry["name"] for entry in summary["left_out"]] == ["medusa", "eagle3"]
    assert "medusa is not here" in summary["left_out"][0]["why"] and "train them" in summary["left_out"][0]["why"]
    assert any(note.startswith("eagle3 left out: ") for note in summary["notes"])
    assert any(line.startswith("left out: medusa") for line in said)


def test_a_method_that_fails_at_its_first_round_is_closed_and_left_out():
    class Broken(RowLLM):
        def generate(self, inputs, sampling_params=None):
            raise RuntimeError("CUDA error:\nout of memory")

    made, clock = {}, Clock()

    def make_llm(name, config, on):
        kind = Broken if name == "ngram" else RowLLM
        made[name] = kind(clock, name, 0 if name == "plain" else 5)
        return made[name]

    options = {"prompts": PROMPTS[:1], "repeats": 1, "say": lambda line: None, "make_llm": make_llm, "clock": clock}
    summary = bench_methods("cpu", methods=["ngram", "suffix"], **options)["summary"]
    assert summary["left_out"] == [{"name": "ngram", "why": "CUDA error: out of memory"}]
    assert made["ngram"].is_closed and summary["method"] == "suffix"
    with pytest.raises(OptionError, match="no drafting method runs here; ngram: CUDA error"):
        bench_methods("cpu", methods=["ngram"], **options)
    assert all(llm.is_closed for llm in made.values())


# ---- predictions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_predictions_count_the_nodes_of_a_tree_and_the_rounds_that_drafted_less(accepted):
    """A tree of six nodes verifies seven rows, not four; look-up drafts in every third round only."""
    changes = {"eagle3_tree": {"accepts": lambda *_: accepted}}
    for entry in a_bench(changes=changes)[0]["summary"]["methods"]:
        assert abs(entry["prediction_error"]) < 0.02, entry["name"]


def test_a_prediction_has_not_seen_the_run():
    """Rounds that secretly take longer than the steps that were timed make it wrong."""
    slower = {"eagle3_tree": {"overhead_s": 0.03}}
    tree = a_bench(changes=slower)[0]["summary"]["methods"][2]
    assert tree["prediction_error"] > 0.2


def test_rows_and_depths_of_rounds():
    rounds = [
        Round((1,) * 6, 2, (1, 1, 1), 0, 0, 0, PARENTS, (0, 2)),
        Round((1, 2), 0, (1,), 0, 0, 0),
        Round((1, 2), 0, (1,), 0, 0, 0),
        Round((), 0, (1,), 0, 0, 0),
    ]
    shapes = RoundShapes.of([Generation([1], [1] * 7, "", "length", rounds)])
    assert shapes.rows == {7: 1, 3: 2, 1: 1} and shapes.depths == {3: 1, 2: 2, 0: 1}
    assert shapes.rows_to_time(5) == [1, 3, 7] and RoundShapes.of([]).rows_to_time(5) == [1, 6]


def test_expected_tokens_follow_from_acceptance_by_depth():
    """Positions weighted by how often they were drafted: what a record's acceptance length is, trees included."""
    document, _ = a_bench()
    for run in document["runs"][1:]:
        figures, depth = run["figures"], run["max_draft_len"]
        reached = [sum(figures["accepted_histogram"][k:]) for k in range(1, depth + 1)]
        expected = 1 + sum(reached) / figures["rounds"] - figures["cut_tokens"] / figures["rounds"]
        assert figures["acceptance_length"] == pytest.approx(expected)


# ---- choosing, opening, writing -------------------------------------------------------------------------------------


def test_both_profiles_run_the_same_code_with_their_own_device_and_number_format():
    for name, form, device in (("cpu", "float32", "cpu"), ("h200", "bfloat16", "cuda")):
        document, opened = a_bench(profile=name)
        assert document["profile"] == name
        for _, config, on in opened.values():
            assert (on.dtype, on.device) == (form, device)
            assert config is None or config.max_draft_len in (5, 3)


def test_every_method_runs_on_both_devices():
    from tutorial_lib.backends.torch_drafters import refuse_unsupported

    for method in methods.ALL.values():
        for device in ("cpu", "cuda"):
            refuse_unsupported(method.make(5, "embedded:draft"), device)


def test_a_gpu_runs_the_wide_trees_too_and_a_cpu_when_asked():
    """Fixed trees are beginnings of the order on the heads' card, whose parents come first."""
    names = {device: methods._chosen(replace(PROFILES["cpu"], device=device), None) for device in ("cpu", "cuda")}
    assert names["cpu"] == list(METHODS) and names["cuda"] == [*METHODS, *methods.WIDE_TREES]
    assert methods._chosen(PROFILES["cpu"], ["eagle3_fixed15"]) == ["eagle3_fixed15"]
    for nodes in (15, 31, 63):
        config = methods.WIDE_TREES[f"eagle3_fixed{nodes}"].make(5, "")
        assert len(config.eagle_choices) == nodes and config.max_draft_len == max(map(len, config.eagle_choices)) > 3
        assert json.dumps(options_of(config))


def test_options_are_told_as_they_differ_from_the_defaults():
    assert options_of(None) == {}
    assert options_of(METHODS["layer_skip"].make(5, "")) == {
        "class": "LayerSkipDecodingConfig", "max_draft_len": 5, "skip_layers": [3, 5],
    }  # fmt: skip
    tree = options_of(METHODS["eagle3_tree"].make(4, ""))
    assert tree["max_total_draft_tokens"] == 10 and "embedded" not in json.dumps(tree)
    assert options_of(LookaheadDecodingConfig(max_window_size=7))["max_window_size"] == 7


@pytest.mark.parametrize(
    ("profile", "names", "words"),
    [
        ("replay", None, "profile replay does not run"),
        ("tensorrt_llm", None, "profile tensorrt_llm does not run"),
        ("cpu", ["hydra"], "'hydra' is unknown"),
        ("cpu", ["plain"], "at least one drafting method"),
        ("cpu", ["ngram", "ngram"], "each once"),
    ],
)
def test_choices_are_checked_before_anything_is_loaded(profile, names, words):
    with pytest.raises(OptionError, match=words):
        bench_methods(profile, methods=names, make_llm=lambda *_: pytest.fail("loaded"))


def test_files(tmp_path):
    document, _ = a_bench(("ngram",))
    methods.write(document, str(tmp_path / "m.json"))
    assert read_records(tmp_path / "m.json") == [json.loads(json.dumps(document))]
    methods.write(document, str(tmp_path / "m.jsonl"))
    kinds = [line["kind"] for line in read_records(tmp_path / "m.jsonl")]
    assert kinds == ["run", "run", "summary"]
