"""`workbook schedule`: the draft length for every load, from times measured on this machine.

A function only: `cli.py` makes a command of it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import OptionError

if TYPE_CHECKING:
    from .bench.schedule import Schedule

JsonFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Also write a JSON document; - is stdout.")
]


def schedule(
    drafter: Annotated[str, typer.Option(help="As for generate.")] = "embedded:draft",
    target: Annotated[str, typer.Option(help="A checkpoint or an engine directory.")] = "embedded:target",
    max_draft_len: Annotated[int | None, typer.Option(help="The largest K to try; default 4.")] = None,
    batches: Annotated[str, typer.Option(metavar="N,…", help="Numbers of running requests to time.")] = "1,2,4,8",
    acceptance: Annotated[
        float | None, typer.Option(metavar="P", help="Of each draft token; default: measured on bundled prompts.")
    ] = None,
    context: Annotated[int, typer.Option(metavar="N", help="Tokens of the texts that rounds are timed on.")] = 128,
    dtype: Annotated[
        str, typer.Option(help="CPU: float32 (auto), bfloat16, int8. GPU: bfloat16 (auto), fp8.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu, cuda.")] = "auto",
    json_file: JsonFile = None,
) -> None:
    """Time whole rounds by load and K and print the draft_len_schedule of the greatest throughput."""
    from . import cli
    from .bench.schedule import measured
    from .drafter_options import DrafterOptions, decoding_config

    config = decoding_config(DrafterOptions(drafter, max_draft_len))
    sizes = cli._listed("--batches", batches, int)
    if sizes is None or min(sizes) < 1 or 1 not in sizes:
        raise OptionError(f"--batches is {batches!r}", "whole numbers >= 1, and 1 among them", "write --batches 1,2,4")
    if acceptance is not None and not 0 <= acceptance <= 1:
        raise OptionError(f"--acceptance is {acceptance:g}", "a probability from 0 to 1")
    cli._at_least_one("--context", context)
    cli.check_json_file(json_file)
    from .api import LLM

    more = {"max_batch_size": max(sizes)} if max(sizes) > 8 else {}
    with LLM(target, speculative_config=config, dtype=dtype, device=device, say=cli._say, **more) as llm:
        found = measured(llm, batches=sizes, acceptance=acceptance, context=context, say=cli._say)
        info = llm.info
    out = sys.stderr if json_file == "-" else sys.stdout
    for size in sorted(set(sizes)):
        best = next(c for c in found.choices if (c.batch, c.max_draft_len) == (size, found.chosen(size)))
        plain = next(c for c in found.choices if (c.batch, c.max_draft_len) == (size, 0))
        gain = best.output_tok_s / plain.output_tok_s
        print(f"{size} at once: K = {best.max_draft_len}, {gain:.2f}x plain decoding (prefill left out)", file=out)
    if found.max_draft_len:
        print(f"max_draft_len={found.max_draft_len}, draft_len_schedule={found.draft_len_schedule}", file=out)
    else:
        print("drafting pays at no load here: decode plainly", file=out)
    if json_file is not None:
        cli.write_json(json_file, _document(found, info, cli._command()))


def _document(found: Schedule, info: dict[str, Any], command: str) -> dict[str, Any]:
    from .results import provenance

    return {
        "kind": "draft length schedule",
        "draft_len_schedule": {str(size): k for size, k in found.draft_len_schedule.items()},
        "choices": [
            {
                "batch": c.batch,
                "max_draft_len": c.max_draft_len,
                "acceptance_length": c.acceptance_length,
                "round_s": c.round_s,
                "output_tok_s": c.output_tok_s,
            }
            for c in found.choices
        ],
        "engine": info,
        "provenance": provenance(command, None),
    }
