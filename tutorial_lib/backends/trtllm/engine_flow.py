"""The engine flow's command line behind `LLM`: engines that a plan built, run by the release's own `examples/run.py`.

No library is imported here: run.py does that in a process that stays (see `worker.py`). Everything that native code
would only answer with `16 != 40` is compared beforehand, from the engine directory's manifest.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...config import DraftTargetDecodingConfig, KvCacheConfig, SamplingParams
from ...engine_dir import EngineInfo, open_engine, require
from ...errors import BackendUnavailable, EngineDirError, PromptError
from ...models import Checkpoint, load_tokenizer
from ...results import Generation
from . import calls, commands, outputs, steps
from .dataset import prompt_line
from .shared import STAND_IN_NOTE, Setup, check_length, drafter_label, refused
from .support import method_of
from .worker import EngineWorker

_MODES = {
    "plain": ("none",),
    "draft_target": ("draft_tokens_external",),
    "ngram": ("draft_tokens_external",),
    "medusa": ("medusa",),
    "eagle": ("eagle",),
    "lookahead": ("lookahead_decoding",),
}


class EngineFlow:
    """Engines that a plan built, run by the release's own run.py in a process that stays (see `trtllm/worker.py`)."""

    def __init__(self, engine: Path, setup: Setup) -> None:
        self._setup = setup
        arch = _engine_arch()
        self._target = open_engine(engine, backend="tensorrt_llm", arch=arch, check_hashes=False)
        self._method = method_of(setup.speculative, "engine")
        self._drafter = self._open_drafter(arch)
        self._check_engines()
        self._tokenizer_dir = self._target.path / "tokenizer"
        self.tokenizer = load_tokenizer(Checkpoint(self._target.checkpoint, self._tokenizer_dir, {}))
        self.eos = self._target.eos_token_ids
        self._work = tempfile.TemporaryDirectory(prefix="workbook-run-")
        self._worker: EngineWorker | None = None
        self._longest = 0
        self.info: dict[str, Any] = {
            "target": self._target.checkpoint,
            "drafter": self._drafter.checkpoint if self._drafter else drafter_label(setup.speculative, None),
            "dtype": self._target.dtype,
            "drafter_dtype": self._drafter.dtype if self._drafter else None,
            "arch": arch,
            "engine_max_draft_len": self._draft_len(),
            "limits": dict(self._target.manifest["limits"]),
            "tactics": {},
            "build_s": self._target.manifest["build"].get("seconds"),
            "eos_token_ids": sorted(self.eos),
            "is_simulated": setup.is_stand_in,
            "notes": self._notes(),
        }

    def _open_drafter(self, arch: str) -> EngineInfo | None:
        if not isinstance(self._setup.speculative, DraftTargetDecodingConfig):
            return None
        folder = str(self._setup.speculative.speculative_model_dir)
        return open_engine(folder, backend="tensorrt_llm", arch=arch, check_hashes=False)

    def _check_engines(self) -> None:
        """Release, mode, limits and GPUs, from our own manifest: native code would only say `16 != 40`."""
        setup, modes = self._setup, _MODES[self._method]
        for engine in (self._target, self._drafter):
            if engine is None:
                continue
            built = engine.manifest["build"]
            if built.get("tensorrt_llm") != str(setup.version):
                raise EngineDirError(
                    f"engine directory {engine.path} was built by TensorRT-LLM {built.get('tensorrt_llm', 'unknown')}",
                    f"{setup.version}, which is installed",
                    f"rebuild: {engine.rebuild_line}",
                )
            require(engine, max_batch_size=setup.max_batch_size, max_seq_len=setup.max_seq_len)
        mode = self._target.manifest["build"].get("speculative_decoding_mode", "none")
        if mode not in modes:
            raise EngineDirError(
                f"engine directory {self._target.path} was built for speculative mode {mode!r}",
                f"{' or '.join(map(repr, modes))} for {self._method}",
                f"rebuild: {self._target.rebuild_line}",
            )
        if self._method != "plain":
            require(self._target, max_draft_len=self._draft_len())
        tp = self._target.manifest["build"].get("tensor_parallel_size", 1)
        if setup.tp not in (1, tp):
            raise EngineDirError(
                f"engine directory {self._target.path} was built for {tp} GPU(s)",
                f"{setup.tp}",
                "leave it out, or rebuild",
            )
        kv = setup.kv or KvCacheConfig()
        if kv.dtype == "fp8" and self._target.dtype != "fp8":
            raise refused(
                "KvCacheConfig(dtype='fp8')", f"this engine was built with {self._target.dtype} weights and cache"
            )
        if kv.tokens_per_block != KvCacheConfig().tokens_per_block:
            raise refused("KvCacheConfig(tokens_per_block=…)", "it was fixed when the engine was built")
        if setup.dtype not in ("auto", self._target.dtype):
            raise refused(f"dtype={setup.dtype!r}", f"the engine holds {self._target.dtype}")
        if setup.forced is not None:
            raise refused("simulated_acceptance", "only the PyTorch flow has it")

    def _draft_len(self) -> int:
        """Draft tokens that a round verifies: K for outside drafts, the size of the tree or window otherwise."""
        config = self._setup.speculative
        if config is None:
            return 0
        if self._method in ("draft_target", "ngram"):
            return config.max_draft_len
        if self._method == "lookahead":
            sizes = (config.max_window_size, config.max_ngram_size, config.max_verification_set_size)  # type: ignore[attr-defined]
            return commands.lookahead_max_draft_len(*sizes)
        return len(calls.tree_of(config))

    def _notes(self) -> list[str]:
        notes = ["one request at a time: run.py's draft loop mixes up requests that end at different times"]
        if self._method == "draft_target":
            notes.append("block reuse is on: a round hands the whole text so far to both engines")
        if self._setup.is_stand_in:
            notes.append(STAND_IN_NOTE)
        return notes

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        limits = self._limits()
        check_length(prompt, params, self._target.max_seq_len, "the engine's max_seq_len")
        if params.max_tokens > limits.max_tokens:
            raise PromptError(
                f"{params.max_tokens} new tokens", f"at most {limits.max_tokens}, as the engine was built"
            )
        for option, is_set in (
            ("logprobs", params.logprobs is not None),
            ("stop", bool(params.stop_strings)),
            ("stop_token_ids", bool(params.stop_token_ids)),
        ):
            if is_set:
                raise refused(option, "run.py has no way to ask for it")
        if self._method != "plain" and params.repetition_penalty not in (None, 1.0):
            raise refused("repetition_penalty with a drafter", "draft tokens are verified without it")
        if self._method in ("draft_target", "ngram") and not params.is_greedy:
            raise refused(
                f"temperature with {self._method}", "every round is a new request that starts with the same seed"
            )
        if self._method == "medusa" and not params.is_greedy:
            raise refused("temperature with Medusa", "run.py insists on greedy decoding")

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Generation]:
        return [self._one(list(prompt), one) for prompt, one in zip(prompts, params, strict=True)]

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Generation]:
        """run.py answers at once; the finished generation is all there is to stream."""
        yield self._one(list(prompt), params)

    def _one(self, prompt: list[int], params: SamplingParams) -> Generation:
        file = Path(self._work.name) / "prompt.csv"
        file.write_text(prompt_line(prompt), "utf-8")
        command = self._command(params, file)
        found = self._running_worker().ask(command.argv[command.argv.index("--engine_dir") :])
        generation = outputs.from_engine_calls(
            prompt,
            found,
            params,
            max_draft_len=calls.most_accepted(self._setup.speculative),
            eos_token_ids=self.eos,
            tokenizer=self.tokenizer,
            has_outside_drafts=self._method in ("draft_target", "ngram"),
            placeholder=self._end_id(params) if self._method == "ngram" else None,
        )
        generation.is_simulated = self._setup.is_stand_in
        if generation.is_simulated:
            generation.text = ""
        return generation

    def _command(self, params: SamplingParams, file: Path) -> commands.Command:
        kv, tp = self._setup.kv or KvCacheConfig(), self._tp(self._target)
        is_pair = self._drafter is not None
        sampling = commands.Sampling()
        if not params.is_greedy:
            sampling = commands.Sampling(
                temperature=params.temperature or 1.0,
                top_k=params.top_k or 0,
                top_p=params.top_p or 1.0,
                random_seed=params.seed if params.seed is not None else secrets.randbelow(2**31),
                repetition_penalty=params.repetition_penalty,
            )
        elif params.repetition_penalty is not None:
            sampling = commands.Sampling(repetition_penalty=params.repetition_penalty)
        return commands.run(
            self._setup.version,
            str(_examples_folder()),
            engine_dir=str(self._target.path),
            tokenizer_dir=str(self._tokenizer_dir),
            input_file=str(file),
            output_csv=str(file.with_name("answer.csv")),
            limits=self._limits(),
            output_len=params.max_tokens,
            end_id=self._end_id(params),
            tp_size=tp,
            kv_fraction=kv.free_gpu_memory_fraction / (2 if is_pair else 1),
            block_reuse=kv.enable_block_reuse or self._method in ("draft_target", "ngram"),
            sampling=sampling,
            windows=kv.max_attention_window,
            kv_tokens=kv.max_tokens,
            drafting=self._drafting(tp),
        )

    def _drafting(self, tp: int) -> commands.Command | None:
        config: Any = self._setup.speculative
        match self._method:
            case "draft_target":
                assert self._drafter is not None
                gpus = list(range(self._tp(self._drafter)))
                return commands.with_draft_model(str(self._drafter.path), config.max_draft_len, gpus, list(range(tp)))
            case "ngram":
                return commands.with_prompt_lookup(
                    self._setup.version, config.max_draft_len, config.max_matching_ngram_size, list(range(tp))
                )
            case "medusa":
                return commands.with_medusa(calls.tree_of(config))
            case "eagle":
                return commands.with_eagle(calls.tree_of(config))
            case "lookahead":
                return commands.with_lookahead(
                    config.max_window_size, config.max_ngram_size, config.max_verification_set_size
                )
        return None

    def _end_id(self, params: SamplingParams) -> int:
        """run.py cannot ignore EOS; the last id of the vocabulary stands in for a token that never comes."""
        if params.ignore_eos or not self.eos:
            return len(self.tokenizer) - 1
        own = self.tokenizer.eos_token_id
        return own if own in self.eos else min(self.eos)

    def _limits(self) -> commands.Limits:
        limits = self._target.manifest["limits"]
        output = self._target.manifest["build"].get("max_tokens", limits["max_seq_len"] // 2)
        return commands.Limits(limits["max_batch_size"], limits["max_seq_len"] - output, output)

    @staticmethod
    def _tp(engine: EngineInfo) -> int:
        return engine.manifest["build"].get("tensor_parallel_size", 1)

    def _running_worker(self) -> EngineWorker:
        if self._worker is None:
            tp = self._tp(self._target)
            limits = self._limits()
            self._worker = EngineWorker(
                _examples_folder() / "examples" / "run.py",
                launcher=["mpirun", "-n", str(tp), "--allow-run-as-root"] if tp > 1 else [],
                draft_engine_dir=str(self._drafter.path) if self._drafter else None,
                max_input_len=limits.max_input_len,
                max_output_len=limits.max_tokens,
                log=Path(self._work.name) / "run.log",
            )
        return self._worker

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None
        self._work.cleanup()


def _engine_arch() -> str:
    here = steps.gpus()
    return here[0].arch if here else "unknown"


def _examples_folder() -> Path:
    """The release's repository: where TENSORRT_LLM_REPO says, or where NVIDIA's containers have it."""
    said = os.environ.get("TENSORRT_LLM_REPO")
    for folder in [Path(said)] if said else [Path("/app/tensorrt_llm")]:
        if (folder / "examples" / "run.py").is_file():
            return folder
    raise BackendUnavailable(
        f"examples/run.py is not in {said or '/app/tensorrt_llm'}",
        "TensorRT-LLM's repository at the installed release's tag",
        "fetch it (a plan's first step does) and set TENSORRT_LLM_REPO to its folder",
    )
