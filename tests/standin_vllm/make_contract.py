"""Reads the names of vLLM's API out of an unpacked wheel: `python make_contract.py FOLDER` writes contract.json.

Only names are kept, and only of what the backend calls. The folder is what `unzip vllm-*.whl` leaves.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

CLASSES = {
    "EngineArgs": "vllm/engine/arg_utils.py",
    "SpeculativeConfig": "vllm/config/speculative.py",
    "SamplingParams": "vllm/sampling_params.py",
    "CompletionOutput": "vllm/outputs.py",
    "SchedulerStats": "vllm/v1/metrics/stats.py",
    "SpecDecodingStats": "vllm/v1/spec_decode/metrics.py",
}
METHODS = {
    "LLMEngine": ("vllm/v1/engine/llm_engine.py", ("add_request", "step", "abort_request", "from_engine_args")),
    "RequestOutput": ("vllm/outputs.py", ("__init__",)),
    "StatLoggerBase": (
        "vllm/v1/metrics/loggers.py",
        ("record", "log", "log_engine_initialized", "record_sleep_state"),
    ),
}


def class_of(root: Path, file: str, name: str) -> ast.ClassDef:
    tree = ast.parse((root / file).read_text("utf-8"))
    return next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)


def fields_of(node: ast.ClassDef) -> list[str]:
    return [b.target.id for b in node.body if isinstance(b, ast.AnnAssign) and isinstance(b.target, ast.Name)]


def arguments_of(node: ast.ClassDef, method: str) -> list[str]:
    found = next(b for b in node.body if isinstance(b, ast.FunctionDef) and b.name == method)
    named = [*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs]
    return [argument.arg for argument in named if argument.arg not in ("self", "cls")]


def main(root: Path) -> None:
    contract = {
        "version": next(root.glob("vllm-*.dist-info")).name.split("-")[1],
        "fields": {name: fields_of(class_of(root, file, name)) for name, file in CLASSES.items()},
        "arguments": {
            name: {method: arguments_of(class_of(root, file, name), method) for method in methods}
            for name, (file, methods) in METHODS.items()
        },
    }
    target = Path(__file__).with_name("contract.json")
    target.write_text(json.dumps(contract, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
