"""Everything that the workbook plans for TensorRT-LLM, against what is recorded of its releases."""

from __future__ import annotations

import copy
import json
import shlex
from itertools import product

import pytest

from tutorial_lib.backends.trtllm import calls, commands, contract, support
from tutorial_lib.backends.trtllm.plan import check_step, experiments, format_call, format_plan, plan, plan_cli
from tutorial_lib.config import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    LayerSkipDecodingConfig,
    LookaheadDecodingConfig,
    MedusaDecodingConfig,
    NGramDecodingConfig,
    SADecodingConfig,
    SamplingParams,
)
from tutorial_lib.errors import OptionError

VERSIONS = ("0.14.0", "0.15.0", "0.17.0", "0.20.0", "1.0.0", "1.1.0", "1.2.1", "1.3.0rc13", "1.4.0")
METHODS = ("plain", "draft_target", "eagle3", "eagle", "medusa", "lookahead", "ngram", "suffix")

# The table of the facts, by hand: flow -> method -> releases that have it.
ENGINE = ("0.14.0", "0.15.0", "0.17.0", "0.20.0", "1.0.0", "1.1.0", "1.2.1")
API = ("1.0.0", "1.1.0", "1.2.1")
TORCH = ("1.0.0", "1.1.0", "1.2.1", "1.3.0rc13", "1.4.0")
TABLE = {
    "pytorch": {"plain": TORCH, "draft_target": TORCH, "eagle3": TORCH, "ngram": TORCH, "suffix": TORCH[3:]},
    "engine_api": {"plain": API, "eagle": API, "medusa": API, "lookahead": API},
    "engine": {
        "plain": ENGINE,
        "draft_target": ENGINE,
        "medusa": ENGINE,
        "lookahead": ENGINE,
        "eagle": ENGINE[1:],
        "ngram": ENGINE[1:],
    },
}
CASES = [(v, f, m) for v, f, m in product(VERSIONS, TABLE, METHODS) if v in TABLE[f].get(m, ())]
REFUSED = [(v, f, m) for v, f, m in product(VERSIONS, TABLE, METHODS) if v not in TABLE[f].get(m, ())]


def settings(argv):
    """flag -> value, as a reader of the command sees it."""
    return dict(zip(argv, [*argv[1:], None], strict=True))


def step_named(plan, name):
    return next(step for step in plan["steps"] if step["name"] == name)


# ---- every plan -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experiment", experiments())
@pytest.mark.parametrize(("version", "flow", "method"), CASES)
def test_every_step_of_every_plan_is_in_the_record(experiment, version, flow, method):
    made = plan(experiment, version, flow, method=method)
    record = contract.record_for(support.parse_version(version))
    kinds = {"argv": 0, "call": 0}
    for step in made["steps"]:
        for kind in kinds:
            kinds[kind] += kind in step
        check_step(record, step)
        for word in step.get("argv", ()):
            if word.startswith("--"):
                assert step["why"][word.partition("=")[0]], f"{word} has no reason"
    assert kinds["argv"] and (kinds["call"] or flow == "engine")
    assert {s["name"] for s in made["steps"]} >= {"run-plain", f"run-{method}"}
    assert (made["flow"], made["method"], made["tensorrt_llm_version"]) == (flow, method, version)


@pytest.mark.parametrize(("version", "flow", "method"), CASES)
@pytest.mark.parametrize("options", [{"fp8": False}, {"nodes": 2}, {"forced_accepted_tokens": 3}])
def test_variants_are_in_the_record_or_refused(version, flow, method, options):
    if "fp8" not in options and (flow != "pytorch" or ("nodes" not in options and version < "1.2")):
        with pytest.raises(OptionError):
            plan("llama-3.3-70b", version, flow, method=method, **options)
    elif "forced_accepted_tokens" in options and method == "plain":
        with pytest.raises(OptionError, match="max_draft_len 0"):
            plan("llama-3.3-70b", version, flow, method=method, **options)
    else:
        assert plan("llama-3.3-70b", version, flow, method=method, **options)["steps"]


@pytest.mark.parametrize(("version", "flow", "method"), REFUSED)
def test_what_a_release_cannot_do_is_refused_by_name(version, flow, method):
    with pytest.raises(OptionError) as error:
        plan("llama-3.3-70b", version, flow, method=method)
    message = str(error.value)
    assert version in message and method in message and flow in message
    assert f"what {version} can: {support.what_it_can(support.parse_version(version))}" in message
    where = [f for f in TABLE if method in TABLE[f]]
    assert all(f in error.value.needed for f in where) and "\n" not in message


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_plan_somewhere(method):
    assert any(m == method for _, _, m in CASES)


def test_the_flow_is_chosen_by_release_and_method():
    chosen = {
        (v, m): support.choose_flow(support.parse_version(v), m)
        for v, m in [("0.15.0", "draft_target"), ("1.2.1", "draft_target"), ("1.2.1", "lookahead"), ("1.3.0", "eagle3")]
    }
    assert list(chosen.values()) == ["engine", "pytorch", "engine_api", "pytorch"]


def test_the_table_as_rows_and_text():
    rows = {row["method"]: row for row in support.support_rows()}
    assert rows["EAGLE-3"]["pytorch"].startswith("1.0 on") and rows["EAGLE-3"]["engine"] == "no"
    assert rows["Medusa"]["engine_api"] == "1.0 to 1.2"
    assert "lookahead" in support.format_support(support.parse_version("0.15.0"))
    assert support.what_it_can(support.parse_version("1.4.0")).startswith("pytorch: plain, draft_target, eagle3, ngram")


def test_what_became_of_the_posts_commands():
    """Every tool and flag that the table calls the posts' own is in their plan, and what replaces it is recorded."""
    rows = support.replaced_rows()
    posts = json.dumps(plan("llama-3.1-405b")["steps"])
    for flag in (
        "quantize.py",
        "trtllm-build",
        "run.py",
        "--draft_target_model_config",
        "--kv_cache_enable_block_reuse",
    ):
        assert flag in posts and any(flag in row["in the posts"] for row in rows)
    names = {name for row in rows for name in row["today"].replace("(", " ").split() if name.endswith("Config")}
    assert names - {"*DecodingConfig"} <= set(contract.record_for(support.parse_version("1.2.1")).classes)


@pytest.mark.parametrize("text", ["", "latest", "0.13.0", "15"])
def test_a_version_that_is_none(text):
    with pytest.raises(OptionError):
        support.parse_version(text)


# ---- what the issue asks to see -------------------------------------------------------------------------------------


def test_the_posts_flags_in_the_plan_for_0_15():
    made = plan_cli("llama-3.3-70b", "0.15.0")
    for part in ("target", "drafter"):
        quantize = settings(step_named(made, f"quantize-{part}")["argv"])
        assert quantize["--qformat"] == "fp8" and quantize["--kv_cache_dtype"] == "fp8"
        assert quantize["--calib_size"] == "512" and quantize["--tp_size"] == "1" and quantize["--dtype"] == "float16"
    target = settings(step_named(made, "build-target")["argv"])
    assert target["--speculative_decoding_mode"] == "draft_tokens_external" and target["--max_draft_len"] == "10"
    for name in ("build-plain", "build-drafter"):
        other = settings(step_named(made, name)["argv"])
        assert "--speculative_decoding_mode" not in other and "--max_draft_len" not in other
        limits = ("--max_batch_size", "--max_input_len", "--max_seq_len", "--use_paged_context_fmha")
        assert [other[limit] for limit in limits] == [target[limit] for limit in limits]
    longest_prompt, output = 2048, 1024  # what the experiment says; a round's input is prompt and output so far
    assert int(target["--max_input_len"]) >= longest_prompt + output
    assert int(target["--max_seq_len"]) >= int(target["--max_input_len"]) + output
    run = step_named(made, "run-draft_target")["argv"]
    assert settings(run)["--draft_target_model_config"] == "[10,[0],[0],False]"
    assert int(settings(run)["--max_input_length"]) == longest_prompt  # the default cuts at 923
    assert settings(run)["--num_beams"] == "1" and "--kv_cache_enable_block_reuse" in run
    assert run[:2] == ["python3", "{trtllm_repo}/examples/run.py"]
    plain = step_named(made, "run-plain")["argv"]
    assert "--draft_engine_dir" not in plain and settings(plain)["--engine_dir"].endswith("plain-engine")


def test_405b_takes_four_gpus_everywhere():
    made = plan("llama-3.1-405b")
    assert made["tensorrt_llm_version"] == "0.14.0" and made["tensor_parallel_size"] == 4
    run = step_named(made, "run-draft_target")["argv"]
    assert run[:4] == ["mpirun", "-n", "4", "--allow-run-as-root"]
    config = settings(run)["--draft_target_model_config"]
    assert json.loads(config.replace("False", "false")) == [10, [0, 1, 2, 3], [0, 1, 2, 3], False]
    assert settings(step_named(made, "quantize-target")["argv"])["--tp_size"] == "4"
    assert settings(step_named(made, "build-target")["argv"])["--workers"] == "4"
    assert step_named(plan("llama-3.1-405b", "1.2.1"), "run-plain")["call"]["kwargs"]["tensor_parallel_size"] == 4


def test_the_new_flow_as_the_facts_say():
    made = plan("llama-3.3-70b", "1.2.1")
    call = step_named(made, "run-draft_target")["call"]
    kwargs = call["kwargs"]
    assert call["class"] == "LLM" and kwargs["disable_overlap_scheduler"] is True
    assert kwargs["kv_cache_config"]["kwargs"]["dtype"] == "fp8"
    assert kwargs["speculative_config"]["class"] == "DraftTargetDecodingConfig"
    assert kwargs["speculative_config"]["kwargs"]["max_draft_len"] == 10
    assert call["then"]["kwargs"]["sampling_params"]["kwargs"]["max_tokens"] == 256
    assert "disable_overlap_scheduler" not in step_named(made, "run-plain")["call"]["kwargs"]  # the best plain run
    bench = settings(step_named(made, "bench-draft_target")["argv"])
    assert bench["--eos_id"] == "128009"  # the default -1 ignores EOS
    options = json.loads(step_named(made, "bench-draft_target")["files"]["{work_dir}/draft_target.yaml"])
    assert options["speculative_config"]["decoding_type"] == "DraftTarget"  # the key, not the class attribute
    assert settings(step_named(made, "serve-draft_target")["argv"])["--host"] == "localhost"


def test_several_nodes():
    made = plan("llama-3.1-405b", "1.2.1", nodes=2)
    assert made["tensor_parallel_size"] == 8
    launch = step_named(made, "run-draft_target")["launch"]["argv"]
    assert launch[:9] == [
        *("srun", "-N", "2", "--ntasks", "8", "--ntasks-per-node", "4", "--mpi=pmix", "trtllm-llmapi-launch"),
    ]
    assert launch[-4:] == ["--experiment", "llama-3.1-405b", "--nodes", "2"]
    assert step_named(made, "bench-plain")["argv"][8:10] == ["trtllm-llmapi-launch", "trtllm-bench"]


def test_forced_acceptance_needs_no_weights_and_says_that_it_is_simulated():
    made = plan("llama-3.3-70b", "1.2.1", forced_accepted_tokens=4)
    step = step_named(made, "run-draft_target")
    assert made["is_simulated"] and step["env"] == {"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS": "4"}
    assert step["call"]["kwargs"]["load_format"] == "dummy"
    assert step["call"]["kwargs"]["speculative_config"]["kwargs"]["load_format"] == "dummy"
    assert "acceptance length 5" in step["why"]["TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"]
    assert step_named(made, "run-plain")["env"] == {}
    with pytest.raises(OptionError, match="1.2 or newer"):
        plan("llama-3.3-70b", "1.1.0", forced_accepted_tokens=4)
    with pytest.raises(OptionError, match="1 to max_draft_len 10"):
        plan("llama-3.3-70b", "1.2.1", forced_accepted_tokens=11)


@pytest.mark.parametrize(("version", "flow", "method"), [("0.15.0", None, None), ("1.2.1", None, None), *CASES[::3]])
def test_a_plan_is_complete(version, flow, method):
    """Nothing is left open, local paths are placeholders, and what is printed can be read and pasted."""
    made = plan_cli("llama-3.3-70b", version, flow, method)
    text = json.dumps(made, allow_nan=False)
    assert json.loads(text) == made
    assert (
        "…" not in text
        and "..." not in text
        and "TODO" not in text
        and "None" not in shlex.join(word for step in made["steps"] for word in step.get("argv", []))
    )
    for step in made["steps"]:
        for word in step.get("argv", []):
            assert not word.startswith(("/", "~")), word
    shown = format_plan(made)
    assert all(step["name"] in shown for step in made["steps"])
    assert all(f"{{{key}}}" in shown and meaning in shown for key, meaning in made["placeholders"].items())
    assert "nothing was run" in shown


def test_a_printed_call_is_python():
    made = plan("llama-3.3-70b", "1.2.1")
    sources = [format_call(step["call"]) for step in made["steps"] if "call" in step]
    assert len(sources) == 2
    for source in sources:
        compile(source, "plan", "exec")
        assert all(f"  {line}" in format_plan(made).splitlines() for line in source.splitlines())
    assert "DraftTargetDecodingConfig(max_draft_len=10" in sources[1] and "from tensorrt_llm import LLM" in sources[1]


# ---- the checks themselves must be able to fail ---------------------------------------------------------------------


def first_argv(version, flow, method, tool):
    record = contract.record_for(support.parse_version(version))
    for step in plan("llama-3.3-70b", version, flow, method=method)["steps"]:
        if "argv" in step and contract.split_tool(step["argv"])[0].endswith(tool):
            return record, list(step["argv"])
    raise AssertionError(tool)


@pytest.mark.parametrize(
    ("version", "flow", "method", "tool"),
    [
        ("0.14.0", "engine", "draft_target", "quantize.py"),
        ("0.15.0", "engine", "draft_target", "trtllm-build"),
        ("0.15.0", "engine", "ngram", "run.py"),
        ("0.15.0", "engine", "eagle", "eagle/convert_checkpoint.py"),
        ("0.15.0", "engine", "plain", "trtllm-bench"),
        ("1.2.1", "pytorch", "draft_target", "trtllm-bench"),
        ("1.2.1", "pytorch", "draft_target", "trtllm-serve"),
        ("1.2.1", "pytorch", "draft_target", "hf_ptq.py"),
    ],
)
def test_a_misspelt_flag_and_a_wrong_value_fail(version, flow, method, tool):
    record, argv = first_argv(version, flow, method, tool)
    contract.check_argv(record, argv)
    for place, word in enumerate(argv):
        if word.startswith("--") and word != "--allow-run-as-root":
            wrong = [*argv[:place], word + "s", *argv[place + 1 :]]
            with pytest.raises(contract.ContractViolation):
                contract.check_argv(record, wrong)
    numbers = [place for place, word in enumerate(argv) if word.isdigit() and argv[place - 1] != "-n"]
    if not numbers or tool == "hf_ptq.py":
        return
    with pytest.raises(contract.ContractViolation):
        contract.check_argv(record, [*argv[: numbers[0]], "many", *argv[numbers[0] + 1 :]])


@pytest.mark.parametrize(
    ("version", "argv"),
    [
        ("0.14.0", ["trtllm-build", "--speculative_decoding_mode", "eagle"]),  # came with 0.15
        ("0.14.0", ["python3", "x/examples/run.py", "--max_output_len", "9", "--prompt_lookup_config", "[1,2,[0]]"]),
        ("1.2.1", ["python3", "x/examples/run.py", "--max_output_len", "9", "--prompt_lookup_config", "[1,2,[0]]"]),
        ("0.15.0", ["python3", "x/examples/run.py", "--max_output_len", "9", "--ngram_config", "[1,2,[0]]"]),
        ("0.15.0", ["python3", "x/examples/run.py"]),  # --max_output_len is required
        ("0.15.0", ["python3", "x/examples/quantization/quantize.py", "--qformat", "fp4"]),
        ("0.15.0", ["trtllm-build", "--max_draft", "3"]),  # no abbreviations
        ("1.2.1", ["trtllm-bench", "--model", "m", "latency", "--extra_llm_api_options", "f"]),
        ("1.2.1", ["trtllm-bench", "latency"]),  # --model is required
        ("1.2.1", ["trtllm-bench", "--model", "m"]),
        ("1.2.1", ["trtllm-serve", "m", "--kv_cache_dtype", "fp8"]),  # main only
        ("1.3.0", ["trtllm-build", "--checkpoint_dir", "c"]),  # removed
        ("1.3.0", ["python3", "x/examples/run.py", "--max_output_len", "9"]),
        ("1.2.1", ["mpirun", "--oversubscribe", "trtllm-serve", "m"]),
        ("1.2.1", ["srun", "--mpi=pmix", "trtllm-llmapi-launch", "trtllm-refit"]),
    ],
)
def test_flags_that_a_release_does_not_have(version, argv):
    with pytest.raises(contract.ContractViolation):
        contract.check_argv(contract.record_for(support.parse_version(version)), argv)


V12 = support.parse_version("1.2.1")
RECORD = contract.record_for(V12)
DRAFT = DraftTargetDecodingConfig(max_draft_len=4, speculative_model_dir="{d}")


def llm_call(**changes):
    options = {"speculative": DRAFT, "kv_cache": KvCacheConfig(dtype="fp8"), "max_batch_size": 1, "max_seq_len": 64}
    call = calls.pytorch_llm(V12, "{m}", **options)
    call["kwargs"] |= changes
    return call


def nested(call, key, **changes):
    call = copy.deepcopy(call)
    call["kwargs"][key]["kwargs"] |= changes
    return call


BROKEN = {
    "misspelt": llm_call(max_seq_length=64),
    "old name": llm_call(max_new_tokens=64),
    "wrong type": llm_call(tensor_parallel_size="1"),
    "bool for int": llm_call(tensor_parallel_size=True),
    "choice": llm_call(load_format="none"),
    "engine-only argument": llm_call(build_config=None),
    "no model": llm_call(model=None),
    "range": nested(llm_call(), "kv_cache_config", free_gpu_memory_fraction=1.5),
    "type in a nested class": nested(llm_call(), "kv_cache_config", max_attention_window=4096),
    "name in a nested class": nested(llm_call(), "kv_cache_config", kv_dtype="fp8"),
    "decoding_type is no constructor argument": nested(llm_call(), "speculative_config", decoding_type="DraftTarget"),
    "negative draft length": nested(llm_call(), "speculative_config", max_draft_len=-1),
    "no draft length": nested(llm_call(), "speculative_config", max_draft_len=None),
    "no draft model": nested(llm_call(), "speculative_config", speculative_model_dir=None),
    "schedule": nested(llm_call(), "speculative_config", draft_len_schedule={1: 3}),
    "name of main": nested(llm_call(), "speculative_config", acceptance_rate_window_size=4),
    "wrong class": llm_call(kv_cache_config=calls.make("SchedulerConfig", {})),
    "unknown class": calls.make("PARDDecodingConfig", {"max_draft_len": 4}),
    "method for the other backend": llm_call(
        speculative_config=calls.engine_drafting_config(LookaheadDecodingConfig())
    ),
}


def test_the_sound_call_passes():
    contract.check_call(RECORD, llm_call())
    contract.check_call(RECORD, nested(llm_call(), "speculative_config", draft_len_schedule={1: 4, 8: 2}))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_call_fails(name):
    with pytest.raises(contract.ContractViolation):
        contract.check_call(RECORD, BROKEN[name])


def test_the_engine_class_refuses_what_is_for_pytorch():
    sound = calls.engine_llm("{m}", speculative=None, kv_cache=None, limits=commands.Limits(), is_fp8=True)
    contract.check_call(RECORD, sound)
    with pytest.raises(contract.ContractViolation, match="does not support backend tensorrt"):
        broken = copy.deepcopy(sound)
        broken["kwargs"]["speculative_config"] = calls.drafting_config(V12, DRAFT)
        contract.check_call(RECORD, broken)
    with pytest.raises(contract.ContractViolation, match="dtype must be 'auto'"):
        contract.check_call(RECORD, nested(sound, "kv_cache_config", dtype="fp8"))


def test_names_that_changed_after_1_2():
    main = contract.record_for(support.parse_version("1.3.0"))
    config = EagleDecodingConfig(max_draft_len=4, speculative_model_dir="{e}")
    for version, record, name in ((V12, RECORD, "EagleDecodingConfig"), ("1.3.0", main, "Eagle3DecodingConfig")):
        release = support.parse_version(str(version))
        call = calls.pytorch_llm(release, "{m}", speculative=config, kv_cache=None)
        assert call["kwargs"]["speculative_config"]["class"] == name
        contract.check_call(record, call)
    with pytest.raises(contract.ContractViolation):
        contract.check_call(main, nested(llm_call(), "speculative_config", acceptance_window=4))


def test_options_files_are_checked_too():
    options = calls.options_of(V12, llm_call())
    contract.check_options(RECORD, "LLM", options)
    for key, value in (("decoding_type", "Draft_Target"), ("max_draft", 4)):
        broken = copy.deepcopy(options)
        broken["speculative_config"][key] = value
        with pytest.raises(contract.ContractViolation):
            contract.check_options(RECORD, "LLM", broken)
    with pytest.raises(contract.ContractViolation):
        contract.check_options(RECORD, "LLM", {**options, "kv_cache": {"dtype": "fp8"}})


@pytest.mark.parametrize(
    ("value", "written", "is_right"),
    [
        (3, "Optional[NonNegativeInt]", True),
        (None, "Optional[NonNegativeInt]", True),
        (-3, "Optional[NonNegativeInt]", False),
        (True, "int", False),
        (1, "float", True),
        ("llama3", 'Literal["llama3", "mistral_large3"]', True),
        ("llama2", 'Literal["llama3", "mistral_large3"]', False),
        ([[0], [0, 1]], "Optional[List[List[int]]]", True),
        ([0, 1], "Optional[List[List[int]]]", False),
        ({1: 4}, "Optional[dict[int, int]]", True),
        ({"1": 4}, "Optional[dict[int, int]]", False),
        ("a", "Union[List[str], str, NoneType]", True),
        (object(), "LoraConfig", False),
        ("x", "str|Path", True),
    ],
)
def test_recorded_types(value, written, is_right):
    assert contract.fits(value, written) is is_right


def test_the_record_says_where_it_comes_from():
    found = contract.load()["provenance"]
    assert set(found["records"]) == set(contract.load()["records"]) == {"0.14.0", "0.15.0", "1.2.1", "main"}
    exact = {v: contract.record_for(support.parse_version(v)).is_exact for v in VERSIONS}
    assert [v for v, is_exact in exact.items() if is_exact] == ["0.14.0", "0.15.0", "1.2.1"]


# ---- arithmetic -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "length"), [((7, 7, 7), 83), ((4, 4, 4), 23), ((2, 2, 1), 2), ((1, 1, 0), 0), ((5, 2, 3), 7)]
)
def test_lookahead_draft_length(sizes, length):
    assert commands.lookahead_max_draft_len(*sizes) == length


def test_lookahead_draft_length_is_computed_and_built_in():
    made = plan("llama-3.3-70b", "0.15.0", method="lookahead")
    assert settings(step_named(made, "build-target")["argv"])["--max_draft_len"] == "83"
    assert settings(step_named(made, "run-lookahead")["argv"])["--lookahead_config"] == "[7,7,7]"
    with pytest.raises(OptionError, match="W is 0"):
        commands.lookahead_max_draft_len(0, 7, 7)


def test_a_request_beyond_the_lookahead_engine_is_refused_with_numbers():
    commands.check_lookahead_request((7, 7, 7), (3, 2, 7))
    with pytest.raises(OptionError) as error:
        commands.check_lookahead_request((7, 7, 7), (8, 7, 7))
    assert "(8, 7, 7)" in str(error.value) and "83" in str(error.value) and "89" in str(error.value)


@pytest.mark.parametrize(("depth", "nodes"), [(1, 1), (1, 5), (4, 4), (4, 63), (6, 200)])
def test_trees_are_closed_and_as_deep_as_asked(depth, nodes):
    tree = commands.drafting_tree(depth, nodes)
    paths = {tuple(path) for path in tree}
    assert len(tree) == len(paths) == nodes and max(map(len, tree)) == depth
    assert all(path[:-1] in paths for path in paths if len(path) > 1)
    assert all((*path[:-1], path[-1] - 1) in paths for path in paths if path[-1] > 0)


@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_tree_and_engine_agree(method):
    made = plan("llama-3.3-70b", "0.15.0", method=method)
    tree = json.loads(settings(step_named(made, f"run-{method}")["argv"])[f"--{method}_choices"])
    built = settings(step_named(made, "build-target")["argv"])
    checkpoint = step_named(made, {"medusa": "quantize-medusa", "eagle": "convert-eagle"}[method])
    assert len(tree) == int(built["--max_draft_len"]) == int(settings(checkpoint["argv"])["--max_draft_len"])
    assert "--use_fp8_context_fmha" in built or method == "eagle"  # the EAGLE converter has no FP8 form


def test_limits_hold_the_growing_prompt_of_a_draft_loop():
    """Every round hands prompt + output so far to both engines, and run.py asks for input + output on top."""
    limits = commands.Limits(1, 2048, 1024)
    assert limits.max_input_len == 2048 + 1024 and limits.max_seq_len == limits.max_input_len + 1024


# ---- our options as theirs ------------------------------------------------------------------------------------------


def test_every_option_of_ours_reaches_the_library():
    kv = KvCacheConfig(
        dtype="fp8", enable_block_reuse=True, tokens_per_block=64, max_tokens=4096, free_gpu_memory_fraction=0.5,
        max_attention_window=[1024, 2048],
    )  # fmt: skip
    kwargs = calls.kv_cache_config(kv)["kwargs"]
    assert kwargs == {
        "dtype": "fp8",
        "enable_block_reuse": True,
        "free_gpu_memory_fraction": 0.5,
        "tokens_per_block": 64,
        "max_tokens": 4096,
        "max_attention_window": [1024, 2048],
    }
    ngram = NGramDecodingConfig(max_draft_len=5, max_matching_ngram_size=2, is_use_oldest=True)
    found = calls.drafting_config(V12, ngram)["kwargs"]
    assert found["max_matching_ngram_size"] == 2 and found["is_use_oldest"] and not found["is_public_pool"]
    with pytest.raises(OptionError, match="no speculative_model_dir"):
        calls.drafting_config(V12, EagleDecodingConfig())


def test_suffix_and_tree_options():
    main = contract.record_for(support.parse_version("1.3.0"))
    suffix = calls.drafting_config(
        support.parse_version("1.3.0"),
        SADecodingConfig(max_draft_len=5, enable_global_pool=True, global_pool_size=9),
    )
    sizes = {"max_draft_len": 5, "max_matching_ngram_size": -1, "enable_global_pool": True, "global_pool_size": 9}
    assert (suffix["class"], suffix["kwargs"]) == ("SADecodingConfig", sizes)
    dynamic = EagleDecodingConfig(
        speculative_model_dir="x", use_dynamic_tree=True, dynamic_tree_max_topK=4, max_total_draft_tokens=20
    )
    found = calls.drafting_config(V12, dynamic)
    assert (found["kwargs"]["dynamic_tree_max_topK"], found["kwargs"]["max_total_draft_tokens"]) == (4, 20)
    fixed = calls.drafting_config(V12, EagleDecodingConfig(speculative_model_dir="x", eagle_choices=[[0], [1], [0, 0]]))
    assert fixed["kwargs"]["eagle_choices"] == [[0], [1], [0, 0]]
    for record, call in ((main, suffix), (RECORD, found), (RECORD, fixed)):
        contract.check_call(record, call)
        assert calls.reasons(call).keys() == call["kwargs"].keys()


@pytest.mark.parametrize(
    ("config", "version", "flow", "words"),
    [
        (DraftTargetDecodingConfig(speculative_model_dir="x", confidence_threshold=0.4), "1.2.1", "pytorch",
         ["DraftTargetDecodingConfig(confidence_threshold=…)", "draft_len_schedule", "backend='torch'"]),
        (DraftTargetDecodingConfig(speculative_model_dir="x", confidence_threshold=0.0), "0.15.0", "engine",
         ["0.15.0", "confidence_threshold", "K is fixed"]),
        (EagleDecodingConfig(speculative_model_dir="x", confidence_threshold=0.4), "1.3.0", "pytorch",
         ["EagleDecodingConfig(confidence_threshold=…)"]),
        (EagleDecodingConfig(speculative_model_dir="x", use_dynamic_tree=True), "1.1.0", "pytorch",
         ["1.1.0", "use_dynamic_tree", "a chain", "1.2"]),
        (EagleDecodingConfig(speculative_model_dir="x", eagle_choices=[[0]]), "1.0.0", "pytorch",
         ["eagle_choices", "a chain"]),
        (EagleDecodingConfig(speculative_model_dir="x", use_dynamic_tree=True), "1.2.1", "engine_api",
         ["use_dynamic_tree", "a fixed tree"]),
    ],
)  # fmt: skip
def test_options_of_the_workbook_are_refused_by_name(config, version, flow, words):
    with pytest.raises(OptionError) as error:
        support.refuse_own_options(config, support.parse_version(version), flow)
    message = str(error.value)
    assert all(word in message for word in words) and "\n" not in message, message


@pytest.mark.parametrize(
    ("config", "version", "flow"),
    [
        (None, "1.2.1", "pytorch"),
        (DRAFT, "1.2.1", "pytorch"),
        (EagleDecodingConfig(speculative_model_dir="x"), "1.0.0", "pytorch"),
        (EagleDecodingConfig(speculative_model_dir="x", use_dynamic_tree=True), "1.2.1", "pytorch"),
        (EagleDecodingConfig(speculative_model_dir="x", eagle_choices=[[0]]), "1.0.0", "engine_api"),
    ],
)
def test_what_the_release_has_is_not_refused(config, version, flow):
    support.refuse_own_options(config, support.parse_version(version), flow)


def test_a_method_of_the_workbook_alone_is_refused_by_name():
    with pytest.raises(OptionError, match="LayerSkipDecodingConfig has no counterpart in TensorRT-LLM") as error:
        support.method_of(LayerSkipDecodingConfig())
    assert "SADecodingConfig" in str(error.value) and "torch backend" in str(error.value)


def test_sampling_params():
    params = SamplingParams(max_tokens=9, temperature=0.7, top_k=5, top_p=0.9, seed=3, stop="x", stop_token_ids=[4])
    kwargs = calls.sampling_params(params, [7, 9])["kwargs"]
    contract.check_call(RECORD, {"class": "SamplingParams", "kwargs": kwargs})
    assert kwargs["stop_token_ids"] == [4, 7, 9] and kwargs["stop"] == ["x"]  # every EOS id, not only the first
    assert (kwargs["temperature"], kwargs["top_k"], kwargs["top_p"], kwargs["seed"]) == (0.7, 5, 0.9, 3)
    greedy = calls.sampling_params(SamplingParams(top_k=5, top_p=0.9, ignore_eos=True), [7])["kwargs"]
    assert greedy["temperature"] == 0.0 and "top_k" not in greedy and "stop_token_ids" not in greedy
    assert greedy["ignore_eos"] is True
    with pytest.raises(OptionError, match="without a tokenizer"):
        calls.sampling_params(params, [7], can_use_text=False)


def test_which_method_a_configuration_is():
    eagle = EagleDecodingConfig(speculative_model_dir="x")
    assert support.method_of(eagle) == "eagle3" and support.method_of(eagle, "engine") == "eagle"
    assert support.method_of(None) == "plain" and support.method_of(DRAFT) == "draft_target"
    assert support.method_of(MedusaDecodingConfig()) == "medusa" and support.method_of(SADecodingConfig()) == "suffix"


def test_the_deepest_acceptance_of_each_method():
    assert calls.most_accepted(None) == 0 and calls.most_accepted(DRAFT) == 4
    assert calls.most_accepted(LookaheadDecodingConfig(max_ngram_size=7)) == 6
    assert calls.most_accepted(MedusaDecodingConfig(num_medusa_heads=3)) == 3
    assert calls.most_accepted(EagleDecodingConfig(eagle_choices=[[0], [0, 0]])) == 2
