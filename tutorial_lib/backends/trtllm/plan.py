"""An experiment as a list of steps: every command line and every call, in order, complete, with a reason per flag.

`plan(experiment, version, flow)` is pure: it runs nothing and needs neither the library nor a GPU. Local paths are
placeholders in braces. A step is a dict: `name`, `kind` (fetch, quantize, build, prepare, run, bench, serve), either
`argv` or `call` (class, keyword arguments, and under `then` the method called on the object), `env`, `files` to write
first, `produces`, `needs` (disk and GPU memory, GiB), `why` (flag or argument: reason). Every step is checked against
the record of the release before it is handed out.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ...config import (
    DecodingBaseConfig,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    LookaheadDecodingConfig,
    MedusaDecodingConfig,
    NGramDecodingConfig,
    SADecodingConfig,
    SamplingParams,
)
from ...errors import OptionError
from . import calls, commands, contract
from .commands import Command, Limits
from .support import FLOWS, METHODS, Version, choose_flow, format_support, parse_version, support_rows, what_it_can

EXPERIMENTS = Path(__file__).parents[2] / "data" / "experiments.json"
GIB = 2**30
KV_FRACTION = 0.85
KV_FRACTION_TWO_ENGINES = 0.4  # both engines sit on the same GPUs, each takes its share of what is then free
TREE_DEPTH, TREE_NODES = 4, 63
LOOKAHEAD = (7, 7, 7)
PLACEHOLDERS = {
    "models_dir": "folder for downloaded checkpoints",
    "work_dir": "folder for what the steps make: checkpoints, engines, logs, results",
    "trtllm_repo": "TensorRT-LLM's repository at the release's tag (in NVIDIA's containers: /app/tensorrt_llm)",
    "modelopt_repo": "Model Optimizer's repository",
    "eagle3_head": "folder of an EAGLE-3 head trained for the target",
    "eagle_head": "folder of an EAGLE head trained for the target",
    "medusa_heads": "folder of Medusa heads trained for the target",
    "prompts": "token ids of the prompts, one list per request",
}


@cache
def experiments() -> dict[str, dict[str, Any]]:
    """The posts' experiments, by name: data."""
    return json.loads(EXPERIMENTS.read_text("utf-8"))


def experiment_named(name: str) -> dict[str, Any]:
    known = experiments()
    if name not in known:
        raise OptionError(f"experiment {name!r} is unknown", f"one of {', '.join(known)}", "choose one of these")
    return known[name]


def plan(
    experiment: str | Mapping[str, Any],
    version: str | None = None,
    flow: str | None = None,
    *,
    method: str = "draft_target",
    nodes: int = 1,
    fp8: bool = True,
    forced_accepted_tokens: int | None = None,
) -> dict[str, Any]:
    """The plan of `experiment` on TensorRT-LLM `version` (default: the posts' release): with and without the drafter.

    experiment: a name of `experiments()`, or a description of the same form (`experiment.describe` makes one).
    flow: `engine`, `engine_api` or `pytorch`; None takes the newest that can run `method`. nodes: machines with the
    experiment's number of GPUs each (PyTorch flow). fp8: False keeps half precision. forced_accepted_tokens: no
    weights at all, that many draft tokens accepted in every round (1.2 on): speed, never text. Raises `OptionError`
    that names what the release can do.
    """
    job = _job(experiment, version, flow, method, nodes, fp8, forced_accepted_tokens)
    facts, release, chosen = job.facts, job.version, job.flow
    record = contract.record_for(release)
    steps = [step for step in _FLOW_STEPS[chosen](job) if step is not None]
    for step in steps:
        check_step(record, step)
    text = json.dumps(steps)
    return {
        "experiment": job.name,
        "title": facts["title"],
        "source": facts["source"],
        "tensorrt_llm_version": str(release),
        "flow": chosen,
        "method": method,
        "max_draft_len": job.draft_len,
        "tensor_parallel_size": job.tp,
        "nodes": nodes,
        "is_simulated": forced_accepted_tokens is not None,
        "checked_against": {"record": record.name, "is_exact": record.is_exact},
        "can": what_it_can(release),
        "placeholders": {key: meaning for key, meaning in PLACEHOLDERS.items() if f"{{{key}}}" in text},
        "notes": _notes(job, record),
        "facts": dict(facts),
        "steps": steps,
    }


def _job(
    experiment: str | Mapping[str, Any], version: str | None, flow: str | None, method: str, nodes: int, fp8: bool,
    forced: int | None,
) -> _Job:  # fmt: skip
    facts = experiment_named(experiment) if isinstance(experiment, str) else experiment
    name = experiment if isinstance(experiment, str) else facts["title"]
    release = parse_version(version or facts["tensorrt_llm"])
    job = _Job(name, release, choose_flow(release, method, flow), method, facts, nodes, fp8, forced)
    _check_job(job)
    return job


def check_step(record: contract.Record, step: Mapping[str, Any]) -> None:
    """Every command line, call and options file of a step against the record; raises `ContractViolation`."""
    if "argv" in step:
        contract.check_argv(record, step["argv"])
    if "call" in step:
        contract.check_call(record, step["call"])
    if "launch" in step:
        contract.check_argv(record, step["launch"]["argv"])
    for name, options in step.get("options_files", {}).items():
        if name.endswith(".yaml"):
            contract.check_options(record, "LLM", options)


# ---- the command line's view ---------------------------------------------------------------------------------------


def plan_cli(
    experiment: str,
    version: str | None = None,
    flow: str | None = None,
    method: str | None = None,
    nodes: int = 1,
) -> dict[str, Any]:
    """What `workbook bench --profile tensorrt_llm --experiment … --tensorrt-llm-version … --dry-run` prints."""
    return plan(experiment, version, flow, method=method or "draft_target", nodes=nodes)


def format_plan(plan: Mapping[str, Any]) -> str:
    """A plan as text: what runs, in order, with the reason beside every flag."""
    checked = plan["checked_against"]
    exact = "" if checked["is_exact"] else " (the nearest record: names may differ)"
    lines = [
        plan["title"],
        f"TensorRT-LLM {plan['tensorrt_llm_version']}, {FLOWS[plan['flow']]}",
        f"method {plan['method']} ({METHODS[plan['method']]}), max_draft_len {plan['max_draft_len']}, "
        f"tensor parallel {plan['tensor_parallel_size']}, {plan['nodes']} node(s)",
        f"checked against the record of {checked['record']}{exact}; nothing was run",
        "",
    ]
    told: set[tuple[str, str]] = set()
    for number, step in enumerate(plan["steps"], start=1):
        lines += _step_lines(number, len(plan["steps"]), step, told)
    lines += ["placeholders"] + [f"  {{{key}}}: {meaning}" for key, meaning in plan["placeholders"].items()]
    if plan["notes"]:
        lines += ["", "notes"] + [f"  - {note}" for note in plan["notes"]]
    lines += ["", f"what TensorRT-LLM {plan['tensorrt_llm_version']} can", f"  {plan['can']}"]
    return "\n".join(lines)


def _step_lines(number: int, total: int, step: Mapping[str, Any], told: set[tuple[str, str]]) -> list[str]:
    """One step; reasons in `told` were given in an earlier one."""
    lines = [f"[{number}/{total}] {step['name']} ({step['kind']}{', optional' if step['is_optional'] else ''})"]
    lines.append(f"  {step['about']}")
    lines += [f"  write {path}" for path in step.get("files", {})]
    lines += [f"  export {key}={shlex.quote(value)}" for key, value in step["env"].items()]
    if "argv" in step:
        lines += [f"  {part}" for part in _wrapped(step["argv"])]
    else:
        lines += [f"  {line}" for line in format_call(step["call"]).splitlines()]
    lines += [f"      {flag}: {because}" for flag, because in step["why"].items() if (flag, because) not in told]
    told.update(step["why"].items())
    if "launch" in step:
        lines += ["  as a script over several nodes:"] + [f"  {part}" for part in _wrapped(step["launch"]["argv"])]
    if step["needs"]:
        lines.append("  needs " + ", ".join(f"{value:g} GiB {what}" for what, value in _shown_needs(step["needs"])))
    return [*lines, ""]


def _shown_needs(needs: Mapping[str, float]) -> list[tuple[str, float]]:
    names = {"models_gib": "in {models_dir}", "work_gib": "in {work_dir}", "gpu_gib": "on every GPU"}
    names |= {"all_gpus_gib": "of GPU and host memory together"}
    return [(names[key], value) for key, value in needs.items()]


def _wrapped(argv: list[str]) -> list[str]:
    """One flag with its value per line."""
    lines: list[list[str]] = [[]]
    for word in argv:
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(word if word.startswith("{") else shlex.quote(word))
    return [("" if i == 0 else "    ") + " ".join(words) + " \\" for i, words in enumerate(lines[:-1])] + [
        ("    " if len(lines) > 1 else "") + " ".join(lines[-1])
    ]


_ONE_PER_LINE = ("\n    ", ",\n    ", ",\n")


def format_call(call: Mapping[str, Any]) -> str:
    """A call as Python source that runs: imports, the object, the method called on it."""
    names: dict[str, str] = {}

    def source(value: Any, before: str = "", between: str = ", ", after: str = "") -> str:
        if not (isinstance(value, Mapping) and "class" in value):
            return repr(value)
        module, _, name = value["import"].rpartition(".")
        names[f"{module}.{name}"] = f"from {module} import {name}"
        return f"{name}({before}{between.join(f'{k}={source(v)}' for k, v in value['kwargs'].items())}{after})"

    body = [f"llm = {source(call, *_ONE_PER_LINE)}"]
    if "then" in call:
        then = call["then"]
        arguments = ", ".join(
            f"{key}={value.strip('{}') if key == 'inputs' else source(value)}" for key, value in then["kwargs"].items()
        )
        body.append(f"outputs = llm.{then['method']}({arguments})")
    return "\n".join([*sorted(names.values()), *body])


# ---- what an experiment and its options come to --------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    name: str
    version: Version
    flow: str
    method: str
    facts: Mapping[str, Any]
    nodes: int
    fp8: bool
    forced: int | None

    @property
    def tp(self) -> int:
        return self.facts["tensor_parallel_size"] * self.nodes

    @property
    def limits(self) -> Limits:
        return Limits(self.facts["max_batch_size"], self.facts["max_prompt_len"], self.facts["max_tokens"])

    @property
    def draft_len(self) -> int:
        if self.method == "plain":
            return 0
        if self.method == "lookahead":
            return commands.lookahead_max_draft_len(*LOOKAHEAD)
        return TREE_NODES if self.method in ("medusa", "eagle") else self.facts["max_draft_len"]

    @property
    def kv_fraction(self) -> float:
        return KV_FRACTION_TWO_ENGINES if self.flow == "engine" and self.method == "draft_target" else KV_FRACTION

    def folder(self, part: str) -> str:
        """Where a checkpoint lies: a folder of the user's own, or where its download goes."""
        model = self.facts[part]
        return model.get("folder") or "{models_dir}/" + model["name"].split("/")[1]

    def weights_gib(self, part: str, is_fp8: bool) -> float:
        """GiB of all weights: FP8 ones with embedding and head in half precision."""
        model = self.facts[part]
        linear = model["parameters"] - model["embedding_parameters"]
        size = linear * (1 if is_fp8 else 2) + model["embedding_parameters"] * 2
        return round(size / GIB, 1)

    def kv_gib(self, part: str) -> float:
        per_token = self.facts[part]["kv_bytes_per_token_fp8"] * (1 if self.fp8 else 2)
        return per_token * self.limits.max_seq_len * self.limits.max_batch_size / GIB


def _check_job(job: _Job) -> None:
    if job.nodes < 1:
        raise OptionError(f"nodes is {job.nodes}", "a whole number >= 1")
    if job.nodes > 1 and job.flow != "pytorch":
        raise OptionError(f"{job.nodes} nodes in flow {job.flow!r}", "flow 'pytorch'", "take 1.0 or newer, or one node")
    if job.forced is not None and job.version.release < (1, 2):
        raise OptionError(f"forced acceptance on TensorRT-LLM {job.version}", "1.2 or newer", "take 1.2.1")
    if job.forced is not None and job.flow != "pytorch":
        raise OptionError(f"forced acceptance in flow {job.flow!r}", "flow 'pytorch'", "leave it out")
    if job.forced is not None and not 0 < job.forced <= job.draft_len:
        raise OptionError(f"forced_accepted_tokens is {job.forced}", f"1 to max_draft_len {job.draft_len}")
    if job.method == "mtp":
        raise OptionError(
            "MTP needs a checkpoint with MTP layers (DeepSeek)", "a method for Llama", "choose draft_target or eagle3"
        )


def speculative_config(method: str, draft_len: int, drafter: str) -> DecodingBaseConfig | None:
    """The workbook's own configuration of a method; folders of heads are placeholders."""
    makers: dict[str, Callable[[], DecodingBaseConfig]] = {
        "draft_target": lambda: DraftTargetDecodingConfig(max_draft_len=draft_len, speculative_model_dir=drafter),
        "ngram": lambda: NGramDecodingConfig(max_draft_len=draft_len, max_matching_ngram_size=3),
        "suffix": lambda: SADecodingConfig(max_draft_len=draft_len),
        "eagle3": lambda: EagleDecodingConfig(max_draft_len=4, speculative_model_dir="{eagle3_head}"),
        "eagle": lambda: EagleDecodingConfig(max_draft_len=TREE_DEPTH, speculative_model_dir="{eagle_head}"),
        "medusa": lambda: MedusaDecodingConfig(
            max_draft_len=TREE_DEPTH, speculative_model_dir="{medusa_heads}", num_medusa_heads=TREE_DEPTH
        ),
        "lookahead": lambda: LookaheadDecodingConfig(
            max_window_size=LOOKAHEAD[0], max_ngram_size=LOOKAHEAD[1], max_verification_set_size=LOOKAHEAD[2]
        ),
    }
    return makers[method]() if method in makers else None


def llm_options(job: _Job, method: str) -> dict[str, Any]:
    """The arguments of the workbook's own `LLM` for a run of `method`: strings may hold placeholders."""
    draft_len = job.facts["max_draft_len"]
    if job.flow == "engine":
        config = speculative_config(method, draft_len, "{work_dir}/draft-engine")
        model = "{work_dir}/plain-engine" if method == "plain" else "{work_dir}/target-engine"
    else:
        config = speculative_config(method, draft_len, _fp8_folder(job, "drafter") if "drafter" in job.facts else "")
        model = _fp8_folder(job, "target") if job.flow == "pytorch" else job.folder("target")
    return {
        "model": model,
        "speculative_config": config,
        "kv_cache_config": KvCacheConfig(
            dtype="fp8" if job.fp8 else "auto", enable_block_reuse=True, free_gpu_memory_fraction=KV_FRACTION
        ),
        "max_batch_size": job.limits.max_batch_size,
        "max_seq_len": job.limits.max_input_len if job.flow == "engine" else job.limits.max_seq_len,
        "tensor_parallel_size": job.tp,
    }


def runs(
    experiment: str | Mapping[str, Any], version: str | None = None, flow: str | None = None, *,
    method: str = "draft_target", nodes: int = 1, fp8: bool = True,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Method -> `LLM` arguments of the runs that a plan prepares: plain, and `method`."""
    job = _job(experiment, version, flow, method, nodes, fp8, None)
    return {name: llm_options(job, name) for name in dict.fromkeys(("plain", method))}


def _step(
    name: str, kind: str, about: str, command: Command | None = None, call: calls.Call | None = None, *,
    produces: list[str] | None = None, needs: Mapping[str, float] | None = None, env: Mapping[str, str] | None = None,
    options_files: Mapping[str, Any] | None = None, is_optional: bool = False,
) -> dict[str, Any]:  # fmt: skip
    step: dict[str, Any] = {"name": name, "kind": kind, "about": about}
    if command is not None:
        step |= {"argv": command.argv, "why": dict(command.why)}
    if call is not None:
        step |= {"call": call, "why": calls.reasons(call)}
    step |= {"env": dict(env or {}), "produces": produces or [], "needs": dict(needs or {})}
    if options_files:
        step["options_files"] = dict(options_files)
        step["files"] = {path: calls.options_text(options) for path, options in options_files.items()}
    return step | {"is_optional": is_optional}


# ---- the engine flow: command lines --------------------------------------------------------------------------------


def _engine_steps(job: _Job) -> list[dict[str, Any] | None]:
    return [
        _step(
            "fetch-examples",
            "fetch",
            "quantize.py, run.py and the converters: scripts of the release that the wheel does not contain",
            commands.fetch_examples(job.version, "{trtllm_repo}"),
            produces=["{trtllm_repo}"],
            env={"GIT_LFS_SKIP_SMUDGE": "1"},
        ),
        _fetch(job, "target"),
        _fetch(job, "drafter") if job.method == "draft_target" else None,
        *_checkpoint_steps(job),
        *_build_steps(job),
        _step(
            "write-prompt",
            "prepare",
            "one of the bundled prompts as token ids",
            commands.write_prompt(job.folder("target"), "{work_dir}/prompt.csv"),
            produces=["{work_dir}/prompt.csv"],
        ),
        _engine_run(job, "plain"),
        _engine_run(job, job.method) if job.method != "plain" else None,
        _step(
            "write-bench-dataset",
            "bench",
            "the bundled prompts for trtllm-bench",
            commands.bench_dataset(
                job.folder("target"), "{work_dir}/prompts.jsonl", job.facts["output_tokens"], is_old=_is_old(job)
            ),
            produces=["{work_dir}/prompts.jsonl"],
            is_optional=True,
        ),
        _step(
            "bench-plain",
            "bench",
            "the same baseline by trtllm-bench; it has no way to run a draft model in this flow",
            commands.bench_engine(
                job.version, job.folder("target"), "{work_dir}/plain-engine", "{work_dir}/prompts.jsonl", requests=64
            ),
            is_optional=True,
        ),
    ]


def _is_old(job: _Job) -> bool:
    return job.version.release < (1, 0)


def _fetch(job: _Job, part: str) -> dict[str, Any] | None:
    """None for a folder of the user's own."""
    name = job.facts[part]["name"]
    if "folder" in job.facts[part]:
        return None
    return _step(
        f"fetch-{part}",
        "fetch",
        f"{name} in half precision" + ("; asks for Meta's licence" if name.startswith("meta-llama/") else ""),
        commands.fetch_model(name, job.folder(part), job.version),
        produces=[job.folder(part)],
        needs={"models_gib": job.weights_gib(part, False)},
    )


def _checkpoint_steps(job: _Job) -> list[dict[str, Any] | None]:
    """One checkpoint per engine: FP8 by quantize.py, or half precision where FP8 is off or the head has no FP8 form."""
    steps: list[dict[str, Any] | None] = [_quantize(job, "target", job.tp)]
    if job.method == "draft_target":
        steps.append(_quantize(job, "drafter", job.facts["drafter_tensor_parallel_size"]))
    if job.method == "medusa":
        command = commands.quantize(
            job.version, "{trtllm_repo}", job.folder("target"), "{work_dir}/ckpt-medusa", tp_size=job.tp,
            calib_size=job.facts["calib_size"], medusa=("{medusa_heads}", TREE_DEPTH, TREE_NODES),
        )  # fmt: skip
        steps.append(_checkpoint("quantize-medusa", "target and Medusa heads as one checkpoint", job, command))
    if job.method == "eagle":
        command = commands.convert_eagle(
            job.version, "{trtllm_repo}", job.folder("target"), "{eagle_head}", "{work_dir}/ckpt-eagle",
            tp_size=job.tp, depth=TREE_DEPTH, draft_len=TREE_NODES,
        )  # fmt: skip
        steps.append(_checkpoint("convert-eagle", "target and EAGLE head as one checkpoint", job, command))
    return steps


def _quantize(job: _Job, part: str, tp_size: int) -> dict[str, Any]:
    output = f"{{work_dir}}/ckpt-{part}"
    if job.fp8:
        command = commands.quantize(
            job.version, "{trtllm_repo}", job.folder(part), output, tp_size=tp_size, calib_size=job.facts["calib_size"]
        )
    else:
        command = commands.convert(job.version, "{trtllm_repo}", job.folder(part), output, tp_size=tp_size)
    verb = "quantize" if job.fp8 else "convert"
    return _checkpoint(f"{verb}-{part}", f"the {part} as a TensorRT-LLM checkpoint", job, command, part)


def _checkpoint(name: str, about: str, job: _Job, command: Command, part: str = "target") -> dict[str, Any]:
    is_fp8 = "quantize.py" in command.argv[1]
    return _step(
        name,
        "quantize",
        about,
        command,
        produces=[command.argv[command.argv.index("--output_dir") + 1]],
        needs={"work_gib": job.weights_gib(part, is_fp8), "all_gpus_gib": job.weights_gib(part, False)},
    )


def _build_steps(job: _Job) -> list[dict[str, Any]]:
    plain = commands.build("{work_dir}/ckpt-target", "{work_dir}/plain-engine", job.limits, tp_size=job.tp, fp8=job.fp8)
    steps = [_engine("build-plain", "the target without a drafter: the baseline", job, plain)]
    if job.method == "draft_target":
        drafter = commands.build(
            "{work_dir}/ckpt-drafter", "{work_dir}/draft-engine", job.limits, fp8=job.fp8,
            tp_size=job.facts["drafter_tensor_parallel_size"],
        )  # fmt: skip
        steps.insert(0, _engine("build-drafter", "the drafter", job, drafter, "drafter"))
    if job.method != "plain":
        source, mode = {
            "draft_target": ("target", "draft_tokens_external"),
            "ngram": ("target", "draft_tokens_external"),
            "lookahead": ("target", "lookahead_decoding"),
            "medusa": ("medusa", "medusa"),
            "eagle": ("eagle", "eagle"),
        }[job.method]
        target = commands.build(
            f"{{work_dir}}/ckpt-{source}", "{work_dir}/target-engine", job.limits, tp_size=job.tp, mode=mode,
            max_draft_len=job.draft_len, fp8=job.fp8 and job.method != "eagle",
        )  # fmt: skip
        steps.append(_engine("build-target", "the target, able to verify draft tokens", job, target))
    return steps


def _engine(name: str, about: str, job: _Job, command: Command, part: str = "target") -> dict[str, Any]:
    is_fp8 = "--use_fp8_context_fmha" in command.argv
    size = job.weights_gib(part, is_fp8)
    tp = job.tp if part == "target" else job.facts["drafter_tensor_parallel_size"]
    return _step(
        name,
        "build",
        about,
        command,
        produces=[command.argv[command.argv.index("--output_dir") + 1]],
        needs={"work_gib": size, "gpu_gib": round(size / tp + 4, 1)},
    )


def _engine_run(job: _Job, method: str) -> dict[str, Any]:
    gpus = list(range(job.tp))
    drafting = {
        "plain": lambda: None,
        "draft_target": lambda: commands.with_draft_model(
            "{work_dir}/draft-engine",
            job.draft_len,
            list(range(job.facts["drafter_tensor_parallel_size"])),
            gpus,
        ),
        "ngram": lambda: commands.with_prompt_lookup(job.version, job.draft_len, 3, gpus),
        "medusa": lambda: commands.with_medusa(commands.drafting_tree(TREE_DEPTH, TREE_NODES)),
        "eagle": lambda: commands.with_eagle(commands.drafting_tree(TREE_DEPTH, TREE_NODES)),
        "lookahead": lambda: commands.with_lookahead(*LOOKAHEAD),
    }[method]()
    is_plain = method == "plain"
    command = commands.run(
        job.version,
        "{trtllm_repo}",
        engine_dir="{work_dir}/plain-engine" if is_plain else "{work_dir}/target-engine",
        tokenizer_dir=job.folder("target"),
        input_file="{work_dir}/prompt.csv",
        output_csv=f"{{work_dir}}/{method}.csv",
        limits=job.limits,
        output_len=job.facts["output_tokens"],
        end_id=job.facts["eos_token_ids"][0],
        tp_size=job.tp,
        kv_fraction=KV_FRACTION if is_plain else job.kv_fraction,
        block_reuse=True,
        drafting=drafting,
    )
    about = "decode without a drafter" if is_plain else f"decode with {METHODS[method]}"
    return _step(f"run-{method}", "run", f"{about}, one prompt at a time", command, needs=_run_needs(job, method))


def _run_needs(job: _Job, method: str) -> dict[str, float]:
    is_fp8 = job.fp8 and method != "eagle"
    gib = (job.weights_gib("target", is_fp8) + job.kv_gib("target")) / job.tp
    if method == "draft_target":
        tp = job.facts["drafter_tensor_parallel_size"] if job.flow == "engine" else job.tp
        gib += (job.weights_gib("drafter", is_fp8) + job.kv_gib("drafter")) / tp
    return {"gpu_gib": round(gib + 2, 1)}


# ---- the engine flow's LLM class ------------------------------------------------------------------------------------


def _engine_api_steps(job: _Job) -> list[dict[str, Any] | None]:
    def run(method: str) -> dict[str, Any]:
        options = llm_options(job, method)
        call = calls.engine_llm(
            options["model"],
            speculative=options["speculative_config"],
            kv_cache=options["kv_cache_config"],
            limits=job.limits,
            is_fp8=job.fp8,
            calib_size=job.facts["calib_size"],
            tensor_parallel_size=job.tp,
        )
        call["then"] = _generate(job)
        needs = _run_needs(job, method) | {"work_gib": job.weights_gib("target", job.fp8)}
        return _step(
            f"run-{method}",
            "run",
            f"quantize, build, load and decode: {METHODS[method]}",
            call=call,
            needs=needs,
            env={"TLLM_LLMAPI_BUILD_CACHE": "1"},
        )

    return [_fetch(job, "target"), run("plain"), run(job.method) if job.method != "plain" else None]


# ---- the PyTorch flow -----------------------------------------------------------------------------------------------


def _pytorch_steps(job: _Job) -> list[dict[str, Any] | None]:
    plain, speculative = _pytorch_run(job, "plain"), _pytorch_run(job, job.method)
    steps = _configurations_only(job) if job.forced is not None else _fp8_checkpoints(job)
    steps += [plain, speculative if job.method != "plain" else None]
    if job.forced is not None:
        return steps
    dataset = "{work_dir}/prompts.jsonl"
    steps.append(
        _step(
            "write-bench-dataset",
            "bench",
            "the bundled prompts for trtllm-bench",
            commands.bench_dataset(_fp8_folder(job, "target"), dataset, job.facts["output_tokens"], is_old=False),
            produces=[dataset],
            is_optional=True,
        )
    )
    for run in (plain, speculative):
        if run["name"] == "run-plain" and run is speculative:
            continue
        steps.append(_bench_step(job, run, dataset))
    steps.append(_serve_step(job, speculative))
    return steps


def _fp8_checkpoints(job: _Job) -> list[dict[str, Any] | None]:
    """FP8 as published where the experiment names one, else quantized here."""
    parts = ["target", "drafter"] if job.method == "draft_target" else ["target"]
    if not job.fp8:
        return [_fetch(job, part) for part in parts]
    steps: list[dict[str, Any] | None] = []
    to_quantize = [part for part in parts if "fp8_name" not in job.facts[part]]
    for part in parts:
        steps.append(_fetch(job, part) if part in to_quantize else _fetch_fp8(job, part))
    if to_quantize:
        steps.append(
            _step(
                "fetch-modelopt",
                "fetch",
                "Model Optimizer's scripts; `pip install nvidia-modelopt[hf]` belongs to it",
                commands.fetch_modelopt("{modelopt_repo}"),
                produces=["{modelopt_repo}"],
            )
        )
    return steps + [_quantize_for_pytorch(job, part) for part in to_quantize]


def _fetch_fp8(job: _Job, part: str) -> dict[str, Any]:
    name = job.facts[part]["fp8_name"]
    return _step(
        f"fetch-{part}",
        "fetch",
        f"{name}: the {part} as NVIDIA published it in FP8 (hf_ptq.py on {job.facts[part]['name']} makes the same)",
        commands.fetch_model(name, _fp8_folder(job, part), job.version),
        produces=[_fp8_folder(job, part)],
        needs={"models_gib": job.weights_gib(part, True)},
    )


def _quantize_for_pytorch(job: _Job, part: str) -> dict[str, Any]:
    return _step(
        f"quantize-{part}",
        "quantize",
        f"the {part} in FP8, as a Hugging Face folder",
        commands.quantize_for_pytorch(
            "{modelopt_repo}", job.folder(part), _fp8_folder(job, part), calib_size=job.facts["calib_size"]
        ),
        produces=[_fp8_folder(job, part)],
        needs={"work_gib": job.weights_gib(part, True), "all_gpus_gib": job.weights_gib(part, False)},
    )


def _configurations_only(job: _Job) -> list[dict[str, Any] | None]:
    """Random weights need no checkpoint, but its configuration, and hf_quant_config.json to be FP8."""

    def fetch(part: str, name: str, folder: str) -> dict[str, Any]:
        command = commands.fetch_configuration(name, folder)
        return _step(f"fetch-{part}", "fetch", f"the configuration of {name}, a few KB", command, produces=[folder])

    model = job.facts["target"]
    name = model["fp8_name"] if job.fp8 and "fp8_name" in model else model["name"]
    target = fetch("target", name, _fp8_folder(job, "target"))
    if job.method != "draft_target":
        return [target]
    return [target, fetch("drafter", job.facts["drafter"]["name"], job.folder("drafter"))]


def _fp8_folder(job: _Job, part: str) -> str:
    if not job.fp8 or (part == "drafter" and job.forced is not None):
        return job.folder(part)
    model = job.facts[part]
    if "fp8_name" in model:
        return "{models_dir}/" + model["fp8_name"].split("/")[1]
    return f"{{work_dir}}/{model['name'].replace(':', '-').split('/')[-1]}-FP8"


def _pytorch_run(job: _Job, method: str) -> dict[str, Any]:
    options = llm_options(job, method)
    config = options.pop("speculative_config")
    is_dummy = job.forced is not None
    call = calls.pytorch_llm(
        job.version,
        options.pop("model"),
        speculative=config,
        kv_cache=options.pop("kv_cache_config"),
        **options,
        is_dummy=is_dummy,
        is_drafter_dummy=is_dummy and method not in ("ngram", "suffix") and config is not None,
    )
    call["then"] = _generate(job)
    env = {}
    if is_dummy and method != "plain":
        env[calls.FORCE_VARIABLE] = str(job.forced)
    about = "decode without a drafter (with the overlap scheduler: the best plain run)"
    step = _step(
        f"run-{method}",
        "run",
        about if method == "plain" else f"decode with {METHODS[method]}",
        call=call,
        needs=_run_needs(job, method),
        env=env,
    )
    if env:
        step["why"][calls.FORCE_VARIABLE] = (
            f"accepts {job.forced} draft tokens in every round: acceptance length {(job.forced or 0) + 1}, simulated"
        )
    if job.nodes > 1:
        script = ["python3", "-m", "tutorial_lib.cli", "bench", "--profile", "tensorrt_llm", "--experiment", job.name]
        script += ["--nodes", str(job.nodes)]
        line = commands.launch(script, nodes=job.nodes, gpus_per_node=job.facts["tensor_parallel_size"])
        step["launch"] = {"argv": line.argv, "why": line.why}
    return step


def _generate(job: _Job) -> dict[str, Any]:
    params = SamplingParams(
        max_tokens=job.facts["output_tokens"], temperature=0.0, ignore_eos=True if job.forced is not None else False
    )
    sampling = calls.sampling_params(params, job.facts["eos_token_ids"], can_use_text=job.forced is None)
    return {"method": "generate", "kwargs": {"inputs": "{prompts}", "sampling_params": sampling}}


def _bench_step(job: _Job, run: Mapping[str, Any], dataset: str) -> dict[str, Any]:
    method = run["name"].removeprefix("run-")
    options = calls.options_of(job.version, run["call"])
    path = f"{{work_dir}}/{method}.yaml"
    command = commands.bench_pytorch(
        _fp8_folder(job, "target"), dataset, f"{{work_dir}}/bench-{method}.json", options_file=path, tp_size=job.tp,
        limits=job.limits, requests=64, end_id=job.facts["eos_token_ids"][0], kv_fraction=KV_FRACTION,
    )  # fmt: skip
    if job.nodes > 1:
        gpus = job.facts["tensor_parallel_size"]
        line = commands.launch(command.argv, nodes=job.nodes, gpus_per_node=gpus)
        command = Command(line.argv, line.why | command.why)
    return _step(
        f"bench-{method}", "bench", "the same configuration by trtllm-bench", command,
        options_files={path: options}, needs=run["needs"], is_optional=True,
    )  # fmt: skip


def _serve_step(job: _Job, run: Mapping[str, Any]) -> dict[str, Any]:
    method = run["name"].removeprefix("run-")
    path = f"{{work_dir}}/{method}.yaml"
    command = commands.serve(
        _fp8_folder(job, "target"), options_file=path, tp_size=job.tp, limits=job.limits, kv_fraction=KV_FRACTION
    )
    if job.nodes > 1:
        line = commands.launch(command.argv, nodes=job.nodes, gpus_per_node=job.facts["tensor_parallel_size"])
        command = Command(line.argv, line.why | command.why)
    return _step(
        f"serve-{method}", "serve", "the same configuration as a server; it runs until it is stopped", command,
        options_files={path: calls.options_of(job.version, run["call"])}, needs=run["needs"], is_optional=True,
    )  # fmt: skip


_FLOW_STEPS = {"engine": _engine_steps, "engine_api": _engine_api_steps, "pytorch": _pytorch_steps}


# ---- what to know ---------------------------------------------------------------------------------------------------


def _notes(job: _Job, record: contract.Record) -> list[str]:
    notes = []
    if not record.is_exact:
        notes.append(
            f"nothing was recorded of {job.version} itself; names were checked against {record.name}, and on the "
            "machine every flag is looked up in the tool's own --help before the first step"
        )
    if job.flow == "engine":
        notes.append("the engine flow was removed after 1.2; newer releases run the PyTorch flow")
        notes.append(
            "do not add --run_profiling to a run with a drafter: its timed loop calls the target alone, without drafts"
        )
        if job.method == "draft_target" and job.tp > 1:
            notes.append(f"the post's `mpirun -n 8` for TP {job.tp} is a slip, as NVIDIA agreed: it is -n {job.tp}")
    if job.flow == "pytorch":
        notes.append("acceptance length is tokens / (decoding_iter + 1), as trtllm-bench counts it")
        notes.append("speculation pays at few requests; at many, max_concurrency turns it off")
    if job.flow == "pytorch" and job.method == "ngram":
        notes.append("draft lengths of n-gram rounds are not reported: acceptance rates are against max_draft_len")
    if job.forced is not None:
        notes.append("weights are random and acceptance is forced: figures are simulated, the text means nothing")
    return notes


def support_table(version: str | None = None) -> list[dict[str, str]]:
    """Rows for a notebook's table: every method, and what each flow has of it."""
    return support_rows(None if version is None else parse_version(version))


def support_text(version: str | None = None) -> str:
    return format_support(None if version is None else parse_version(version))
