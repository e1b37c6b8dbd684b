"""Train the small draft model: the target writes the text, a few layers learn to foresee it (self-distillation).

`generate_corpus` (see `corpus.py`) lets the target invent chats and keeps its 16 most likely tokens at every position.
A few Llama layers, started from layers of the target and sharing its embeddings, learn to rank those tokens over a
shortlist of the vocabulary (`train_draft_model`). `evaluate` gives the exact greedy acceptance length without decoding:
a draft model sees tokens only, so the outcome of a round is its agreement with the target's text. `export` writes what
the package ships. `python -m tutorial_lib.drafters.training --device cpu --minutes 1 --out DIR` shows all of it.

Sequence-level distillation: Kim & Rush 2016 (arXiv 1606.07947); for drafters: DistillSpec (arXiv 2310.08461).
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import nn

from ..bench.prompts import Prompt, load_prompts, render
from ..engine.model import ModelConfig, inverse_frequencies
from ..errors import OptionError, WorkbookError
from ..models import Checkpoint, load_tokenizer, resolve
from .card import card_text, make_card
from .corpus import (
    ANSWER,
    FORCED,
    USER,
    Corpus,
    CorpusSettings,
    Say,
    choose_shortlist,
    generate_corpus,
    greedy_texts,
)

# ----------------------------------------------------------------------------------------------------- the draft model


class DraftLayer(nn.Module):
    """One Llama decoder layer for training; parameter names as in Hugging Face's Llama."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, head_dim

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.self_attn = nn.ModuleDict(
            {
                "q_proj": linear(width, self.heads * head_dim),
                "k_proj": linear(width, self.kv_heads * head_dim),
                "v_proj": linear(width, self.kv_heads * head_dim),
                "o_proj": linear(self.heads * head_dim, width),
            }
        )
        self.mlp = nn.ModuleDict(
            {"gate_proj": linear(width, inner), "up_proj": linear(width, inner), "down_proj": linear(inner, width)}
        )
        self.input_layernorm = nn.RMSNorm(width, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(width, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [rows, length, width]; cos, sin [length, head_dim]."""
        rows, length, _ = x.shape
        h = self.input_layernorm(x)
        q = self.self_attn["q_proj"](h).view(rows, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.self_attn["k_proj"](h).view(rows, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.self_attn["v_proj"](h).view(rows, length, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = (_rotate_halves(t, cos, sin) for t in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.self_attn["o_proj"](out.transpose(1, 2).reshape(rows, length, -1))
        h = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](h)) * self.mlp["up_proj"](h))


def _rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-b, a], dim=-1) * sin).to(x.dtype)


class DraftModel(nn.Module):
    """A few Llama layers between the target's frozen embeddings and the shortlist rows of its output head.

    config: the target's Hugging Face config with `num_hidden_layers` of its own. embed [vocab, width] and head
    [V_d, width] belong to the target. shortlist int64 [V_d]: the target id of every head row.
    """

    embed: torch.Tensor
    head: torch.Tensor
    shortlist: torch.Tensor
    inverse_frequencies: torch.Tensor

    def __init__(
        self, config: Mapping[str, Any], embed: torch.Tensor, head: torch.Tensor, shortlist: torch.Tensor
    ) -> None:
        super().__init__()
        self.config = dict(config)
        shape = ModelConfig.from_hf(config)
        self.layers = nn.ModuleList(DraftLayer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.register_buffer("embed", embed, persistent=False)
        self.register_buffer("head", head[shortlist.to(head.device)].contiguous(), persistent=False)
        self.register_buffer("shortlist", shortlist.to(embed.device), persistent=False)
        self.register_buffer("inverse_frequencies", inverse_frequencies(shape).to(embed.device), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [rows, length] -> hidden states [rows, length, width], normed for the head."""
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), self.inverse_frequencies).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        x = F.embedding(tokens, self.embed).float()
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def first_choices(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target id that the drafter would propose after every hidden state [..., width]."""
        return self.shortlist[F.linear(hidden, self.head.to(hidden.dtype)).argmax(-1)]


def new_draft_model(
    target: Checkpoint, shortlist: torch.Tensor, init_layers: Sequence[int], device: str = "cpu"
) -> DraftModel:
    """A draft model that starts as the given layers of the target (counted from 0) and its final norm."""
    tensors = target.tensors(device, torch.float32)
    config = {**target.config, "num_hidden_layers": len(init_layers)}
    embed = tensors["model.embed_tokens.weight"]
    head = embed if target.config.get("tie_word_embeddings") else tensors["lm_head.weight"]
    draft = DraftModel(config, embed, head, shortlist).to(device)
    with torch.no_grad():
        for layer, source in zip(draft.layers, init_layers, strict=True):
            for name, parameter in layer.named_parameters():
                parameter.copy_(tensors[f"model.layers.{source}.{name}"])
        draft.norm.weight.copy_(tensors["model.norm.weight"])
    return draft


def spread_layers(count: int, total: int) -> list[int]:
    """`count` of `total` layers, first and last among them, evenly spread."""
    return [round(i * (total - 1) / max(1, count - 1)) for i in range(count)]


# ------------------------------------------------------------------------------------------------------------ training


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """hard_share: weight of the target's first choice against its whole top-16 distribution (1: the first choice alone,
    best for greedy acceptance by a hair; lower for sampling). user_share: how many of the positions in user turns are
    trained on. Exactly one of `steps` and `seconds` ends the schedule. Defaults: as the shipped weights were made."""

    init_layers: tuple[int, ...]
    shortlist_size: int = 8192
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


@dataclass
class Trained:
    """A draft model, how it was made, and its curve: one entry per measurement on held-out documents."""

    draft: DraftModel
    settings: TrainingSettings
    curve: list[dict[str, float | None]] = field(default_factory=list)
    held_out: list[int] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0


def train_draft_model(
    target: Checkpoint,
    corpus: Corpus,
    settings: TrainingSettings,
    *,
    device: str = "cpu",
    measure_every: float = 0.1,
    say: Say = print,
) -> Trained:
    """Distil the target's choices into a draft model. `measure_every`: share of the schedule between measurements."""
    if not (corpus.kinds == ANSWER).any():
        raise OptionError("the corpus holds no answer yet", "answers to learn from", "give the corpus more time")
    torch.manual_seed(settings.seed)
    always = sorted(target.eos_token_ids())
    shortlist = choose_shortlist(corpus, target.config["vocab_size"], settings.shortlist_size, always)
    trained = Trained(new_draft_model(target, shortlist, settings.init_layers, device), settings)
    draft, held_out = trained.draft, min(settings.held_out, max(1, corpus.documents // 8))
    examples = _Examples(corpus, draft.shortlist, target.config["vocab_size"], held_out, settings)
    trained.held_out = examples.held_out
    optimizers = _optimizers(draft, settings)
    head = draft.head
    if device.startswith("cuda"):
        head = head.bfloat16()
        for layer in draft.layers:
            layer.compile(dynamic=True)
    start, next_measure = time.monotonic(), 0.0
    recent: list[torch.Tensor] = []
    for tokens, where, labels, probs in examples.batches():
        trained.seconds = time.monotonic() - start
        progress = trained.steps / settings.steps if settings.steps else trained.seconds / (settings.seconds or 1)
        if progress >= next_measure or progress >= 1:
            next_measure += measure_every
            trained.curve.append(_measure(trained, corpus, examples.held_out, recent, say))
            recent = []
            if progress >= 1:
                break
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * _schedule(progress, settings.warmup_share)
        with torch.autocast(device_type=tokens.device.type, dtype=torch.bfloat16, enabled=tokens.is_cuda):
            hidden = draft(tokens).flatten(0, 1)[where]
        loss = ShortlistLoss.apply(hidden, head, labels, probs)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recent.append(loss.detach())
        trained.steps += 1
    return trained


class ShortlistLoss(torch.autograd.Function):
    """Mean cross-entropy of softmax(hidden @ head.T) against sparse targets; the head is frozen.

    hidden [n, width], head [V_d, width], labels int64 [n, 16] rows of the head, probs [n, 16] summing to 1 per row.
    The gradient is taken chunk by chunk in the forward pass, so the [n, V_d] logits never exist as a whole.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, probs: torch.Tensor) -> Any:
        total = hidden.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(hidden)
        for part in range(0, len(hidden), 8192):
            rows = slice(part, part + 8192)
            logits = F.linear(hidden[rows].to(head.dtype), head).float()
            log_probs = logits.log_softmax(-1)
            total -= (log_probs.gather(1, labels[rows]) * probs[rows]).sum()
            error = log_probs.exp_().scatter_add_(1, labels[rows], -probs[rows])
            gradient[rows] = (error.to(head.dtype) @ head).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        ctx.count = max(1, len(hidden))
        return total / ctx.count

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * (grads[0] / ctx.count), None, None, None


class _Examples:
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

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Endless: tokens [rows, length], and for the chosen positions: index into rows x length, labels, probs."""
        while True:
            for index in torch.randperm(len(self.groups), generator=self.generator).tolist():
                yield self._batch(*self.groups[index])

    def _batch(
        self, documents: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
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
        return tokens, where, labels.clamp(min=0), probs


def _padded(length: int) -> int:
    return -(-length // 64) * 64


def _places(corpus: Corpus, documents: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices into the flat corpus [documents, length], and which of them are text rather than padding."""
    starts, stops = corpus.offsets[documents], corpus.offsets[documents + 1]
    places = starts[:, None] + torch.arange(length, device=starts.device)
    is_text = places < stops[:, None]
    return places.clamp(max=len(corpus.tokens) - 1), is_text


def _optimizers(draft: DraftModel, settings: TrainingSettings) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for matrices and AdamW for the norms, or AdamW for all."""
    is_muon = settings.optimizer == "muon"
    matrices = [p for p in draft.parameters() if p.dim() == 2]
    vectors = [p for p in draft.parameters() if p.dim() < 2]
    options: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if is_muon:
        first: torch.optim.Optimizer = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options)
    else:
        first = torch.optim.AdamW(matrices, betas=(0.9, 0.95), **options)
    return [first, torch.optim.AdamW(vectors, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)]


def _schedule(progress: float, warmup: float) -> float:
    """Linear warm-up, then linearly to zero."""
    return min(1.0, (progress + 1e-3) / warmup) * max(0.0, 1 - progress) if warmup else 1 - progress


def _measure(
    trained: Trained, corpus: Corpus, documents: Sequence[int], losses: Sequence[torch.Tensor], say: Say
) -> dict[str, float | None]:
    """One point of the curve, on held-out greedy documents."""
    found = evaluate(trained.draft, held_out_texts(corpus, documents))
    point = {
        "step": trained.steps,
        "seconds": round(trained.seconds, 1),
        "loss": round(float(torch.stack(list(losses)).mean()), 4) if losses else None,
        "agreement": found["agreement"],
        "acceptance_length": found["acceptance_length"],
    }
    say(
        f"step {trained.steps:>6}  {trained.seconds:>6.1f} s  loss {point['loss'] or float('nan'):>7.3f}  held out: "
        f"agreement {found['agreement']:.3f}, acceptance length at K=4 {found['acceptance_length']:.3f}"
    )
    return point


# ---------------------------------------------------------------------------------------------------------- evaluation


@dataclass(frozen=True)
class Text:
    """A prompt and what the target greedily answers to it, EOS included."""

    category: str
    prompt_ids: list[int]
    output_ids: list[int]


def walk_rounds(match: Sequence[bool], max_draft_len: int) -> list[tuple[int, int, int]]:
    """Greedy speculation played over a known text: (drafted, accepted, emitted) of every round.

    match[i]: after output token i the drafter proposes output token i + 1. Output token 0 comes from prefill and
    belongs to no round, so n output tokens have n - 1 entries. The last round emits what is left.
    """
    rounds, at = [], 0
    while at < len(match):
        drafted = min(max_draft_len, len(match) - at)
        accepted = 0
        while accepted < drafted and match[at + accepted]:
            accepted += 1
        emitted = min(accepted + 1, len(match) - at)
        rounds.append((drafted, accepted, emitted))
        at += emitted
    return rounds


def acceptance_length(match: Sequence[bool], max_draft_len: int) -> float:
    """Mean tokens emitted per round, bonus token included; nan for a text of fewer than two tokens."""
    rounds = walk_rounds(match, max_draft_len)
    return sum(emitted for _, _, emitted in rounds) / len(rounds) if rounds else float("nan")


@torch.inference_mode()
def matches(draft: DraftModel, texts: Sequence[Text], tokens_per_pass: int = 16384) -> list[list[bool]]:
    """For every text, whether the drafter's first choice after output token i is output token i + 1 (float32)."""
    found: list[list[bool]] = [[] for _ in texts]
    device = draft.embed.device
    order = sorted(range(len(texts)), key=lambda i: len(texts[i].prompt_ids) + len(texts[i].output_ids), reverse=True)
    while order:
        longest = len(texts[order[0]].prompt_ids) + len(texts[order[0]].output_ids)
        rows, order = order[: max(1, tokens_per_pass // longest)], order[max(1, tokens_per_pass // longest) :]
        batch = torch.zeros(len(rows), longest, dtype=torch.long)
        for line, i in zip(batch, rows, strict=True):
            ids = texts[i].prompt_ids + texts[i].output_ids
            line[: len(ids)] = torch.tensor(ids)
        batch = batch.to(device)
        with torch.compiler.set_stance("force_eager"):
            agrees = (draft.first_choices(draft(batch))[:, :-1] == batch[:, 1:]).tolist()
        for line, i in zip(agrees, rows, strict=True):
            start = len(texts[i].prompt_ids)
            found[i] = line[start : start + len(texts[i].output_ids) - 1]
    return found


def evaluate(draft: DraftModel, texts: Sequence[Text], max_draft_len: int = 4) -> dict[str, Any]:
    """Exact greedy acceptance of `draft` on the target's own texts: over all, by category and by draft position.

    acceptance_length: tokens emitted / rounds over all texts. acceptance_by_position: of the rounds that drafted a
    j-th token, the share that accepted it. agreement: share of output tokens that the drafter would propose.
    """
    found = matches(draft, texts)
    hits, total = sum(map(sum, found)), sum(map(len, found))
    everything = _walk_all(found, max_draft_len)
    by_category: dict[str, list[list[bool]]] = defaultdict(list)
    for text, match in zip(texts, found, strict=True):
        by_category[text.category].append(match)
    return {
        "max_draft_len": max_draft_len,
        "texts": len(texts),
        "output_tokens": total + len(texts),
        "agreement": round(hits / max(1, total), 4),
        "acceptance_length": _per_round(everything),
        "acceptance_length_by_max_draft_len": {str(k): _per_round(_walk_all(found, k)) for k in (1, 2, 3, 4, 5, 6, 8)},
        "acceptance_by_position": [
            round(sum(a > j for d, a, _ in everything if d > j) / max(1, sum(d > j for d, _, _ in everything)), 4)
            for j in range(max_draft_len)
        ],
        "by_category": {name: _per_round(_walk_all(m, max_draft_len)) for name, m in sorted(by_category.items())},
    }


def _walk_all(found: Sequence[Sequence[bool]], max_draft_len: int) -> list[tuple[int, int, int]]:
    return [one for match in found for one in walk_rounds(match, max_draft_len)]


def _per_round(rounds: Sequence[tuple[int, int, int]]) -> float:
    return round(sum(emitted for _, _, emitted in rounds) / max(1, len(rounds)), 4)


def held_out_texts(corpus: Corpus, documents: Sequence[int]) -> list[Text]:
    """The greedy answers in these documents, each with all that stands before it as its prompt."""
    texts = []
    for document in documents:
        if corpus.temperatures[document] > 0:
            continue
        places = slice(int(corpus.offsets[document]), int(corpus.offsets[document + 1]))
        tokens, kinds = corpus.tokens[places].tolist(), corpus.kinds[places].tolist()
        start = None
        for i, kind in enumerate([*kinds, FORCED]):
            if kind == ANSWER and start is None:
                start = i
            elif kind != ANSWER and start is not None:
                texts.append(Text("held out", tokens[:start], tokens[start:i]))
                start = None
    return texts


def bundled_texts(
    target: Checkpoint,
    prompts: Sequence[Prompt] | None = None,
    *,
    max_tokens: int = 128,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[Text]:
    """The target's greedy answers to the bundled prompts; every turn of a chat is a text of its own."""
    prompts, tokenizer, texts = load_prompts() if prompts is None else prompts, load_tokenizer(target), []
    answers: list[list[str]] = [[] for _ in prompts]
    for turn in range(max(len(p.turns) for p in prompts)):
        open_ones = [i for i, p in enumerate(prompts) if len(p.turns) > turn]
        asked = [render(prompts[i], tokenizer, answers[i]) for i in open_ones]
        outputs = greedy_texts(target, asked, max_tokens=max_tokens, device=device, dtype=dtype)
        for i, prompt_ids, output_ids in zip(open_ones, asked, outputs, strict=True):
            texts.append(Text(prompts[i].category, prompt_ids, output_ids))
            answers[i].append(str(tokenizer.decode(output_ids, skip_special_tokens=True)))
    return texts


# -------------------------------------------------------------------------------------------------------------- export


def export(draft: DraftModel, folder: str | Path, card: Mapping[str, Any]) -> Path:
    """Write what the package ships: `config.json`, `model.safetensors` (matrices int8 with a float32 scale per row,
    norms float32, the shortlist; no embeddings), `card.json`, `CARD.md`."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"draft_vocab": draft.shortlist.to("cpu", torch.int32)}
    for name, parameter in draft.named_parameters():
        weight = parameter.detach().to("cpu", torch.float32)
        if weight.dim() == 2:
            tensors[f"model.{name}"], tensors[f"model.{name}_scale"] = to_int8(weight)
        else:
            tensors[f"model.{name}"] = weight.clone()
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    _write_json(folder / "config.json", {k: v for k, v in draft.config.items() if k not in ("dtype", "torch_dtype")})
    card = {**card, "weights_bytes": (folder / "model.safetensors").stat().st_size}
    _write_json(folder / "card.json", card)
    (folder / "CARD.md").write_text(card_text(card), encoding="utf-8")
    return folder


def round_weights(draft: DraftModel) -> None:
    """Replace every matrix by what `export` stores of it."""
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() == 2:
                rounded, scale = to_int8(parameter)
                parameter.copy_(rounded * scale[:, None])


def to_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [rows, columns] and float32 scales [rows] with weight ~ int8 * scale."""
    scale = weight.abs().amax(-1).clamp(min=1e-12) / 127
    return (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def load_draft(folder: str | Path, target: Checkpoint, device: str = "cpu") -> DraftModel:
    """The draft model that `export` wrote, completed with the target's embeddings."""
    from safetensors.torch import load_file

    stored = load_file(str(Path(folder) / "model.safetensors"), device=device)
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    layers = list(range(config["num_hidden_layers"]))
    draft = new_draft_model(target, stored["draft_vocab"].long(), layers, device)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            weight = stored[f"model.{name}"].float()
            scale = stored.get(f"model.{name}_scale")
            parameter.copy_(weight if scale is None else weight * scale[:, None])
    return draft


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------------- command line


def recipe(
    device: str, seconds: float, *, layers: int | None = None, shortlist: int | None = None, total_layers: int = 30
) -> tuple[CorpusSettings, float, dict[str, Any]]:
    """What `seconds` on `device` are spent on: corpus settings, seconds for the corpus, options for training.

    On a GPU it is how the shipped weights were made. On a CPU it is a demonstration: complete requests, short greedy
    answers, and two layers, the target's first (a few hundred steps gain most from layers that already fit together).
    """
    if device.startswith("cuda"):
        init_layers = tuple(spread_layers(layers or 4, total_layers))
        return CorpusSettings(), 0.7 * seconds, {"init_layers": init_layers, "shortlist_size": shortlist or 8192}
    settings = CorpusSettings(
        rows=48, length=160, greedy_share=1.0, complete_share=1.0, plain_share=0.0, follow_up_share=0.0
    )
    options = {"shortlist_size": shortlist or 2048, "tokens_per_step": 384, "optimizer": "adamw", "learning_rate": 2e-3}
    return settings, 0.5 * seconds, {"init_layers": tuple(range(layers or 2)), **options}


def main(
    out: Annotated[Path, typer.Option(help="folder for the weights and their card")],
    target: Annotated[str, typer.Option(help="checkpoint to distil")] = "embedded:target",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    minutes: Annotated[float, typer.Option(help="time for the corpus and the training together")] = 1.0,
    layers: Annotated[int, typer.Option(help="layers of the draft model; 0: 2 on a CPU, 4 on a GPU")] = 0,
    shortlist: Annotated[int, typer.Option(help="head rows of the draft model; 0: 4096 on a CPU, 8192 on a GPU")] = 0,
    prompts: Annotated[bool, typer.Option(help="measure on the bundled prompts too (minutes on a CPU)")] = False,
    seed: Annotated[int, typer.Option(help="of the openers, the sampling and the training")] = 0,
) -> None:
    """Let the target write a corpus, distil a draft model from it, measure it, write it down."""
    if not 0 < minutes < 24 * 60:
        raise OptionError(f"minutes is {minutes}", "a time between 0 and 24 hours", "set --minutes, for example to 1")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise OptionError("this machine has no CUDA device", "one for --device cuda", "use --device cpu")
    checkpoint = resolve(target)
    settings, corpus_seconds, options = recipe(
        device,
        60 * minutes,
        layers=layers or None,
        shortlist=shortlist or None,
        total_layers=checkpoint.config["num_hidden_layers"],
    )
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    start = time.monotonic()
    corpus = generate_corpus(checkpoint, settings, seconds=corpus_seconds, device=device, dtype=dtype, seed=seed)
    corpus_seconds = time.monotonic() - start
    print(json.dumps(corpus.summary()))
    train = TrainingSettings(seconds=max(1.0, 60 * minutes - corpus_seconds), seed=seed, **options)
    trained = train_draft_model(checkpoint, corpus, train, device=device)
    texts = {"held-out answers": held_out_texts(corpus, trained.held_out)}
    if prompts:
        texts = {"bundled prompts": bundled_texts(checkpoint, device=device), **texts}
    command = ["python", "-m", "tutorial_lib.drafters.training", *sys.argv[1:]]
    make_and_export(checkpoint, corpus, settings, corpus_seconds, trained, texts, command, out)


def make_and_export(
    target: Checkpoint,
    corpus: Corpus,
    corpus_settings: CorpusSettings,
    corpus_seconds: float,
    trained: Trained,
    texts: Mapping[str, Sequence[Text]],
    command: Sequence[str],
    out: Path,
    say: Say = print,
) -> dict[str, Any]:
    """Round the weights as they will be stored, measure those on `texts`, write them with their card to `out`."""
    exact = {name: evaluate(trained.draft, found) for name, found in texts.items()}
    round_weights(trained.draft)
    stored = {name: evaluate(trained.draft, found) for name, found in texts.items()}
    card = make_card(target, corpus, corpus_settings, corpus_seconds, trained, stored, command)
    card["before_int8"] = {name: found["acceptance_length"] for name, found in exact.items()}
    export(trained.draft, out, card)
    for name, found in stored.items():
        say(f"{name}: {json.dumps(found)} (before rounding to int8: {exact[name]['acceptance_length']})")
    return card


if __name__ == "__main__":
    try:
        typer.run(main)
    except WorkbookError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
