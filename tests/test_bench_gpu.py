"""GPU experiments on stand-ins: what is kept, what a failure or a short budget costs, and every sum they make."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from test_measure import Clock, FakeLLM, Tokenizer

from tutorial_lib import config
from tutorial_lib.bench import gpu, gpu_forced, gpu_meter, gpu_run, measure, quality
from tutorial_lib.bench.gpu_meter import KernelTime, Metered, Nvml, by_kind, kind_of
from tutorial_lib.bench.gpu_parts import model_card
from tutorial_lib.bench.gpu_run import Run, Tools, finite
from tutorial_lib.config import SamplingParams
from tutorial_lib.errors import OptionError
from tutorial_lib.models import resolve
from tutorial_lib.results import Generation, read_records

ROOT = Path(__file__).resolve().parents[1]
SMALL = gpu.Experiment(
    "small", "dummy:tiny-llama", "dummy:tiny-llama?layers=1", max_draft_len=4, draft_lens=(2,),
    acceptance_lengths=(3.0, 2.0), rows=(1, 4), context=64, prompt_tokens=32, output_tokens=30,
)  # fmt: skip
SUMMARY_KEYS = {
    "plain_tok_s", "step_ms", "draft_step_ms", "round_ms", "speculative_tok_s", "read_ceiling_tb_s", "pct_of_ceiling",
    "load_s", "build_s", "floors",
}  # fmt: skip


# ---- stand-ins ------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def known_origin(monkeypatch):
    """No look at git and the hardware for each of the many runs."""
    origin = {"time_utc": "2026-01-01T00:00:00+00:00", "hardware": {"gpus": [{"name": "GPU"}]}, "seed": None}
    for module in (measure, gpu_run):
        monkeypatch.setattr(module, "provenance", lambda command, seed: {**origin, "command": command})


@dataclass
class Meter:
    """NVML that counts 100 J more at every look."""

    problem: str | None = None
    joules: float = 0.0

    def energy_j(self) -> float:
        self.joules += 100
        return self.joules

    def now(self) -> dict:
        return {"sm_clock_mhz": 1980, "power_w": 650.0}

    def limits(self) -> dict:
        return {"power_cap_w": 700.0}


def some_logits(ids) -> torch.Tensor:
    return torch.arange(128.0).repeat(len(ids), 1) / 128


@dataclass
class Bench:
    """`Tools` whose models are `FakeLLM`s; `fails` names calls that raise."""

    clock: Clock = field(default_factory=Clock)
    fails: tuple[str, ...] = ()
    opened: list = field(default_factory=list)
    llms: list[FakeLLM] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    step_s: float = 0.040

    def tools(self) -> Tools:
        return Tools(
            build=self.build,
            llm=self.llm,
            resolve=resolve,
            read_ceiling=lambda: self.do("read", {"tb_s": 4.0, "bytes": 1, "passes": 1, "median_tb_s": 3.9}),
            nvml=Meter,
            profile_rounds=self.profile_rounds,
            first_token_s=lambda *_: self.do("first token", 6.5),
            gpu_model=lambda path: path,
            reference=lambda folder: SimpleNamespace(text_logits=some_logits),
            clock=self.clock,
        )

    def do(self, name, value):
        if name in self.fails:
            raise RuntimeError(f"{name} broke\nfor a reason")
        return value

    def build(self, checkpoint, folder, **options):
        self.clock.work(5)
        self.do(f"build {checkpoint}", None)
        folder.mkdir()
        made = {"steps": {"pack": 1.0}, "timings": {"qkv": {"1": {"us": float("nan")}}}}
        manifest = {"build": made, "limits": {"max_seq_len": options["max_seq_len"]}, "tactics": {}}
        (folder / "engine.json").write_text(json.dumps(manifest))
        return folder

    def llm(self, model, *, speculative_config=None, simulated_acceptance=None, backend="torch", **options):
        k = speculative_config.max_draft_len if speculative_config else 0
        self.opened.append((model, k, simulated_acceptance and simulated_acceptance.acceptance_length, backend))
        self.do(f"load {backend} K={k}", None)
        self.clock.work(1)
        assert all(llm.is_closed for llm in self.llms) or not simulated_acceptance, "two large models at once"
        accepted = round(simulated_acceptance.acceptance_length) - 1 if simulated_acceptance else min(k, 2)
        made = FakeLLM(
            self.clock, "draft_target" if k else "plain", k, plain_step_s=self.step_s, overhead_s=0.0,
            accepts=lambda *_: accepted, is_simulated=simulated_acceptance is not None,
        )  # fmt: skip
        self.llms.append(made)
        return made

    def profile_rounds(self, llm, ids, params, rounds):
        self.do("profile", None)
        return [KernelTime("_linear_kernel", 0.0, 8.0), KernelTime("_stamp_kernel", 9.0, 10.0)]

    def run(self, experiment, **options):
        return gpu.run_experiment(experiment, tools=self.tools(), say=self.said.append, **options)


def status_of(document) -> dict[str, str]:
    return {part["part"]: part["status"] for part in document["parts"]}


def test_a_kernel_that_is_asked_for_is_part_of_the_name_and_goes_to_every_build_and_load():
    bench, asked = Bench(), []
    build, llm = bench.build, bench.llm
    bench.build = lambda *args, kernel, **options: asked.append(kernel) or build(*args, **options)

    def load(model, *, backend="torch", **options):
        asked.append(options.get("kernel") if backend == "torch" else "stream")
        assert ("kernel" in options) is (backend == "torch")
        return llm(model, backend=backend, **options)

    bench.llm = load
    document = bench.run("embedded", kernel="stream")
    assert document["experiment"] == document["runs"][0]["experiment"] == "embedded, kernel stream"
    assert set(asked) == {"stream"} and len(asked) > 4


# ---- the card -------------------------------------------------------------------------------------------------------


def test_card_of_the_70b_shape_matches_the_published_bytes():
    card = model_card(resolve("dummy:llama-3.3-70b"), "fp8")
    assert card["parameters"] == 70_553_706_496
    assert round(card["layer_bytes_per_step"] / 1e9, 2) == 68.45 and round(card["head_bytes_per_step"] / 1e9, 2) == 2.10
    assert card["kv_bytes_per_token"] == 2 * 80 * 8 * 128 * 2
    bf16 = model_card(resolve("dummy:llama-3.3-70b"), "bfloat16")
    assert bf16["layer_bytes_per_step"] == 2 * card["layer_bytes_per_step"]


def test_a_tied_head_and_a_shortlist_head_are_read_as_they_are():
    tied = model_card(resolve("dummy:llama-3.2-1b"), "fp8")
    assert tied["head_bytes_per_step"] == 128256 * 2048 * 2
    checkpoint = resolve("dummy:tiny-llama")
    short = SimpleNamespace(name="d", config=checkpoint.config, draft_vocab=lambda: torch.arange(10))
    assert model_card(short, "fp8")["head_bytes_per_step"] == 10 * 64 * 2


# ---- parts, budget, files -------------------------------------------------------------------------------------------


def a_run(tools=None, **options) -> Run:
    return Run(SMALL, tools or Bench().tools(), lambda line: None, **options)


def test_a_part_that_fails_is_noted_and_written_and_the_next_runs(tmp_path):
    file = tmp_path / "out.json"
    run = a_run(json_file=str(file))

    def fail():
        raise ValueError("no\nluck")

    assert run.part("one", 1, fail) is None
    (part,) = read_records(file)[0]["parts"]
    assert (part["status"], part["why"]) == ("failed", "ValueError: no luck")
    assert run.part("two", 1, lambda: 7) == 7
    assert run.part("three", 1, lambda: 8, None) is None
    assert [p["status"] for p in read_records(file)[0]["parts"]] == ["failed", "done", "skipped"]


def test_an_interrupt_is_no_failed_part():
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        a_run().part("one", 1, interrupt)


def test_a_part_that_would_end_after_the_budget_is_left_out_and_says_so():
    bench = Bench()
    run = a_run(bench.tools(), budget_s=100)
    bench.clock.work(90)
    assert run.part("long", 11, lambda: 1) is None and run.part("short", 9, lambda: 1) == 1
    assert run.parts[0]["why"] == "it takes about 11 s and 10 s of 100 s are left"


def test_records_hold_nothing_that_json_does_not():
    assert finite({1: (1.0, float("nan")), "a": {"b": float("inf"), "c": "text"}}) == {
        "1": [1.0, None], "a": {"b": None, "c": "text"},
    }  # fmt: skip


def test_json_lines_hold_every_record_once_and_the_summary_last(tmp_path):
    file = tmp_path / "small.jsonl"
    file.write_text('{"kind": "run", "old": true}\n')
    document = Bench().run(SMALL, json_file=str(file))
    lines = read_records(file)
    assert not any("old" in line for line in lines)
    kinds = [line["kind"] for line in lines]
    assert kinds[0] == "card" and kinds[-1] == "summary" and kinds.count("summary") == 1
    assert kinds.count("run") == len(document["runs"]) == 4
    assert lines[-1]["summary"] == document["summary"] and lines[-1]["parts"] == document["parts"]


def test_a_file_is_whole_after_every_part(tmp_path):
    file = tmp_path / "small.json"
    bench, seen = Bench(), []
    whole = bench.profile_rounds

    def look(*arguments):
        seen.append(read_records(file)[0])
        return whole(*arguments)

    bench.profile_rounds = look
    bench.run(SMALL, json_file=str(file))
    assert len(seen[0]["runs"]) == 1 and seen[0]["summary"]["plain_tok_s"] > 0
    assert len(read_records(file)[0]["runs"]) == 4


# ---- random weights -------------------------------------------------------------------------------------------------


def test_a_forced_experiment_from_card_to_summary():
    bench = Bench()
    document = bench.run(SMALL, command="workbook bench")
    assert set(status_of(document).values()) == {"done"}
    summary = document["summary"]
    assert SUMMARY_KEYS <= summary.keys() and summary["is_simulated"] is True
    assert list(summary["speculative_tok_s"]) == ["3.0", "2.0"]
    assert list(summary["step_ms"]) == ["1", "3", "4", "5"]
    assert summary["build_s"] == 5 and summary["load_s"] > 1 and summary["start_s"] == 6.5
    kinds = [r["kind"] for r in document["records"]]
    assert kinds == ["card", "build", "build", "steps", "breakdown", "steps", "breakdown"]
    assert [(k, length) for _, k, length, _ in bench.opened][:3] == [(0, None), (4, 3.0), (4, 2.0)]
    assert bench.opened[3][1] == 2 and all(llm.is_closed for llm in bench.llms)


def test_figures_of_the_summary_follow_from_the_engine():
    document = Bench().run(SMALL)
    summary, card = document["summary"], document["records"][0]
    assert summary["step_ms"]["1"] == pytest.approx(40) and summary["step_ratio"]["5"] == pytest.approx(50 / 40)
    assert summary["draft_step_ms"] == pytest.approx(10 / 4)
    assert summary["round_ms"] == pytest.approx(60)
    assert summary["overhead_ms"] == pytest.approx(60 - 10 - 50)
    read = card["target"]["bytes_per_step"]
    assert summary["tb_s"] == pytest.approx(read / 0.040 / 1e12)
    assert summary["pct_of_ceiling"] == pytest.approx(100 * read / 0.040 / 4e12)
    assert summary["floors"]["step_ms"] == pytest.approx(read / 4e12 * 1e3)
    assert summary["floors"]["round_ms"] == pytest.approx(
        summary["floors"]["step_ms"] + 4 * summary["floors"]["draft_step_ms"]
    )
    runs = {r["experiment"]: r for r in document["runs"]}
    for length in ("3", "2"):
        run = runs[f"small, acceptance length {length}"]
        assert run["figures"]["acceptance_length"] == pytest.approx(float(length), abs=0.15)
        assert summary["speculative_tok_s"][f"{length}.0"] == run["figures"]["output_tok_s"]
    assert summary["plain_tok_s"] == runs["small"]["figures"]["output_tok_s"]
    assert summary["speedup"]["3.0"] == pytest.approx(summary["speculative_tok_s"]["3.0"] / summary["plain_tok_s"])


def test_runs_of_random_weights_say_so_and_keep_no_text():
    document = Bench().run(SMALL)
    for run in document["runs"]:
        assert run["is_simulated"] is True and run["tokens_sha256"] is None
        assert run["prompt_tokens"] == 32 and run["provenance"]["time_utc"]
    plain, forced = document["runs"][:2]
    assert plain["method"] == "plain" and plain["drafter"] is None and plain["simulated_acceptance"] is None
    assert forced["simulated_acceptance"] == {"acceptance_length": 3.0, "acceptance_probability": None}
    swept = document["runs"][3]
    assert swept["max_draft_len"] == 2 and 0 < swept["simulated_acceptance"]["acceptance_probability"] < 1
    assert swept["experiment"].startswith("small, acceptance probability 0.")


def test_runs_of_one_pair_share_what_a_speed_up_needs():
    from tutorial_lib.show.plots import speedup

    runs = Bench().run(SMALL)["runs"]
    assert speedup(runs[1], runs) == pytest.approx(
        runs[1]["figures"]["output_tok_s"] / runs[0]["figures"]["output_tok_s"]
    )


@pytest.mark.parametrize(
    "fails", ["read", "profile", "first token", "load torch K=4", "build dummy:tiny-llama?layers=1"]
)
def test_what_fails_costs_only_what_needs_it(fails):
    bench = Bench(fails=(fails,))
    document = bench.run(SMALL)
    failed = [part for part in document["parts"] if part["status"] == "failed"]
    assert failed and all("broke for a reason" in part["why"] for part in failed)
    assert document["summary"]["plain_tok_s"] > 0
    if not fails.startswith(("load", "build")):
        assert document["summary"]["speculative_tok_s"].keys() == {"3.0", "2.0"}
    if fails == "read":
        assert document["summary"]["pct_of_ceiling"] is None and document["summary"]["floors"]["step_ms"] is None
    assert all(llm.is_closed for llm in bench.llms)


def test_without_a_target_everything_else_is_skipped():
    document = Bench(fails=("build dummy:tiny-llama",)).run(SMALL)
    assert status_of(document)["plain run"] == "skipped" and document["runs"] == []


def test_a_short_budget_keeps_the_first_parts():
    document = Bench().run(SMALL, budget_s=42)
    status = status_of(document)
    assert status["build of the target, fp8"] == "done" and status["first token of a new process"] == "skipped"
    assert any("of 42 s are left" in part["why"] for part in document["parts"] if part["status"] == "skipped")


def test_only_cheap_runs_are_repeated():
    quick, slow = Bench(), Bench(step_s=0.4)
    assert [r["repeats"] for r in quick.run(SMALL)["runs"]][0] == 3
    assert [r["repeats"] for r in slow.run(SMALL)["runs"]][0] == 1


def test_the_filler_prompt_has_the_length_asked_for():
    tokenizer = Tokenizer()
    assert len(tokenizer(gpu_forced.filler_prompt(tokenizer, 200).turns[0])["input_ids"]) == 200


def test_a_dummy_tokenizer_renders_the_filler_prompt_to_the_length_asked_for():
    from tutorial_lib.bench.prompts import render
    from tutorial_lib.models import load_tokenizer

    tokenizer = load_tokenizer(resolve("dummy:llama-3.2-1b"))
    assert len(render(gpu_forced.filler_prompt(tokenizer, 128), tokenizer)) == 128


def test_every_experiment_fits_its_own_limits():
    for experiment in gpu.EXPERIMENTS.values():
        assert experiment.max_draft_len not in experiment.draft_lens
        if experiment.is_simulated:
            assert experiment.acceptance_lengths[0] == 5.0 and {1, 4, 8, 11, 16} <= set(experiment.rows)
            assert experiment.prompt_tokens + experiment.output_tokens / 2 == experiment.context
            for setting in gpu_forced.settings_of(experiment):
                assert 1 <= setting.acceptance_length <= setting.max_draft_len + 1


# ---- the embedded pair ----------------------------------------------------------------------------------------------

PAIR = replace(
    SMALL, name="pair", target="embedded:target", drafter="embedded:draft", dtype="bfloat16", acceptance_lengths=(),
    output_tokens=12,
)  # fmt: skip


@pytest.fixture
def pair(monkeypatch):
    """A bench whose embedded pair is a pair of dummies, and whose logits are the same everywhere."""
    bench = Bench()
    names = {"embedded:target": "dummy:tiny-llama", "embedded:draft": "dummy:tiny-llama?layers=1"}
    tools = bench.tools()
    tools.resolve = lambda name, **_: resolve(names[name])
    bench.tools = lambda: tools
    monkeypatch.setattr(quality, "text_logits", lambda model, ids: some_logits(ids))
    return bench


def test_the_embedded_pair_beside_transformers(pair):
    document = pair.run(PAIR)
    summary = document["summary"]
    assert set(status_of(document).values()) == {"done"}, document["parts"]
    assert SUMMARY_KEYS <= summary.keys() and summary["is_simulated"] is False
    assert summary["identical_text"] is True and summary["plain_vs_transformers"] > 0
    assert summary["speculative_vs_transformers_assisted"] > 0 and summary["method"].startswith("draft_target K=")
    methods = {(r["method"], r["backend"], r["dtype"], r["max_draft_len"]) for r in document["runs"]}
    assert {method for method, *_ in methods} == {"plain", "draft_target", "ngram"}
    assert not any(r["is_simulated"] for r in document["runs"])
    assert summary["energy_j_per_token"].keys() == {"plain", "draft_target"}
    energies = [r for r in document["records"] if r["kind"] == "energy"]
    assert all(r["energy_j_per_token"] == pytest.approx(100 / r["output_tokens"]) for r in energies)
    assert all(llm.is_closed for llm in pair.llms)


def test_what_a_number_format_costs(pair):
    document = pair.run(replace(PAIR, draft_lens=(), is_about_formats=True))
    assert set(status_of(document).values()) == {"done"}, document["parts"]
    summary = document["summary"]
    assert set(summary["tok_s"]) == {"bfloat16", "fp8"} and summary["tok_s"]["fp8"]["draft_target"] > 0
    formats = summary["number_formats"]
    error = formats["logits"]["fp8"]
    assert error["logit_error_max"] == 0 and error["argmax_agreement"] == 1 and error["perplexity"] > 1
    assert formats["texts_apart"] == {"bfloat16": [], "fp8": []} and formats["fp8_answers_that_differ"] == 0
    assert all(llm.is_closed for llm in pair.llms)


def test_the_embedded_pair_without_its_drafter_still_compares(pair):
    pair.fails = ("build embedded:draft",)
    document = pair.run(PAIR)
    assert status_of(document)["load of draft_target K=4"] == "skipped"
    assert document["summary"]["method"].startswith("ngram") and document["summary"]["plain_tok_s"] > 0


# ---- quality --------------------------------------------------------------------------------------------------------


def test_logit_errors_are_counted_over_the_answer_only():
    ids, start = [0, 1, 2, 3], 2
    truth = torch.zeros(4, 4)
    truth[1, 2] = truth[2, 3] = 4.0
    mine = truth.clone()
    mine[0] += 100  # before the answer: no matter
    mine[3] += 100  # after its last token: predicts nothing
    mine[2, 0] += 0.4
    found = quality.compare_logits([truth], [mine], [(ids, start)])
    assert found["tokens"] == 2 and found["argmax_agreement"] == 1.0
    assert found["logit_error_max"] == pytest.approx(0.4) and found["logit_error_rms"] == pytest.approx(
        (0.4**2 / 8) ** 0.5
    )
    exact = torch.nn.functional.cross_entropy(truth[1:3], torch.tensor([2, 3])).exp()
    assert found["reference_perplexity"] == pytest.approx(float(exact)) and found["perplexity"] > float(exact)


def test_where_texts_part_both_logits_are_looked_up():
    asked = []

    def logits(ids):
        asked.append(list(ids))
        return torch.tensor([[0.0] * 10, [float(i) for i in range(10)]])

    found = quality.first_tokens_apart(
        [{"method": "ngram", "request": "a", "first_difference": 1, "repeat": r} for r in (1, 2)]
        + [{"method": "ngram", "request": "b", "first_difference": 2, "repeat": 1}],
        {"a": [9, 9], "b": [8]},
        {"a": [1, 5, 6], "b": [1, 2]},
        {"ngram": {"a": [1, 7, 6], "b": [1, 2, 3]}},
        {"bfloat16": logits},
    )
    assert found == [
        {"method": "ngram", "request": "a", "first_difference": 1, "tokens": [5, 7], "gap_bfloat16": -2.0},
        {"method": "ngram", "request": "b", "first_difference": 2},
    ]
    assert asked == [[9, 9, 1]]


def test_logits_of_a_text_do_not_depend_on_how_it_is_cut():
    from tutorial_lib.engine.gpu_build import assemble
    from tutorial_lib.engine.gpu_model import Ops
    from tutorial_lib.engine.model import ModelConfig, pack
    from tutorial_lib.shapes import dummy_config, random_tensors

    hf, seed = dummy_config("dummy:tiny-llama?seed=5")
    shape = ModelConfig.from_hf(hf)
    packed = pack(random_tensors(hf, seed, "cpu", torch.bfloat16), shape, is_interleaved=False)
    model = assemble(shape, packed, {}, pages=4, max_positions=192, ops=Ops.make(off=("all",), pdl=False))
    ids = torch.randint(0, 320, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    whole = quality.text_logits(model, ids)
    assert whole.shape == (150, 320)
    torch.testing.assert_close(quality.text_logits(model, ids[:70])[-1], whole[69], atol=0.05, rtol=0.05)


# ---- readings -------------------------------------------------------------------------------------------------------


def test_kernels_that_overlap_count_once_and_everything_adds_up():
    kernels = [
        KernelTime("_linear_kernel", 0.0, 10.0),
        KernelTime("_add_norm_kernel", 4.0, 12.0),  # waited inside for the one before: only 2 are its own
        KernelTime("void at::native::vectorized_elementwise_kernel<4>", 15.0, 16.0),
        *[KernelTime("_stamp_kernel", 20.0 + i, 20.5 + i) for i in range(6)],
    ]
    found = by_kind(reversed(kernels), rounds=99)
    times = {kind["kind"]: kind["us_per_round"] for kind in found["kinds"]}
    assert found["rounds"] == 2 and times == {"linear": 5.0, "add_norm": 1.0, "torch": 0.5, "stamp": 1.5}
    assert found["us_per_round"] == pytest.approx(25.5 / 2)
    assert found["gap_us_per_round"] + sum(times.values()) == pytest.approx(found["us_per_round"])
    assert sum(kind["share"] for kind in found["kinds"]) == pytest.approx(8 * 2 / 25.5)
    assert by_kind([], 3)["us_per_round"] == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_gate_up_kernel", "gate_up"),
        ("_argmax_finish_kernel", "argmax_finish"),
        ("Memcpy DtoH", "memcpy"),
        ("x", "torch"),
    ],
)
def test_kinds_of_kernels(name, kind):
    assert kind_of(name) == kind


def a_library(**functions) -> ModuleType:
    library = ModuleType("pynvml")
    library.NVMLError = type("NVMLError", (Exception,), {})
    library.NVML_CLOCK_SM, library.NVML_CLOCK_MEM, library.NVML_TEMPERATURE_GPU = 1, 2, 0
    library.nvmlInit = lambda: None
    library.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    for name, function in functions.items():
        setattr(library, name, function)
    return library


def test_readings_in_units_and_none_where_the_driver_refuses(monkeypatch):
    library = a_library(
        nvmlDeviceGetTotalEnergyConsumption=lambda gpu: 1_500,
        nvmlDeviceGetClockInfo=lambda gpu, which: {1: 1980, 2: 3201}[which],
        nvmlDeviceGetMaxClockInfo=lambda gpu, which: 1980,
        nvmlDeviceGetPowerUsage=lambda gpu: 650_000,
    )

    def refuse(gpu):
        raise library.NVMLError("not supported")

    library.nvmlDeviceGetEnforcedPowerLimit = refuse
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="1-2"))
    nvml = Nvml()
    assert nvml.problem is None and nvml.energy_j() == 1.5
    assert nvml.now() == {"sm_clock_mhz": 1980, "memory_clock_mhz": 3201, "power_w": 650.0, "temperature_c": None}
    assert nvml.limits()["power_cap_w"] is None and nvml.limits()["max_sm_clock_mhz"] == 1980


def test_without_the_library_every_reading_is_none_and_the_summary_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    nvml = Nvml()
    assert nvml.energy_j() is None and set(nvml.now().values()) == {None}
    bench = Bench()
    tools = bench.tools()
    tools.nvml = lambda: nvml
    document = gpu.run_experiment(SMALL, tools=tools, say=bench.said.append)
    assert document["summary"]["energy_j_per_token"]["plain"] is None
    assert "nvidia-ml-py is not installed" in document["summary"]["notes"][0]


def test_energy_is_that_of_the_timed_calls():
    def llm(seconds):
        made = [Generation([1], [1] * 40, "", "length", latency_s=seconds)]
        return SimpleNamespace(generate=lambda inputs, params: made)

    metered = Metered(llm(2.0), Meter(), output_tokens=40)
    metered.generate([[1]], SamplingParams(max_tokens=3))
    assert metered.energy()["energy_j_per_token"] is None
    for _ in range(3):
        metered.generate([[1]], SamplingParams(max_tokens=40))
    assert metered.energy()["energy_j_per_token"] == pytest.approx(100 / 40)
    assert metered.energy()["mean_power_w"] == pytest.approx(50) and metered.energy()["gpu_after"]["power_w"] == 650
    short = Metered(llm(0.1), Meter(), output_tokens=40)
    short.generate([[1]], SamplingParams(max_tokens=40))
    assert short.energy()["energy_j_per_token"] is None


def test_the_kernel_that_measures_the_ceiling_reads_everything():
    pytest.importorskip("triton")
    code = (
        "import torch; from tutorial_lib.bench.read_kernel import TILE, TILES, read_sums\n"
        "x = torch.randn(3 * TILE * TILES); sums = read_sums(x)\n"
        "torch.testing.assert_close(sums, x.view(3, -1).sum(1), atol=1e-2, rtol=1e-3)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env=interpreted())


def interpreted() -> dict[str, str]:
    import os

    return {**os.environ, "TRITON_INTERPRET": "1"}


def test_a_first_token_that_never_comes_is_an_error(monkeypatch, tmp_path):
    from tutorial_lib.bench import gpu_parts

    with pytest.raises(OptionError, match="workbook generate ended with 2 .*error: .*needed"):
        gpu_parts.first_token_s(tmp_path / "nothing", None, 4)


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_run(monkeypatch):
    calls = []

    def run_experiment(experiment, **options):
        calls.append((experiment, options))
        options["say"]("a line")
        return {"experiment": experiment.name, "profile": "h200", "runs": [1], "records": [], "parts": [],
                "definitions": {}, "summary": {"plain_tok_s": 1.0}}  # fmt: skip

    monkeypatch.setattr(gpu, "run_experiment", run_experiment)
    return calls


def test_the_last_line_of_stdout_is_the_summary(fake_run, capsys):
    assert command("bench", "--profile", "h200", "--experiment", "70b-1b", "--budget-s", "100") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a line" and json.loads(lines[-1])["summary"] == {"plain_tok_s": 1.0}
    ((experiment, options),) = fake_run
    assert experiment is gpu.EXPERIMENTS["70b-1b"] and options["budget_s"] == 100 and options["profile"] == "h200"


def test_with_json_on_stdout_nothing_else_is(fake_run, capsys):
    assert command("bench", "--profile", "h200", "--experiment", "8b-1b", "--json", "-") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["runs"] == [1] and "a line" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--experiment", "70b-1b"], "profile cpu has no experiments"),
        (["--profile", "h200", "--experiment", "405b"], "experiment '405b' is unknown"),
        (["--profile", "h200", "--experiment", "70b-1b", "--methods", "plain"], "--methods has no effect"),
        (["--profile", "h200", "--experiment", "70b-1b", "--budget-s", "0"], "--budget-s is 0"),
        (["--profile", "h200", "--budget-s", "5"], "--budget-s has no effect without"),
        (["--profile", "h200", "--experiment", "70b-1b", "--json", "/nowhere/x.json"], "there is no folder"),
    ],
)
def test_mistakes_on_the_command_line(fake_run, capsys, arguments, message):
    assert command("bench", *arguments) == 2
    assert message in capsys.readouterr().err and fake_run == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_an_experiment_is_refused(capsys):
    assert command("bench", "--profile", "h200", "--experiment", "70b-1b") == 2
    assert "sees no GPU" in capsys.readouterr().err


def command(*arguments: str) -> int:
    from tutorial_lib.cli import _run

    return _run(list(arguments))


def test_the_profiles_name_their_device():
    assert config.PROFILES["h200"].device == "cuda" and config.PROFILES["cpu"].device == "cpu"
    assert gpu_meter.CLOCK_STAMPS == 3
