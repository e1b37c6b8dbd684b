"""Which tensors a Llama-family model has, how many parameters that makes, and true shapes to fill with random numbers.

`tensor_shapes` is the one table of names and sizes: a checkpoint on disk is checked against it, parameters are
counted from it, and `dummy:` models are made from it. Shapes of the `llama-*` dummies are those of Meta's published
configurations. A dummy answers "how fast", never "how well": its weights are noise.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from .errors import ModelError

if TYPE_CHECKING:
    import torch

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")
BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1}


COUNTS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_MORE_COUNTS = ("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window")


def check_config(name: str, config: Mapping[str, Any]) -> None:
    """`ModelError` for a value in a config.json that is of another kind than what it is read as. A key that is missing
    or null is told by whoever needs it."""
    for key, value in config.items():
        needed = ""
        if value is None:
            continue
        if key in COUNTS or key in _MORE_COUNTS:
            needed = "" if type(value) is int and 0 < value < 2**31 else "a whole number >= 1"
        elif key in ("rms_norm_eps", "rope_theta"):
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            needed = "" if is_number and 0 < value < math.inf else "a number above 0"
        elif key in ("rope_scaling", "rope_parameters", "quantization_config"):
            needed = "" if isinstance(value, Mapping) else "an object"
        elif key in ("architectures", "layer_types"):
            needed = "" if isinstance(value, list) and all(isinstance(v, str) for v in value) else "a list of names"
        elif key in ("eos_token_id", "bos_token_id"):
            ids = value if isinstance(value, list) else [value]
            needed = "" if all(type(i) is int and i >= 0 for i in ids) else "an id, or a list of ids"
        if needed:
            raise ModelError(f"{key} in config.json of {name} is {value!r}"[:200], needed, "fetch the model again")


def head_dim(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor, in the order of the forward pass; none for a tied lm_head."""
    width, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    size = head_dim(config)
    queries = config["num_attention_heads"] * size
    keys = (config.get("num_key_value_heads") or config["num_attention_heads"]) * size
    kind = config["architectures"][0]
    has_qkv_bias = kind == "Qwen2ForCausalLM" or bool(config.get("attention_bias"))
    has_o_bias = kind != "Qwen2ForCausalLM" and bool(config.get("attention_bias"))
    has_mlp_bias = bool(config.get("mlp_bias"))

    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, width)}

    def linear(name: str, rows: int, columns: int, has_bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)

    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes[f"{at}.input_layernorm.weight"] = (width,)
        linear(f"{at}.self_attn.q_proj", queries, width, has_qkv_bias)
        linear(f"{at}.self_attn.k_proj", keys, width, has_qkv_bias)
        linear(f"{at}.self_attn.v_proj", keys, width, has_qkv_bias)
        if kind == "Qwen3ForCausalLM":
            shapes[f"{at}.self_attn.q_norm.weight"] = (size,)
            shapes[f"{at}.self_attn.k_norm.weight"] = (size,)
        linear(f"{at}.self_attn.o_proj", width, queries, has_o_bias)
        shapes[f"{at}.post_attention_layernorm.weight"] = (width,)
        linear(f"{at}.mlp.gate_proj", inner, width, has_mlp_bias)
        linear(f"{at}.mlp.up_proj", inner, width, has_mlp_bias)
        linear(f"{at}.mlp.down_proj", width, inner, has_mlp_bias)
    shapes["model.norm.weight"] = (width,)
    if not is_tied(config):
        shapes["lm_head.weight"] = (vocab, width)
    return shapes


def is_tied(config: dict[str, Any]) -> bool:
    """Does the head reuse the embedding matrix? Hugging Face's default for these architectures is no."""
    return bool(config.get("tie_word_embeddings", False))


def parameter_count(config: dict[str, Any]) -> int:
    """Parameters of the model; a tied embedding counts once."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def parameter_bytes(config: dict[str, Any], dtype: str | None = None) -> int:
    """Bytes of the weights in `dtype` (the checkpoint's own by default), scales of quantized forms not counted."""
    return parameter_count(config) * BYTES_PER_ELEMENT[dtype or dtype_name(config)]


def dtype_name(config: dict[str, Any]) -> str:
    """The dtype the checkpoint says it is stored in; transformers 4.x and 5.x name the key differently."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


_LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "dtype": "bfloat16",
}
_TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "dtype": "float32",
}


def _llama3(layers: int, hidden: int, heads: int, inner: int, *, factor: float = 8.0, **rest: Any) -> dict[str, Any]:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {
        **_LLAMA3,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": hidden // heads,
        "intermediate_size": inner,
        "rope_scaling": {**scaling, "original_max_position_embeddings": 8192},
        **rest,
    }


DUMMIES: dict[str, dict[str, Any]] = {
    "llama-3.1-405b": _llama3(126, 16384, 128, 53248),
    "llama-3.3-70b": _llama3(80, 8192, 64, 28672),
    "llama-3.1-70b": _llama3(80, 8192, 64, 28672),
    "llama-3.1-8b": _llama3(32, 4096, 32, 14336),
    "llama-3.2-3b": _llama3(28, 3072, 24, 8192, factor=32.0, tie_word_embeddings=True),
    "llama-3.2-1b": _llama3(16, 2048, 32, 8192, factor=32.0, tie_word_embeddings=True),
    "tiny-llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_TINY},
    "tiny-qwen2": {
        **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **_TINY},
        **{"tie_word_embeddings": True, "bos_token_id": None},
    },
    "tiny-qwen3": {
        **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **_TINY},
        **{"head_dim": 32, "bos_token_id": None},
    },
    "tiny-mistral": {
        **{"architectures": ["MistralForCausalLM"], "model_type": "mistral", **_TINY},
        **{"sliding_window": 32},
    },
}
_OVERRIDES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
    "context": "max_position_embeddings",
    "window": "sliding_window",
}


def dummy_config(name: str) -> tuple[dict[str, Any], int]:
    """Config and seed of `dummy:<shape>[?layers=2&hidden=256&seed=1...]`; `ModelError` for an unknown shape or option.

    A smaller `hidden` alone keeps the head size: heads and intermediate size shrink with it.
    """
    shape, _, query = name.removeprefix("dummy:").partition("?")
    if shape not in DUMMIES:
        raise ModelError(f"dummy model {shape!r} is unknown", f"one of {', '.join(DUMMIES)}", "choose one of these")
    given = _parse_overrides(name, query)
    seed = given.pop("seed", 0)
    if "window" in given and "sliding_window" not in DUMMIES[shape]:
        raise ModelError(f"{name} asks for a window", "a shape with sliding-window attention", "use dummy:tiny-mistral")
    config = {**DUMMIES[shape], **_narrowed(DUMMIES[shape], given), **{_OVERRIDES[k]: v for k, v in given.items()}}
    if config["num_attention_heads"] % config["num_key_value_heads"] or config["head_dim"] % 2:
        raise ModelError(
            f"{name} has {config['num_attention_heads']} heads, {config['num_key_value_heads']} key-value heads of "
            f"{config['head_dim']}",
            "heads divisible by key-value heads, an even head_dim",
            "correct heads, kv_heads or head_dim",
        )
    return _with_reachable_specials(name, config), seed


def _parse_overrides(name: str, query: str) -> dict[str, int]:
    given: dict[str, int] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in (*_OVERRIDES, "seed"):
            raise ModelError(f"{name} has an unknown option {key!r}", f"one of {', '.join((*_OVERRIDES, 'seed'))}")
        if not value.isdecimal() or (key != "seed" and int(value) < 1):
            raise ModelError(f"{name} has {key}={value!r}", "a whole number of at least " + str(int(key != "seed")))
        if key in given:
            raise ModelError(f"{name} has {key} twice", "each option once", "drop one")
        if key != "seed" and int(value) > 2**20:  # of layers alone, that many names would take minutes to write down
            raise ModelError(f"{name} has {key}={value}", f"at most {2**20}", "ask for less")
        given[key] = int(value)
    return given


def _narrowed(full: dict[str, Any], given: dict[str, int]) -> dict[str, int]:
    """What follows from `hidden` where it is not given: heads of the same size, and an MLP in proportion."""
    if "hidden" not in given:
        return {}
    size, ratio = given.get("head_dim", full["head_dim"]), given["hidden"] / full["hidden_size"]
    heads = given.get("heads", max(1, given["hidden"] // size))
    groups = [n for n in range(1, min(heads, full["num_key_value_heads"]) + 1) if heads % n == 0]
    inner = max(32, 32 * round(full["intermediate_size"] * ratio / 32))
    return {"num_attention_heads": heads, "num_key_value_heads": groups[-1], "intermediate_size": inner}


def _with_reachable_specials(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Special ids above a cut-down vocabulary move to just above the 256 byte tokens."""
    stops = config["eos_token_id"] if isinstance(config["eos_token_id"], list) else [config["eos_token_id"]]
    if config["vocab_size"] < 257 + len(stops):
        raise ModelError(
            f"{name} has vocab={config['vocab_size']}", f"at least {257 + len(stops)} (bytes and specials)"
        )
    if max(stops) < config["vocab_size"]:
        return config
    return {**config, "bos_token_id": 256, "eos_token_id": list(range(257, 257 + len(stops)))}


class LazyTensors(MutableMapping[str, "torch.Tensor"]):
    """Name -> tensor, each made or read when it is asked for and not kept: a 70B model need not fit twice."""

    def __init__(self, makers: dict[str, Callable[[], torch.Tensor]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._makers[name]()

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        self._makers[name] = lambda: tensor

    def __delitem__(self, name: str) -> None:
        del self._makers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def random_tensors(
    config: dict[str, Any], seed: int, device: str | torch.device, dtype: torch.dtype | None
) -> LazyTensors:
    """Seeded noise in the model's shapes, made on the device. Same seed, device kind and dtype: same numbers.

    Matrices have variance 1/columns, and those that write to the residual stream a further 1/(2 x layers), so that
    activations stay near 1 at any depth. Norms scatter around 1, biases around 0: mixed-up ones are noticed.
    """
    import torch

    chosen = dtype or getattr(torch, dtype_name(config))
    depth = 2 * config["num_hidden_layers"]

    def make(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big")
        generator = torch.Generator(device=device).manual_seed(key)
        noise = torch.randn(shape, generator=generator, device=device, dtype=chosen)
        if len(shape) == 1:
            return noise.mul_(0.1) if name.endswith(".bias") else noise.mul_(0.1).add_(1)
        if name == "model.embed_tokens.weight" and not is_tied(config):
            return noise
        writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        return noise.mul_((shape[1] * (depth if writes_residual else 1)) ** -0.5)

    return LazyTensors(
        {name: lambda n=name, s=shape: make(n, s) for name, shape in tensor_shapes(config).items()}  # type: ignore[misc]
    )
