"""Stands in for the whole-step kernel on a CPU: the same calls, computed by a `GpuModel` in plain torch."""

from __future__ import annotations

from typing import Any

import torch

from tutorial_lib.engine.gpu_model import GpuModel
from tutorial_lib.engine.stream.model import StreamModel


class PlainSteps:
    """`WholeSteps` by the model itself. fails_at: the launch, counted from 0, from which on it gives up."""

    def __init__(self, model: GpuModel, fails_at: int | None = None) -> None:
        self.model, self.fails_at, self.launches = model, fails_at, 0
        self.head_rows = model.head.data.shape[0]
        self.trouble = torch.zeros(4, dtype=torch.int32, device=model.device)
        self.report: dict[str, Any] = {}
        self.rows: list[int] = []  # of every launch
        self.chains: list[int] = []  # K of every draft in one launch

    def _is_up(self) -> bool:
        if self.launches == self.fails_at:
            self.trouble.copy_(torch.tensor([1, 3, 2, 7], dtype=torch.int32))
        self.launches += 1
        return not self.trouble.any()

    def step(self, tokens, table, lengths, slots, rows, *, choices, damage, logits, tree) -> None:
        self.rows.append(lengths.shape[0] * rows)
        if self._is_up():
            found = self.model.step(tokens, table, lengths, slots, rows, tree)
            self.model.ops.argmax(found, choices, damage=damage)
            if logits is not None:
                logits.copy_(found)

    def chain(self, pair, table, lengths, slots, out, *, ids, vocab_size) -> None:
        self.chains.append(out.shape[1])
        if not self._is_up():
            return
        tokens, rows = pair.reshape(-1), 2
        for i in range(out.shape[1]):
            at = lengths if i == 0 else lengths + i + 1
            logits = self.model.step(tokens, table, at, slots, rows)[rows - 1 :: rows]
            self.model.ops.argmax(logits if ids is not None else logits[:, :vocab_size], out[:, i], ids=ids)
            tokens, rows = out[:, i], 1

    def explain(self, trouble) -> str:
        return f"phase {trouble[1]}, block {trouble[2]}, barrier {trouble[3]}"


def streamed(model: GpuModel, *, keeps_reader: bool = True, fails_at: int | None = None) -> StreamModel:
    return StreamModel.of(model, PlainSteps(model, fails_at), keeps_reader=keeps_reader)
