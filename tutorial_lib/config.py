"""What a user may ask for: sampling, drafting method, KV cache, profile. Data only, checked when made.

Names, aliases and defaults follow TensorRT-LLM 1.2 (`SamplingParams`, `*DecodingConfig`, `KvCacheConfig`), so that
a cell written here runs there. Options that no backend of ours honours are not declared: passing one is a
`TypeError` naming it, as it would be there for an unknown one. Which declared option a backend cannot honour is
decided by that backend, by name (`tutorial_lib.api`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from .errors import OptionError

SMALLEST = 2.0**-126  # of float32, at full precision: a smaller temperature or top_p is 0 in it, and 0 / 0 no number
LARGEST_SEED = 2**64 - 1  # a larger one would give the numbers of a smaller one


def _need_int(name: str, value: object, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError(f"{name} is {value!r}", f"a whole number >= {minimum}", f"set {name} to such a number")
    if value < minimum:
        raise OptionError(f"{name} is {value}", f"a whole number >= {minimum}", f"set {name} to at least {minimum}")
    return value


def _need_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise OptionError(f"{name} is {value!r}", "True or False", f"set {name} to one of them")


def _need_list(name: str, value: object, of_what: str) -> Sequence[Any]:
    """`value`, if it is a list or a tuple; a lone number or text is none."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise OptionError(f"{name} is {value!r}", f"a list of {of_what}", f"set {name} to one")
    return value


def _need_float(name: str, value: object, low: float, high: float = math.inf, *, above: bool = False) -> float:
    bounds = f"{'above' if above else 'at least'} {low:g}" + (f" and at most {high:g}" if high < math.inf else "")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise OptionError(f"{name} is {value!r}", f"a finite number {bounds}", f"correct {name}")
    if value < low or (above and value == low) or value > high:
        raise OptionError(f"{name} is {value}", f"a number {bounds}", f"correct {name}")
    return float(value)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is decoded and when it stops.

    `temperature` None or 0 is greedy. `top_k` None or 0 keeps every token; `top_p` None or 1 likewise. `stop` strings
    are cut from the text; the token that completes one is the last of `token_ids`. `logprobs=n` returns for every
    emitted token its raw log-probability (before temperature and filters) and those of the n most likely tokens.
    Without `seed` every call draws anew. Raises `OptionError` for a value out of range.
    """

    max_tokens: int = 32
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        _need_int("max_tokens", self.max_tokens, 1)
        if self.temperature is not None:
            _need_float("temperature", self.temperature, 0)
            if 0 < self.temperature < SMALLEST:
                raise OptionError(f"temperature is {self.temperature}", f"0 (greedy) or at least {SMALLEST:.3g}")
        if self.top_k is not None:
            _need_int("top_k", self.top_k, 0)
        if self.top_p is not None:
            _need_float("top_p", self.top_p, SMALLEST, 1)
        if self.seed is not None and _need_int("seed", self.seed, 0) > LARGEST_SEED:
            raise OptionError(f"seed is {self.seed}", f"at most {LARGEST_SEED}", "choose a smaller seed")
        if self.logprobs is not None:
            _need_int("logprobs", self.logprobs, 0)
        if self.repetition_penalty is not None:
            _need_float("repetition_penalty", self.repetition_penalty, 0, above=True)
        _need_bool("ignore_eos", self.ignore_eos)
        if self.stop is not None and not isinstance(self.stop, str):
            _need_list("stop", self.stop, "strings")
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise OptionError(f"stop holds {text!r}", "non-empty strings", "drop that entry")
        for token in () if self.stop_token_ids is None else _need_list("stop_token_ids", self.stop_token_ids, "ids"):
            _need_int("stop_token_ids entry", token, 0)

    @property
    def is_greedy(self) -> bool:
        return not self.temperature

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """How `build` makes an FP8 engine on a GPU.

    weight_scales: a scale for every output row of a matrix, or one for all of it. activation_scales: calibrated, one
    for each of a layer's four products, the largest value seen on `calib_size` of the bundled prompts; or dynamic, each
    row's own at run time. quantize_head: the output head too, which is bf16 otherwise.
    """

    weight_scales: Literal["per_channel", "per_tensor"] = "per_channel"
    activation_scales: Literal["calibrated", "dynamic"] = "calibrated"
    quantize_head: bool = False
    calib_size: int = 64

    def __post_init__(self) -> None:
        for name, known in (
            ("weight_scales", ("per_channel", "per_tensor")),
            ("activation_scales", ("calibrated", "dynamic")),
        ):
            if getattr(self, name) not in known:
                raise OptionError(f"{name} is {getattr(self, name)!r}", f"{known[0]!r} or {known[1]!r}")
        _need_int("calib_size", self.calib_size, 1)


@dataclass(frozen=True, kw_only=True)
class KvCacheConfig:
    """The KV cache. `dtype="auto"` follows the weights. The torch backend's blocks have 64 tokens on a GPU, the tile of
    its attention kernel, and `tokens_per_block` on a CPU. Further forms arrive with the backends that support them."""

    dtype: Literal["auto", "fp8"] = "auto"
    enable_block_reuse: bool = False
    tokens_per_block: int = 32
    max_tokens: int | None = None
    free_gpu_memory_fraction: float = 0.9
    max_attention_window: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "fp8"):
            raise OptionError(f"KvCacheConfig.dtype is {self.dtype!r}", "'auto' or 'fp8'")
        _need_bool("enable_block_reuse", self.enable_block_reuse)
        _need_int("tokens_per_block", self.tokens_per_block, 1)
        _need_float("free_gpu_memory_fraction", self.free_gpu_memory_fraction, 0, 1, above=True)
        if self.max_tokens is not None:
            _need_int("max_tokens", self.max_tokens, 1)
        if self.max_attention_window is not None:
            for window in _need_list("max_attention_window", self.max_attention_window, "whole numbers, one a layer"):
                _need_int("max_attention_window entry", window, 1)

    def changed_options(self) -> list[str]:
        """Names of the options that differ from their defaults: what a backend must honour or refuse."""
        return [f.name for f in fields(self) if getattr(self, f.name) != f.default]


@dataclass(frozen=True, kw_only=True)
class DecodingBaseConfig:
    """Common to every drafting method. `max_draft_len` is K, draft tokens per round; K = 0 is plain decoding and is
    asked for by leaving `speculative_config` out, so 0 is refused here.

    draft_len_schedule: number of active requests -> K from that number on, as in TensorRT-LLM 1.2. {1: 4, 4: 2, 8: 0}
    drafts 4 tokens for one to three requests, 2 for four to seven, and none for eight or more.
    """

    decoding_type: ClassVar[str] = ""
    own_options: ClassVar[tuple[str, ...]] = ()  # the workbook's own: a library that lacks them refuses them by name
    max_draft_len: int = 4
    draft_len_schedule: Mapping[int, int] | None = None

    def __post_init__(self) -> None:
        _need_int("max_draft_len", self.max_draft_len, 1)
        self._check_schedule()

    def _check_schedule(self) -> None:
        """The rules of TensorRT-LLM 1.2."""
        schedule = self.draft_len_schedule
        if schedule is None:
            return
        if not isinstance(schedule, Mapping):
            raise OptionError(f"draft_len_schedule is {schedule!r}", "a mapping such as {1: 4, 8: 0}")
        for size, length in schedule.items():
            _need_int("a batch size in draft_len_schedule", size, 1)
            _need_int(f"draft_len_schedule[{size}]", length, 0)
        if schedule.get(1) != self.max_draft_len or max(schedule.values()) > self.max_draft_len:
            raise OptionError(
                f"draft_len_schedule is {dict(schedule)} with max_draft_len {self.max_draft_len}",
                f"an entry 1 with max_draft_len, {self.max_draft_len}, and no larger one",
            )
        object.__setattr__(self, "draft_len_schedule", dict(sorted(schedule.items())))


@dataclass(frozen=True, kw_only=True)
class DraftTargetDecodingConfig(DecodingBaseConfig):
    """A second, smaller model proposes (Leviathan et al. 2023, arXiv 2211.17192). `speculative_model_dir` is a
    checkpoint or an engine directory; `speculative_model` is TensorRT-LLM 1.2's other name for it.

    confidence_threshold (the workbook's own option): stop drafting after a token to which the drafter gave a lower
    probability than this; None drafts `max_draft_len` tokens always. On a CPU only: a round on a GPU is one graph of
    fixed length, in which stopping early saves no time.
    """

    decoding_type: ClassVar[str] = "Draft_Target"
    own_options: ClassVar[tuple[str, ...]] = ("confidence_threshold",)
    speculative_model_dir: str | Path | None = None
    speculative_model: str | Path | None = None
    confidence_threshold: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = _given_models(self)
        if len(given) != 1:
            raise OptionError(
                f"DraftTargetDecodingConfig got {len(given)} draft models",
                "exactly one",
                "give speculative_model_dir a checkpoint or an engine directory",
            )
        object.__setattr__(self, "speculative_model_dir", given[0])
        object.__setattr__(self, "speculative_model", given[0])
        _need_threshold(self.confidence_threshold)


@dataclass(frozen=True, kw_only=True)
class NGramDecodingConfig(DecodingBaseConfig):
    """Prompt lookup: the longest n-gram that ends the text is looked up earlier in prompt + output, and what followed
    it there is proposed. `is_use_oldest` takes the first such place, else the latest."""

    decoding_type: ClassVar[str] = "NGram"
    max_matching_ngram_size: int = 3
    is_use_oldest: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _need_int("max_matching_ngram_size", self.max_matching_ngram_size, 1)
        _need_bool("is_use_oldest", self.is_use_oldest)


@dataclass(frozen=True, kw_only=True)
class SADecodingConfig(DecodingBaseConfig):
    """Suffix decoding: the longest suffix of the text that occurred before, and what followed it most often (Oliaro et
    al. 2024, arXiv 2411.04975; the class is named as in TensorRT-LLM from 1.3 on). max_matching_ngram_size: the
    longest suffix compared, -1 for any length. enable_global_pool: outputs of earlier requests are searched too, the
    latest `global_pool_size` of them (None: all)."""

    decoding_type: ClassVar[str] = "SA"
    max_matching_ngram_size: int = -1
    enable_global_pool: bool = False
    global_pool_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_matching_ngram_size != -1:
            _need_int("max_matching_ngram_size", self.max_matching_ngram_size, 1)
        _need_bool("enable_global_pool", self.enable_global_pool)
        if self.global_pool_size is not None:
            _need_int("global_pool_size", self.global_pool_size, 1)
            if not self.enable_global_pool:
                raise OptionError("global_pool_size is set and enable_global_pool is off", "both or neither")


@dataclass(frozen=True, kw_only=True)
class LookaheadDecodingConfig(DecodingBaseConfig):
    """Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): Jacobi window W, n-gram size N, verification set G.
    (1, 1, 0) is plain decoding. `max_draft_len` follows from N: an n-gram's tokens behind its first."""

    decoding_type: ClassVar[str] = "Lookahead"
    max_window_size: int = 4
    max_ngram_size: int = 3
    max_verification_set_size: int = 4

    def __post_init__(self) -> None:
        _need_int("max_window_size", self.max_window_size, 1)
        _need_int("max_ngram_size", self.max_ngram_size, 1)
        object.__setattr__(self, "max_draft_len", max(1, self.max_ngram_size - 1))
        self._check_schedule()
        is_plain = self.max_window_size == self.max_ngram_size == 1
        _need_int("max_verification_set_size", self.max_verification_set_size, 0 if is_plain else 1)
        if self.max_ngram_size == 1 and (self.max_window_size, self.max_verification_set_size) != (1, 0):
            raise OptionError("max_ngram_size is 1", "at least 2, or (1, 1, 0) for plain decoding")


@dataclass(frozen=True, kw_only=True)
class LayerSkipDecodingConfig(DecodingBaseConfig):
    """The target drafts for itself with some of its layers skipped (Zhang et al. 2023, arXiv 2309.08168). The
    workbook's own: TensorRT-LLM has no such method. skip_layers: layers left out, counted from 0; None: every second
    one, the first two and the last two kept. confidence_threshold as in `DraftTargetDecodingConfig`."""

    decoding_type: ClassVar[str] = "Layer_Skip"
    own_options: ClassVar[tuple[str, ...]] = ("skip_layers", "confidence_threshold")
    skip_layers: Sequence[int] | None = None
    confidence_threshold: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for layer in () if self.skip_layers is None else _need_list("skip_layers", self.skip_layers, "layers"):
            _need_int("skip_layers entry", layer, 0)
        _need_threshold(self.confidence_threshold)


@dataclass(frozen=True, kw_only=True)
class MedusaDecodingConfig(DecodingBaseConfig):
    """Medusa heads (Cai et al. 2024, arXiv 2401.10774). medusa_choices: the tree, as paths of ranks: [0] is the first
    head's best token, [0, 1] the second head's second best behind it; None takes the checkpoint's own tree.
    `max_draft_len` is the number of heads used and follows from the choices where they are given."""

    decoding_type: ClassVar[str] = "Medusa"
    speculative_model_dir: str | Path | None = None
    speculative_model: str | Path | None = None
    medusa_choices: Sequence[Sequence[int]] | None = None
    num_medusa_heads: int | None = None

    def __post_init__(self) -> None:
        if self.medusa_choices is not None:
            choices = check_choices("medusa_choices", self.medusa_choices)
            object.__setattr__(self, "medusa_choices", choices)
            object.__setattr__(self, "max_draft_len", max(map(len, choices)))
        super().__post_init__()
        _one_model(self)
        if self.num_medusa_heads is not None:
            _need_int("num_medusa_heads", self.num_medusa_heads, 1)


@dataclass(frozen=True, kw_only=True)
class EagleDecodingConfig(DecodingBaseConfig):
    """EAGLE-3 (Li et al. 2025, arXiv 2503.01840), as TensorRT-LLM 1.2 reads this class. A chain of `max_draft_len`
    tokens, or a tree: a fixed one by `eagle_choices` (as `medusa_choices`), or with `use_dynamic_tree` the
    `max_total_draft_tokens` likeliest nodes of a beam of `dynamic_tree_max_topK` candidates per step (EAGLE-2, arXiv
    2406.16858). `confidence_threshold` as in `DraftTargetDecodingConfig`, for chains."""

    decoding_type: ClassVar[str] = "Eagle"
    own_options: ClassVar[tuple[str, ...]] = ("confidence_threshold",)
    speculative_model_dir: str | Path | None = None
    speculative_model: str | Path | None = None
    eagle3_one_model: bool = True
    eagle_choices: Sequence[Sequence[int]] | None = None
    use_dynamic_tree: bool = False
    dynamic_tree_max_topK: int | None = None
    max_total_draft_tokens: int | None = None
    num_eagle_layers: int | None = None
    confidence_threshold: float | None = None

    def __post_init__(self) -> None:
        if self.eagle_choices is not None:
            if self.use_dynamic_tree:
                raise OptionError("eagle_choices and use_dynamic_tree are both given", "one of them")
            choices = check_choices("eagle_choices", self.eagle_choices)
            object.__setattr__(self, "eagle_choices", choices)
            object.__setattr__(self, "max_draft_len", max(map(len, choices)))
        super().__post_init__()
        _one_model(self)
        for name in ("dynamic_tree_max_topK", "max_total_draft_tokens"):
            if getattr(self, name) is not None:
                _need_int(name, getattr(self, name), 1)
                if not self.use_dynamic_tree:
                    raise OptionError(f"{name} is set and use_dynamic_tree is off", "both or neither")
        _need_threshold(self.confidence_threshold)
        is_tree = self.use_dynamic_tree or self.eagle_choices is not None
        if is_tree and self.confidence_threshold is not None:
            raise OptionError("confidence_threshold with a tree", "a chain", "leave one of the two out")


def check_choices(name: str, choices: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Paths of ranks as tuples, parents before children; `OptionError` for a path whose beginning is not among them."""
    form = "paths of ranks such as [[0], [1], [0, 0]]"
    for choice in _need_list(name, choices, form):
        for rank in _need_list(f"a path in {name}", choice, "ranks"):
            _need_int(f"rank in {name}", rank, 0)
    paths = sorted({tuple(c) for c in choices}, key=lambda path: (len(path), path))
    if not paths or not paths[0]:
        raise OptionError(f"{name} is {list(choices)!r}", form)
    for path in paths:
        if len(path) > 1 and path[:-1] not in paths:
            raise OptionError(f"{name} holds {list(path)} without {list(path[:-1])}", "every beginning of every path")
    return tuple(paths)


def _one_model(config: MedusaDecodingConfig | EagleDecodingConfig) -> None:
    given = _given_models(config)
    if len(given) > 1:
        raise OptionError(
            f"{type(config).__name__} got speculative_model and speculative_model_dir", "one of the two names"
        )
    for name in ("speculative_model_dir", "speculative_model"):
        object.__setattr__(config, name, given[0] if given else None)


def _given_models(
    config: DraftTargetDecodingConfig | MedusaDecodingConfig | EagleDecodingConfig,
) -> list[str | Path]:
    """What the two names for a drafter hold; once, if they agree, as in a copy made by `dataclasses.replace`."""
    given = [x for x in (config.speculative_model_dir, config.speculative_model) if x is not None]
    for model in given:
        if not isinstance(model, (str, Path)) or not str(model):
            raise OptionError(f"speculative_model_dir is {model!r}", "a name or a folder", "give a checkpoint")
    return list(dict.fromkeys(given))


def _need_threshold(value: float | None) -> None:
    if value is not None:
        _need_float("confidence_threshold", value, 0, 1)


@dataclass(frozen=True, kw_only=True)
class SimulatedAcceptance:
    """Force how many drafts are accepted, to time an engine apart from any drafter's quality (random weights, say).

    acceptance_length: mean tokens per round, bonus included, as vLLM's `synthetic_acceptance_length` and SGLang's
    `SGLANG_SIMULATE_ACC_LEN` count; TensorRT-LLM's variable counts draft tokens only, one less. The schedule is the
    one of least variance. acceptance_by_position: instead, the share of rounds that accept at least 1, 2, … drafts, as
    metrics count it; the mean follows from it. Text made so is meaningless: every result says `is_simulated`.
    """

    acceptance_length: float | None = None
    acceptance_by_position: Sequence[float] | None = None

    def __post_init__(self) -> None:
        rates = self.acceptance_by_position
        if (self.acceptance_length is None) == (rates is None):
            raise OptionError(
                "SimulatedAcceptance got both or neither of acceptance_length and acceptance_by_position", "one of them"
            )
        if rates is None:
            _need_float("acceptance_length", self.acceptance_length, 1)
            return
        falling = all(a >= b for a, b in zip([1.0, *rates], [*rates, 0.0], strict=True))
        if not rates or not falling:
            raise OptionError(f"acceptance_by_position is {list(rates)}", "shares from 1 down to 0 that never rise")
        object.__setattr__(self, "acceptance_by_position", tuple(rates))
        object.__setattr__(self, "acceptance_length", 1.0 + sum(rates))

    @property
    def mean(self) -> float:
        """Tokens per round, bonus included."""
        assert self.acceptance_length is not None
        return self.acceptance_length


SpeculativeConfig = DecodingBaseConfig


@dataclass(frozen=True)
class Profile:
    """One dial for size: what a notebook or command runs, by name. Data, not code."""

    name: str
    backend: str
    target: str
    drafter: str
    dtype: str
    max_draft_len: int
    max_tokens: int
    prompts_per_category: int
    repeats: int
    device: str = "auto"
    kernel: str = "auto"
    is_replay: bool = False
    extra: Mapping[str, str] = field(default_factory=dict)


PROFILES: dict[str, Profile] = {
    "cpu": Profile("cpu", "torch", "embedded:target", "embedded:draft", "float32", 4, 64, 1, 3, device="cpu"),
    "h200": Profile(
        "h200", "torch", "embedded:target", "embedded:draft", "bfloat16", 4, 128, 2, 3, device="cuda"
    ),  # one GPU; larger shapes are experiments of their own, see `bench.gpu`
    "tensorrt_llm": Profile(
        "tensorrt_llm",
        "tensorrt_llm",
        "meta-llama/Llama-3.3-70B-Instruct",
        "meta-llama/Llama-3.2-1B-Instruct",
        "auto",
        10,
        256,
        1,
        3,
        extra={"experiment": "llama-3.3-70b"},
    ),
    "replay": Profile("replay", "torch", "embedded:target", "embedded:draft", "float32", 4, 64, 1, 3, is_replay=True),
}


def profile(name: str) -> Profile:
    """The profile called `name`; `OptionError` listing the known ones otherwise."""
    if name not in PROFILES:
        raise OptionError(f"profile {name!r} is unknown", f"one of {', '.join(PROFILES)}", "choose one of these")
    return PROFILES[name]
