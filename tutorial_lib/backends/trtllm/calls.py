"""The Python calls of TensorRT-LLM as data: `{"class": name, "kwargs": {…}}`, nested, with a reason per argument.

Pure functions from the workbook's own options. `backends/tensorrt_llm.py` turns the same data into the library's
objects, so what a dry run prints is what a run does. Names are those of the record (`contract.py`); `import` says where
a class comes from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
from .commands import Limits, drafting_tree
from .support import Version

Call = dict[str, Any]
IMPORTS = {
    "LLM": "tensorrt_llm.LLM",
    "TrtLLM": "tensorrt_llm._tensorrt_engine.LLM",
    "SamplingParams": "tensorrt_llm.SamplingParams",
}
FORCE_VARIABLE = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"
_WITHOUT_OVERLAP = (DraftTargetDecodingConfig, NGramDecodingConfig)
DTYPES = ("auto", "float16", "bfloat16", "float32")


def make(name: str, kwargs: Mapping[str, Any]) -> Call:
    """A call of class `name`; arguments that are None are left out."""
    given = {key: value for key, value in kwargs.items() if value is not None}
    return {"class": name, "import": IMPORTS.get(name, f"tensorrt_llm.llmapi.{name}"), "kwargs": given}


# ---- the PyTorch flow -----------------------------------------------------------------------------------------------


def pytorch_llm(
    version: Version,
    model: str,
    *,
    speculative: DecodingBaseConfig | None,
    kv_cache: KvCacheConfig | None,
    dtype: str = "auto",
    max_batch_size: int | None = None,
    max_seq_len: int | None = None,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    is_dummy: bool = False,
    is_drafter_dummy: bool = False,
) -> Call:
    """`tensorrt_llm.LLM(...)`. is_dummy: random weights in the true shapes, only the configuration is read."""
    if dtype not in DTYPES:
        raise OptionError(f"dtype is {dtype!r}", f"one of {', '.join(DTYPES)}", "for FP8 give an FP8 checkpoint")
    return make(
        "LLM",
        {
            "model": str(model),
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": None if pipeline_parallel_size == 1 else pipeline_parallel_size,
            "dtype": None if dtype == "auto" else dtype,
            "max_batch_size": max_batch_size,
            "max_seq_len": max_seq_len,
            "kv_cache_config": kv_cache_config(kv_cache or KvCacheConfig()),
            "speculative_config": drafting_config(version, speculative, is_dummy=is_drafter_dummy),
            "disable_overlap_scheduler": True if isinstance(speculative, _WITHOUT_OVERLAP) else None,
            "load_format": "dummy" if is_dummy else None,
            "skip_tokenizer_init": True if is_dummy else None,
        },
    )


def kv_cache_config(config: KvCacheConfig) -> Call:
    """Every option is written out: the library's own defaults differ from ours (it reuses blocks)."""
    windows = config.max_attention_window
    return make(
        "KvCacheConfig",
        {
            "dtype": config.dtype,
            "enable_block_reuse": config.enable_block_reuse,
            "free_gpu_memory_fraction": config.free_gpu_memory_fraction,
            "tokens_per_block": config.tokens_per_block,
            "max_tokens": config.max_tokens,
            "max_attention_window": None if windows is None else [int(window) for window in windows],
        },
    )


def drafting_config(version: Version, config: DecodingBaseConfig | None, *, is_dummy: bool = False) -> Call | None:
    """The `*DecodingConfig` of the PyTorch flow. The method was checked against the flow before (`support.py`)."""
    if config is None:
        return None
    kwargs: dict[str, Any] = {"max_draft_len": config.max_draft_len}
    if config.draft_len_schedule is not None:
        kwargs["draft_len_schedule"] = dict(config.draft_len_schedule)
    if isinstance(config, NGramDecodingConfig):
        kwargs |= {"max_matching_ngram_size": config.max_matching_ngram_size, "is_use_oldest": config.is_use_oldest}
        kwargs |= {"is_keep_all": True, "is_public_pool": False}  # one request must not learn from another
        return make("NGramDecodingConfig", kwargs)
    if isinstance(config, SADecodingConfig):
        names = ("max_matching_ngram_size", "enable_global_pool", "global_pool_size")
        return make("SADecodingConfig", kwargs | {name: getattr(config, name) for name in names})
    if not isinstance(config, (DraftTargetDecodingConfig, EagleDecodingConfig)):
        raise OptionError(f"{type(config).__name__} is not for the PyTorch flow", "an engine flow for it")
    kwargs["speculative_model_dir"] = str(needs_model(config))
    if is_dummy:
        kwargs["load_format"] = "dummy"
    if isinstance(config, DraftTargetDecodingConfig):
        return make("DraftTargetDecodingConfig", kwargs)
    kwargs["eagle3_one_model"] = config.eagle3_one_model
    if config.eagle_choices is not None:
        kwargs["eagle_choices"] = tree_of(config)
    if config.use_dynamic_tree:
        names = ("use_dynamic_tree", "dynamic_tree_max_topK", "max_total_draft_tokens")
        kwargs |= {name: getattr(config, name) for name in names}
    return make("Eagle3DecodingConfig" if version.release >= (1, 3) else "EagleDecodingConfig", kwargs)


def needs_model(config: Any) -> str:
    if config.speculative_model_dir is None:
        raise OptionError(
            f"{type(config).__name__} has no speculative_model_dir", "the folder of the drafter's weights", "give it"
        )
    return str(config.speculative_model_dir)


# ---- the engine flow's LLM class (1.0 to 1.2) -----------------------------------------------------------------------


def engine_llm(
    model: str,
    *,
    speculative: DecodingBaseConfig | None,
    kv_cache: KvCacheConfig | None,
    limits: Limits,
    is_fp8: bool,
    calib_size: int = 512,
    tensor_parallel_size: int = 1,
    is_dummy: bool = False,
) -> Call:
    """`tensorrt_llm._tensorrt_engine.LLM(...)`: quantizes, builds and loads in one call. FP8 KV comes with FP8 weights,
    so `KvCacheConfig.dtype` stays 'auto' there."""
    cache = kv_cache_config(kv_cache or KvCacheConfig())
    cache["kwargs"]["dtype"] = "auto"
    cache["kwargs"].pop("tokens_per_block", None)
    return make(
        "TrtLLM",
        {
            "model": str(model),
            "tensor_parallel_size": tensor_parallel_size,
            "build_config": make(
                "BuildConfig",
                {
                    "max_batch_size": limits.max_batch_size,
                    "max_input_len": limits.max_input_len,
                    "max_seq_len": limits.max_seq_len,
                },
            ),
            "quant_config": make("QuantConfig", {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"})
            if is_fp8
            else None,
            "calib_config": make("CalibConfig", {"calib_batches": calib_size}) if is_fp8 else None,
            "kv_cache_config": cache,
            "speculative_config": engine_drafting_config(speculative),
            "load_format": "dummy" if is_dummy else None,
            "skip_tokenizer_init": True if is_dummy else None,
        },
    )


def engine_drafting_config(config: DecodingBaseConfig | None) -> Call | None:
    if config is None:
        return None
    if isinstance(config, LookaheadDecodingConfig):
        sizes = ("max_window_size", "max_ngram_size", "max_verification_set_size")
        return make("LookaheadDecodingConfig", {name: getattr(config, name) for name in sizes})
    if isinstance(config, MedusaDecodingConfig):
        tree = tree_of(config)
        return make(
            "MedusaDecodingConfig",
            {
                "speculative_model_dir": needs_model(config),
                "max_draft_len": len(tree),
                "medusa_choices": tree,
                "num_medusa_heads": heads_of(config),
            },
        )
    if isinstance(config, EagleDecodingConfig):
        tree = tree_of(config)
        return make(
            "EagleDecodingConfig",
            {
                "speculative_model_dir": needs_model(config),
                "max_draft_len": len(tree),
                "num_eagle_layers": heads_of(config),
                "eagle_choices": tree,
            },
        )
    raise OptionError(f"{type(config).__name__} is not for the engine flow's LLM class", "lookahead, Medusa or EAGLE")


def heads_of(config: DecodingBaseConfig) -> int:
    """Depth of the tree: Medusa heads or EAGLE layers, by default the most tokens that a round may accept."""
    own = getattr(config, "num_medusa_heads", None) or getattr(config, "num_eagle_layers", None)
    return own or max((len(path) for path in _choices(config) or ()), default=config.max_draft_len)


def most_accepted(config: DecodingBaseConfig | None) -> int:
    """The most draft tokens that one round can accept."""
    if config is None:
        return 0
    if isinstance(config, LookaheadDecodingConfig):
        return max(1, config.max_ngram_size - 1)
    if isinstance(config, MedusaDecodingConfig) or _choices(config):
        return heads_of(config)
    return config.max_draft_len


def tree_of(config: DecodingBaseConfig, nodes: int = 63) -> list[list[int]]:
    """The paths that a Medusa or EAGLE round verifies: the configuration's own, else the likeliest 63."""
    own = _choices(config)
    return [list(path) for path in own] if own else drafting_tree(heads_of(config), nodes)


def _choices(config: DecodingBaseConfig) -> Sequence[Sequence[int]] | None:
    return getattr(config, "medusa_choices", None) or getattr(config, "eagle_choices", None)


# ---- requests -------------------------------------------------------------------------------------------------------


def sampling_params(params: SamplingParams, eos_token_ids: Sequence[int], *, can_use_text: bool = True) -> Call:
    """`SamplingParams(...)`. Every EOS id of the target becomes a stop token: the library honours only one by itself.

    Stop tokens stay in the ids that come back, and text is cut by us, so that ids, log-probabilities and counts agree.
    """
    stops = list(dict.fromkeys([*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos_token_ids)]))
    if params.stop_strings and not can_use_text:
        raise OptionError("stop strings were asked of a run without a tokenizer", "stop_token_ids", "leave stop out")
    is_sampled = not params.is_greedy
    return make(
        "SamplingParams",
        {
            "max_tokens": params.max_tokens,
            "temperature": params.temperature if is_sampled else 0.0,
            "top_k": params.top_k if is_sampled else None,
            "top_p": params.top_p if is_sampled else None,
            "seed": params.seed,
            "stop": list(params.stop_strings) or None,
            "stop_token_ids": stops or None,
            "include_stop_str_in_output": True,
            "ignore_eos": params.ignore_eos,
            "logprobs": params.logprobs,
            "add_special_tokens": False,
            "detokenize": None if can_use_text else False,
        },
    )


# ---- options files and reasons --------------------------------------------------------------------------------------

_DECODING_TYPE = {
    "DraftTargetDecodingConfig": ("DraftTarget", "Draft_Target"),
    "EagleDecodingConfig": ("Eagle", "Eagle"),
    "Eagle3DecodingConfig": ("Eagle3", "Eagle3"),
    "NGramDecodingConfig": ("NGram", "NGram"),
    "SADecodingConfig": ("SA", "SA"),
}
ON_THE_COMMAND_LINE = ("model", "tensor_parallel_size", "max_batch_size", "max_seq_len")


def options_of(version: Version, call: Call) -> dict[str, Any]:
    """What of an LLM call has no flag: the document for `--extra_llm_api_options`."""
    options: dict[str, Any] = {}
    for key, value in call["kwargs"].items():
        if key in ON_THE_COMMAND_LINE:
            continue
        if key == "speculative_config":
            kind = _DECODING_TYPE[value["class"]][version.release >= (1, 3)]
            value = {"decoding_type": kind, **value["kwargs"]}
        elif isinstance(value, dict) and "class" in value:
            value = dict(value["kwargs"])
        options[key] = value
    return options


def options_text(options: Mapping[str, Any]) -> str:
    """As YAML; JSON is YAML, and needs no further library."""
    return json.dumps(options, indent=1) + "\n"


REASONS = {
    "model": "an FP8 checkpoint (hf_quant_config.json inside): LLM() quantizes nothing itself",
    "tensor_parallel_size": "GPUs that share the target",
    "pipeline_parallel_size": "stages of layers, one group of GPUs each",
    "dtype": "type of the weights that are not quantized; in KvCacheConfig, of the cache (fp8: half the bytes)",
    "max_batch_size": "the posts measure one request at a time",
    "max_seq_len": "prompt and output",
    "max_input_len": "longest prompt",
    "kv_cache_config": "the paged KV cache",
    "enable_block_reuse": "prompts that begin alike share cached blocks",
    "free_gpu_memory_fraction": "share of the memory left free by the weights; both models share one budget",
    "tokens_per_block": "tokens per page of the cache",
    "max_tokens": "output tokens; in KvCacheConfig, an upper bound for the cache",
    "max_attention_window": "older tokens fall out of the cache (a circular buffer), cycled over the layers",
    "speculative_config": "the drafting method",
    "max_draft_len": "draft tokens per round (K)",
    "draft_len_schedule": "K from so many active requests on; 0: too many for speculation to pay",
    "speculative_model_dir": "the drafter's own checkpoint",
    "disable_overlap_scheduler": "draft-target and n-gram need the tokens of a round before they draft the next",
    "load_format": "random weights in the true shapes: speed without a checkpoint",
    "skip_tokenizer_init": "token ids in, token ids out: random weights make no text",
    "eagle3_one_model": "drafter and target in one graph; two models can sample",
    "max_matching_ngram_size": "longest n-gram looked up; always set, since the releases' defaults differ (-1: any)",
    "is_use_oldest": "take the first place where the n-gram stood, or the latest",
    "is_keep_all": "remember all continuations of an n-gram",
    "is_public_pool": "off: a request must not draft from another one's text",
    "enable_global_pool": "whether a request may draft from another one's text",
    "global_pool_size": "how many finished requests stay searchable",
    "use_dynamic_tree": "the likeliest nodes of a beam instead of a fixed tree (EAGLE-2)",
    "dynamic_tree_max_topK": "candidates per step of that beam",
    "max_total_draft_tokens": "nodes of the tree that are verified",
    "max_window_size": "lookahead window W",
    "max_ngram_size": "lookahead n-gram size N",
    "max_verification_set_size": "lookahead verification set G",
    "medusa_choices": "the tree of guesses that is verified per round",
    "num_medusa_heads": "Medusa heads of the checkpoint",
    "eagle_choices": "the tree of guesses that is verified per round",
    "num_eagle_layers": "depth of that tree",
    "build_config": "limits of the engine that LLM() builds",
    "quant_config": "FP8 weights and FP8 KV cache, calibrated by LLM() itself",
    "quant_algo": "FP8 weights and activations",
    "kv_cache_quant_algo": "FP8 KV cache; KvCacheConfig.dtype stays 'auto' in this flow",
    "calib_config": "how it calibrates",
    "calib_batches": "texts whose activations set the FP8 scales; the posts' number",
    "temperature": "0: greedy",
    "stop_token_ids": "all of the model's EOS ids: the library honours one by itself",
    "include_stop_str_in_output": "the token that ends an answer counts as output",
    "ignore_eos": "whether EOS ends an answer",
    "add_special_tokens": "the prompt's ids already have their BOS",
    "detokenize": "random weights make no text",
    "inputs": "the prompts as token ids",
    "sampling_params": "how each is decoded",
    "streaming": "shows when each round's tokens are there",
}


def reasons(call: Call) -> dict[str, str]:
    """A reason for every argument of a call, nested ones included."""
    found: dict[str, str] = {}

    def collect(kwargs: Mapping[str, Any]) -> None:
        for key, value in kwargs.items():
            found[key] = REASONS[key]
            if isinstance(value, dict) and "class" in value:
                collect(value["kwargs"])

    collect(call["kwargs"])
    if "then" in call:
        collect(call["then"]["kwargs"])
    return found
