"""The tuner on engines whose best setting is known: it finds it, says by how much, keeps to its budget, and its file is
taken for its own target only."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, replace

import pytest
from test_measure import Clock, FakeLLM

from tutorial_lib import cli
from tutorial_lib.bench import tune as tuner
from tutorial_lib.bench.cost_model import Components, predict_speedup
from tutorial_lib.bench.prompts import Prompt
from tutorial_lib.bench.redraft import redraft, unknown_rate
from tutorial_lib.bench.settings import read_settings, write_settings
from tutorial_lib.config import PROFILES
from tutorial_lib.drafter_options import DrafterOptions
from tutorial_lib.errors import ModelError, OptionError
from tutorial_lib.results import Generation, Round
from tutorial_lib.show.gpu_records import gpu_experiment
from tutorial_lib.show.recorded import Recorder

PROMPTS = [Prompt(f"{kind}{i}", kind, (f"{kind} {'word ' * (5 + i)}",)) for kind in ("easy", "hard") for i in range(3)]
PROFILE = replace(PROFILES["cpu"], max_tokens=120)
CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 8, "num_hidden_layers": 2}


# ---- one run answers for every K -------------------------------------------------------------------------------------


def rounds_at(right: list[bool], k: int) -> list[Round]:
    """The rounds of a drafter that is right about token i where `right[i]`."""
    rounds, at = [], 0
    while at < len(right):
        accepted = 0
        while accepted < k and at + accepted < len(right) and right[at + accepted]:
            accepted += 1
        emitted = min(accepted + 1, len(right) - at)
        rounds.append(Round((0,) * k, accepted, (0,) * emitted, 0.01, 0.04, 0.05 * (len(rounds) + 1)))
        at += emitted
    return rounds


def generation(rounds: list[Round]) -> Generation:
    return Generation([1], [0] * (1 + sum(len(r.emitted) for r in rounds)), "", "length", rounds)


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.7, 0.9, 1.0])
def test_the_replay_is_the_run_at_the_smaller_k(chance):
    """Only tokens that no draft reached are guessed; with none of them it is exact, with few it is close."""
    rng = random.Random(7)
    right = [rng.random() < chance for _ in range(4000)]
    ran = generation(rounds_at(right, 8))
    rate = unknown_rate([ran], 8)
    for k in range(1, 9):
        replayed = redraft(ran, k, asked=8, is_lookup=False, unknown_right=rate)
        truth = rounds_at(right, k)
        assert sum(o.emitted for o in replayed) == len(right)
        if chance <= 0.3 or k == 8:
            assert [o.emitted for o in replayed] == [len(r.emitted) for r in truth]
        assert len(replayed) == pytest.approx(len(truth), rel=0.03)
    with pytest.raises(OptionError, match="largest K"):
        redraft(ran, 9, asked=8, is_lookup=False, unknown_right=rate)


def test_a_lookup_drafts_no_longer_than_it_matched():
    """One round of a match of 5 (all right), one without a match, one of 3 that fails at its second token."""
    rounds = [
        Round((0,) * 5, 5, (0,) * 6, 0, 0, 0.1), Round((), 0, (0,), 0, 0, 0.2), Round((0,) * 3, 1, (0, 0), 0, 0, 0.3),
    ]  # fmt: skip
    found = redraft(generation(rounds), 2, asked=8, is_lookup=True, unknown_right=0.9)
    assert [(o.depth, o.emitted) for o in found] == [(2, 3), (2, 3), (0, 1), (2, 2)]


# ---- a drafter whose best K is known ---------------------------------------------------------------------------------


@dataclass
class Seeded(FakeLLM):
    """Right about a token with `chance` (`hard` prompts: `hard_chance`), decided by the token's place alone; a draft
    token costs `step_s`, a row of the target beyond the first `row_s`."""

    chance: float = 0.8
    hard_chance: float = 0.8
    step_s: float = 0.004
    row_s: float = 0.001

    def _answer(self, ids, params, start):
        chance = self.hard_chance if bytes(ids).startswith(b"hard") else self.chance
        rng = random.Random(sum(ids))
        right = [rng.random() < chance for _ in range(params.max_tokens)]
        self.clock.work(0.010)
        ttft, rounds, done = self.clock() - start, [], 1
        while done < params.max_tokens:
            k, accepted, began = self.max_draft_len, 0, self.clock()
            while accepted < k and done + accepted < params.max_tokens - 1 and right[done + accepted]:
                accepted += 1
            self.clock.work(k * self.step_s)
            drafted = self.clock()
            self.clock.work(0.040 + k * self.row_s)
            times = (drafted - began, self.clock() - drafted, self.clock() - start)
            rounds.append(Round((0,) * k, accepted, (0,) * (accepted + 1), *times))
            done += accepted + 1
        return Generation(list(ids), [0] * done, "", "length", rounds, ttft, self.clock() - start)

    def time_steps(self, rows, context=128):
        self.clock.work(sum(0.040 + (n - 1) * self.row_s for n in rows))
        return {n: 0.040 + (n - 1) * self.row_s for n in rows}

    def time_draft(self, max_draft_len, context=128):
        self.clock.work(self.step_s * max_draft_len)
        return self.step_s * max_draft_len


def makers(clock, made, **kinds):
    """kinds: options of `Seeded` by the name of a drafter."""

    def make(name, config):
        if name in kinds and kinds[name] is None:
            raise ModelError(f"{name} is not here", "its weights", "train them")
        options = kinds.get(name, {})
        k = 0 if config is None else config.max_draft_len
        made.append(Seeded(clock, name, k, **options))
        return made[-1]

    return make


def a_tune(
    drafters=("draft", "ngram"),
    clock=None,
    made=None,
    said=None,
    budget_s=None,
    repeats=3,
    is_exhaustive=False,
    **kinds,
):
    clock, made = clock or Clock(), [] if made is None else made
    kinds = {"draft": {"chance": 0.9}, "ngram": {"chance": 0.3, "hard_chance": 0.3, "step_s": 0.0}} | kinds
    say = (lambda line: None) if said is None else said.append
    return tuner.tune(
        PROFILE, drafters, PROMPTS, budget_s=budget_s, repeats=repeats, say=say, make_llm=makers(clock, made, **kinds),
        clock=clock, is_exhaustive=is_exhaustive,
    )  # fmt: skip


def exhaustive(name: str, **options) -> dict[int, float]:
    """Output tokens/s of every K, run."""
    found = {}
    for k in range(1, 9):
        llm = Seeded(Clock(), name, k, **options)
        answers = [llm.generate(list(p.turns[0].encode()), tuner.SamplingParams(max_tokens=120)) for p in PROMPTS]
        found[k] = sum(len(g.token_ids) for g in answers) / sum(g.latency_s for g in answers)
    return found


@pytest.mark.parametrize("chance", [0.35, 0.6, 0.85, 0.97])
def test_it_finds_what_exhaustive_runs_find(chance):
    options = {"chance": chance, "hard_chance": chance}
    truth = exhaustive("draft", **options)
    document = a_tune(("draft",), draft=options)
    choice = document["choice"]
    assert truth[choice["options"]["max_draft_len"]] >= 0.98 * max(truth.values())
    assert len(document["predictions"]) == 9 and len(document["verified"]) == 3 and document["is_verified"]
    assert all(abs(row["prediction_error"]) < 0.04 for row in document["verified"])
    assert json.dumps(document, allow_nan=False)


@pytest.mark.parametrize("chance", [0.35, 0.85])
def test_an_exhaustive_search_runs_every_setting_and_says_what_the_usual_few_miss(chance):
    said = []
    document = a_tune(("draft", "ngram"), said=said, is_exhaustive=True, draft={"chance": chance})
    found, rows = document["exhaustive"], document["verified"]
    assert len(rows) == found["settings"] == 16 and rows[0]["label"] == found["best"]
    usual = [p["label"] for p in document["predictions"] if p["name"] != "plain"][:3]
    assert found["picked"] == max((r for r in rows if r["label"] in usual), key=lambda r: r["speedup"])["label"]
    assert found["short_by"] == pytest.approx(1 - found["picked_speedup"] / found["best_speedup"])
    assert 0 <= found["short_by"] < 0.05 and any("of all 16 settings run" in line for line in said)
    assert "exhaustive" not in a_tune(("draft",), draft={"chance": chance})
    with pytest.raises(OptionError, match="exhaustive search within a budget"):
        a_tune(("draft",), is_exhaustive=True, budget_s=60.0)


def test_the_choice_has_a_margin_and_names_where_it_does_not_pay():
    said, made = [], []
    document = a_tune(("draft",), said=said, made=made, draft={"chance": 0.95, "hard_chance": 0.05})
    choice, rows = document["choice"], document["verified"]
    assert choice["name"] == "draft" and choice["speedup"] == max(row["speedup"] for row in rows)
    assert document["margin"] == pytest.approx(choice["speedup"] / rows[1]["speedup"] - 1)
    assert list(document["does_not_pay"]) == ["hard"] and document["does_not_pay"]["hard"] < 1 < choice["speedup"]
    assert any(line.startswith("does not pay in: hard 0.") for line in said)
    assert any(line.startswith(f"choice: {choice['label']}, ") and "ahead of the next" in line for line in said)
    assert all(llm.is_closed for llm in made)
    assert {run["method"] for run in document["runs"]} == {"plain", "draft_target"}


def test_where_nothing_pays_plain_decoding_is_the_choice():
    document = a_tune(
        draft={"chance": 0.1, "hard_chance": 0.1, "step_s": 0.02}, ngram={"chance": 0.0, "hard_chance": 0.0}
    )
    assert document["choice"]["name"] == "plain" and document["choice"]["options"] == {}
    assert document["margin"] > 0 and document["is_clear"] and document["does_not_pay"] == {}


def test_drafters_that_cannot_run_are_left_out_with_the_reason():
    document = a_tune(ngram=None)
    assert document["left_out"][0]["name"] == "ngram" and "not here" in document["left_out"][0]["why"]
    assert {p["name"] for p in document["predictions"]} == {"plain", "draft"}
    with pytest.raises(OptionError, match="no drafter runs here; draft: draft is not here"):
        a_tune(("draft",), draft=None)


def test_a_budget_leaves_out_verification_first_and_drafters_next():
    once = 6 * (0.010 + 119 * 0.040)  # seconds of a pass of plain decoding; a drafter is taken to need no longer
    assert a_tune(budget_s=16 * once)["notes"] == [] and a_tune()["seconds"] < 16 * once
    less = a_tune(budget_s=9.1 * once)
    assert len(less["verified"]) == 1 and less["notes"] == [f"1 setting verified within {9.1 * once:g} s"]
    least = a_tune(budget_s=2.1 * once)
    assert not least["is_verified"] and least["verified"] == [] and "ngram" in least["notes"][0]
    assert least["choice"]["label"] == least["predictions"][0]["label"] and not least["is_clear"]
    with pytest.raises(OptionError, match="the budget is 1 s; needed: about"):
        a_tune(budget_s=1)


def test_ctrl_c_closes_every_model():
    made, clock = [], Clock()
    work = clock.work

    def interrupted(seconds):
        if clock.now > 60:
            raise KeyboardInterrupt
        work(seconds)

    clock.work = interrupted
    with pytest.raises(KeyboardInterrupt):
        a_tune(clock=clock, made=made)
    assert len(made) == 3 and all(llm.is_closed for llm in made)


@pytest.mark.parametrize(
    ("drafters", "k", "words"),
    [((), 8, "drafters are none"), (("ngram", "ngram"), 8, "each once"), (("ngram",), 0, "max_draft_len is 0")],
)
def test_mistakes_are_said_before_a_model_is_loaded(drafters, k, words):
    with pytest.raises(OptionError, match=words):
        tuner.settings_asked(drafters, k, PROFILE)
    with pytest.raises(OptionError, match="name it in --drafters"):
        tuner.settings_asked(["draft"], 8, replace(PROFILE, drafter=""))


def test_names_are_those_of_generate():
    found = {
        s.name: s for s in tuner.settings_asked(["draft", "lookahead", "eagle3", "eagle3_tree", "suffix"], 6, PROFILE)
    }
    assert found["draft"].options.drafter == "embedded:draft" and found["draft"].method == "draft_target"
    assert found["eagle3"].max_draft_len == 6 and not found["eagle3"].is_tree
    assert found["eagle3_tree"].is_tree and found["eagle3_tree"].method == "eagle3_tree"
    assert found["lookahead"].is_tree and found["suffix"].method == "suffix"


def chosen_of_best(plain, runs, parts_of, largest) -> float:
    """What the run at the largest K and the timed parts choose, as a share of the best that was measured."""
    predicted, measured = {}, {}
    for run in runs:
        k, at_most = run["max_draft_len"], largest[run["method"]]
        rounds = {c: f["accepted_histogram"] for c, f in at_most["by_category"].items()}
        lengths = {c: 1 + sum(n * min(i, k) for i, n in enumerate(found)) / sum(found) for c, found in rounds.items()}
        key = (run["method"], k)
        predicted[key] = predict_speedup(plain, replace(parts_of(run), acceptance_length=lengths))["speedup"]
        measured[key] = run["figures"]["output_tok_s"] / plain["figures"]["output_tok_s"]
    return measured[max(predicted, key=predicted.get)] / max(measured.values())


def test_one_run_at_the_largest_k_finds_the_best_of_the_recorded_settings():
    """Exhaustive runs that were recorded on quiet machines: two methods at four K on a GPU, four K on a CPU."""
    records = gpu_experiment("embedded")
    times = next(r for r in records if r["kind"] == "summary")["summary"]["calibration"]
    runs = [r for r in records if r["kind"] == "run" and r["experiment"] == "embedded" and r["dtype"] == "bfloat16"]
    largest = {r["method"]: r for r in sorted(runs, key=lambda r: r["max_draft_len"])}

    def on_gpu(run):
        own, k = times[f"{run['method']} K={run['max_draft_len']}"], run["max_draft_len"]
        return Components(k, times["plain"]["step_s"], own["verify_step_s"], own["draft_s"], own["draft_step_s"], {})

    assert len(runs) == 9 and chosen_of_best(runs[0], runs[1:], on_gpu, largest) >= 0.95
    recorded = Recorder("02_speculative_runs", is_replay=True)
    sweep, parts = recorded("sweep", list), recorded("parts", dict)

    def on_cpu(run):
        k = run["max_draft_len"]
        return Components(
            k, parts["verify_s"][1], parts["verify_s"][k + 1], parts["draft_s"][k], parts["draft_s"][1], {}
        )

    assert len(sweep) == 5 and chosen_of_best(sweep[0], sweep[1:], on_cpu, {"draft_target": sweep[-1]}) >= 0.95


# ---- the file --------------------------------------------------------------------------------------------------------


def test_a_settings_file_is_for_one_target(tmp_path):
    file = tmp_path / "best.json"
    options = DrafterOptions("eagle3", 5, tree="dynamic:3,10")
    write_settings(file, options, "/models/mine", CONFIG, {"speedup": 1.5})
    found = read_settings(file, "/elsewhere/mine", CONFIG)
    assert found.options == options and found.found["speedup"] == 1.5
    assert "/models" not in file.read_text()
    for target, config, words in (
        ("/models/other", CONFIG, "tuned for target mine; .*one for other"),
        ("/models/mine", CONFIG | {"num_hidden_layers": 3}, "shape differs"),
    ):
        with pytest.raises(OptionError, match=words):
            read_settings(file, target, config)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"kind": "tune"}', '{"kind": "settings", "format": 1, "options": {"x": 1}}']
)
def test_a_file_that_holds_no_settings_is_refused(tmp_path, text):
    file = tmp_path / "best.json"
    file.write_text(text)
    with pytest.raises(OptionError, match="workbook tune"):
        read_settings(file, "mine", CONFIG)
    with pytest.raises(OptionError, match="cannot be read"):
        read_settings(tmp_path / "none.json", "mine", CONFIG)


@pytest.mark.parametrize(
    "options",
    [{"drafter": 5}, {"drafter": []}, {"drafter": None}, {"max_draft_len": "4"}, {"max_draft_len": True}, {"tree": {}}],
    ids=str,
)
def test_options_of_a_wrong_kind_in_a_settings_file_are_refused(tmp_path, options):
    file = tmp_path / "best.json"
    write_settings(file, DrafterOptions("ngram", 3), "mine", CONFIG, {})
    document = json.loads(file.read_text())
    file.write_text(json.dumps(document | {"options": document["options"] | options}))
    ((name, value),) = options.items()
    with pytest.raises(OptionError, match=re.escape(f"has {name} {value!r}; needed: ")):
        read_settings(file, "mine", CONFIG)


def run(*argv: str) -> int:
    return cli._run(list(argv))


def test_the_command_writes_what_generate_takes(tmp_path, monkeypatch, capsys):
    """On fakes the tuner chooses; the file then steers a real, tiny target, and no other one."""
    made, clock = [], Clock()
    make = makers(clock, made, ngram={"chance": 0.9, "hard_chance": 0.9, "step_s": 0.0})
    monkeypatch.setattr(tuner, "_maker", lambda profile: make)
    file, out, document = tmp_path / "prompts.jsonl", tmp_path / "best.json", tmp_path / "tune.json"
    file.write_text(
        "".join(
            json.dumps({"question_id": p.question_id, "category": p.category, "turns": p.turns}) + "\n" for p in PROMPTS
        )
    )
    target = "dummy:tiny-llama"
    options = ("--prompts", str(file), "--max-tokens", "60", "--max-draft-len", "4", "--repeats", "1")
    assert (
        run("tune", "--target", target, "--drafters", "ngram", *options, "--out", str(out), "--json", str(document))
        == 0
    )
    said = capsys.readouterr().out
    assert "choice: ngram K=4" in said and f"settings: {out}" in said
    written = json.loads(out.read_text())
    assert written["options"] == {"drafter": "ngram", "max_draft_len": 4} and written["target"] == target
    assert json.loads(document.read_text())["choice"]["label"] == written["label"] == "ngram K=4"
    answer = tmp_path / "answer.json"
    asked = ("generate", "--prompt", "abcabcabc", "--max-tokens", "8", "--device", "cpu")
    assert run(*asked, "--target", target, "--settings", str(out), "--json", str(answer)) == 0
    assert json.loads(answer.read_text())["engine"]["max_draft_len"] == 4
    capsys.readouterr()
    for argv, words in (
        ((*asked, "--target", "dummy:tiny-qwen2", "--settings", str(out)), "tuned for target dummy:tiny-llama"),
        ((*asked, "--target", target, "--settings", str(out), "--max-draft-len", "2"), "leave one out"),
        (("bench", "--settings", str(out)), "needed: one for embedded:target"),
        (("bench", "--settings", str(out), "--methods", "plain,ngram"), "--methods has no effect with --settings"),
        (("bench", "--settings", str(out), "--experiment", "methods"), "--settings has no effect with --experiment"),
    ):
        assert run(*argv) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--drafters", "ngram,ngram"), "each once"),
        (("--drafters", "draft", "--target", "dummy:tiny-llama"), "no draft model is known"),
        (("--out", "/nowhere/best.json"), "--out /nowhere/best.json: there is no folder"),
        (("--out", "-"), "use --json - for stdout"),
        (("--budget-s", "0"), "seconds above 0"),
        (("--max-tokens", "0"), "--max-tokens is 0"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(argv, words, capsys):
    assert run("tune", *argv) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_bench_takes_a_setting(monkeypatch):
    opened = []
    monkeypatch.setattr(tuner, "_maker", lambda profile: lambda name, config: opened.append((name, config)) or name)
    monkeypatch.setattr(tuner, "_make_llm", lambda name, profile: f"own {name}")
    found = tuner.bench_options(DrafterOptions("suffix", 3), PROFILE)
    assert found["methods"] == ("plain", "suffix")
    assert found["make_llm"]("suffix", PROFILE) == "suffix" and found["make_llm"]("plain", PROFILE) == "own plain"
    assert opened[0][1].max_draft_len == 3
    with pytest.raises(OptionError, match="plain decoding is fastest"):
        tuner.bench_options(DrafterOptions(), PROFILE)
