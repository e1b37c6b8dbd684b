"""`workbook`: the commands, each a thin layer over the package.

Results go to stdout, progress to stderr. A mistake that the user can mend is one line, `error: found; needed; do
this`, and exit code 2; so is what the file system refuses (a full disk, a name too long, a folder of others). Ctrl-C
ends with 130. Anything else that escapes is a defect of ours and keeps its traceback.
Options are checked before a model is loaded. Text that a model wrote cannot steer the terminal: see `printable`.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import sys
import threading
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import cli_compare, cli_schedule
from .errors import OptionError, PromptError, WorkbookError

if TYPE_CHECKING:
    from .config import Profile
    from .drafter_options import DrafterOptions
    from .results import Generation

app = typer.Typer(
    name="workbook",
    help="Speculative decoding as a workbook: build engines, run them with and without a drafter, measure, report.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# The base of what typer raises for a wrong command line: click's own class, or typer's copy of it in newer releases.
_CommandLineError: type[Any] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

_REFUSED = {  # what a file system refuses for reasons of the user's machine, and what helps
    errno.ENOSPC: "free space on that disk",
    errno.EDQUOT: "room in your quota on that disk",
    errno.EACCES: "a place that you may read and write",
    errno.EPERM: "a place that you may read and write",
    errno.EROFS: "a place that can be written",
    errno.ENAMETOOLONG: "a shorter name",
    errno.ELOOP: "a link that leads somewhere",
    errno.EMFILE: "a higher limit of open files (ulimit -n)",
}
JsonFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Also write a JSON document; - is stdout.")
]
ProfileName = Annotated[str, typer.Option(help="How much to run: cpu, h200, tensorrt_llm, replay.")]
Dtype = Annotated[str, typer.Option(help="CPU: float32 (auto), bfloat16, int8. GPU: bfloat16 (auto), fp8.")]
Device = Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu, cuda.")]
Kernel = Annotated[
    str, typer.Option(help="GPU: auto (the faster, as measured at the build), stream (the whole-step kernel), triton.")
]


def main(argv: Sequence[str] | None = None) -> None:
    """The console script. Always ends the process, with 0, 1 (it did not work out), 2 (a mistake), 130 (Ctrl-C) or 128
    and the number of the signal that ended it."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its warnings would stand beside our one line
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:  # nohup has it ignored, and so it stays
                signal.signal(number, _end)
    sys.exit(_run(argv))


def _end(number: int, frame: Any) -> None:
    """A command that is told to end (by a time limit, a container, a closed terminal) puts away what is half done, as
    after Ctrl-C; told again, it ends at once."""
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)


def _run(argv: Sequence[str] | None) -> int:
    try:
        os.getcwd()
    except FileNotFoundError:
        return _fail("the folder that this was started in is gone; needed: one that exists; do this: cd to another")
    try:
        code = app(args=None if argv is None else list(argv), prog_name="workbook", standalone_mode=False)
        sys.stdout.flush()
        if code == 130:  # newer typer turns Ctrl-C into this exit code without a word
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except WorkbookError as error:
        return _fail(str(error))
    except _CommandLineError as error:
        return _fail_on_command_line(error)
    except (KeyboardInterrupt, typer.Abort):
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `workbook ... | head`: nobody reads on, and Python's own flush at exit would complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        if error.filename is None and error.errno == errno.ENOSPC:  # stdout itself, which Python flushes at exit again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        place = "writing" if error.filename is None else str(error.filename)[:200]
        return _fail(f"{place}: {error.strerror}; needed: {_REFUSED[error.errno]}")
    except FloatingPointError as error:
        return _fail(f"{error}; needed: sound weights; do this: fetch the model again and build it anew")


def _fail(message: str) -> int:
    print(f"error: {printable(' '.join(message.splitlines()))}", file=sys.stderr)
    return 2


def _fail_on_command_line(error: Any) -> int:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "workbook"
    if context is not None and type(error).__name__ == "NoArgsIsHelpError":
        print(context.get_help())
        return 2
    return _fail(f"{error.format_message().rstrip('.')}; do this: {command} --help")


# ---- the machine and its models -------------------------------------------------------------------------------------


@app.command()
def doctor() -> None:
    """Say what this machine can do, and what to do about what it cannot. Exit code 1 if `make run` cannot work."""
    from . import doctor as examiner

    findings = examiner.diagnose()
    print("workbook doctor: what this machine can do\n")
    print(printable(examiner.report(findings)))
    raise typer.Exit(examiner.exit_code(findings))


@app.command()
def fetch(
    names: Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...", help="Default: embedded:target.")] = None,
) -> None:
    """Fetch models into the cache, so that later runs need no network. Sizes are said before any download."""
    from .models import resolve

    for name in names or ["embedded:target"]:
        checkpoint = resolve(name, say=_say)
        print(f"{name} is ready" + (f" in {checkpoint.folder}" if checkpoint.folder else ": it needs no files"))


@app.command()
def build(
    checkpoint: Annotated[str, typer.Argument(help="A folder, a Hub id, embedded:target, embedded:draft, dummy:NAME.")],
    backend: Annotated[str, typer.Option(help="torch, or tensorrt_llm for its engine flow.")] = "torch",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: in the cache, used again if there.")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_batch_size: Annotated[int, typer.Option(help="Most requests at once.")] = 8,
    max_seq_len: Annotated[
        int | None, typer.Option(help="Longest prompt + output; default: 2048 or the model's.")
    ] = None,
    max_draft_len: Annotated[int, typer.Option(help="Most draft tokens per round.")] = 16,
    weight_scales: Annotated[
        str | None, typer.Option(help="fp8: per_channel (the default) or per_tensor.", show_default=False)
    ] = None,
    activation_scales: Annotated[
        str | None, typer.Option(help="fp8: calibrated (the default) or dynamic.", show_default=False)
    ] = None,
    fp8_head: Annotated[bool, typer.Option("--fp8-head", help="fp8: the output head too.")] = False,
    kernel: Kernel = "auto",
    calib_size: Annotated[
        int | None, typer.Option(metavar="N", help="fp8: bundled prompts to calibrate on; default 64.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an engine directory that is there.")] = False,
) -> None:
    """Compile a checkpoint into an engine directory."""
    from . import api
    from .config import Fp8Config
    from .engine_dir import MANIFEST

    asked: dict[str, Any] = {
        "weight_scales": weight_scales,
        "activation_scales": activation_scales,
        "quantize_head": fp8_head or None,
        "calib_size": calib_size,
    }
    asked = {name: value for name, value in asked.items() if value is not None}

    path = api.build(
        checkpoint,
        out,
        backend=backend,
        dtype=dtype,
        device=device,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        max_draft_len=max_draft_len,
        fp8=Fp8Config(**asked) if asked else None,
        kernel=kernel,
        overwrite=overwrite,
        say=_say,
    )
    manifest = json.loads((path / MANIFEST).read_text("utf-8"))
    size_mb = sum(entry["bytes"] for entry in manifest["files"].values()) / 1e6
    seconds = manifest["build"].get("seconds", 0.0)
    print(f"{path} ({manifest['dtype']}, {manifest['arch']}, {size_mb:.1f} MB, built in {seconds:.1f} s)")


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="A shape such as llama-3.3-70b, a folder, an engine directory.")],
    gpu: Annotated[
        str, typer.Option(help="A100-40GB, A100-80GB, L4, L40S, RTX-4090, H100-PCIe, H100, H200, B200.")
    ] = "H200",
    gpus: Annotated[int, typer.Option(help="GPUs that share the model.")] = 1,
    batch: Annotated[int, typer.Option(help="Requests at once.")] = 1,
    input_len: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 1024,
    output_len: Annotated[int, typer.Option(help="Tokens of an output.")] = 256,
    dtype: Annotated[str, typer.Option(help="The weights: bfloat16, fp8, int8, float32.")] = "bfloat16",
    kv_dtype: Annotated[str, typer.Option(help="The KV cache: auto, bfloat16, fp8.")] = "auto",
    drafter: Annotated[str | None, typer.Option(help="A draft model that shares the memory.")] = None,
    max_draft_len: Annotated[int, typer.Option(help="K, draft tokens per round.")] = 0,
    tokens_per_block: Annotated[int, typer.Option(help="Positions in a block of the cache.")] = 32,
    memory_fraction: Annotated[float, typer.Option(help="Share of the memory beside the weights for the cache.")] = 0.9,
    json_file: JsonFile = None,
) -> None:
    """Say what a model and a batch take of a GPU and how many requests fit. Refuses what cannot fit."""
    from . import plan as planner

    check_json_file(json_file)
    planned = planner.make_plan(
        planner.config_of(model),
        gpu,
        gpus=gpus,
        batch=batch,
        input_len=input_len,
        output_len=output_len,
        dtype=dtype,
        kv_dtype=kv_dtype,
        drafter=None if drafter is None else planner.config_of(drafter),
        max_draft_len=max_draft_len,
        tokens_per_block=tokens_per_block,
        free_gpu_memory_fraction=memory_fraction,
    )
    planner.check(planned)
    for what, value in planner.rows(planned):
        print(f"{what:<40} {value}", file=sys.stderr if json_file == "-" else sys.stdout)
    if json_file is not None:
        from .results import without_folders

        names = {name: what and without_folders([what]) for name, what in (("model", model), ("drafter", drafter))}
        write_json(json_file, {"kind": "plan", **names, **planned.to_dict()})


# ---- generate -------------------------------------------------------------------------------------------------------


@app.command()
def generate(
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What to ask.")],
    target: Annotated[str, typer.Option(help="A checkpoint or an engine directory.")] = "embedded:target",
    drafter: Annotated[
        str | None,
        typer.Option(
            help="ngram, suffix, lookahead, layer-skip, medusa, eagle3, embedded:draft, embedded:medusa, "
            "embedded:eagle3; or a checkpoint or engine directory. Without it: plain decoding."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most output tokens.")] = 64,
    max_draft_len: Annotated[int | None, typer.Option(help="K, draft tokens per round; default 4.")] = None,
    confidence_threshold: Annotated[
        float | None,
        typer.Option(metavar="P", help="End a draft at the first token that the drafter gives less than this."),
    ] = None,
    ngram_size: Annotated[
        int | None, typer.Option(metavar="N", help="ngram: longest n-gram, default 3. suffix: default -1, any.")
    ] = None,
    lookahead: Annotated[
        str | None, typer.Option(metavar="W,N,G", help="lookahead: window, n-gram size, verification set; 4,3,4.")
    ] = None,
    skip_layers: Annotated[
        str | None, typer.Option(metavar="I,J,…", help="layer-skip: layers left out; default: every second one.")
    ] = None,
    tree: Annotated[
        str | None,
        typer.Option(
            metavar="TREE", help="medusa, eagle3: ranks, 0/1/0.0 for [[0], [1], [0, 0]]. eagle3: dynamic:TOPK,TOTAL."
        ),
    ] = None,
    settings: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A drafter with its options, as workbook tune --out wrote it.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 or left out: greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep this many of the likeliest tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    backend: Annotated[str, typer.Option(help="torch, transformers, tensorrt_llm or vllm.")] = "torch",
    dtype: Dtype = "auto",
    device: Device = "auto",
    tensor_parallel_size: Annotated[
        int, typer.Option(metavar="N", help="Processes (CPU) or GPUs that share the target, each with a slice of it.")
    ] = 1,
    kernel: Kernel = "auto",
    metrics_port: Annotated[
        int | None, typer.Option(metavar="P", help="Meanwhile answer Prometheus on this port of 127.0.0.1; 0: any.")
    ] = None,
    json_file: JsonFile = None,
    raw: Annotated[bool, typer.Option("--raw", help="Send the prompt as it is, without the chat template.")] = False,
) -> None:
    """Answer a prompt, with or without a drafter. The text comes as it is made; the last line is a summary."""
    from .config import SamplingParams
    from .drafter_options import DrafterOptions, decoding_config

    _check_prompt(prompt)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    asked = DrafterOptions(drafter, max_draft_len, confidence_threshold, ngram_size, lookahead, skip_layers, tree)
    if settings is not None:
        asked = _tuned(settings, target, asked)
    speculative = decoding_config(asked)
    if speculative is None and max_draft_len is not None:
        _say("note: --max-draft-len has no effect without --drafter: this is plain decoding")
    check_json_file(json_file)

    from .api import LLM
    from .bench import metrics

    options: dict[str, Any] = {"backend": backend, "speculative_config": speculative, "dtype": dtype, "device": device}
    if kernel != "auto":
        options["kernel"] = kernel
    if metrics_port is not None:
        options["metrics_port"] = metrics_port
    with LLM(target, **options, tensor_parallel_size=tensor_parallel_size, say=_say) as llm:
        if metrics_port is not None:
            _say(f"metrics: {llm.metrics_url}")
        inputs = prompt if raw else _with_chat_template(prompt, llm.tokenizer)
        out = sys.stderr if json_file == "-" else sys.stdout
        generation = stream_text(llm.generate_async(inputs, params, streaming=True), out)
        figures = metrics.figures([generation], is_speculative=speculative is not None)
        print(summary_line(generation, figures), file=out)
        if json_file is not None:
            write_json(json_file, _generation_document(prompt, generation, figures, llm.info, seed))


def _tuned(settings: Path, target: str, given: DrafterOptions | None = None) -> DrafterOptions:
    """The options in a settings file; nothing of them may be given beside it."""
    from .bench.settings import read_settings
    from .drafter_options import DrafterOptions

    if given not in (None, DrafterOptions()):
        raise OptionError("--settings and an option of the drafter are both given", "one of them", "leave one out")
    found = read_settings(settings, target)
    _say(f"settings: {found.found.get('label', 'a drafter')}, tuned on {found.found.get('machine', 'some machine')}")
    return found.options


def _check_prompt(prompt: str) -> None:
    if not prompt.strip():
        raise PromptError("the prompt is empty", "some text", 'write for example --prompt "What is a bird?"')
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise PromptError("the prompt is not valid UTF-8", "UTF-8 text", "check the terminal's encoding") from None


def _with_chat_template(prompt: str, tokenizer: Any) -> list[int]:
    from .bench.prompts import Prompt, render

    return render(Prompt("cli", "chat", (prompt,)), tokenizer)


def stream_text(generations: Iterable[Generation], out: Any) -> Generation:
    """Print what is new in each generation-so-far; returns the last, complete one. Ends with a line break."""
    shown, last = "", None
    for last in generations:
        print(printable(last.text[len(shown) :]), end="", flush=True, file=out)
        shown = last.text
    if last is None:
        raise OptionError("the backend returned no generation", "one", "try --backend torch")
    print(file=out)
    return last


def printable(text: str) -> str:
    """`text` with every character that could steer a terminal (escape sequences, bidirectional overrides, lone
    surrogates) written as its escape; line breaks and tabs stay."""
    return "".join(char.encode("unicode_escape").decode() if _steers(char) else char for char in text)


def _steers(char: str) -> bool:
    if char in "\n\t":
        return False
    return unicodedata.category(char) in ("Cc", "Cs") or "\u202a" <= char <= "\u202e" or "\u2066" <= char <= "\u2069"


def summary_line(generation: Generation, figures: dict[str, Any]) -> str:
    """The last line of `workbook generate`. Every figure by its name; what does not apply says so."""
    length, throughput = figures["acceptance_length"], figures["output_tok_s"]
    parts = [
        f"summary: {figures['output_tokens']} output tokens",
        f"output throughput {throughput:.1f} tokens/s" if throughput is not None else "output throughput unknown",
        f"acceptance length {length:.2f}" if length is not None else "acceptance length: none, no drafts",
        f"TTFT {figures['ttft_s']:.3f} s",
        f"ended by {'its limit' if generation.finish_reason == 'length' else generation.finish_reason}",
    ]
    return " | ".join(parts)


def _generation_document(
    prompt: str, generation: Generation, figures: dict[str, Any], info: dict[str, Any], seed: int | None
) -> dict[str, Any]:
    from .bench.metrics import DEFINITIONS
    from .results import provenance

    return {
        "kind": "generation",
        "prompt": prompt,
        **generation.to_dict(),
        "figures": figures,
        "definitions": {name: DEFINITIONS[name] for name in figures if name in DEFINITIONS},
        "engine": info,
        "provenance": provenance(_command(), seed),
    }


# ---- bench, run, report ---------------------------------------------------------------------------------------------


@app.command()
def bench(
    profile: ProfileName = "cpu",
    json_file: JsonFile = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Spec-Bench JSON lines; default: bundled.")
    ] = None,
    repeats: Annotated[int | None, typer.Option(help="Timed repeats; default: the profile's.")] = None,
    max_draft_len: Annotated[int | None, typer.Option(help="K; default: the profile's.")] = None,
    methods: Annotated[str | None, typer.Option(help="Comma-separated, for example plain,draft_target,ngram.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="CPU: float32, bfloat16, int8. GPU: bfloat16, fp8. Default: the profile's.")
    ] = None,
    kernel: Kernel = "auto",
    settings: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The drafter that workbook tune --out wrote, beside plain.")
    ] = None,
    experiment: Annotated[
        str | None,
        typer.Option(
            help="Profiles cpu and h200: methods, every drafting method in turns; load, many requests at once. "
            "Profile h200: 70b-1b, 70b-3b, 70b-8b, 8b-1b, embedded, number-formats. "
            "Profile tensorrt_llm: llama-3.3-70b, llama-3.1-70b, llama-3.1-405b."
        ),
    ] = None,
    budget_s: Annotated[
        float | None, typer.Option("--budget-s", metavar="S", help="Leave out parts of the experiment that end later.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Profile tensorrt_llm: print every command and call, run nothing.")
    ] = False,
    tensorrt_llm_version: Annotated[
        str | None, typer.Option(metavar="V", help="For --dry-run: 0.14.0, 0.15.0, 1.2.1, …; default: the installed.")
    ] = None,
    flow: Annotated[str | None, typer.Option(help="TensorRT-LLM's: engine, engine_api or pytorch.")] = None,
    nodes: Annotated[
        int | None, typer.Option(help="TensorRT-LLM's: machines that this command was launched over; default 1.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="TensorRT-LLM's: draft_target (default), ngram, lookahead, medusa, eagle, eagle3."),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Above 0 texts are sampled and not compared.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most output tokens; default: the profile's.")] = None,
    rules: Annotated[
        str | None, typer.Option(help="spec-bench: also scored by that benchmark's rules, over all prompts of FILE.")
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(metavar="P", help="What the machine costs an hour: adds a price per token.")
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(metavar="N,…", help="load: clients that each wait for their answer; Poisson: at most.")
    ] = None,
    arrival: Annotated[str | None, typer.Option(help="load: closed (default) or poisson.")] = None,
    rate: Annotated[str | None, typer.Option(metavar="R,…", help="load, poisson: requests per second.")] = None,
    target: Annotated[str | None, typer.Option(help="load: default the profile's.")] = None,
    drafter: Annotated[str | None, typer.Option(help="load: default the profile's.")] = None,
    acceptance_length: Annotated[
        float | None, typer.Option(metavar="A", help="load, on a GPU: force it; with dummy: targets default 2.44.")
    ] = None,
    input_len: Annotated[int | None, typer.Option(metavar="N", help="load: tokens of every prompt.")] = None,
    output_len: Annotated[int | None, typer.Option(metavar="N", help="load: mean tokens of an output.")] = None,
    kv_tokens: Annotated[int | None, typer.Option(metavar="N", help="load: room of the KV cache.")] = None,
    draft_len_schedule: Annotated[
        str | None, typer.Option(metavar="N:K,…", help="load: K from so many requests on, 1:4,4:2,8:0.")
    ] = None,
    beside: Annotated[
        str | None, typer.Option("--backends", metavar="torch,vllm", help="load: engines that get the same requests.")
    ] = None,
) -> None:
    """Measure plain and speculative decoding side by side; or an experiment, whose last line is a JSON document."""
    from . import config
    from .engine.stream.choice import check_kernel

    chosen = config.profile(profile)
    options: dict[str, Any] = {}
    of_trtllm: dict[str, Any] = {"--dry-run": dry_run or None, "--tensorrt-llm-version": tensorrt_llm_version}
    of_trtllm |= {"--flow": flow, "--method": method, "--nodes": nodes}
    of_workload = {"--temperature": temperature, "--max-tokens": max_tokens, "--rules": rules}
    of_workload |= {"--price-per-hour": price_per_hour, "--dtype": dtype}
    given = {"--prompts": prompts, "--max-draft-len": max_draft_len, "--methods": methods, **of_workload}
    of_load = {
        "--concurrency": concurrency, "--arrival": arrival, "--rate": rate, "--target": target, "--drafter": drafter,
        "--acceptance-length": acceptance_length, "--input-len": input_len, "--output-len": output_len,
        "--kv-tokens": kv_tokens, "--draft-len-schedule": draft_len_schedule,
        "--backends": beside,
    }  # fmt: skip
    if experiment is not None:
        _refuse_given({"--settings": settings}, "with --experiment")
    if experiment != "load":
        _refuse_given(of_load, "without --experiment load")
    if kernel != "auto":
        check_kernel(kernel)
        if chosen.backend != "torch" or chosen.device != "cuda":
            _refuse_given({"--kernel": kernel}, f"with --profile {chosen.name}: it chooses between kernels of a GPU")
        chosen = replace(chosen, kernel=kernel)
    if experiment is not None and chosen.backend == "tensorrt_llm":
        _refuse_given(given | {"--budget-s": budget_s}, "with an experiment of TensorRT-LLM")
        _bench_trtllm(experiment, json_file, repeats, dry_run, tensorrt_llm_version, flow, method, nodes or 1)
        return
    _refuse_given(of_trtllm, "without --profile tensorrt_llm and --experiment")
    if experiment == "load":
        _refuse_given({"--prompts": prompts, "--repeats": repeats, **of_workload}, "with --experiment load")
        asked = {name.removeprefix("--").replace("-", "_"): value for name, value in of_load.items()}
        _bench_load(chosen, asked | {"methods": methods, "max_draft_len": max_draft_len}, json_file, budget_s)
        return
    if experiment is not None and experiment != "methods":
        _refuse_given(given | {"--repeats": repeats}, "with --experiment")
        _bench_experiment(chosen, experiment, json_file, budget_s)
        return
    _refuse_given({"--budget-s": budget_s}, "without an experiment that has parts")
    if max_draft_len is not None:
        options["max_draft_len"] = _at_least_one("--max-draft-len", max_draft_len)
    if repeats is not None:
        options["repeats"] = _at_least_one("--repeats", repeats)
    if methods is not None:
        options["methods"] = [name.strip() for name in methods.split(",")]
    check_json_file(json_file)
    if settings is not None:
        _refuse_given({"--methods": methods, "--max-draft-len": max_draft_len}, "with --settings")
        from .bench.tune import bench_options

        options |= bench_options(_tuned(settings, chosen.target), chosen)
    if max_tokens is not None:
        chosen = replace(chosen, max_tokens=_at_least_one("--max-tokens", max_tokens))
    if dtype is not None:
        chosen = replace(chosen, dtype=dtype)
    workload = {"temperature": temperature, "rules": rules, "price_per_hour": price_per_hour}
    options |= {name: value for name, value in workload.items() if value is not None}
    if prompts is not None:
        from .bench.prompts import load_prompts

        options |= {"prompts": load_prompts(prompts), "prompt_set": prompts.stem}
    if experiment is not None:
        _bench_methods(chosen, options, json_file)
        return
    chosen = replace(chosen, max_draft_len=options.pop("max_draft_len", chosen.max_draft_len))
    from .bench import measure

    out = sys.stderr if json_file == "-" else sys.stdout
    document = measure.bench(chosen, **options, command=_command(), say=lambda line: _say(line, out))
    if json_file is not None:
        write_json(json_file, document)


def _refuse_given(options: dict[str, Any], where: str) -> None:
    """No option is dropped silently: `OptionError` for the first that was given where it means nothing."""
    if named := [name for name, value in options.items() if value is not None]:
        raise OptionError(f"{named[0]} has no effect {where}", "only options that have one", "leave it out")


def _bench_trtllm(
    experiment: str,
    json_file: str | None,
    repeats: int | None,
    dry_run: bool,
    version: str | None,
    flow: str | None,
    method: str | None,
    nodes: int,
) -> None:
    """One of the posts' experiments on TensorRT-LLM: as a plan that runs nothing, or for real."""
    check_json_file(json_file)
    if dry_run:
        _refuse_given({"--repeats": repeats}, "with --dry-run")
        from .backends.trtllm.plan import format_plan, plan_cli

        document = plan_cli(experiment, version, flow, method, nodes)
        if json_file != "-":
            print(format_plan(document))
    else:
        from .backends.trtllm.experiment import run_experiment

        out = sys.stderr if json_file == "-" else sys.stdout
        document = run_experiment(
            experiment,
            version=version,
            flow=flow,
            method=method or "draft_target",
            nodes=nodes,
            repeats=3 if repeats is None else _at_least_one("--repeats", repeats),
            command=_command(),
            say=lambda line: _say(line, out),
        )
    if json_file is not None:
        write_json(json_file, document)


def _bench_methods(profile: Profile, options: dict[str, Any], json_file: str | None) -> None:
    """Every drafting method side by side. The last line of stdout is the summary as JSON, or with `--json -` the whole
    document; FILE holds a record a line if it ends in .jsonl."""
    from .bench import methods

    out = sys.stderr if json_file == "-" else sys.stdout
    document = methods.bench_methods(profile, **options, command=_command(), say=lambda line: _say(line, out))
    if json_file not in (None, "-"):
        methods.write(document, json_file)
    shown = document if json_file == "-" else {key: document[key] for key in ("experiment", "profile", "summary")}
    print(json.dumps(shown, allow_nan=False))


def _bench_load(profile: Profile, asked: dict[str, Any], json_file: str | None, budget_s: float | None) -> None:
    """Plain and speculative decoding, and static batching, under one load. Files and stdout as `_bench_methods`."""
    from .bench import load_run
    from .bench.methods import write

    for name, kind in (("concurrency", int), ("rate", float), ("methods", str), ("backends", str)):
        asked[name] = _listed(f"--{name}", asked[name], kind)
    asked["rates"] = asked.pop("rate")
    asked["draft_len_schedule"] = _schedule(asked["draft_len_schedule"])
    settings = load_run.settings_for(profile, **asked)
    check_json_file(json_file)
    out = sys.stderr if json_file == "-" else sys.stdout
    options: dict[str, Any] = {"budget_s": budget_s, "command": _command(), "say": lambda line: _say(line, out)}
    if json_file not in (None, "-"):
        options["keep"] = lambda so_far: write(so_far, json_file)
    document = load_run.bench_load(profile, settings, **options)
    if json_file not in (None, "-"):
        write(document, json_file)
    shown = document if json_file == "-" else {key: document[key] for key in ("experiment", "profile", "summary")}
    print(json.dumps(shown, allow_nan=False))


def _listed(option: str, text: str | None, kind: type[int] | type[float] | type[str]) -> tuple[Any, ...] | None:
    if text is None:
        return None
    try:
        return tuple(kind(part.strip()) for part in text.split(","))
    except ValueError:
        raise OptionError(f"{option} is {text!r}", "numbers, commas between them", f"write {option} 1,2,4") from None


def _schedule(text: str | None) -> dict[int, int] | None:
    if text is None:
        return None
    try:
        pairs = [(int(size), int(k)) for size, k in (part.split(":") for part in text.split(","))]
    except ValueError:
        raise OptionError(
            f"--draft-len-schedule is {text!r}", "pairs of requests and K", "write for example 1:4,4:2,8:0"
        ) from None
    if len(dict(pairs)) < len(pairs):
        raise OptionError(f"--draft-len-schedule is {text!r}", "every number of requests once", "drop one of the two")
    return dict(pairs)


def _bench_experiment(profile: Profile, experiment: str, json_file: str | None, budget_s: float | None) -> None:
    """An experiment on one GPU. FILE is written part by part (a record a line if it ends in .jsonl); the last line of
    stdout is the summary as JSON, or with `--json -` the whole document. Exit code 1 if nothing could be measured."""
    if profile.device != "cuda":
        raise OptionError(
            f"profile {profile.name} has no experiments but methods", "profile h200", "add --profile h200"
        )
    if budget_s is not None and not budget_s > 0:
        raise OptionError(f"--budget-s is {budget_s:g}", "seconds above 0")
    check_json_file(json_file)
    from .bench import gpu

    out = sys.stderr if json_file == "-" else sys.stdout
    document = gpu.run_experiment(
        gpu.experiment_named(experiment),
        json_file=json_file,
        budget_s=budget_s,
        profile=profile.name,
        command=_command(),
        kernel=profile.kernel,
        say=lambda line: _say(line, out),
    )
    shown = ("experiment", "profile", "parts", "summary")
    print(json.dumps(document if json_file == "-" else {key: document[key] for key in shown}, allow_nan=False))
    raise typer.Exit(0 if document["runs"] else 1)


@app.command()
def tune(
    target: Annotated[str, typer.Option(help="A checkpoint or an engine directory.")] = "embedded:target",
    drafters: Annotated[
        str,
        typer.Option(
            help="Comma-separated: draft (the embedded target's draft model), eagle3_tree, and what generate --drafter "
            "takes."
        ),
    ] = "draft,ngram,suffix,eagle3",
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Spec-Bench JSON lines; default: bundled.")
    ] = None,
    per_category: Annotated[int, typer.Option(help="Prompts of each category.")] = 1,
    max_tokens: Annotated[int, typer.Option(help="Most output tokens of an answer.")] = 64,
    max_draft_len: Annotated[int, typer.Option(help="The largest K to consider.")] = 8,
    repeats: Annotated[int, typer.Option(help="Timed repeats of the best settings.")] = 3,
    budget_s: Annotated[
        float | None, typer.Option("--budget-s", metavar="S", help="Leave out what does not fit into so many seconds.")
    ] = None,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Run every setting: what would the best three have missed?")
    ] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the choice, for generate --settings and bench --settings.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Find the drafter and the K that gain most here: measure once, predict all, run the best three."""
    from .bench import settings
    from .bench import tune as tuner
    from .bench.prompts import load_prompts, select
    from .config import PROFILES
    from .drafter_options import DrafterOptions

    check_json_file(json_file)
    check_json_file(out, "--out")
    if out == "-":
        raise OptionError("--out is -", "a file name", "use --json - for stdout")
    if budget_s is not None and not budget_s > 0:
        raise OptionError(f"--budget-s is {budget_s:g}", "seconds above 0")
    embedded = PROFILES["cpu"]
    on = replace(
        embedded, name="tune", target=target, drafter=embedded.drafter if target == embedded.target else "",
        dtype=dtype, device=device, max_tokens=_at_least_one("--max-tokens", max_tokens),
    )  # fmt: skip
    if exhaustive:
        _refuse_given({"--budget-s": budget_s}, "with --exhaustive")
    names = [name.strip() for name in drafters.split(",")]
    tuner.settings_asked(names, max_draft_len, on)
    asked = select(load_prompts(prompts) if prompts else load_prompts(), per_category)
    stream = sys.stderr if json_file == "-" else sys.stdout
    document = tuner.tune(
        on, names, asked, max_draft_len=max_draft_len, repeats=_at_least_one("--repeats", repeats), budget_s=budget_s,
        is_exhaustive=exhaustive, prompt_set=prompts.stem if prompts else "bundled", command=_command(),
        say=lambda line: _say(line, stream),
    )  # fmt: skip
    if json_file is not None:
        write_json(json_file, document)
    if out is not None:
        chosen = DrafterOptions(**document["choice"]["options"])
        settings.write_settings(out, chosen, target, settings.config_of_target(target), tuner.found_for_file(document))
        _say(f"settings: {out}", stream)


@app.command()
def run(
    notebooks: Annotated[
        list[str] | None, typer.Argument(metavar="[NOTEBOOK]...", help="Path, name or number; default: all.")
    ] = None,
    profile: ProfileName = "cpu",
    parameter: Annotated[
        list[str] | None, typer.Option("-p", "--parameter", metavar="NAME=VALUE", help="Of a notebook; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: runs/PROFILE.")] = None,
    timeout: Annotated[float | None, typer.Option(metavar="S", help="Seconds that each notebook may take.")] = None,
) -> None:
    """Execute notebooks as a batch and write one offline HTML report. Exit code 1 if any failed."""
    from . import runner

    summary = runner.run_notebooks(
        notebooks or None,
        profile=profile,
        parameters=runner.parse_parameters(parameter or ()),
        out_dir=out if out is not None else Path("runs") / profile,
        timeout_s=runner.NOTEBOOK_TIMEOUT_S if timeout is None else timeout,
        say=lambda line: _say(line, sys.stdout),
    )
    raise typer.Exit(summary.exit_code)


@app.command()
def report(
    runs_dir: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder that `workbook run` wrote; with --out: one of records.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Report the records in DIR as one HTML page.")
    ] = None,
) -> None:
    """Write the HTML report of a finished run again, or with --out one of all records in a folder."""
    if out is not None:
        from .record_report import write_record_report

        check_json_file(str(out), "--out")
        print(f"report: {write_record_report(runs_dir, out)}")
        return
    from . import runner

    if not runs_dir.is_dir():
        raise OptionError(f"{runs_dir} is not a folder", "one that `workbook run` wrote", "correct the path")
    print(f"report: {runner.write_report(runs_dir)}")


# ---- small things ---------------------------------------------------------------------------------------------------


def check_json_file(name: str | None, option: str = "--json") -> None:
    """Refuse, before any work, a `--json` (or another `option`) that could not be written afterwards."""
    if name is None or name == "-":
        return
    path = Path(name)
    if not path.parent.is_dir():
        raise OptionError(f"{option} {name}: there is no folder {path.parent}", "a folder that exists", "make it first")
    if path.exists() and not path.is_file():
        raise OptionError(f"{option} {name} is not a file", "a file name", "choose another, or - for stdout")
    if not os.access(path.parent, os.W_OK):
        raise OptionError(
            f"{option} {name}: {path.parent} cannot be written", "a folder you may write to", "choose one"
        )


def write_json(name: str, document: dict[str, Any]) -> None:
    """Write `document` whole or not at all; "-" is stdout."""
    if name == "-":
        print(json.dumps(document, ensure_ascii=False, allow_nan=False))
        return
    from .results import write_record

    write_record(Path(name), document, append=False)


def _at_least_one(option: str, value: int) -> int:
    if value < 1:
        raise OptionError(f"{option} is {value}", "a whole number >= 1", f"set {option} to at least 1")
    return value


def _command() -> str:
    return shlex.join(["workbook", *sys.argv[1:]])


def _say(line: str, out: Any = None) -> None:
    print(printable(line), file=sys.stderr if out is None else out, flush=True)


# ---- commands that stand in their own module ------------------------------------------------------------------------

app.command("compare")(cli_compare.compare)
app.command("compare-records")(cli_compare.compare_records)
app.command("schedule")(cli_schedule.schedule)


if __name__ == "__main__":
    main()
