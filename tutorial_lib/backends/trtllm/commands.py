"""The command lines of TensorRT-LLM that the workbook uses: one function each, every flag with its reason.

Pure functions of settings; nothing is run here. Paths may be placeholders in braces. What a release calls a thing is
decided here and nowhere else: where the examples lie, and `--prompt_lookup_config` that became `--ngram_config`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...errors import OptionError
from .support import Version

REPOSITORY = "https://github.com/NVIDIA/TensorRT-LLM.git"
MODELOPT_REPOSITORY = "https://github.com/NVIDIA/TensorRT-Model-Optimizer.git"


@dataclass
class Command:
    """An argument list with the reason for every flag in it."""

    argv: list[str]
    why: dict[str, str] = field(default_factory=dict)

    def flag(self, name: str, value: object, because: str) -> Command:
        """Append `name value`; a value True appends the bare switch."""
        self.argv += [name] if value is True else [name, str(value)]
        self.why[name] = because
        return self

    def then(self, *words: str) -> Command:
        """Append words that are no flags."""
        self.argv += words
        return self


@dataclass(frozen=True)
class Limits:
    """What an engine is built for. Both engines of a pair get the same ones."""

    max_batch_size: int = 1
    max_prompt_len: int = 2048
    max_tokens: int = 1024

    @property
    def max_input_len(self) -> int:
        """With a draft model every round hands the whole text so far to both engines as a new prompt."""
        return self.max_prompt_len + self.max_tokens

    @property
    def max_seq_len(self) -> int:
        """run.py asks for input + output, and with a draft model the input already holds the output."""
        return self.max_input_len + self.max_tokens


# ---- drafting arithmetic --------------------------------------------------------------------------------------------


def lookahead_max_draft_len(window: int, ngram: int, verification_set: int) -> int:
    """The `max_draft_len` that a lookahead engine (W, N, G) must be built with; computed, never asked."""
    for name, value, least in (("W", window, 1), ("N", ngram, 1), ("G", verification_set, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise OptionError(f"lookahead {name} is {value!r}", f"a whole number >= {least}")
    return (0 if ngram == 1 else ngram - 2) + (window - 1 + verification_set) * (ngram - 1)


def check_lookahead_request(engine: tuple[int, int, int], request: tuple[int, int, int]) -> None:
    """A request's (w, n, g) may not exceed the engine's (W, N, G); `OptionError` with both."""
    if any(asked > built for asked, built in zip(request, engine, strict=True)):
        raise OptionError(
            f"lookahead (W, N, G) = {request} asked of an engine built for {engine}",
            f"at most {engine}, max_draft_len {lookahead_max_draft_len(*engine)}",
            f"ask for less, or build for max_draft_len {lookahead_max_draft_len(*request)}",
        )


def drafting_tree(depth: int, nodes: int) -> list[list[int]]:
    """The `nodes` likeliest paths of a Medusa or EAGLE tree: entry d of a path is the rank of its guess at depth d.

    A guess of rank r is taken to be right half as often per rank and four in five times as often per level. Every
    prefix of a path is a path, and one path reaches `depth`, as the engine flow demands.
    """
    if depth < 1 or nodes < depth:
        raise OptionError(f"a tree of depth {depth} with {nodes} nodes", "at least one node per level")
    paths = [[0] * level for level in range(1, depth + 1)]
    taken = {tuple(path) for path in paths}
    heap = [(-_chance((1,)), (1,)), *((-_chance((*path, 1)), (*path, 1)) for path in paths[:-1])]
    heapq.heapify(heap)
    while len(paths) < nodes:
        _, path = heapq.heappop(heap)
        if path in taken:
            continue
        taken.add(path)
        paths.append(list(path))
        siblings = [(*path[:-1], path[-1] + 1)] + ([(*path, 0)] if len(path) < depth else [])
        for other in siblings:
            heapq.heappush(heap, (-_chance(other), other))
    return sorted(paths, key=lambda path: (len(path), path))


def _chance(path: Sequence[int]) -> float:
    chance = 1.0
    for level, rank in enumerate(path):
        chance *= 0.8**level * 0.5 ** (rank + 1)
    return chance


# ---- getting things -------------------------------------------------------------------------------------------------


def fetch_examples(version: Version, folder: str) -> Command:
    return (
        Command(["git", "clone"])
        .flag("--depth", 1, "only the files of the release, not their history")
        .flag("--branch", f"v{version}", "quantize.py and run.py are not in the wheel and must match the library")
        .then(REPOSITORY, folder)
    )


def fetch_modelopt(folder: str) -> Command:
    return (
        Command(["git", "clone"])
        .flag("--depth", 1, "only the files, not their history")
        .then(MODELOPT_REPOSITORY, folder)
    )


def fetch_model(name: str, folder: str, version: Version) -> Command:
    tool = "hf" if version.release >= (1, 0) else "huggingface-cli"
    return Command([tool, "download", name]).flag(
        "--local-dir", folder, "a plain folder that every later step can name; meta-llama asks for a login (gated)"
    )


def fetch_configuration(name: str, folder: str) -> Command:
    return (
        Command(["hf", "download", name])
        .flag("--include", "*.json", "configuration and quantization settings, no weights")
        .flag("--local-dir", folder, "a plain folder that every later step can name")
    )


# ---- quantizing and converting --------------------------------------------------------------------------------------


def quantize(
    version: Version, repo: str, model_dir: str, output_dir: str, *, tp_size: int, calib_size: int,
    medusa: tuple[str, int, int] | None = None,
) -> Command:  # fmt: skip
    """`examples/quantization/quantize.py`: FP8 weights and KV scales. medusa: (heads folder, heads, draft tokens)."""
    command = (
        Command(["python3", f"{repo}/examples/quantization/quantize.py"])
        .flag("--model_dir", model_dir, "the Hugging Face checkpoint")
        .flag("--dtype", "float16", "what is not quantized (embedding, head, norms) stays in half precision")
        .flag("--qformat", "fp8", "FP8 weights and activations: half the bytes that a step must read")
        .flag("--kv_cache_dtype", "fp8", "scales for an FP8 KV cache: half the cache, twice the context")
        .flag("--output_dir", output_dir, "a TensorRT-LLM checkpoint, not yet an engine")
        .flag("--calib_size", calib_size, "texts whose activations set the FP8 scales; the posts' number")
        .flag("--tp_size", tp_size, "the weights are split now, once, for that many GPUs")
    )
    if medusa is not None:
        heads_dir, heads, draft_len = medusa
        command.flag("--medusa_model_dir", heads_dir, "the Medusa heads become part of the checkpoint")
        command.flag("--num_medusa_heads", heads, "as many as the heads' checkpoint has")
        command.flag("--max_draft_len", draft_len, "nodes of the tree that is verified per round")
    return command


def convert(version: Version, repo: str, model_dir: str, output_dir: str, *, tp_size: int) -> Command:
    """`convert_checkpoint.py`: half precision instead of FP8, for GPUs before Ada or to see what FP8 gains."""
    folder = "examples/models/core/llama" if version.release >= (0, 19) else "examples/llama"
    return (
        Command(["python3", f"{repo}/{folder}/convert_checkpoint.py"])
        .flag("--model_dir", model_dir, "the Hugging Face checkpoint")
        .flag("--output_dir", output_dir, "a TensorRT-LLM checkpoint, not yet an engine")
        .flag("--dtype", "float16", "half precision for all weights")
        .flag("--tp_size", tp_size, "the weights are split now, once, for that many GPUs")
    )


def convert_eagle(
    version: Version, repo: str, model_dir: str, eagle_dir: str, output_dir: str, *, tp_size: int, depth: int,
    draft_len: int,
) -> Command:  # fmt: skip
    return (
        Command(["python3", f"{repo}/examples/eagle/convert_checkpoint.py"])
        .flag("--model_dir", model_dir, "the target")
        .flag("--eagle_model_dir", eagle_dir, "its EAGLE head: it becomes part of the same checkpoint")
        .flag("--output_dir", output_dir, "a TensorRT-LLM checkpoint that holds both")
        .flag("--dtype", "float16", "the EAGLE converter has no FP8 form")
        .flag("--max_draft_len", draft_len, "nodes of the tree that is verified per round")
        .flag("--num_eagle_layers", depth, "depth of the tree: the most draft tokens one round can accept")
        .flag("--tp_size", tp_size, "the weights are split now, once, for that many GPUs")
    )


def quantize_for_pytorch(modelopt: str, model_dir: str, export_path: str, *, calib_size: int) -> Command:
    """Model Optimizer's `hf_ptq.py`: the PyTorch flow quantizes nothing itself, it takes an FP8 checkpoint."""
    return (
        Command(["python3", f"{modelopt}/examples/llm_ptq/hf_ptq.py"])
        .flag("--pyt_ckpt_path", model_dir, "the Hugging Face checkpoint")
        .flag("--qformat", "fp8", "FP8 weights and activations, as quantize.py did in the old flow")
        .flag("--kv_cache_qformat", "fp8", "scales for an FP8 KV cache")
        .flag("--calib_size", calib_size, "texts whose activations set the FP8 scales; the posts' number")
        .flag("--export_path", export_path, "a Hugging Face folder with hf_quant_config.json, which LLM() reads")
    )


# ---- building -------------------------------------------------------------------------------------------------------


def build(
    checkpoint_dir: str, output_dir: str, limits: Limits, *, tp_size: int, mode: str | None = None,
    max_draft_len: int = 0, fp8: bool = True,
) -> Command:  # fmt: skip
    """`trtllm-build`. mode: `draft_tokens_external`, `medusa`, `eagle`, `lookahead_decoding` or None for plain."""
    command = (
        Command(["trtllm-build"])
        .flag("--checkpoint_dir", checkpoint_dir, "what the quantize or convert step wrote")
        .flag("--output_dir", output_dir, "the engine: config.json and one rank*.engine per GPU")
        .flag("--gemm_plugin", "auto", "half-precision products through the plugin; FP8 ones keep TensorRT's kernels")
        .flag("--use_paged_context_fmha", "enable", "a prompt may begin with cached blocks: needed for block reuse")
    )
    if fp8:
        command.flag("--use_fp8_context_fmha", "enable", "paged context attention over an FP8 cache needs it")
    command.flag("--max_batch_size", limits.max_batch_size, "the posts measure one request at a time")
    command.flag("--max_input_len", limits.max_input_len, "prompt and output: a round's input is the text so far")
    command.flag("--max_seq_len", limits.max_seq_len, "max_input_len and once more the output, as run.py asks")
    command.flag("--max_beam_width", 1, "speculation works with one beam only")
    command.flag("--workers", tp_size, "one builder per GPU")
    if mode is not None:
        command.flag("--speculative_decoding_mode", mode, _MODES[mode])
        command.flag("--max_draft_len", max_draft_len, "the most draft tokens one round may verify: baked in")
    return command


_MODES = {
    "draft_tokens_external": "draft tokens come from outside: a draft model or a look-up",
    "medusa": "the Medusa heads inside the engine propose a tree",
    "eagle": "the EAGLE head inside the engine proposes a tree",
    "lookahead_decoding": "the engine fills a window of guesses beside the text",
}


# ---- running --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """run.py's sampling flags; the defaults are greedy."""

    temperature: float = 1.0
    top_k: int = 1
    top_p: float = 0.0
    random_seed: int | None = None
    repetition_penalty: float | None = None


def run(
    version: Version, repo: str, *, engine_dir: str, tokenizer_dir: str, input_file: str, output_csv: str,
    limits: Limits, output_len: int, end_id: int, tp_size: int, kv_fraction: float, block_reuse: bool,
    sampling: Sampling = Sampling(), windows: Sequence[int] | None = None, kv_tokens: int | None = None,
    drafting: Command | None = None,
) -> Command:  # fmt: skip
    """`examples/run.py` for one prompt. drafting: the flags of one of the functions below."""
    head = ["mpirun", "-n", str(tp_size), "--allow-run-as-root"] if tp_size > 1 else []
    command = Command([*head, "python3", f"{repo}/examples/run.py"])
    if head:
        command.why["-n"] = "one process per GPU of the target"
        command.why["--allow-run-as-root"] = "inside a container everybody is root"
    command.flag("--engine_dir", engine_dir, "the target's engine")
    command.flag("--tokenizer_dir", tokenizer_dir, "the target's own tokenizer")
    command.flag("--input_file", input_file, "token ids, so that the prompt has exactly one BOS and its chat template")
    command.flag("--max_input_length", limits.max_prompt_len, "else run.py cuts prompts to 923 tokens and says nothing")
    command.flag("--max_output_len", output_len, "output tokens")
    command.flag("--end_id", end_id, "the token that ends an answer")
    command.flag("--output_csv", output_csv, "token ids of prompt and answer")
    command.flag("--num_beams", 1, "speculation works with one beam only")
    command.flag("--temperature", sampling.temperature, "1.0 with top_k 1 is greedy; Medusa insists on 1.0")
    command.flag("--top_k", sampling.top_k, "1: always the likeliest token")
    command.flag("--top_p", sampling.top_p, "0: no nucleus filter")
    if sampling.random_seed is not None:
        command.flag("--random_seed", sampling.random_seed, "the request's seed")
    if sampling.repetition_penalty is not None:
        command.flag("--repetition_penalty", sampling.repetition_penalty, "as the request asks")
    command.flag("--kv_cache_free_gpu_memory_fraction", kv_fraction, _fraction_reason(kv_fraction))
    if block_reuse:
        command.flag("--kv_cache_enable_block_reuse", True, "a round finds the text so far in the cache")
    elif version.release >= (1, 0):
        command.flag("--no-kv_cache_enable_block_reuse", True, "reuse is on by default since 1.0")
    if kv_tokens is not None:
        command.flag("--max_tokens_in_paged_kv_cache", kv_tokens, "an upper bound for the cache, in tokens")
    if windows:
        command.argv += ["--max_attention_window_size", *map(str, windows)]
        command.why["--max_attention_window_size"] = "older tokens fall out of the cache (a circular buffer)"
    if drafting is not None:
        command.argv += drafting.argv
        command.why |= drafting.why
    if drafting is None or not drafting.why.keys() & {"--draft_target_model_config", *_LOOKUP_FLAGS}:
        command.flag("--streaming", True, "shows when the first token is there")
        command.flag("--streaming_interval", 1, "every step, so that rounds can be told apart")
    return command


def _fraction_reason(fraction: float) -> str:
    if fraction <= 0.5:
        return "share of the memory left free that each of the two engines takes for its KV cache"
    return "share of the memory left free by the weights that the KV cache takes"


def with_draft_model(
    draft_engine_dir: str, draft_len: int, draft_gpus: Sequence[int], target_gpus: Sequence[int]
) -> Command:
    return (
        Command([])
        .flag("--draft_engine_dir", draft_engine_dir, "the drafter's engine")
        .flag(
            "--draft_target_model_config",
            f"[{draft_len},{_list(draft_gpus)},{_list(target_gpus)},False]",
            "[draft tokens per round, GPUs of the drafter, GPUs of the target, use logits]: a list is as long as that "
            "engine's TP size; False accepts by comparing tokens, True would need --gather_generation_logits twice",
        )
    )


_LOOKUP_FLAGS = ("--prompt_lookup_config", "--ngram_config")


def with_prompt_lookup(version: Version, draft_len: int, ngram_size: int, gpus: Sequence[int]) -> Command:
    flag = _LOOKUP_FLAGS[version.release >= (1, 0)]
    return Command([]).flag(
        flag, f"[{draft_len},{ngram_size},{_list(gpus)}]", "[draft tokens per round, longest n-gram looked up, GPUs]"
    )


def with_medusa(tree: Sequence[Sequence[int]]) -> Command:
    return Command([]).flag("--medusa_choices", _tree(tree), "the paths of the tree: which head guesses which rank")


def with_eagle(tree: Sequence[Sequence[int]]) -> Command:
    return Command([]).flag("--eagle_choices", _tree(tree), "the paths of the tree; as deep as the engine was built")


def with_lookahead(window: int, ngram: int, verification_set: int) -> Command:
    return Command([]).flag(
        "--lookahead_config", f"[{window},{ngram},{verification_set}]", "[window W, n-gram size N, verification set G]"
    )


def _list(numbers: Sequence[int]) -> str:
    return "[" + ",".join(map(str, numbers)) + "]"


def _tree(tree: Sequence[Sequence[int]]) -> str:
    return "[" + ",".join(_list(path) for path in tree) + "]"


# ---- trtllm-bench, trtllm-serve and several nodes ------------------------------------------------------------------


def write_prompt(tokenizer: str, output: str) -> Command:
    return (
        Command(["python3", "-m", "tutorial_lib.backends.trtllm.dataset"])
        .flag("--tokenizer", tokenizer, "prompts are written as token ids, with the chat template and one BOS")
        .flag("--output", output, "run.py reads .csv as token ids: one line, one prompt")
    )


def bench_dataset(tokenizer: str, output: str, output_tokens: int, *, is_old: bool) -> Command:
    """The bundled prompts in the form that trtllm-bench reads: real text, since random tokens flatter speculation."""
    command = (
        Command(["python3", "-m", "tutorial_lib.backends.trtllm.dataset"])
        .flag("--tokenizer", tokenizer, "prompts are written as token ids, with the chat template and one BOS")
        .flag("--output", output, "JSON lines")
        .flag("--output-tokens", output_tokens, "output tokens per request")
    )
    if is_old:
        command.flag("--old-form", True, "before 1.0 trtllm-bench calls token ids `logits`")
    return command


def bench_engine(version: Version, model: str, engine_dir: str, dataset: str, *, requests: int) -> Command:
    """`trtllm-bench latency` on a built engine: the baseline without a drafter, one request at a time."""
    command = Command(["trtllm-bench"]).flag("--model", model, "names the tokenizer")
    if version.release >= (1, 0):
        command.flag("--model_path", model, "where it lies")
    command.argv.append("latency")
    command.flag("--engine_dir", engine_dir, "the engine without a drafter")
    if version.release >= (1, 0):
        command.flag("--backend", "tensorrt", "this is an engine, the default is the PyTorch flow")
    command.flag("--dataset", dataset, "the same prompts as for run.py")
    command.flag("--num_requests", requests, "all of them")
    if version.release > (0, 14):
        command.flag("--warmup", 2, "requests before the clock starts")
    return command


def bench_pytorch(
    model: str, dataset: str, report: str, *, options_file: str | None, tp_size: int, limits: Limits, requests: int,
    end_id: int, kv_fraction: float,
) -> Command:  # fmt: skip
    """`trtllm-bench throughput` at concurrency 1: `latency` reads no options file, so it cannot speculate."""
    command = (
        Command(["trtllm-bench"])
        .flag("--model", model, "names the model and its tokenizer")
        .flag("--model_path", model, "where it lies")
    )
    command.argv.append("throughput")
    command.flag("--backend", "pytorch", "the flow without engines")
    command.flag("--dataset", dataset, "real prompts: random tokens overstate speculation by about a quarter")
    command.flag("--num_requests", requests, "all of them")
    command.flag("--concurrency", 1, "one request at a time, as in the posts")
    command.flag("--max_batch_size", limits.max_batch_size, "nothing is kept for larger batches")
    command.flag("--max_seq_len", limits.max_seq_len, "prompt and output")
    command.flag("--tp", tp_size, "GPUs that share the target")
    command.flag("--kv_cache_free_gpu_mem_fraction", kv_fraction, "as in the Python call")
    command.flag("--warmup", 2, "requests before the clock starts")
    command.flag("--streaming", True, "reports the time to first token")
    command.flag("--eos_id", end_id, "the default -1 would run every answer to its full length")
    command.flag("--report_json", report, "the figures, acceptance length among them")
    if options_file is not None:
        command.flag("--extra_llm_api_options", options_file, "speculation is set here and nowhere else")
    return command


def serve(model: str, *, options_file: str | None, tp_size: int, limits: Limits, kv_fraction: float) -> Command:
    command = (
        Command(["trtllm-serve", model])
        .flag("--backend", "pytorch", "the flow without engines")
        .flag("--tp_size", tp_size, "GPUs that share the target")
        .flag("--max_batch_size", limits.max_batch_size, "requests at once; speculation pays at few")
        .flag("--max_seq_len", limits.max_seq_len, "prompt and output")
        .flag("--kv_cache_free_gpu_memory_fraction", kv_fraction, "as in the Python call")
        .flag("--host", "localhost", "reachable from this machine only")
        .flag("--port", 8000, "an OpenAI-compatible server")
    )
    if options_file is not None:
        command.flag("--extra_llm_api_options", options_file, "speculation is set here and nowhere else")
    return command


def launch(command: Sequence[str], *, nodes: int, gpus_per_node: int) -> Command:
    """`command` over several nodes: Slurm starts one process per GPU, the wrapper makes them one LLM."""
    line = (
        Command(["srun"])
        .flag("-N", nodes, "nodes")
        .flag("--ntasks", nodes * gpus_per_node, "processes in all: must equal TP x PP")
        .flag("--ntasks-per-node", gpus_per_node, "one process per GPU")
        .then("--mpi=pmix", "trtllm-llmapi-launch", *command)
    )
    line.why["--mpi"] = "how the processes find each other"
    return line
