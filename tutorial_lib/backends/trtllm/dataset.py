"""The bundled prompts as token ids: JSON lines for `trtllm-bench --dataset`, one .csv line for `run.py --input_file`.

python3 -m tutorial_lib.backends.trtllm.dataset --tokenizer FOLDER --output prompts.jsonl --output-tokens 256
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...errors import OptionError, WorkbookError


def bench_lines(prompts: Iterable[Sequence[int]], output_tokens: int, *, is_old: bool = False) -> list[str]:
    """One JSON object per prompt, as trtllm-bench reads it. is_old: the key for token ids before 1.0."""
    key = "logits" if is_old else "input_ids"
    return [
        json.dumps({"task_id": number, key: list(ids), "output_tokens": output_tokens})
        for number, ids in enumerate(prompts)
    ]


def prompt_line(ids: Sequence[int]) -> str:
    """One prompt as run.py reads it from a .csv file."""
    return ",".join(map(str, ids)) + "\n"


def first_turns(tokenizer: Any) -> list[list[int]]:
    """The first turn of every bundled prompt, with the chat template and one BOS."""
    from ...bench.prompts import load_prompts, render

    return [render(prompt, tokenizer) for prompt in load_prompts()]


def _tokenizer(name: str) -> Any:
    """Of a folder, whatever its weights are (FP8 ones too, or none yet); of anything else that `resolve` knows."""
    from ...models import Checkpoint, load_tokenizer, resolve

    folder = Path(name)
    return load_tokenizer(Checkpoint(name, folder, {}) if folder.is_dir() else resolve(name))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="dataset", description=__doc__)
    parser.add_argument("--tokenizer", required=True, help="folder or name of the target's checkpoint")
    parser.add_argument("--output", required=True, help="prompts.jsonl, or prompt.csv for a single prompt")
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--old-form", action="store_true", help="for trtllm-bench before 1.0")
    arguments = parser.parse_args(argv)
    if arguments.output_tokens < 1:
        raise OptionError(f"--output-tokens is {arguments.output_tokens}", "a whole number >= 1")
    prompts = first_turns(_tokenizer(arguments.tokenizer))
    output = Path(arguments.output)
    if output.suffix == ".csv":
        text = prompt_line(prompts[0])
    else:
        text = "\n".join(bench_lines(prompts, arguments.output_tokens, is_old=arguments.old_form)) + "\n"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, "utf-8")
    print(f"{output}: {1 if output.suffix == '.csv' else len(prompts)} prompt(s)")


if __name__ == "__main__":
    try:
        main()
    except WorkbookError as error:
        sys.exit(f"error: {error}")
