"""Hugging Face assisted generation behind `LLM`: the reference for correctness, written by nobody here.

Only public hooks of `transformers` are used: a stopping criterion sees the tokens of every step, forward hooks on the
target see how many draft tokens it was given and its raw logits. So rounds are counted, not guessed. Two things differ
from the other backends. Requests run one after the other, all counted from the start of the call. And the first pass
checks drafts together with the prompt: all its tokens are known at TTFT and belong to no round.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from ..config import DecodingBaseConfig, DraftTargetDecodingConfig, KvCacheConfig, NGramDecodingConfig, SamplingParams
from ..engine.detokenize import Detokenizer
from ..engine_dir import is_engine_dir
from ..errors import ModelError, OptionError, PromptError
from ..models import Checkpoint, check_pair, load_tokenizer, resolve
from ..results import Generation, Round
from ..shapes import dtype_name

METHODS = (DraftTargetDecodingConfig, NGramDecodingConfig)
DTYPES = ("float32", "bfloat16", "float16")


class TransformersBackend:
    """model: a checkpoint or its name. dtype "auto" is float32 on a CPU and the checkpoint's own on a GPU.

    max_batch_size is checked and noted, but requests run one at a time. Options that cannot be honoured are refused by
    name (`OptionError`); a drafter that does not fit raises `ModelError`.
    """

    def __init__(
        self,
        model: Checkpoint | str | Path,
        *,
        speculative_config: DecodingBaseConfig | None = None,
        kv_cache_config: KvCacheConfig | None = None,
        dtype: str = "auto",
        max_batch_size: int | None = None,
        max_seq_len: int | None = None,
        device: str = "auto",
        tensor_parallel_size: int = 1,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        _refuse_unsupported(speculative_config, kv_cache_config, dtype, tensor_parallel_size)
        for name, value in (("max_batch_size", max_batch_size), ("max_seq_len", max_seq_len)):
            if value is not None and value < 1:
                raise OptionError(f"{name} is {value}", "at least 1", f"leave {name} out, or correct it")
        self._device = _device(device)
        target = model if isinstance(model, Checkpoint) else _checkpoint(model, say)
        drafter = None
        notes: tuple[str, ...] = ()
        if isinstance(speculative_config, DraftTargetDecodingConfig):
            drafter = _checkpoint(str(speculative_config.speculative_model_dir), say)
            notes = check_pair(target, drafter).notes
            _refuse_other_vocabulary(target, drafter)
        start = time.perf_counter()
        self.tokenizer = load_tokenizer(target)
        self._eos_ids = target.eos_token_ids()
        self._pad_id = min(self._eos_ids, default=0)
        self._model: Any = _load(target, dtype, self._device)
        self._assistant: Any = None if drafter is None else _load(drafter, dtype, self._device)
        self._method = _method_options(speculative_config, self._assistant, self._pad_id)
        self._limit, self._limit_name = _length_limit(target, drafter, max_seq_len)
        self._one_at_a_time = threading.Lock()
        self.info: dict[str, Any] = {
            "backend": "transformers",
            "target": target.name,
            "drafter": drafter.name if drafter else speculative_config and speculative_config.decoding_type.lower(),
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "drafter_dtype": str(self._assistant.dtype).removeprefix("torch.") if self._assistant else None,
            "device": str(self._device),
            "threads": torch.get_num_threads(),
            "max_draft_len": speculative_config.max_draft_len if speculative_config else 0,
            "limits": {"max_batch_size": max_batch_size, "max_seq_len": self._limit},
            "tactics": {},
            "build_s": 0.0,
            "load_s": round(time.perf_counter() - start, 3),
            "eos_token_ids": sorted(self._eos_ids),
            "notes": [*notes, "requests run one at a time", "the first pass verifies drafts along with the prompt"],
            "transformers": transformers.__version__,
        }

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Generation]:
        """Decode every prompt (token ids) with its own params, in order. Raises `PromptError` before any work."""
        watchers = self._watchers(prompts, params)
        for watcher in watchers:
            self._run(watcher)
        return [watcher.generation() for watcher in watchers]

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Generation]:
        """The generation so far after every step; the last one is complete. Abandoning the iterator ends the run."""
        (watcher,) = self._watchers([prompt], [params])
        return self._stream(watcher)

    def close(self) -> None:
        self._model = self._assistant = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _watchers(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Watcher]:
        if self._model is None:
            raise OptionError("this LLM was closed", "an open one", "make a new LLM")
        for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            self._check(prompt, param, f"prompt {index + 1} of {len(prompts)}" if len(prompts) > 1 else "the prompt")
        start = time.perf_counter()
        return [
            Watcher(list(prompt), param, self.tokenizer, self._eos_ids, start)
            for prompt, param in zip(prompts, params, strict=True)
        ]

    def _check(self, prompt: Sequence[int], params: SamplingParams, which: str) -> None:
        vocab, limit, needed = self._model.config.vocab_size, self._limit, len(prompt) + params.max_tokens
        if not prompt:
            raise PromptError(f"{which} is empty", "at least one token", "write something, or begin with the BOS token")
        if bad := [token for token in prompt if not 0 <= token < vocab]:
            raise PromptError(f"{which} holds id {bad[0]}", f"ids from 0 to {vocab - 1}", "use this model's tokenizer")
        if len(prompt) >= limit:
            raise PromptError(
                f"{which} has {len(prompt)} tokens", f"fewer than {limit}, {self._limit_name}", "shorten it"
            )
        if needed > limit:
            raise PromptError(
                f"{which} has {len(prompt)} tokens and max_tokens asks for {params.max_tokens} more",
                f"together at most {limit}, {self._limit_name}",
                f"ask for at most {limit - len(prompt)} tokens",
            )

    def _run(self, watcher: Watcher) -> None:
        ids = torch.tensor([watcher.prompt_ids], device=self._device)
        seeded, followed = _seeded(watcher.params.seed, self._device), watcher.attached_to(self._model)
        with self._one_at_a_time, _only_errors(), seeded, followed:
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=self._generation_config(watcher.params),
                stopping_criteria=StoppingCriteriaList([watcher]),
                assistant_model=self._assistant,
            )

    def _generation_config(self, params: SamplingParams) -> GenerationConfig:
        options: dict[str, Any] = {"max_new_tokens": params.max_tokens, "pad_token_id": self._pad_id, **self._method}
        stops = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else self._eos_ids)
        # Without any, prompt lookup in transformers 4.57 fails: an id that no logit has stands for none.
        options["eos_token_id"] = sorted(stops) or [self._model.config.vocab_size]
        if params.repetition_penalty is not None:
            options["repetition_penalty"] = params.repetition_penalty
        if params.is_greedy:
            return GenerationConfig(do_sample=False, **options)
        return GenerationConfig(
            do_sample=True,
            temperature=params.temperature,
            top_k=params.top_k or 0,
            top_p=params.top_p or 1.0,
            **options,
        )

    def _stream(self, watcher: Watcher) -> Iterator[Generation]:
        """`generate` blocks, so it runs in a thread of its own and hands over a snapshot after every step."""
        steps: SimpleQueue[Generation | BaseException | None] = SimpleQueue()
        watcher.on_step = lambda: steps.put(watcher.generation())

        def work() -> None:
            try:
                self._run(watcher)
                steps.put(None)
            except BaseException as error:  # noqa: BLE001 - handed to the reader, who raises it
                steps.put(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            while (step := steps.get()) is not None:
                if isinstance(step, BaseException):
                    raise step
                yield step
        finally:
            watcher.is_cancelled = True
            thread.join()


@dataclass(eq=False)
class Watcher(StoppingCriteria):
    """Follows one request from inside `generate`: notes what every step brought and when, and says when to stop.

    `transformers` asks a stopping criterion once per step, after a whole block of accepted tokens; whatever follows
    the token that ends the request is cut here.
    """

    prompt_ids: list[int]
    params: SamplingParams
    tokenizer: Any
    eos_ids: frozenset[int]
    start_s: float
    on_step: Callable[[], None] | None = None
    is_cancelled: bool = False
    token_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: int | str | None = None
    ttft_s: float = 0.0
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        self.logprobs: list[dict[int, float]] | None = None if self.params.logprobs is None else []
        self._detokenizer = Detokenizer(self.tokenizer, self.params.stop_strings)
        self._pushed = 0
        self._drafted: tuple[int, ...] = ()
        self._rows: torch.Tensor | None = None
        self._forward_s = self._step_s = 0.0
        self._is_target_step = False

    @contextmanager
    def attached_to(self, model: torch.nn.Module) -> Iterator[None]:
        hooks = [model.register_forward_pre_hook(self._before_target, with_kwargs=True)]
        if self.logprobs is not None:
            hooks.append(model.register_forward_hook(self._after_target))
        self._step_s = time.perf_counter()
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before_target(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The target is given what it has not seen: the prompt or the last token, and after it the drafts."""
        self._forward_s, self._is_target_step = time.perf_counter(), True
        given = kwargs["input_ids"][0]
        seen_before = len(self.prompt_ids) if not self.token_ids else 1
        self._drafted = tuple(given[seen_before:].tolist()) if given.shape[0] > seen_before else ()

    def _after_target(self, _: Any, args: tuple[Any, ...], output: Any) -> None:
        """Keep the raw logits: `transformers` applies penalty and filters in place afterwards."""
        self._rows = output.logits[0, -(len(self._drafted) + 1) :].float().clone()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """input_ids: [1, prompt + output so far]. Returns [1], True once the request has ended."""
        if not self._is_target_step:  # transformers 4.57 asks after every step of the draft model too
            return torch.tensor([False], device=input_ids.device)
        self._is_target_step = False
        block = input_ids[0, len(self.prompt_ids) + len(self.token_ids) :].tolist()
        is_first = not self.token_ids
        emitted = self._emit(block)
        now = time.perf_counter()
        self.latency_s = now - self.start_s
        if is_first:
            self.ttft_s = self.latency_s
        else:
            self.rounds.append(
                Round(
                    drafted=self._drafted,
                    accepted=_leading_run(self._drafted, emitted),
                    emitted=emitted,
                    draft_s=self._forward_s - self._step_s if self._drafted else 0.0,
                    verify_s=now - (self._forward_s if self._drafted else self._step_s),
                    end_s=self.latency_s,
                )
            )
        if self.on_step is not None:
            self.on_step()
        self._step_s = time.perf_counter()
        return torch.tensor([bool(self.finish_reason) or self.is_cancelled], device=input_ids.device)

    def _emit(self, block: Sequence[int]) -> tuple[int, ...]:
        """Append tokens until one of them ends the request. Returns those appended."""
        emitted: list[int] = []
        for row, token in enumerate(block):
            emitted.append(token)
            self.token_ids.append(token)
            if self.logprobs is not None and self._rows is not None:
                self.logprobs.append(_logprobs(self._rows[row], token, self.params.logprobs or 0))
            self._find_end(token)
            if self.finish_reason:
                break
        return tuple(emitted)

    def _find_end(self, token: int) -> None:
        if token in (self.params.stop_token_ids or ()):
            self.finish_reason, self.stop_reason = "stop", token
        elif token in self.eos_ids and not self.params.ignore_eos:
            self.finish_reason = "stop"
        elif self.params.stop_strings and self._read_text():
            self.finish_reason, self.stop_reason = "stop", self._detokenizer.stopped_by
        elif len(self.token_ids) == self.params.max_tokens:
            self.finish_reason = "length"

    def _read_text(self) -> bool:
        """Detokenize what is new, without a token that ended the request; True if a stop string is complete."""
        is_end_token = self.finish_reason == "stop" and not isinstance(self.stop_reason, str)
        for token in self.token_ids[self._pushed : len(self.token_ids) - is_end_token]:
            self._pushed += 1
            if self._detokenizer.push(token):
                return True
        return False

    def generation(self) -> Generation:
        """What is known so far; complete once `finish_reason` is set. Text is decoded here, outside the timed steps."""
        self._read_text()
        return Generation(
            prompt_token_ids=self.prompt_ids,
            token_ids=list(self.token_ids),
            text=self._detokenizer.finish() if self.finish_reason else self._detokenizer.streamable,
            finish_reason=self.finish_reason,
            rounds=list(self.rounds),
            ttft_s=self.ttft_s,
            latency_s=self.latency_s,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            stop_reason=self.stop_reason,
        )


def _leading_run(drafted: Sequence[int], emitted: Sequence[int]) -> int:
    """How many drafts stayed. The token after them differs from the draft in its place, or there is none."""
    count = 0
    while count < min(len(drafted), len(emitted)) and drafted[count] == emitted[count]:
        count += 1
    return count


def _logprobs(logits: torch.Tensor, token: int, top: int) -> dict[int, float]:
    """Raw log-probabilities of `token` and the `top` most likely ids. logits: float32 [V]."""
    values = torch.log_softmax(logits, dim=-1)
    best = torch.topk(values, top).indices.tolist() if top else []
    return {t: float(values[t]) for t in dict.fromkeys([token, *best])}


@contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """With a seed: random numbers from it, and the process's own stream left as it was. Without: that stream."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _refuse_unsupported(
    speculative: DecodingBaseConfig | None, kv: KvCacheConfig | None, dtype: str, tensor_parallel_size: int
) -> None:
    if speculative is not None and not isinstance(speculative, METHODS):
        raise OptionError(
            f"the transformers backend does not run {type(speculative).__name__}",
            f"one of {', '.join(m.__name__ for m in METHODS)}",
            "choose one of these, or another backend",
        )
    if isinstance(speculative, NGramDecodingConfig) and not speculative.is_use_oldest:
        raise OptionError(
            "the transformers backend cannot honour NGramDecodingConfig(is_use_oldest=False)",
            "is_use_oldest=True: its prompt lookup takes the oldest match",
            "set is_use_oldest=True, or choose another backend",
        )
    if speculative is not None and speculative.draft_len_schedule is not None:
        raise OptionError(
            f"the transformers backend cannot honour {type(speculative).__name__}(draft_len_schedule=…)",
            "None: it runs one request at a time",
            "leave it out, or use backend='torch'",
        )
    if isinstance(speculative, DraftTargetDecodingConfig) and speculative.confidence_threshold is not None:
        raise OptionError(
            "the transformers backend cannot honour DraftTargetDecodingConfig(confidence_threshold=…)",
            "None: its own threshold moves from call to call",
            "leave it out, or use backend='torch'",
        )
    if kv is not None and kv.changed_options():
        raise OptionError(
            f"the transformers backend cannot honour KvCacheConfig({kv.changed_options()[0]}=…)",
            "its default",
            "leave it out",
        )
    if dtype not in ("auto", *DTYPES):
        raise OptionError(
            f"the transformers backend cannot honour dtype={dtype!r}", f"auto or one of {', '.join(DTYPES)}"
        )
    if tensor_parallel_size != 1:
        raise OptionError(f"tensor_parallel_size is {tensor_parallel_size}", "1 for the transformers backend")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"device is {name!r}", "auto, cpu, cuda or cuda:<n>", "choose one of these") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise OptionError(f"device {name!r} is not on this machine", "auto, cpu, or a CUDA GPU that torch sees")
    return device


def _checkpoint(name: str | Path, say: Callable[[str], None]) -> Checkpoint:
    if is_engine_dir(name):
        raise ModelError(
            f"{name} is an engine directory of the torch backend",
            "a checkpoint",
            "give the transformers backend the checkpoint that the engine was built from",
        )
    return resolve(str(name), say=say)


def _refuse_other_vocabulary(target: Checkpoint, drafter: Checkpoint) -> None:
    sizes = [c.config["vocab_size"] for c in (target, drafter)]
    if sizes[0] != sizes[1]:
        raise OptionError(
            f"vocabulary sizes are {sizes[0]} (target) and {sizes[1]} (drafter)",
            "the same size: assisted generation in transformers compares logits row by row",
            "choose the torch backend, which runs this pair",
        )


def _load(checkpoint: Checkpoint, dtype: str, device: torch.device) -> Any:
    wanted = ("float32" if device.type == "cpu" else dtype_name(checkpoint.config)) if dtype == "auto" else dtype
    torch_dtype = getattr(torch, wanted)
    model: Any
    if checkpoint.folder is None:
        model = _from_shapes(checkpoint, torch_dtype, device)
    else:
        with _no_progress_bar():
            model = AutoModelForCausalLM.from_pretrained(
                str(checkpoint.folder), dtype=torch_dtype, local_files_only=True, use_safetensors=True
            )
        model.to(device)
    # What the checkpoint recommends (temperature, top_p, ...) must not slip into requests that did not ask for it.
    model.generation_config = GenerationConfig()
    return model.eval()


def _from_shapes(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
    with device:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**checkpoint.config), dtype=dtype)
    tensors = checkpoint.tensors(device, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])
    return model


@contextmanager
def _only_errors() -> Iterator[None]:
    """transformers 5 warns about the very arguments that its own assisted generation passes to the draft model."""
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    logging = transformers.utils.logging
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def _method_options(config: DecodingBaseConfig | None, assistant: Any, pad_id: int) -> dict[str, Any]:
    """Generation options of the method. A draft model's own settings live in its generation config: fixed K."""
    if isinstance(config, NGramDecodingConfig):
        return {
            "prompt_lookup_num_tokens": config.max_draft_len,
            "max_matching_ngram_size": config.max_matching_ngram_size,
        }
    if config is not None:
        assistant.generation_config = GenerationConfig(
            num_assistant_tokens=config.max_draft_len,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
            pad_token_id=pad_id,
        )
    return {}


def _length_limit(target: Checkpoint, drafter: Checkpoint | None, asked: int | None) -> tuple[int, str]:
    """The smallest limit on prompt + output, and its name. The drafter's counts: transformers drafts to the end."""
    limits = [(target.config["max_position_embeddings"], "the model's context length")]
    if drafter is not None:
        limits.append((drafter.config["max_position_embeddings"], "the drafter's context length"))
    if asked is not None:
        if asked > limits[0][0]:
            raise OptionError(f"max_seq_len is {asked}", f"at most {limits[0][0]}, the model's context length")
        limits.append((asked, "max_seq_len"))
    return min(limits)
