"""`workbook compare` and `workbook compare-records`: engines side by side, and runs of two days side by side.

Functions only: `cli.py` makes commands of them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import OptionError

FILLER_TOKENS = 128  # of the one prompt for random weights, as in the experiments on a GPU
JsonFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Also write a JSON document; - is stdout.")
]


def compare(
    backends: Annotated[
        str, typer.Option(metavar="B,…", help="Two or more of torch, transformers, vllm, tensorrt_llm.")
    ],
    target: Annotated[str, typer.Option(help="A checkpoint.")] = "embedded:target",
    drafter: Annotated[str | None, typer.Option(help="As for generate. Without it: plain decoding only.")] = None,
    max_draft_len: Annotated[int | None, typer.Option(help="K, draft tokens per round; default 4.")] = None,
    draft_lens: Annotated[
        str | None, typer.Option("--sweep", metavar="K,…", help="Run the drafter at each K; tells each engine's best.")
    ] = None,
    ngram_size: Annotated[int | None, typer.Option(metavar="N", help="ngram: longest n-gram; default 3.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Spec-Bench JSON lines; default: one of each kind.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most output tokens.")] = 64,
    temperature: Annotated[float, typer.Option(help="0: greedy, and texts are compared.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampled texts.")] = 0,
    repeats: Annotated[int, typer.Option(help="Timed repeats, in turns.")] = 3,
    dtype: Annotated[str, typer.Option(help="auto: bfloat16 on a GPU, float32 on a CPU, for all.")] = "auto",
    device: Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu, cuda.")] = "auto",
    tensor_parallel_size: Annotated[int, typer.Option(help="GPUs that share the target.")] = 1,
    acceptance_length: Annotated[
        float | None, typer.Option(metavar="A", help="Force it, where an engine can; texts then mean nothing.")
    ] = None,
    acceptance_probability: Annotated[
        float | None, typer.Option(metavar="P", help="Force as much as if each draft token were right so often.")
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(metavar="P", help="What the machine costs an hour: adds a price per token.")
    ] = None,
    one_at_a_time: Annotated[
        bool, typer.Option("--one-at-a-time", help="Load engine after engine, where they do not fit together.")
    ] = False,
    nodes: Annotated[int | None, typer.Option(help="With --dry-run: machines that vLLM serves from.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what vLLM is called with and its launch lines; run nothing.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Several engines over the same prompts, in turns. Exit code 1 unless at least two of them ran."""
    from . import cli
    from .bench import energy, methods, peers
    from .drafter_options import DrafterOptions

    names = [name.strip() for name in backends.split(",") if name.strip()]
    peers.check_names(names)
    options = None if drafter is None else DrafterOptions(drafter, max_draft_len, ngram_size=ngram_size)
    if options is None:
        of_drafter = {"--max-draft-len": max_draft_len, "--ngram-size": ngram_size, "--sweep": draft_lens}
        forced = {"--acceptance-length": acceptance_length, "--acceptance-probability": acceptance_probability}
        cli._refuse_given(of_drafter | forced, "without --drafter")
    if draft_lens is not None:
        cli._refuse_given({"--max-draft-len": max_draft_len}, "with --sweep")
    asked = peers.Asked(
        target, options, dtype, device, max_tokens, temperature, seed, tensor_parallel_size, acceptance_length,
        draft_lens=cli._listed("--sweep", draft_lens, int) or (), acceptance_probability=acceptance_probability,
    )  # fmt: skip
    peers.check_sweep(asked)
    _ = asked.params  # refuses a temperature or a limit that makes no sense
    cli.check_json_file(json_file)
    out = sys.stderr if json_file == "-" else sys.stdout
    if dry_run:
        cli._refuse_given({"--sweep": draft_lens}, "with --dry-run")
        _dry_run(names, asked, nodes, json_file)
        return
    cli._refuse_given({"--nodes": nodes}, "without --dry-run")
    more: dict[str, Any] = {}
    if prompts is not None:
        from .bench.prompts import load_prompts

        more = {"prompts": load_prompts(prompts), "prompt_set": prompts.stem}
    elif target.startswith("dummy:"):  # its tokens are bytes: the bundled prompts would be long, and say nothing to it
        from .bench.gpu_forced import filler_prompt
        from .models import load_tokenizer, resolve

        more = {"prompts": [filler_prompt(load_tokenizer(resolve(target)), FILLER_TOKENS)], "prompt_set": "filler"}
    if json_file not in (None, "-"):
        more["keep"] = lambda so_far: methods.write(so_far, json_file)
    document = peers.compare_backends(
        names, asked, repeats=cli._at_least_one("--repeats", repeats), command=cli._command(),
        say=lambda line: cli._say(line), price_per_hour=price_per_hour,
        one_at_a_time=one_at_a_time, **more,
    )  # fmt: skip
    from .show.tables import Table

    print(cli.printable(repr(Table(peers.describe(document["summary"])))), file=out)
    if best := document["summary"].get("best"):
        print(cli.printable(repr(Table(peers.describe_best(best, document["summary"]["reference"])))), file=out)
    for line in energy.describe(_by_name(document["runs"])):
        cli._say(line, out)
    if document["summary"]["is_simulated"]:
        print("simulated: acceptance was forced or weights are random; texts mean nothing", file=out)
    if json_file == "-":
        cli.write_json(json_file, document)
    elif json_file is not None:
        methods.write(document, json_file)
    raise typer.Exit(0 if len(document["summary"]["ran"]) > 1 else 1)


def _by_name(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    def name(run: dict[str, Any]) -> str:
        return f"{run['backend']} {run['method']}" + (f" K={run['max_draft_len']}" if run["max_draft_len"] else "")

    return {name(run): run for run in runs}


def _dry_run(names: list[str], asked: Any, nodes: int | None, json_file: str | None) -> None:
    """vLLM's engine arguments, and with --nodes the lines that launch it over so many machines through Ray."""
    from . import cli
    from .backends import vllm_calls
    from .config import SimulatedAcceptance
    from .drafter_options import decoding_config

    if "vllm" not in names:
        raise OptionError("--dry-run without vllm in --backends", "vllm", "its launch is what is printed")
    config = None if asked.drafter is None else decoding_config(asked.drafter)
    drafter = getattr(config, "speculative_model_dir", None)
    simulated = asked.forced_length(asked.drafter)
    model, model_config = _place_of(asked.target)
    arguments = vllm_calls.engine_args(
        model,
        config=model_config,
        speculative=config,
        drafter=None if drafter is None else _place_of(str(drafter))[0],
        dtype=asked.dtype,
        simulated=None if simulated is None else SimulatedAcceptance(acceptance_length=simulated),
        tensor_parallel_size=asked.tensor_parallel_size,
        is_dummy=asked.target.startswith("dummy:"),
    )
    lines = [] if nodes is None else vllm_calls.ray_launch(
        arguments, nodes=nodes, gpus_per_node=asked.tensor_parallel_size
    )  # fmt: skip
    document = {"kind": "plan", "follows": f"vllm {vllm_calls.FOLLOWS}", "EngineArgs": arguments, "launch": lines}
    if json_file != "-":
        print(f"vllm.EngineArgs (as of {vllm_calls.FOLLOWS}):")
        for name, value in arguments.items():
            print(f"  {name} = {value!r}")
        for line in lines:
            print(line)
    if json_file is not None:
        cli.write_json(json_file, document)


def _place_of(name: str) -> tuple[str, dict[str, Any]]:
    """A model as vLLM is told of it, and its configuration: a folder, or the name of what nobody fetched yet."""
    from . import cli
    from .models import resolve

    if not name.startswith(("embedded:", "dummy:")) and not Path(name).expanduser().is_dir():
        return name, {"dtype": "auto"}
    checkpoint = resolve(name, say=cli._say)
    return str(checkpoint.folder or name), checkpoint.config


def compare_records(
    before: Annotated[Path, typer.Argument(metavar="A", help="A file of records, or a folder of such files.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Likewise: what A is compared with.")],
    json_file: JsonFile = None,
) -> None:
    """What changed between two sets of records, run by run and figure by figure, and whether it is beyond noise."""
    from . import cli
    from .bench import compare_records as comparing
    from .bench.record_files import records_of

    cli.check_json_file(json_file)
    document = comparing.compare_records(records_of(before), records_of(after))
    document |= {"before": before.name, "after": after.name}
    for line in comparing.describe(document):
        cli._say(line, sys.stderr if json_file == "-" else sys.stdout)
    if json_file is not None:
        cli.write_json(json_file, document)
