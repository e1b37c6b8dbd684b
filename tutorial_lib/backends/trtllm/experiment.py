"""The posts' experiments from start to record: prepare, run without and with the drafter, compare, summarize.

Two 70 GB engines do not fit beside each other, so the runs follow one another instead of taking turns, and later turns
of a prompt (which would hold an earlier answer) are left out: every run decodes after the very same tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...bench.measure import compare
from ...bench.prompts import Prompt, load_prompts, select
from ...bench.summary import describe as describe_summary
from ...bench.summary import summarize
from ...config import DecodingBaseConfig, DraftTargetDecodingConfig, SamplingParams
from ...engine_dir import is_engine_dir
from ...errors import BackendUnavailable, EngineDirError, OptionError
from ...models import Checkpoint, cache_dir, load_tokenizer, parameter_count, resolve
from ...results import Generation
from ..tensorrt_llm import PROBE_LIMIT_S, TensorRTLLMBackend
from . import plan as plans
from .probe import probe
from .shared import refused
from .steps import default_values, fill, run_steps

Say = Callable[[str], None]


class OpenRun:
    """One run of an experiment: what `measure.compare` needs of an `LLM`, over a backend opened with its own flow."""

    def __init__(self, backend: TensorRTLLMBackend) -> None:
        self._backend, self.tokenizer, self.info = backend, backend.tokenizer, backend.info

    def generate(self, inputs: Any, sampling_params: Any = None) -> Any:
        """A list of token ids, or a list of such lists, all with the same parameters."""
        is_single = bool(inputs) and isinstance(inputs[0], int)
        prompts = [inputs] if is_single else inputs
        found = self._backend.generate(prompts, [sampling_params or SamplingParams()] * len(prompts))
        return found[0] if is_single else found

    def time_steps(self, rows: Sequence[int], context: int = 128) -> dict[int, float]:
        raise refused("timing its steps apart", "a round is one step inside the library")

    def time_draft(self, max_draft_len: int, context: int = 128) -> float:
        raise refused("timing its steps apart", "a round is one step inside the library")

    def close(self) -> None:
        self._backend.close()

    def __enter__(self) -> OpenRun:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def run_experiment(
    experiment: str | Mapping[str, Any],
    *,
    version: str | None = None,
    flow: str | None = None,
    method: str = "draft_target",
    nodes: int = 1,
    fp8: bool = True,
    work_dir: str | Path = "runs/tensorrt_llm",
    models_dir: str | Path | None = None,
    values: Mapping[str, str] | None = None,
    prompts: Sequence[Prompt] | None = None,
    prompts_per_category: int = 1,
    repeats: int = 3,
    command: str = "",
    say: Say = print,
) -> dict[str, Any]:
    """What `workbook bench --profile tensorrt_llm --experiment NAME` does: `{"runs": [records], "summary": {…}}`.

    version: must be the installed one; None takes it. nodes: machines that this
    process was launched over (`trtllm-llmapi-launch`). values: folders for a plan's placeholders, beside the default
    ones under `work_dir`. Steps that were finished by an earlier call are not repeated. Raises `WorkbookError`s.
    """
    release = _installed(version)
    made = plans.plan(experiment, release, flow, method=method, nodes=nodes, fp8=fp8)
    folders = default_values(work_dir, models_dir) | dict(values or {})
    say(f"{made['title']}: TensorRT-LLM {release}, flow {made['flow']}")
    run_steps(made, folders, kinds=("fetch", "quantize", "build"), say=say)
    if made["flow"] == "engine":
        os.environ["TENSORRT_LLM_REPO"] = folders["trtllm_repo"]
    chosen = select(load_prompts(), prompts_per_category) if prompts is None else list(prompts)
    chosen = [replace(prompt, turns=prompt.turns[:1]) for prompt in chosen]
    params = SamplingParams(max_tokens=made["facts"]["output_tokens"])
    records: dict[str, dict[str, Any]] = {}
    generations: dict[str, Sequence[Mapping[str, Generation]]] = {}
    for name, options in plans.runs(experiment, release, made["flow"], method=method, nodes=nodes, fp8=fp8).items():
        say(f"loading {name}")
        with open_run(options, folders, flow=made["flow"], say=say) as llm:
            session = compare(
                {name: llm}, chosen, params, repeats=repeats, experiment=made["experiment"], profile="tensorrt_llm",
                command=command, say=say,
            )  # fmt: skip
        records |= session.records
        generations |= session.generations
        records[name]["tensorrt_llm"] = _facts_of(made)
    return {"runs": list(records.values()), "summary": _summary(made, records, generations, method, say)}


def build_engine(
    checkpoint: str | Path,
    output_dir: str | Path | None = None,
    *,
    dtype: str = "auto",
    max_batch_size: int = 1,
    max_seq_len: int | None = None,
    max_draft_len: int = 10,
    overwrite: bool = False,
    say: Say = print,
) -> Path:
    """`tutorial_lib.build(..., backend="tensorrt_llm")`: an engine directory of the engine flow (0.14 to 1.2).

    max_draft_len: what it can verify from a draft model or a look-up; 0 builds it for plain decoding. dtype: "auto"
    and "fp8" quantize, "float16" does not. Without `output_dir` it goes to the cache and is used again.
    """
    if dtype not in ("auto", "fp8", "float16"):
        raise OptionError(f"dtype is {dtype!r}", "auto, fp8 or float16 for TensorRT-LLM", "leave it out")
    release, target = _installed(None), resolve(str(checkpoint), say=say)
    if target.folder is None:
        raise OptionError(f"{checkpoint} has no weights to build an engine of", "a folder or a Hub id")
    length = max_seq_len or min(2048, int(target.config.get("max_position_embeddings", 2048)))
    facts = describe(
        target, target, tokenizer=load_tokenizer(target), version=release, max_draft_len=max_draft_len or 1,
        max_prompt_len=length - length // 2, max_tokens=length // 2,
    ) | {"max_batch_size": max_batch_size}  # fmt: skip
    made = plans.plan(facts, release, "engine", fp8=dtype != "float16")
    name = "build-target" if max_draft_len else "build-plain"
    wanted = ("fetch-examples", "quantize-target", "convert-target", name)
    made["steps"] = [step for step in made["steps"] if step["name"] in wanted]
    short = f"{target.fingerprint()[:12]}-{dtype}"
    work_dir = cache_dir() / "tensorrt_llm" / f"{release}-{short}"
    build = made["steps"][-1]
    planned = build["produces"][0]
    output = str(
        Path(output_dir).expanduser().resolve() if output_dir else work_dir / f"engine-{max_draft_len}-{length}"
    )
    build["argv"] = [output if word == planned else word for word in build["argv"]]
    build["produces"] = [output]
    if is_engine_dir(output) and not overwrite and output_dir is not None:
        raise EngineDirError(f"{output} exists already", "a free path", "choose another, or say overwrite=True")
    run_steps(made, default_values(work_dir), kinds=("fetch", "quantize", "build"), say=say)
    return Path(output)


def open_run(options: Mapping[str, Any], values: Mapping[str, str], *, flow: str | None = None, say: Say) -> OpenRun:
    """One run of `plan.runs`, its placeholders filled in."""
    config = options["speculative_config"]
    folder = getattr(config, "speculative_model_dir", None)
    if folder is not None:
        config = _with_folder(config, fill(str(folder), values))
    filled = {**options, "model": fill(options["model"], values), "speculative_config": config}
    return OpenRun(TensorRTLLMBackend(**filled, flow=flow, say=say))


def _with_folder(config: DecodingBaseConfig, folder: str) -> DecodingBaseConfig:
    if isinstance(config, DraftTargetDecodingConfig):  # its two names for the folder must agree
        return DraftTargetDecodingConfig(max_draft_len=config.max_draft_len, speculative_model_dir=folder)
    return replace(config, speculative_model_dir=folder)  # type: ignore[call-arg]


def _installed(asked: str | None) -> str:
    found = probe(PROBE_LIMIT_S)
    if found.version is None:
        raise BackendUnavailable(
            f"TensorRT-LLM is not usable here: {found.reason}", "", f"{found.remedy}; --dry-run shows what would run"
        )
    if asked not in (None, found.version):
        raise OptionError(
            f"TensorRT-LLM {asked} was asked for and {found.version} is installed",
            "the installed one, or --dry-run",
            "leave the version out",
        )
    return found.version


def _facts_of(made: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("tensorrt_llm_version", "flow", "tensor_parallel_size", "checked_against")
    return {key: made[key] for key in keys}


def _summary(
    made: Mapping[str, Any],
    records: Mapping[str, dict[str, Any]],
    generations: Mapping[str, Sequence[Mapping[str, Generation]]],
    method: str,
    say: Say,
) -> dict[str, Any]:
    if method == "plain":
        return {"plain_tok_s": records["plain"]["figures"]["output_tok_s"], "notes": list(made["notes"])}
    unknown = {
        "speedup": None,
        "round_ms": None,
        "by_category": dict.fromkeys(records[method]["by_category"]),
    }
    summary = summarize(records, generations, [method], {method: unknown})
    summary["notes"] += made["notes"]
    summary["notes"].append("no prediction: the library does not time its steps apart")
    post = made["facts"].get("measured_by_the_post")
    if post is not None and method == "draft_target":
        summary["measured_by_the_post"] = {**post, "source": made["source"]}
    for line in describe_summary(summary):
        say(line)
    return summary


def describe(
    target: Checkpoint,
    drafter: Checkpoint | None,
    *,
    tokenizer: Any,
    version: str,
    max_draft_len: int = 4,
    max_prompt_len: int = 512,
    max_tokens: int = 256,
    output_tokens: int = 128,
    tensor_parallel_size: int = 1,
) -> dict[str, Any]:
    """Checkpoints of one's own in the form of an experiment, for `plan` and `run_experiment`."""
    own_eos = tokenizer.eos_token_id
    eos = sorted(target.eos_token_ids(), key=lambda token: (token != own_eos, token))
    facts: dict[str, Any] = {
        "title": f"{target.name} with {drafter.name if drafter else 'no draft model'}",
        "source": "this workbook",
        "tensorrt_llm": version,
        "target": _describe_model(target),
        "eos_token_ids": eos,
        "tensor_parallel_size": tensor_parallel_size,
        "drafter_tensor_parallel_size": 1,
        "max_draft_len": max_draft_len,
        "calib_size": 512,
        "max_batch_size": 1,
        "max_prompt_len": max_prompt_len,
        "max_tokens": max_tokens,
        "output_tokens": output_tokens,
    }
    if drafter is not None:
        facts["drafter"] = _describe_model(drafter)
    return facts


def _describe_model(checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.config
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    ties = 1 if config.get("tie_word_embeddings") else 2
    found = {
        "name": checkpoint.name,
        "parameters": parameter_count(config),
        "embedding_parameters": ties * config["vocab_size"] * config["hidden_size"],
        "kv_bytes_per_token_fp8": 2 * config["num_hidden_layers"] * heads * size,
    }
    return found if checkpoint.folder is None else {**found, "folder": str(checkpoint.folder)}
