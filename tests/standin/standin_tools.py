"""STAND-INS for the command lines of TensorRT-LLM and its surroundings: recorded flags only, tiny results.

`install(folder)` writes the programs; `STAND_IN_MODEL` is the folder that a download copies, `STAND_IN_GPUS` what
nvidia-smi shows, `STAND_IN_FAIL` a program that ends with code 1 after it began to write.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from tensorrt_llm import RECORD, __version__

from tutorial_lib.backends.trtllm import contract

HERE = Path(__file__).parent
H200 = "NVIDIA H200, 143771, 143000, 9.0"
PROGRAMS = ("trtllm-build", "nvidia-smi", "git", "hf", "huggingface-cli", "mpirun")


def install(folder: Path) -> None:
    """The programs, each a line of shell that calls this module."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PROGRAMS:
        file = folder / name
        file.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m standin_tools {name} "$@"\n')
        file.chmod(0o755)


def parse(tool: str, words: list[str] | None):
    argv = ["python3", tool] if tool.startswith("examples/") else [tool]
    try:
        return contract.check_argv(RECORD, [*argv, *(sys.argv[1:] if words is None else words)])
    except contract.ContractViolation as error:
        sys.exit(f"stand-in: {error}")


def convert(tool: str) -> None:
    """A converter or quantizer: reads the model's config.json, writes a checkpoint folder."""
    if "--help" in sys.argv:
        return show_help(tool)
    options = parse(tool, None)
    source = getattr(options, "model_dir", None) or options.pyt_ckpt_path
    output = Path(getattr(options, "output_dir", None) or options.export_path)
    config = json.loads((Path(source) / "config.json").read_text())
    output.mkdir(parents=True)
    (output / "rank0.safetensors").write_bytes(b"stand-in weights")
    fail_if_told(tool)
    (output / "config.json").write_text(json.dumps(config))
    print(f"stand-in: wrote {output.name}")


def build(words: list[str]) -> None:
    options = parse("trtllm-build", words)
    config = json.loads((Path(options.checkpoint_dir) / "config.json").read_text())
    output = Path(options.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    for rank in range(options.workers):
        (output / f"rank{rank}.engine").write_bytes(b"stand-in engine" * 100)
    fail_if_told("trtllm-build")
    named = {name: value for name, value in vars(options).items() if name.startswith("max_")}
    named["speculative_decoding_mode"] = options.speculative_decoding_mode
    written = {"version": __version__, "pretrained_config": config, "build_config": named}
    (output / "config.json").write_text(json.dumps(written))
    print(f"stand-in: built for {named}")


def fail_if_told(tool: str) -> None:
    if os.environ.get("STAND_IN_FAIL", "") == tool:
        sys.exit(f"stand-in: {tool} was told to fail")


def show_help(tool: str) -> None:
    table = RECORD.tools[tool]
    hidden = os.environ.get("STAND_IN_HIDE_FLAG", "")
    print(" ".join(flag for entry in table for flag in entry["flags"] if flag != hidden))


def main(name: str, words: list[str]) -> None:
    if name == "nvidia-smi":
        shown = os.environ.get("STAND_IN_GPUS", H200)
        if not shown:
            sys.exit(9)
        print(shown.replace(";", "\n"))
    elif name == "git" and "clone" not in words:
        sys.exit("stand-in: git can only clone")  # a record's provenance asks git too: it gets no revision here
    elif name == "git":
        target = Path(words[-1])
        target.mkdir(parents=True)
        shutil.copytree(HERE / "examples", target / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    elif name in ("hf", "huggingface-cli"):
        target = Path(words[words.index("--local-dir") + 1])
        target.mkdir(parents=True, exist_ok=True)
        for file in Path(os.environ["STAND_IN_MODEL"]).iterdir():
            shutil.copy(file, target)
    elif name == "mpirun":
        os.execvp(words[3], words[3:])  # -n N --allow-run-as-root: one process is enough here
    elif "--help" in words:
        show_help(name)
    else:
        build(words)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
