"""`GpuModel` whose steps are launches of the whole-step kernel: same cache, same inputs, same outputs.

What a round needs of a model is `step`, `choose` and `draft_chain`; here each of them is one launch (`WholeSteps`).
Weights lie in the order in which the kernel streams them. Where the GPU has room for both orders, the Triton kernels
keep theirs and read the prompts, 64 rows a step; where it has not, prompts are read by this kernel too, 16 rows a step.
A round never mixes the two, so speculative text equals plain text exactly either way.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch

from ...errors import OptionError
from ..gpu_model import MAX_STEP_ROWS, FixedStep, GpuModel, Taps
from .choice import STREAM_ROWS, refused_features, refused_layers
from .launch import GO_ON, StreamError


class WholeSteps(Protocol):
    """The kernel, ready for one model. All tensors are on its device; shapes and dtypes as `GpuModel` takes them.

    trouble: int32 words, zero while all is well; a launch that gives up writes where and why, and later launches
    return at once. head_rows: of the output head, and so the width of the logits. report: plain data on what was
    compiled.
    """

    trouble: torch.Tensor
    head_rows: int
    report: dict[str, Any]

    def step(
        self,
        tokens: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        rows: int,
        *,
        choices: torch.Tensor,
        damage: torch.Tensor,
        logits: torch.Tensor | None,
        tree: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """One step. choices: int32 [sequences * rows], contiguous. damage: int32 [B] as in `kernels.argmax`. logits:
        float32 [sequences * rows, V], or None where nobody needs them."""

    def chain(
        self,
        pair: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
        *,
        ids: torch.Tensor | None,
        vocab_size: int,
    ) -> None:
        """`GpuModel.draft_chain`."""

    def explain(self, trouble: Sequence[int]) -> str:
        """The words of `trouble` as half a sentence: which phase, block and barrier."""


class StreamModel(GpuModel):
    """See the module's header. reader: the model of the Triton kernels over the same cache that reads the prompts, None
    if this one does."""

    kernel = "stream"
    round_rows = STREAM_ROWS

    reader: GpuModel | None
    steps: WholeSteps
    _damage: torch.Tensor  # where it goes if nobody asks
    _choices: torch.Tensor

    @classmethod
    def of(cls, model: GpuModel, steps: WholeSteps, *, keeps_reader: bool) -> StreamModel:
        """`model` with its steps run by `steps`. It shares all that it has with it: without `keeps_reader` its weights
        may have been packed in place, and `model` is not to be used any more."""
        made = cls.__new__(cls)
        made.__dict__ = {**model.__dict__, "_fixed_steps": {}}
        made.steps, made.reader, made.trouble = steps, model if keeps_reader else None, steps.trouble
        made.prompt_rows = MAX_STEP_ROWS if keeps_reader else STREAM_ROWS
        made._damage = torch.zeros(1, dtype=torch.int32, device=model.device)
        made._choices = torch.zeros(STREAM_ROWS, dtype=torch.int32, device=model.device)
        return made

    @torch.inference_mode()
    def step(
        self,
        tokens: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        rows: int,
        tree: tuple[torch.Tensor, torch.Tensor] | None = None,
        taps: Taps | None = None,
    ) -> torch.Tensor:
        count = lengths.shape[0] * rows
        damage, choices = self._damage, self._choices[:count]
        logits = self.choose(tokens, table, lengths, slots, rows, choices, damage=damage, tree=tree, taps=taps)
        assert logits is not None
        return logits

    @torch.inference_mode()
    def choose(
        self,
        tokens: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        rows: int,
        out: torch.Tensor,
        *,
        damage: torch.Tensor,
        tree: tuple[torch.Tensor, torch.Tensor] | None = None,
        taps: Taps | None = None,
        needs_logits: bool = True,
    ) -> torch.Tensor | None:
        count = lengths.shape[0] * rows
        if count > STREAM_ROWS:
            raise OptionError(f"a step has {count} rows", f"at most {STREAM_ROWS} by the whole-step kernel", GO_ON)
        if taps is not None:
            raise refused_features()
        logits = None
        if needs_logits:
            logits = torch.empty(count, self.steps.head_rows, dtype=torch.float32, device=self.device)
        self.steps.step(tokens, table, lengths, slots, rows, choices=out, damage=damage, logits=logits, tree=tree)
        return logits

    def draft_chain(
        self,
        pair: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
        *,
        ids: torch.Tensor | None = None,
        vocab_size: int,
    ) -> bool:
        self.steps.chain(pair, table, lengths, slots, out, ids=ids, vocab_size=vocab_size)
        return True

    def check(self, trouble: Sequence[int]) -> None:
        if any(trouble):
            raise StreamError(
                f"the whole-step kernel gave up: {self.steps.explain(trouble)}",
                "a GPU whose processors all run it at once; the text so far is not to be trusted",
                f"make a new LLM, or {GO_ON}",
            )

    @torch.inference_mode()
    def body(
        self, tokens, table, lengths, slots, rows: int, tree=None, taps: Taps | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A step whose tokens nobody asks for. Unlike `GpuModel.body` it gives back no residual."""
        count = lengths.shape[0] * rows
        self.choose(
            tokens, table, lengths, slots, rows, self._choices[:count], damage=self._damage, tree=tree, taps=taps,
            needs_logits=False,
        )  # fmt: skip
        return self._choices[:0], None

    def without_layers(self, skipped: Collection[int]) -> GpuModel:
        raise refused_layers()

    @torch.inference_mode()
    def rehearse(self, rows: int) -> None:
        """What the reader's steps launch, or what is done with logits. The whole-step kernel is compiled already."""
        if self.reader is not None:
            self.reader.rehearse(rows)
            return
        rows = min(rows, STREAM_ROWS)
        logits = torch.zeros(rows, self.steps.head_rows, device=self.device)
        self.ops.argmax(logits, torch.empty(rows, dtype=torch.int32, device=self.device), self.ops.pdl)

    def _fixed_step(self, rows: int, feature_layers: tuple[int, ...], *, has_logits: bool) -> FixedStep:
        if self.reader is not None:
            return self.reader._fixed_step(rows, feature_layers, has_logits=has_logits)
        return super()._fixed_step(rows, feature_layers, has_logits=has_logits)
