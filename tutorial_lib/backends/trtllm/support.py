"""Which release of TensorRT-LLM can do which drafting method in which flow: data, and the refusal that names it.

A flow is one way to run a model. `engine` is the posts' own: command lines that quantize, build TensorRT engines and
run `examples/run.py`. `engine_api` is the same engines behind `tensorrt_llm._tensorrt_engine.LLM` (1.0 to 1.2).
`pytorch` is `tensorrt_llm.LLM` from 1.0 on, without engines. The engine flow was removed after 1.2.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from ...config import (
    DecodingBaseConfig,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    LookaheadDecodingConfig,
    MedusaDecodingConfig,
    NGramDecodingConfig,
    SADecodingConfig,
)
from ...errors import OptionError

METHODS = {
    "plain": "no drafter",
    "draft_target": "a smaller draft model",
    "eagle3": "EAGLE-3",
    "eagle": "EAGLE-1/2",
    "medusa": "Medusa",
    "lookahead": "lookahead",
    "ngram": "n-gram / prompt lookup",
    "suffix": "suffix automaton",
    "mtp": "MTP",
}
FLOWS = {
    "pytorch": "PyTorch flow: tensorrt_llm.LLM",
    "engine_api": "engine flow, LLM API: tensorrt_llm._tensorrt_engine.LLM",
    "engine": "engine flow, command line: trtllm-build and examples/run.py",
}
OLDEST = (0, 14)
SCHEDULE_FROM = (1, 2)  # the PyTorch flow: the first release recorded with draft_len_schedule
TREES_FROM = (1, 2)  # the PyTorch flow: the first release recorded with max_total_draft_tokens beside max_draft_len


class Version(NamedTuple):
    """A release: compared by its first two numbers, shown as it was written."""

    major: int
    minor: int
    text: str

    @property
    def release(self) -> tuple[int, int]:
        return self.major, self.minor

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Support:
    """`first` to `last` release (inclusive; last None: still there) that has a method in a flow, and what to know."""

    first: tuple[int, int]
    last: tuple[int, int] | None = None
    note: str = ""

    def covers(self, version: Version) -> bool:
        return version.release >= self.first and (self.last is None or version.release <= self.last)

    def __str__(self) -> str:
        first = ".".join(map(str, self.first))
        return f"{first} on" if self.last is None else f"{first} to {'.'.join(map(str, self.last))}"


_ENGINE_LAST = (1, 2)
SUPPORT: dict[str, dict[str, Support]] = {
    "pytorch": {
        "plain": Support((1, 0)),
        "draft_target": Support((1, 0), note="without the overlap scheduler"),
        "eagle3": Support((1, 0), note="one model (default) or two"),
        "ngram": Support((1, 0), note="without the overlap scheduler"),
        "suffix": Support(
            (1, 3), note="on the GPU; max_matching_ngram_size is the one length compared, -1 the longest"
        ),
        "mtp": Support((1, 0), note="checkpoints with MTP layers (DeepSeek)"),
    },
    "engine_api": {
        "plain": Support((1, 0), _ENGINE_LAST),
        "eagle": Support((1, 0), _ENGINE_LAST),
        "medusa": Support((1, 0), _ENGINE_LAST),
        "lookahead": Support((1, 0), _ENGINE_LAST),
    },
    "engine": {
        "plain": Support((0, 14), _ENGINE_LAST),
        "draft_target": Support((0, 14), _ENGINE_LAST, "draft_tokens_external and run.py"),
        "eagle": Support((0, 15), _ENGINE_LAST, "0.15: EAGLE-1"),
        "medusa": Support((0, 14), _ENGINE_LAST),
        "lookahead": Support((0, 14), _ENGINE_LAST),
        "ngram": Support((0, 15), _ENGINE_LAST, "0.15: --prompt_lookup_config; 1.x: --ngram_config"),
    },
}
_WHY_NOT = {
    ("draft_target", "engine_api"): "its DraftTargetDecodingConfig is for the PyTorch flow only",
    ("eagle", "pytorch"): "an EagleDecodingConfig is read as EAGLE-3 there",
    ("eagle3", "engine_api"): "the engine flow stopped at EAGLE-2",
    ("eagle3", "engine"): "the engine flow stopped at EAGLE-2",
    ("suffix", "engine_api"): "its SADecodingConfig is for the PyTorch flow only",
    ("suffix", "engine"): "its SADecodingConfig is for the PyTorch flow only",
    ("medusa", "pytorch"): "Medusa was not ported to the PyTorch flow",
    ("lookahead", "pytorch"): "lookahead was not ported to the PyTorch flow",
    ("ngram", "engine_api"): "its NGramDecodingConfig is for the PyTorch flow only",
    ("mtp", "engine_api"): "MTP came with the PyTorch flow",
    ("mtp", "engine"): "MTP came with the PyTorch flow",
}


# What the posts wrote, what became of it, and since when: for notebook 01.
REPLACED: tuple[tuple[str, str, str], ...] = (
    ("examples/quantization/quantize.py", "an FP8 checkpoint: published, or by Model Optimizer's hf_ptq.py", "1.0"),
    ("trtllm-build", "nothing: LLM(model=…) loads the checkpoint itself", "1.0; removed after 1.2"),
    ("examples/run.py", "LLM(…).generate(…), trtllm-bench or trtllm-serve", "1.0; removed after 1.2"),
    ("--draft_engine_dir, --draft_target_model_config", "DraftTargetDecodingConfig(speculative_model_dir=…)", "1.0"),
    ("--speculative_decoding_mode, --max_draft_len at build", "max_draft_len of the *DecodingConfig", "1.0"),
    ("--kv_cache_dtype fp8 at quantizing", "KvCacheConfig(dtype='fp8'), or in the checkpoint", "1.0"),
    ("--kv_cache_enable_block_reuse", "KvCacheConfig(enable_block_reuse=True), which is the default", "1.0"),
    ("--kv_cache_free_gpu_memory_fraction, one share per engine", "one budget: free_gpu_memory_fraction", "1.0"),
    ("--tp_size, --workers and mpirun -n", "tensor_parallel_size=N", "1.0"),
    ("mpirun -n 8 for TP 4 (in the post)", "a slip: as many processes as GPUs, -n 4", "0.14"),
    ("--prompt_lookup_config", "--ngram_config of run.py, NGramDecodingConfig of LLM", "1.0"),
    (
        "--medusa_choices, --lookahead_config, --eagle_choices",
        "EAGLE-3 (Medusa and lookahead have no PyTorch form)",
        "1.3",
    ),
    ("examples/llama/convert_checkpoint.py", "examples/models/core/llama/convert_checkpoint.py", "0.19"),
    ("tensorrt_llm.hlapi", "tensorrt_llm.llmapi", "0.15"),
    ("several nodes: not in that flow", "srun … trtllm-llmapi-launch python3 script.py", "1.0"),
)


def replaced_rows() -> list[dict[str, str]]:
    """`REPLACED` as rows of a table."""
    return [{"in the posts": then, "today": now, "since": since} for then, now, since in REPLACED]


def parse_version(text: str) -> Version:
    """`"1.2.1"`, `"0.15.0"`, `"1.3.0rc13"` as a `Version`; `OptionError` for anything else or older than 0.14."""
    match = re.fullmatch(r"v?(\d+)\.(\d+)(?:[.\w+-]*)", text.strip())
    if match is None:
        raise OptionError(f"TensorRT-LLM version {text!r} is not a version", "such as 0.15.0 or 1.2.1")
    version = Version(int(match[1]), int(match[2]), text.strip().removeprefix("v"))
    if version.release < OLDEST:
        raise OptionError(f"TensorRT-LLM {version} is too old", "0.14 or newer", "take 0.15.0 for the posts' flow")
    return version


def is_supported(method: str, version: Version, flow: str) -> bool:
    entry = SUPPORT[flow].get(method)
    return entry is not None and entry.covers(version)


def choose_flow(version: Version, method: str, flow: str | None = None) -> str:
    """The flow that runs `method` on `version`: the one asked for, else the first of `FLOWS` that can.

    Raises `OptionError` that says why not, where the method can be had, and what this release can.
    """
    _known(method, METHODS, "method")
    if flow is not None:
        _known(flow, FLOWS, "flow")
        if not is_supported(method, version, flow):
            raise _refusal(method, version, flow)
        return flow
    for candidate in FLOWS:
        if is_supported(method, version, candidate):
            return candidate
    raise _refusal(method, version, None)


def method_of(config: DecodingBaseConfig | None, flow: str | None = None) -> str:
    """The method that a configuration asks for. `EagleDecodingConfig` is EAGLE-3 except in the engine flows."""
    if config is None:
        return "plain"
    if isinstance(config, EagleDecodingConfig):
        return "eagle" if flow in ("engine", "engine_api") else "eagle3"
    names = {
        DraftTargetDecodingConfig: "draft_target",
        NGramDecodingConfig: "ngram",
        LookaheadDecodingConfig: "lookahead",
        MedusaDecodingConfig: "medusa",
        SADecodingConfig: "suffix",
    }
    for kind, name in names.items():
        if isinstance(config, kind):
            return name
    raise OptionError(
        f"{type(config).__name__} has no counterpart in TensorRT-LLM",
        f"one of {', '.join(kind.__name__ for kind in (*names, EagleDecodingConfig))}",
        "use the torch backend for it",
    )


def refuse_own_options(config: DecodingBaseConfig | None, version: Version, flow: str) -> None:
    """`OptionError` for an option of a drafting method that TensorRT-LLM has not, or not in this release and flow, with
    what it can do instead."""
    if config is None:
        return
    name = type(config).__name__
    if getattr(config, "confidence_threshold", None) is not None:
        instead = "draft_len_schedule sets K by batch size" if version.release >= (1, 2) else "K is fixed"
        raise OptionError(
            f"TensorRT-LLM {version} cannot honour {name}(confidence_threshold=…), an option of this workbook",
            f"None: it always drafts max_draft_len tokens ({instead})",
            "leave it out, or use backend='torch'",
        )
    if config.draft_len_schedule is not None and (flow != "pytorch" or version.release < SCHEDULE_FROM):
        raise OptionError(
            f"TensorRT-LLM {version} cannot honour {name}(draft_len_schedule=…) in flow {flow!r}",
            "the PyTorch flow of {}.{} or newer".format(*SCHEDULE_FROM),
            "leave it out",
        )
    if not isinstance(config, EagleDecodingConfig):
        return
    if flow == "pytorch" and version.release < TREES_FROM:
        asked = "use_dynamic_tree" if config.use_dynamic_tree else "eagle_choices" if config.eagle_choices else ""
        can = "a chain: trees in the PyTorch flow came with {}.{}".format(*TREES_FROM)
    else:
        asked = "use_dynamic_tree" if config.use_dynamic_tree and flow != "pytorch" else ""
        can = "a fixed tree (eagle_choices): that is how this workbook runs EAGLE in the engine flow"
    if asked:
        raise OptionError(
            f"TensorRT-LLM {version} cannot honour {name}({asked}=…) in flow {flow!r}", can, "leave it out"
        )


def support_rows(version: Version | None = None) -> list[dict[str, str]]:
    """One row per method: what each flow has of it, over all releases or in `version`."""
    rows = []
    for method, title in METHODS.items():
        row = {"method": title}
        for flow in FLOWS:
            entry = SUPPORT[flow].get(method)
            if entry is None or (version is not None and not entry.covers(version)):
                row[flow] = "no"
            else:
                row[flow] = "yes" if version is not None else f"{entry}"
                row[flow] += f" ({entry.note})" if entry.note else ""
        rows.append(row)
    return rows


def format_support(version: Version | None = None) -> str:
    """The table of `support_rows` as text, for a terminal."""
    rows = support_rows(version)
    columns = ["method", *FLOWS]
    widths = {c: max(len(c), *(len(row[c]) for row in rows)) for c in columns}
    lines = ["  ".join(c.ljust(widths[c]) for c in columns), "  ".join("-" * widths[c] for c in columns)]
    lines += ["  ".join(row[c].ljust(widths[c]) for c in columns) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def what_it_can(version: Version) -> str:
    """The table for one release in one line."""
    parts = []
    for flow in FLOWS:
        can = [method for method in METHODS if is_supported(method, version, flow)]
        if can:
            parts.append(f"{flow}: {', '.join(can)}")
    return "; ".join(parts) or "nothing"


def _refusal(method: str, version: Version, flow: str | None) -> OptionError:
    where = f" in flow {flow!r}" if flow else ""
    why = _WHY_NOT.get((method, flow or ""), "")
    if flow and not why and SUPPORT[flow].get(method):
        why = f"this flow has it in {SUPPORT[flow][method]}"
    can = [f"{f} ({SUPPORT[f][method]})" for f in FLOWS if method in SUPPORT[f]]
    return OptionError(
        f"TensorRT-LLM {version} cannot run {METHODS[method]} ({method}){where}" + (f": {why}" if why else ""),
        f"a flow and release that has it: {' or '.join(can)}",
        f"choose one of these, or what {version} can: {what_it_can(version)}",
    )


def _known(name: str, table: dict[str, str], what: str) -> None:
    if name not in table:
        raise OptionError(f"{what} {name!r} is unknown", f"one of {', '.join(table)}")
