"""What a number format costs: logits over whole texts, their error, perplexity, and how near a tie two tokens were.

Works on a `GpuModel` (on a GPU, or on a CPU where its parts are plain torch) and on any matrix of logits. The
reference is `transformers` in float32, which nobody here wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..engine.gpu_model import GpuModel


@torch.inference_mode()
def text_logits(model: GpuModel, ids: Sequence[int]) -> torch.Tensor:
    """float32 [len(ids), V]: row i are the logits after ids[: i + 1], 64 rows a step, as verification computes them."""
    from ..engine.gpu_model import MAX_STEP_ROWS, PAGE

    blocks = -(-len(ids) // PAGE)
    table = torch.arange(blocks, dtype=torch.int32, device=model.device)[None]
    slot = torch.zeros(1, dtype=torch.int32, device=model.device)
    found = []
    for at in range(0, len(ids), MAX_STEP_ROWS):
        chunk = torch.tensor(list(ids[at : at + MAX_STEP_ROWS]), device=model.device)
        length = torch.full((1,), at, dtype=torch.int32, device=model.device)
        found.append(model.step(chunk, table, length, slot, len(chunk)).clone())
    return torch.cat(found)


class Reference:
    """The model in `folder` by `transformers`, in float32."""

    def __init__(self, folder: str | Path, device: str = "cuda") -> None:
        from transformers import AutoModelForCausalLM

        self.device = device
        model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
        self.model = model.to(device).eval()

    @torch.inference_mode()
    def text_logits(self, ids: Sequence[int]) -> torch.Tensor:
        """float32 [len(ids), V], like `text_logits`."""
        return self.model(torch.tensor([list(ids)], device=self.device)).logits[0].float()


def compare_logits(
    reference: Sequence[torch.Tensor], other: Sequence[torch.Tensor], texts: Sequence[tuple[Sequence[int], int]]
) -> dict[str, float]:
    """Errors of `other` over texts of (ids, where the answer starts): of every answer token the logits that precede it.

    {"logit_error_rms", "logit_error_max", "logit_error_relative": rms error / spread of the reference's logits,
    "argmax_agreement", "perplexity", "reference_perplexity", "tokens"}. A text's prompt is not counted.
    """
    squares = spread = loss = reference_loss = 0.0
    largest, same, tokens, numbers = 0.0, 0, 0, 0
    for truth, mine, (ids, start) in zip(reference, other, texts, strict=True):
        a, b = truth[start - 1 : len(ids) - 1].double(), mine[start - 1 : len(ids) - 1].double()
        answer = torch.tensor(list(ids[start:]), device=a.device)
        error = (a - b).abs()
        squares, largest = squares + float(error.pow(2).sum()), max(largest, float(error.max()))
        spread += float((a - a.mean(-1, keepdim=True)).pow(2).sum())
        same += int((a.argmax(-1) == b.argmax(-1)).sum())
        reference_loss += float(torch.nn.functional.cross_entropy(a, answer, reduction="sum"))
        loss += float(torch.nn.functional.cross_entropy(b, answer, reduction="sum"))
        tokens, numbers = tokens + len(answer), numbers + a.numel()
    return {
        "logit_error_rms": (squares / numbers) ** 0.5,
        "logit_error_max": largest,
        "logit_error_relative": (squares / spread) ** 0.5,
        "argmax_agreement": same / tokens,
        "perplexity": float(torch.tensor(loss / tokens).exp()),
        "reference_perplexity": float(torch.tensor(reference_loss / tokens).exp()),
        "tokens": tokens,
    }


def first_tokens_apart(
    differences: Sequence[Mapping[str, Any]],
    prompts: Mapping[str, Sequence[int]],
    reference: Mapping[str, Sequence[int]],
    others: Mapping[str, Mapping[str, Sequence[int]]],
    logits_of: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """For each difference (`summary.first_differences`, with "method") once per method and request: which two tokens
    met, and how far their logits lie apart by each of `logits_of` (name -> ids -> logits of the text).

    prompts, reference and others[method]: token ids by request. A text that is merely shorter has no second token.
    """
    found = {}
    for difference in differences:
        method, request, at = difference["method"], difference["request"], difference["first_difference"]
        if (method, request) in found:
            continue
        ours, theirs = reference[request], others[method][request]
        entry: dict[str, Any] = {"method": method, "request": request, "first_difference": at}
        found[method, request] = entry
        if at >= min(len(ours), len(theirs)):
            continue
        before = [*prompts[request], *ours[:at]]
        entry["tokens"] = [ours[at], theirs[at]]
        for name, logits in logits_of.items():
            row = logits(before)[-1]
            entry[f"gap_{name}"] = float(row[ours[at]] - row[theirs[at]])
    return list(found.values())


def gpu_model_of(path: Path) -> GpuModel:
    """The model of a GPU engine directory."""
    from ..engine.build import machine_arch
    from ..engine.gpu_build import load_gpu_model
    from ..engine_dir import open_engine

    return load_gpu_model(open_engine(path, backend="torch", arch=machine_arch("cuda")), max_draft_len=0)[0]
