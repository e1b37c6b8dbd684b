"""What the workbook's options are in vLLM's words: engine arguments, speculation, sampling, launch lines. Pure.

Follows vLLM 0.24.0: every name here is a field of its `EngineArgs`, `SpeculativeConfig` or `SamplingParams`, read from
that release (tests/standin_vllm/contract.json). What vLLM cannot honour is refused by name; nothing is dropped.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ..config import (
    DecodingBaseConfig,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    NGramDecodingConfig,
    SamplingParams,
    SimulatedAcceptance,
)
from ..errors import OptionError
from ..shapes import head_dim

FOLLOWS = "0.24.0"
METHODS = (DraftTargetDecodingConfig, NGramDecodingConfig, EagleDecodingConfig)
DTYPES = ("float32", "bfloat16", "float16", "fp8")
BLOCK = 16  # positions in a block of vLLM's cache, unless told otherwise
SPARE_BLOCKS = 8  # per request: draft tokens, and one block that vLLM keeps empty


def engine_args(
    model: str,
    *,
    config: Mapping[str, Any],
    speculative: DecodingBaseConfig | None = None,
    drafter: str | None = None,
    drafter_config: Mapping[str, Any] | None = None,
    simulated: SimulatedAcceptance | None = None,
    kv: KvCacheConfig | None = None,
    dtype: str = "auto",
    max_batch_size: int | None = None,
    max_seq_len: int | None = None,
    tensor_parallel_size: int = 1,
    free_share: float = 1.0,
    is_dummy: bool = False,
) -> dict[str, Any]:
    """Keyword arguments of `vllm.EngineArgs`. model, drafter: folders, with their config.json as a mapping.
    free_share: how much of the GPU's memory is free, 0 to 1.

    Tokens go in and out as ids, so vLLM loads no tokenizer. Its prefix cache is off unless `enable_block_reuse` asks
    for it: repeats of a prompt would otherwise skip their prefill. With both limits given the cache is as large as
    they need, so that several engines fit on one GPU; else it takes `free_gpu_memory_fraction` of what is free.
    """
    refuse_unsupported(speculative, kv, dtype, simulated)
    kv = kv or KvCacheConfig()
    arguments: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": weights_dtype(config, dtype),
        "tensor_parallel_size": tensor_parallel_size,
        "gpu_memory_utilization": round(kv.free_gpu_memory_fraction * free_share, 3),
        "enable_prefix_caching": kv.enable_block_reuse,
        "disable_log_stats": False,
    }
    if dtype == "fp8":
        arguments["quantization"] = "fp8"
    if kv.dtype == "fp8":
        arguments["kv_cache_dtype"] = "fp8"
    if is_dummy:
        arguments["load_format"] = "dummy"
    if "tokens_per_block" in kv.changed_options():
        arguments["block_size"] = kv.tokens_per_block
    if max_batch_size is not None:
        arguments["max_num_seqs"] = max_batch_size
    if max_seq_len is not None:
        arguments["max_model_len"] = max_seq_len
    tokens = kv.max_tokens
    if tokens is None and max_batch_size is not None and max_seq_len is not None:
        tokens = max_batch_size * (max_seq_len + SPARE_BLOCKS * BLOCK)
    if tokens is not None:
        caches = [c for c in (config, drafter_config) if c is not None]
        arguments["kv_cache_memory_bytes"] = cache_bytes(caches, tokens, arguments["dtype"], kv.dtype)
    if speculative is not None:
        arguments["speculative_config"] = speculative_config(speculative, drafter, dtype, simulated)
    return arguments


def speculative_config(
    config: DecodingBaseConfig, drafter: str | None, dtype: str, simulated: SimulatedAcceptance | None = None
) -> dict[str, Any]:
    """What `EngineArgs(speculative_config=…)` takes. drafter: a folder, for methods that have weights."""
    found: dict[str, Any] = {"num_speculative_tokens": config.max_draft_len}
    if isinstance(config, NGramDecodingConfig):
        # Left out, the shortest n-gram would be as long as the longest.
        found |= {"method": "ngram", "prompt_lookup_max": config.max_matching_ngram_size, "prompt_lookup_min": 1}
    elif isinstance(config, EagleDecodingConfig):
        found |= {"method": "eagle3", "model": drafter}
    else:
        found |= {"method": "draft_model", "model": drafter}
        if dtype == "fp8":
            found["quantization"] = "fp8"  # the target's does not reach the draft model
    if simulated is not None:
        found |= {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": simulated.acceptance_length,
        }
    return found


def sampling_params(params: SamplingParams, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """Keyword arguments of `vllm.SamplingParams`, the kind of output aside. vLLM is told every id that ends an answer;
    text, and with it stop strings, are read here, as on every other backend."""
    ends = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(eos_token_ids))
    found: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature or 0.0,
        "top_p": params.top_p or 1.0,
        "top_k": params.top_k or 0,
        "ignore_eos": True,
        "stop_token_ids": sorted(ends),
        "detokenize": False,
    }
    given = {"seed": params.seed, "logprobs": params.logprobs, "repetition_penalty": params.repetition_penalty}
    return found | {name: value for name, value in given.items() if value is not None}


def weights_dtype(config: Mapping[str, Any], dtype: str) -> str:
    """vLLM's `dtype`. Its own "auto" makes float16 of float32 without a word; here it is the checkpoint's own."""
    own = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if dtype == "fp8":
        return "bfloat16" if own == "float32" else own
    return own if dtype == "auto" else dtype


def cache_bytes(configs: Sequence[Mapping[str, Any]], tokens: int, dtype: str, kv_dtype: str) -> int:
    """Bytes of keys and values for `tokens` positions of all models, a quarter more for how vLLM aligns its blocks."""
    size = 1 if kv_dtype == "fp8" else 4 if dtype == "float32" else 2
    per_token = sum(2 * c["num_hidden_layers"] * c["num_key_value_heads"] * head_dim(dict(c)) * size for c in configs)
    return math.ceil(1.25 * per_token * tokens)


# ---- what is refused ------------------------------------------------------------------------------------------------


def refuse_unsupported(
    speculative: DecodingBaseConfig | None,
    kv: KvCacheConfig | None,
    dtype: str,
    simulated: SimulatedAcceptance | None,
) -> None:
    """`OptionError` for the first option that vLLM cannot honour."""
    if dtype not in ("auto", *DTYPES):
        raise _refused(f"dtype={dtype!r}", f"auto or one of {', '.join(DTYPES)}")
    if kv is not None and kv.max_attention_window is not None:
        raise _refused("KvCacheConfig(max_attention_window=…)", "its default: the window is the model's own")
    if simulated is not None and speculative is None:
        raise OptionError("simulated_acceptance without a drafter", "a speculative_config", "give one")
    if speculative is None:
        return
    name = type(speculative).__name__
    if not isinstance(speculative, METHODS):
        raise _refused(name, f"one of {', '.join(m.__name__ for m in METHODS)}")
    if simulated is not None and simulated.acceptance_by_position is not None:
        raise _refused("SimulatedAcceptance(acceptance_by_position=…)", "acceptance_length")
    if simulated is not None and simulated.mean > speculative.max_draft_len + 1:
        raise OptionError(
            f"simulated acceptance length is {simulated.mean:g}",
            f"at most max_draft_len + 1 = {speculative.max_draft_len + 1}",
        )
    needs_default = {
        "draft_len_schedule": None,
        "confidence_threshold": None,
        "is_use_oldest": True,  # its look-up takes the earliest match
        "eagle3_one_model": True,
        "eagle_choices": None,
        "use_dynamic_tree": False,
        "num_eagle_layers": None,
    }
    for option, default in needs_default.items():
        if getattr(speculative, option, default) != default:
            raise _refused(f"{name}({option}=…)", f"{default}: it drafts chains of a fixed length")


def refuse_head(name: str, config: Mapping[str, Any]) -> None:
    """An EAGLE-3 head must bring its own output matrix; those shipped here borrow the target's."""
    if config.get("tie_lm_head_to_target"):
        raise _refused(f"the head {name}", "one with an lm_head of its own: this one borrows the target's rows")


def _refused(option: str, needed: str) -> OptionError:
    return OptionError(f"the vllm backend cannot honour {option}", needed, "leave it out, or choose another backend")


# ---- several machines -----------------------------------------------------------------------------------------------

# A server has a tokenizer, its GPUs to itself, and prints no statistics that anybody here would read.
_NOT_SERVED = (
    "model", "tensor_parallel_size", "gpu_memory_utilization", "kv_cache_memory_bytes", "skip_tokenizer_init",
    "disable_log_stats",
)  # fmt: skip


def ray_launch(arguments: Mapping[str, Any], *, nodes: int, gpus_per_node: int, head: str = "HEAD_NODE") -> list[str]:
    """The lines that serve `arguments` (of `engine_args`) from several machines through Ray, in order, comments
    between them. Without a drafter the layers are split over the machines and every layer over a machine's GPUs; with
    one every layer is split over all GPUs, since drafting does not run over split layers everywhere."""
    if nodes < 2:
        raise OptionError(f"nodes is {nodes}", "at least 2", "one machine needs no launch lines")
    is_speculative = "speculative_config" in arguments
    split = {"tensor_parallel_size": gpus_per_node * (nodes if is_speculative else 1)}
    if not is_speculative:
        split["pipeline_parallel_size"] = nodes
    options = {**split, "distributed_executor_backend": "ray"}
    options |= {name: value for name, value in arguments.items() if name not in _NOT_SERVED}
    words = ["vllm", "serve", str(arguments["model"])]
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return [
        "# on the head machine; the model must lie at the same path on all of them",
        "ray start --head --port=6379",
        f"# on each of the other {nodes - 1}",
        f"ray start --address={head}:6379",
        f"# on the head machine, once `ray status` counts {nodes * gpus_per_node} GPUs",
        shlex.join(words),
    ]
