"""What the trainings of all drafters share: examples from the corpus, the loss, the optimizers, the loop, int8.

A "student" is a drafter in training: a module with a shortlist of the vocabulary, a loss on a batch and an exact
evaluation. Several students can learn from the same batches in one loop; those that read the target's hidden states
share one pass of the target then.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import OptionError
from ..models import Checkpoint
from .acceptance import Text, held_out_texts
from .corpus import ANSWER, FORCED, USER, Corpus, Say, Threads, choose_shortlist, widened


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """hard_share: weight of the target's first choice against its whole top-16 distribution (1: the first choice alone,
    best for greedy acceptance by a hair; lower for sampling and for trees). user_share: how many of the positions in
    user turns are trained on. init_layers: layers of the target to start from. export_shortlist: ids that the trained
    drafter may propose, beyond those trained (None: only those). is_averaged: see `average_if_better`. Exactly one of
    `steps` and `seconds` ends the schedule. Defaults: as the shipped draft model was made."""

    init_layers: tuple[int, ...] = ()
    shortlist_size: int = 8192
    export_shortlist: int | None = None
    is_averaged: bool = False
    steps: int | None = None
    seconds: float | None = None
    tokens_per_step: int = 65536
    optimizer: str = "muon"
    learning_rate: float = 6e-3
    weight_decay: float = 0.01
    warmup_share: float = 0.03
    hard_share: float = 1.0
    user_share: float = 0.1
    held_out: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise OptionError("training got both or neither of steps and seconds", "exactly one of them")
        if self.optimizer not in ("muon", "adamw"):
            raise OptionError(f"optimizer is {self.optimizer!r}", "'muon' or 'adamw'")


@dataclass(frozen=True)
class Batch:
    """tokens [rows, length]; where [n]: places in rows x length whose next token is learned; labels, probs [n, 16]: the
    target's choices there as rows of the shortlist. group: batches of one group have the same tokens. states: what
    `look` found of the target's hidden states, each [rows, length, width]."""

    tokens: torch.Tensor
    where: torch.Tensor
    labels: torch.Tensor
    probs: torch.Tensor
    group: int = 0
    states: Sequence[torch.Tensor] = ()


class Student(Protocol):
    """A drafter in training (also an `nn.Module`). kind: 'draft', 'medusa' or 'eagle3'; prefix: of its stored names;
    config: of its config.json; facts: what its card should say of how it was made."""

    kind: str
    prefix: str
    config: dict[str, Any]
    facts: dict[str, Any]
    shortlist: torch.Tensor

    def loss(self, batch: Batch) -> torch.Tensor: ...

    def evaluate(self, texts: Sequence[Text], max_draft_len: int | None = None) -> dict[str, Any]: ...

    def vocabulary(self) -> dict[str, torch.Tensor]: ...

    def cover(self, shortlist: torch.Tensor, whole_head: torch.Tensor) -> None: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


@dataclass
class Trained:
    """A student, how it was made, and its curve: one entry per measurement on held-out documents."""

    draft: Any
    settings: TrainingSettings
    curve: list[dict[str, float | None]] = field(default_factory=list)
    held_out: list[int] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0


# ------------------------------------------------------------------------------------------------------------ the loop


def corpus_shortlist(target: Checkpoint, corpus: Corpus, settings: TrainingSettings) -> torch.Tensor:
    """The vocabulary of drafters trained on this corpus; EOS is always part of it."""
    if not (corpus.kinds == ANSWER).any():
        raise OptionError("the corpus holds no answer yet", "answers to learn from", "give the corpus more time")
    always = sorted(target.eos_token_ids())
    return choose_shortlist(corpus, target.config["vocab_size"], settings.shortlist_size, always)


def fit(
    students: Sequence[Any],
    corpus: Corpus,
    settings: TrainingSettings,
    vocab_size: int,
    *,
    look: Callable[[torch.Tensor, int], Sequence[torch.Tensor]] | None = None,
    measure_every: float = 0.1,
    say: Say = print,
) -> list[Trained]:
    """Distil the target's choices into `students`, which share a shortlist. look: the target's states of the tokens of
    a group. measure_every: share of the schedule between measurements."""
    held_out = min(settings.held_out, max(1, corpus.documents // 8))
    examples = Examples(corpus, students[0].shortlist, vocab_size, held_out, settings)
    trained = [Trained(student, settings, held_out=examples.held_out) for student in students]
    texts = held_out_texts(corpus, examples.held_out)
    every = [parameter for student in students for parameter in student.parameters()]
    optimizers = _optimizers(every, settings)
    start, next_measure, steps = time.monotonic(), 0.0, 0
    recent: list[list[torch.Tensor]] = [[] for _ in students]
    is_tried = not corpus.tokens.is_cuda and settings.seconds is not None
    with Threads(is_tried=is_tried) as threads:
        for batch in examples.batches():
            seconds = time.monotonic() - start
            progress = steps / settings.steps if settings.steps else seconds / (settings.seconds or 1)
            if progress >= next_measure or progress >= 1:
                next_measure += measure_every
                for one, losses in zip(trained, recent, strict=True):
                    one.steps, one.seconds = steps, seconds
                    one.curve.append(_measure(one, texts, losses, say))
                    losses.clear()
                if progress >= 1:
                    break
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = settings.learning_rate * _schedule(progress, settings.warmup_share)
            threads.before_step()
            if look is not None:
                batch = Batch(
                    batch.tokens, batch.where, batch.labels, batch.probs, states=look(batch.tokens, batch.group)
                )
            for student, losses in zip(students, recent, strict=True):
                loss = student.loss(batch)
                loss.backward()
                losses.append(loss.detach())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            steps += 1
    return trained


def average_if_better(trained: Trained, before: Any | None, corpus: Corpus, say: Say = print) -> None:
    """Give a student that went on from `before` the mean of both weights, if that is accepted more on held-out answers.

    What two runs of one family agree on stays, what each learned by chance is halved: Wortsman et al. 2022 (arXiv
    2203.05482). The card tells both figures (`facts["average"]`). Without `settings.is_averaged` nothing happens.
    """
    if not trained.settings.is_averaged or before is None:
        return
    student, texts = trained.draft, held_out_texts(corpus, trained.held_out)
    own = {name: weight.clone() for name, weight in student.state_dict().items()}
    found = {"trained": student.evaluate(texts)["acceptance_length"]}
    student.load_state_dict(mean_weights([before.state_dict(), own]))
    found["mean"] = student.evaluate(texts)["acceptance_length"]
    kept = max(found, key=found.__getitem__)
    if kept == "trained":
        student.load_state_dict(own)
    student.facts["average"] = {**found, "kept": kept}
    say(f"{student.kind}, held out: trained {found['trained']:.3f}, mean {found['mean']:.3f}; kept: {kept}")


def mean_weights(states: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The mean of several state dicts of the same names and shapes."""
    return {name: torch.stack([state[name].to(one) for state in states]).mean(0) for name, one in states[-1].items()}


def widen(student: Student, size: int, whole_head: torch.Tensor) -> None:
    """Let a trained student propose `size` ids (see `widened`). The rows of a head are the target's own, so those added
    are as good as any; what they cost is being read at every draft step. whole_head [vocab, width]."""
    student.cover(widened(student.shortlist, size, len(whole_head)), whole_head)


def _optimizers(parameters: Sequence[nn.Parameter], settings: TrainingSettings) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for matrices and AdamW for the rest, or AdamW for all."""
    matrices = [p for p in parameters if p.dim() == 2]
    vectors = [p for p in parameters if p.dim() < 2]
    options: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if settings.optimizer == "muon":
        first: torch.optim.Optimizer = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options)
    else:
        first = torch.optim.AdamW(matrices, betas=(0.9, 0.95), **options)
    return [first, torch.optim.AdamW(vectors, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)]


def _schedule(progress: float, warmup: float) -> float:
    """Linear warm-up, then linearly to zero."""
    return min(1.0, (progress + 1e-3) / warmup) * max(0.0, 1 - progress) if warmup else 1 - progress


def _measure(
    trained: Trained, texts: Sequence[Text], losses: Sequence[torch.Tensor], say: Say
) -> dict[str, float | None]:
    """One point of the curve, on held-out greedy answers."""
    found = trained.draft.evaluate(texts)
    point = {
        "step": trained.steps,
        "seconds": round(trained.seconds, 1),
        "loss": round(float(torch.stack(list(losses)).mean()), 4) if losses else None,
        "agreement": found["agreement"],
        "acceptance_length": found["acceptance_length"],
    }
    say(
        f"{trained.draft.kind}: step {trained.steps:>6}  {trained.seconds:>6.1f} s  loss "
        f"{point['loss'] or float('nan'):>7.3f}  held out: agreement {found['agreement']:.3f}, acceptance length at "
        f"K={found['max_draft_len']} {found['acceptance_length']:.3f}"
    )
    return point


# ------------------------------------------------------------------------------------------------------------ the loss


def shortlist_loss(
    hidden: torch.Tensor,
    head: torch.Tensor,
    labels: torch.Tensor,
    probs: torch.Tensor,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of softmax(hidden @ head.T) against sparse targets, summed over the rows; the head is frozen.

    hidden [n, width], head [V_d, width], labels int64 [n, 16] rows of the head, probs [n, 16] summing to 1 per row,
    weights [n] of the rows (None: all 1). Also returns [n]: the probability given to the first label, a constant.
    """
    return _ShortlistLoss.apply(hidden, head, labels, probs, weights)


class _ShortlistLoss(torch.autograd.Function):
    """The gradient is taken chunk by chunk in the forward pass, so the [n, V_d] logits never exist as a whole."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, head: Any, labels: Any, probs: Any, weights: Any) -> Any:
        total = hidden.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(hidden)
        first = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        for part in range(0, len(hidden), 8192):
            rows = slice(part, part + 8192)
            logits = F.linear(hidden[rows].to(head.dtype), head)
            own = None if weights is None else weights[rows, None]
            losses, first[rows], error = _chunk(hidden.is_cuda)(logits, labels[rows], probs[rows], own)
            total += losses
            gradient[rows] = (error @ head).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(first)
        return total, first

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None, None, None, None


def _chunk_loss(
    logits: torch.Tensor, labels: torch.Tensor, probs: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of some rows: their loss, the probability of the first labels, the gradient of the logits in their dtype."""
    log_probs = logits.float().log_softmax(-1)
    found = log_probs.gather(1, labels)
    losses, wanted, error = -(found * probs).sum(-1), probs, log_probs.exp()
    if weights is not None:
        losses, wanted, error = losses * weights[:, 0], wanted * weights, error * weights
    return losses.sum(), found[:, 0].exp(), error.scatter_add(1, labels, -wanted).to(logits.dtype)


@cache
def _chunk(is_compiled: bool) -> Callable[..., Any]:
    """`_chunk_loss`, compiled on a GPU: as single operations it moves every logit through memory ten times."""
    return torch.compile(_chunk_loss, dynamic=True) if is_compiled else _chunk_loss


# ------------------------------------------------------------------------------------------------------------ examples


class Examples:
    """Batches of documents of similar length, with targets over the shortlist; a held-out slice apart."""

    def __init__(
        self, corpus: Corpus, shortlist: torch.Tensor, vocab_size: int, held_out: int, settings: TrainingSettings
    ) -> None:
        self.corpus, self.settings, device = corpus, settings, corpus.tokens.device
        self.rank = torch.full((vocab_size,), -1, dtype=torch.long, device=device)
        self.rank[shortlist.to(device)] = torch.arange(len(shortlist), device=device)
        generator = torch.Generator().manual_seed(settings.seed)
        order = torch.randperm(corpus.documents, generator=generator)
        self.held_out = order[:held_out].tolist()
        lengths = corpus.offsets.diff().cpu()
        order = order[held_out:]
        order = order[lengths[order].argsort(stable=True)]
        self.groups, self.generator = [], generator
        while len(order):
            rows = max(1, settings.tokens_per_step // int(lengths[order[0]]))
            rows = max(1, settings.tokens_per_step // _padded(int(lengths[order[:rows][-1]])))
            padded = _padded(int(lengths[order[:rows][-1]]))
            self.groups.append((order[:rows].to(device), padded))
            order = order[rows:]

    def batches(self) -> Iterator[Batch]:
        """Endless, every document once before one comes again."""
        while True:
            for index in torch.randperm(len(self.groups), generator=self.generator).tolist():
                yield self._batch(index)

    def _batch(self, group: int) -> Batch:
        documents, length = self.groups[group]
        corpus, settings = self.corpus, self.settings
        places, is_text = _places(corpus, documents, length)
        tokens = corpus.tokens[places].long()
        writer = torch.where(is_text, corpus.kinds[places], FORCED)
        writer = F.pad(writer[:, 1:], (0, 1))  # position i is trained on token i + 1
        chance = torch.rand(writer.shape, device=writer.device)
        is_chosen = (writer == ANSWER) | ((writer == USER) & (chance < settings.user_share))
        # what the shortlist cannot propose cannot be accepted: nothing to learn there
        is_chosen &= self.rank[corpus.top_ids[places, 0].long()] >= 0
        where = is_chosen.flatten().nonzero()[:, 0]
        source = places.flatten()[where]
        labels = self.rank[corpus.top_ids[source].long()]
        probs = torch.where(labels >= 0, corpus.top_logprobs[source].float().exp(), 0)
        probs = probs / probs.sum(-1, keepdim=True).clamp(min=1e-6) * (1 - settings.hard_share)
        probs[:, 0] += settings.hard_share
        return Batch(tokens, where, labels.clamp(min=0), probs, group)


def _padded(length: int) -> int:
    return -(-length // 64) * 64


def _places(corpus: Corpus, documents: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices into the flat corpus [documents, length], and which of them are text rather than padding."""
    starts, stops = corpus.offsets[documents], corpus.offsets[documents + 1]
    places = starts[:, None] + torch.arange(length, device=starts.device)
    is_text = places < stops[:, None]
    return places.clamp(max=len(corpus.tokens) - 1), is_text


# ---------------------------------------------------------------------------------------------------------------- int8


def write_student(student: Any, folder: Path) -> int:
    """`config.json` and `model.safetensors` (matrices int8 with a float32 scale per row, the rest float32, and the
    shortlist; nothing of the target); returns the bytes of the weights."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(student.vocabulary())
    for name, parameter in student.named_parameters():
        weight = parameter.detach().to("cpu", torch.float32)
        if weight.dim() == 2:
            tensors[f"{student.prefix}{name}"], tensors[f"{student.prefix}{name}_scale"] = to_int8(weight)
        else:
            tensors[f"{student.prefix}{name}"] = weight.clone()
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    write_json(folder / "config.json", student.config)
    return (folder / "model.safetensors").stat().st_size


def read_weights(student: Any, stored: Mapping[str, torch.Tensor]) -> None:
    """Fill a student with what `write_student` wrote of it."""
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            weight = stored[f"{student.prefix}{name}"].float()
            scale = stored.get(f"{student.prefix}{name}_scale")
            parameter.copy_(weight if scale is None else weight * scale[:, None])


def round_weights(student: Any) -> None:
    """Replace every matrix by what is stored of it."""
    with torch.no_grad():
        for parameter in student.parameters():
            if parameter.dim() == 2:
                rounded, scale = to_int8(parameter)
                parameter.copy_(rounded * scale[:, None])


def to_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [rows, columns] and float32 scales [rows] with weight ~ int8 * scale."""
    scale = weight.abs().amax(-1).clamp(min=1e-12) / 127
    return (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
