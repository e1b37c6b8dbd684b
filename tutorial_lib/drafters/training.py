"""Train a drafter: the target writes the text, a small student learns to foresee it (self-distillation).

`generate_corpus` (see `corpus.py`) lets the target invent chats and keeps its 16 most likely tokens at every position.
Here is the draft model: a few Llama layers, started from layers of the target and sharing its embeddings, that learn to
rank those tokens over a shortlist of the vocabulary; Medusa heads and the EAGLE-3 head are in `train_heads.py`.
`evaluate` gives the exact greedy acceptance length without decoding. `make_and_export` writes what the package ships.
`python -m tutorial_lib.drafters.training --kind draft --device cpu --minutes 1 --out DIR` shows all of it.

Sequence-level distillation: Kim & Rush 2016 (arXiv 1606.07947); for drafters: DistillSpec (arXiv 2310.08461).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import nn

from ..engine.model import ModelConfig, inverse_frequencies
from ..errors import OptionError, WorkbookError
from ..models import Checkpoint, resolve
from .acceptance import Text, acceptance_length, bundled_texts, held_out_texts, runs, summary, walk_rounds
from .card import card_text, make_card
from .corpus import Corpus, CorpusSettings, Say, generate_corpus
from .distill import (
    Batch,
    Trained,
    TrainingSettings,
    average_if_better,
    corpus_shortlist,
    fit,
    read_weights,
    round_weights,
    shortlist_loss,
    widen,
    write_json,
    write_student,
)

__all__ = [
    "DraftModel",
    "Text",
    "Trained",
    "TrainingSettings",
    "acceptance_length",
    "bundled_texts",
    "evaluate",
    "held_out_texts",
    "load_draft",
    "made",
    "make_and_export",
    "matches",
    "new_draft_model",
    "read_card",
    "train_draft_model",
    "walk_rounds",
]

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
        q, k = (rotate_halves(t, cos, sin) for t in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.self_attn["o_proj"](out.transpose(1, 2).reshape(rows, length, -1))
        h = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](h)) * self.mlp["up_proj"](h))


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
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
        self.config = {k: v for k, v in config.items() if k not in ("dtype", "torch_dtype")}
        shape = ModelConfig.from_hf(config)
        self.layers = nn.ModuleList(DraftLayer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.facts: dict[str, Any] = {"layers": shape.num_layers}
        for name in ("head", "shortlist"):
            self.register_buffer(name, None, persistent=False)
        self.register_buffer("embed", embed, persistent=False)
        self.cover(shortlist, head)
        self.register_buffer("inverse_frequencies", inverse_frequencies(shape).to(embed.device), persistent=False)

    kind, prefix = "draft", "model."

    def cover(self, shortlist: torch.Tensor, whole_head: torch.Tensor) -> None:
        """Propose the ids of `shortlist` [V_d] from now on; whole_head [vocab, width] is the target's."""
        self.head = whole_head[shortlist.to(whole_head.device)].contiguous()
        self.shortlist = shortlist.to(self.embed.device)

    def states(self, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        """tokens [rows, length] -> [rows, length, width] after 0, 1, … layers, at last normed for the head."""
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), self.inverse_frequencies).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        x = F.embedding(tokens, self.embed).float()
        yield x
        for layer in self.layers:
            x = layer(x, cos, sin)
            yield x
        yield self.norm(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [rows, length] -> hidden states [rows, length, width], normed for the head."""
        for state in self.states(tokens):
            hidden = state
        return hidden

    def loss(self, batch: Batch) -> torch.Tensor:
        is_cuda = batch.tokens.is_cuda
        with torch.autocast(device_type=batch.tokens.device.type, dtype=torch.bfloat16, enabled=is_cuda):
            hidden = self(batch.tokens).flatten(0, 1)[batch.where]
        head = self.head.bfloat16() if is_cuda else self.head
        total, _ = shortlist_loss(hidden, head, batch.labels, batch.probs)
        return total / max(1, len(hidden))

    def evaluate(self, texts: Sequence[Text], max_draft_len: int | None = None) -> dict[str, Any]:
        return evaluate(self, texts, max_draft_len or 4)

    def vocabulary(self) -> dict[str, torch.Tensor]:
        return {"draft_vocab": self.shortlist.to("cpu", torch.int32)}

    def first_choices(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target id that the drafter would propose after every hidden state [..., width]."""
        return self.shortlist[F.linear(hidden, self.head.to(hidden.dtype)).argmax(-1)]


def new_draft_model(
    target: Checkpoint, shortlist: torch.Tensor, init_layers: Sequence[int], device: str = "cpu"
) -> DraftModel:
    """A draft model that starts as the given layers of the target (counted from 0) and its final norm."""
    tensors = target.tensors(device, torch.float32)
    config = {**target.config, "num_hidden_layers": len(init_layers)}
    draft = DraftModel(config, tensors["model.embed_tokens.weight"], whole_head(target, tensors), shortlist).to(device)
    with torch.no_grad():
        for layer, source in zip(draft.layers, init_layers, strict=True):
            for name, parameter in layer.named_parameters():
                parameter.copy_(tensors[f"model.layers.{source}.{name}"])
        draft.norm.weight.copy_(tensors["model.norm.weight"])
    return draft


def whole_head(target: Checkpoint, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The target's output matrix [vocab, width]."""
    return tensors["model.embed_tokens.weight" if target.config.get("tie_word_embeddings") else "lm_head.weight"]


def spread_layers(count: int, total: int) -> list[int]:
    """`count` of `total` layers, first and last among them, evenly spread."""
    return [round(i * (total - 1) / max(1, count - 1)) for i in range(count)]


# ------------------------------------------------------------------------------------------------------------ training


def train_draft_model(
    target: Checkpoint,
    corpus: Corpus,
    settings: TrainingSettings,
    *,
    device: str = "cpu",
    go_on_from: str | Path | None = None,
    measure_every: float = 0.1,
    say: Say = print,
) -> Trained:
    """Distil the target's choices into a draft model. `measure_every`: share of the schedule between measurements.
    go_on_from: the exported folder of a draft model whose weights, and number of layers, are the start."""
    check_average(settings, go_on_from)
    torch.manual_seed(settings.seed)
    shortlist = corpus_shortlist(target, corpus, settings)
    layers, before = settings.init_layers, None
    if go_on_from is not None:
        before = load_draft(go_on_from, target, device)
        layers = tuple(range(len(before.layers)))
    draft = new_draft_model(target, shortlist, layers, device)
    if before is not None:
        draft.load_state_dict(before.state_dict())
        draft.facts["before"] = before.facts["made"]
    if device.startswith("cuda"):
        for layer in draft.layers:
            layer.compile(dynamic=True)
    trained = fit([draft], corpus, settings, target.config["vocab_size"], measure_every=measure_every, say=say)[0]
    average_if_better(trained, before, corpus, say)
    if settings.export_shortlist is not None:
        widen(draft, settings.export_shortlist, whole_head(target, target.tensors(device, torch.float32)))
    return trained


def check_average(settings: TrainingSettings, go_on_from: str | Path | None) -> None:
    """A mean needs two runs."""
    if settings.is_averaged and go_on_from is None:
        raise OptionError("a mean of weights is asked for, and no earlier run", "the folder of one to go on from")


# ---------------------------------------------------------------------------------------------------------- evaluation


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
    """Exact greedy acceptance of `draft` on the target's own texts, as `acceptance.summary` gives it."""
    return summary(texts, [runs(match) for match in matches(draft, texts)], max_draft_len)


# -------------------------------------------------------------------------------------------------------------- export


def load_draft(folder: str | Path, target: Checkpoint, device: str = "cpu") -> DraftModel:
    """The draft model that `make_and_export` wrote, completed with the target's embeddings."""
    from safetensors.torch import load_file

    stored = load_file(str(Path(folder) / "model.safetensors"), device=device)
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    layers = list(range(config["num_hidden_layers"]))
    draft = new_draft_model(target, stored["draft_vocab"].long(), layers, device)
    read_weights(draft, stored)
    draft.facts["made"] = made(read_card(folder))
    return draft


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
    """Round the weights as they will be stored, measure those on `texts`, write them with `card.json` and `CARD.md`."""
    exact = {name: trained.draft.evaluate(found) for name, found in texts.items()}
    round_weights(trained.draft)
    stored = {name: trained.draft.evaluate(found) for name, found in texts.items()}
    card = make_card(target, corpus, corpus_settings, corpus_seconds, trained, stored, command)
    card["before_int8"] = {name: found["acceptance_length"] for name, found in exact.items()}
    card["weights_bytes"] = write_student(trained.draft, out)
    write_json(out / "card.json", card)
    (out / "CARD.md").write_text(card_text(card), encoding="utf-8")
    for name, found in stored.items():
        before = exact[name]["acceptance_length"]
        say(f"{trained.draft.kind}, {name}: {json.dumps(found)} (before rounding to int8: {before})")
    return card


# ------------------------------------------------------------------------------------------------------- command line

KINDS = ("draft", "medusa", "eagle3")
# what of the time goes where, relative to the corpus
SHARES = {"cuda": {"draft": 0.6, "medusa": 0.4, "eagle3": 2.2}, "cpu": {"draft": 1.0, "medusa": 1.0, "eagle3": 2.0}}


def recipe(
    kinds: Sequence[str],
    device: str,
    seconds: float,
    *,
    layers: int | None = None,
    shortlist: int | None = None,
    total_layers: int = 30,
) -> tuple[CorpusSettings, float, dict[str, dict[str, Any]]]:
    """What `seconds` on `device` are spent on: corpus settings, seconds for the corpus, options for each training.

    On a GPU it is how the shipped weights were made. On a CPU it is a demonstration that half a minute of one core must
    suffice for: short complete requests of two kinds (of such text a few thousand tokens already teach something),
    few rows, short greedy answers, a small shortlist, and a draft model of two layers, the target's first (a hundred
    steps gain most from layers that already fit together).
    """
    is_cuda = device.startswith("cuda")
    shares = SHARES["cuda" if is_cuda else "cpu"]
    draft: dict[str, Any]
    heads: dict[str, Any]
    unit = seconds / (1 + sum(shares[kind] for kind in kinds))
    if is_cuda:
        # the rows of a head are read at every draft step, on a CPU at some cost; one EAGLE-3 layer has time for more
        settings, draft = CorpusSettings(), {"init_layers": tuple(spread_layers(layers or 4, total_layers))}
        draft |= {"shortlist_size": shortlist or 8192}
        heads = {"tokens_per_step": 32768, "hard_share": 0.5, "held_out": 128}
    else:
        settings = CorpusSettings(
            rows=32,
            length=144,
            greedy_share=1.0,
            complete_share=1.0,
            plain_share=0.0,
            categories=("code", "mathematics"),
            max_opener=160,
            is_distinct=True,
            follow_up_share=0.0,
        )
        common: dict[str, Any] = {"shortlist_size": shortlist or 1024, "tokens_per_step": 384, "optimizer": "adamw"}
        draft = {"init_layers": tuple(range(layers or 2)), "learning_rate": 2e-3, "hard_share": 0.3, **common}
        heads = {"learning_rate": 1e-3, "hard_share": 0.5, **common}
    options = {kind: {"seconds": unit * shares[kind], **(draft if kind == "draft" else heads)} for kind in kinds}
    for kind in {"medusa", "eagle3"} & set(kinds):
        options[kind].setdefault("shortlist_size", shortlist or {"medusa": 8192, "eagle3": 16384}[kind])
    return settings, unit, options


def main(
    out: Annotated[Path, typer.Option(help="folder for weights and card (several kinds: a folder each in it)")],
    kind: Annotated[list[str] | None, typer.Option(help="draft, medusa or eagle3; may be given several times")] = None,
    target: Annotated[str, typer.Option(help="checkpoint to distil")] = "embedded:target",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    minutes: Annotated[float, typer.Option(help="time for the corpus and all training together")] = 1.0,
    layers: Annotated[int, typer.Option(help="layers of the draft model; 0: 2 on a CPU, 4 on a GPU")] = 0,
    shortlist: Annotated[
        int, typer.Option(help="head rows of the drafter; 0: 1024 on a CPU, on a GPU 8192 and 16384 for EAGLE-3")
    ] = 0,
    intermediate: Annotated[int, typer.Option(help="neurons of the EAGLE-3 head's MLP; 0: as the target's")] = 0,
    prompts: Annotated[bool, typer.Option(help="measure on the bundled prompts too (minutes on a CPU)")] = False,
    go_on_from: Annotated[
        list[Path] | None,
        typer.Option(help="folder of an earlier run's drafter, whose weights are the start; one for each kind at most"),
    ] = None,
    average: Annotated[
        bool,
        typer.Option(
            "--average",
            help="keep the mean of the weights trained and those gone on from, if better on held-out answers",
        ),
    ] = False,
    export_shortlist: Annotated[
        int, typer.Option(help="head rows when done, beyond those trained, in the order of their ids; 0: no more")
    ] = 0,
    seed: Annotated[int, typer.Option(help="of the openers, the sampling and the training")] = 0,
) -> None:
    """Let the target write a corpus, distil drafters from it, measure them, write them down."""
    kinds = list(dict.fromkeys(kind or ["draft"]))
    if unknown := set(kinds) - set(KINDS):
        raise OptionError(f"kind is {sorted(unknown)[0]!r}", f"one of {', '.join(KINDS)}")
    if not 0 < minutes < 24 * 60:
        raise OptionError(f"minutes is {minutes}", "a time between 0 and 24 hours", "set --minutes, for example to 1")
    numbers = {"layers": layers, "shortlist": shortlist, "intermediate": intermediate, "seed": seed}
    for name, value in {**numbers, "export-shortlist": export_shortlist}.items():
        if value < 0:
            raise OptionError(f"{name} is {value}", "a whole number >= 0", f"set --{name} to one")
    if device != "cpu" and device.partition(":")[0] != "cuda":
        raise OptionError(f"device is {device!r}", "cpu or cuda", "choose one of these")
    if out.exists() and not out.is_dir():
        raise OptionError(f"{out} is not a folder", "one, or a name that is free", "choose another --out")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise OptionError("this machine has no CUDA device", "one for --device cuda", "use --device cpu")
    checkpoint = resolve(target)
    before = _earlier(kinds, go_on_from or [], {"layers": layers, "intermediate_size": intermediate})
    if average and set(before) != set(kinds):
        missing = ", ".join(sorted(set(kinds) - set(before)))
        raise OptionError(
            f"--average for {missing} without an earlier run", "a folder to go on from", "add --go-on-from"
        )
    settings, seconds, options = recipe(
        kinds,
        device,
        60 * minutes,
        layers=layers or None,
        shortlist=shortlist or None,
        total_layers=checkpoint.config["num_hidden_layers"],
    )
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    start = time.monotonic()
    corpus = _with_less_memory(
        lambda now: generate_corpus(checkpoint, now, seconds=seconds, device=device, dtype=dtype, seed=seed, say=_say),
        settings,
        "rows",
    )
    corpus_seconds = time.monotonic() - start
    _say(json.dumps(corpus.summary()))
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # of the rows that wrote
    bundled = bundled_texts(checkpoint, device=device) if prompts else []
    command = ["python", "-m", "tutorial_lib.drafters.training", *sys.argv[1:]]
    for name in kinds:
        train = TrainingSettings(
            seed=seed, is_averaged=average, export_shortlist=export_shortlist or None, **options[name]
        )
        if name == "draft":
            trained = train_draft_model(checkpoint, corpus, train, device=device, go_on_from=before.get(name), say=_say)
        else:
            trained = _with_less_memory(
                partial(
                    _train_one_head,
                    name,
                    checkpoint,
                    corpus,
                    device=device,
                    intermediate_size=intermediate or None,
                    go_on_from=before.get(name),
                ),
                train,
                "tokens_per_step",
            )
        texts = {"held-out answers": held_out_texts(corpus, trained.held_out)}
        if bundled:
            texts = {"bundled prompts": bundled, **texts}
        folder = out if len(kinds) == 1 else out / name
        make_and_export(checkpoint, corpus, settings, corpus_seconds, trained, texts, command, folder, say=_say)


def _earlier(kinds: Sequence[str], folders: Sequence[Path], sizes: Mapping[str, int]) -> dict[str, Path]:
    """The folders to go on from by kind; what is wrong with them, `sizes` asked for (0: none) among it, is found before
    minutes of work."""
    found: dict[str, Path] = {}
    for folder in folders:
        card = read_card(folder)
        kind = card["kind"]
        if kind not in kinds or kind in found or kind == "medusa":
            raise OptionError(
                f"--go-on-from {folder.name!r} holds {kind}, and what is trained is {', '.join(kinds)}",
                "a draft model or an EAGLE-3 head of a kind that is trained, at most one for each",
                "leave it out, or name its --kind",
            )
        for name, size in sizes.items():
            if size and card.get(name, size) != size:
                option = name.removesuffix("_size")
                raise OptionError(
                    f"--{option} is {size}, and {folder.name!r} was trained with {card[name]}",
                    "the size of the run gone on from",
                    f"leave out --{option}",
                )
        found[kind] = folder
    return found


def read_card(folder: str | Path) -> dict[str, Any]:
    """The card that `make_and_export` left beside a drafter's weights."""
    path = Path(folder) / "card.json"
    if not path.is_file():
        raise OptionError(
            f"{Path(folder).name!r} holds no card.json", "the folder of a drafter that a training here wrote"
        )
    card: dict[str, Any] = {"kind": "draft"} | json.loads(path.read_text(encoding="utf-8"))
    return card


def made(card: Mapping[str, Any]) -> dict[str, Any]:
    """What the card of a training that goes on says of the one before."""
    figures = next(iter(card["evaluation"].values()))
    return {
        "steps": card["training"]["steps"],
        "seconds": card["training"]["seconds"],
        "acceptance_length": figures["acceptance_length"],
        "before": card.get("before"),
        **({"mean_of": card["mean_of"]} if "mean_of" in card else {}),
    }


def _train_one_head(
    kind: str, target: Checkpoint, corpus: Corpus, settings: TrainingSettings, *, device: str, **options: Any
) -> Trained:
    from .train_heads import train_heads

    depth, every = (5, 0.2) if device.startswith("cuda") else (2, 0.1)
    found = train_heads(
        [kind], target, corpus, settings, device=device, depth=depth, measure_every=every, say=_say, **options
    )
    return found[kind]


def _with_less_memory(make: Callable[[Any], Any], settings: Any, what: str) -> Any:
    """`make(settings)`; where a GPU's memory does not suffice, again with half of the number called `what`."""
    while True:
        try:
            return make(settings)
        except torch.cuda.OutOfMemoryError:
            half = getattr(settings, what) // 2
            if half < 64:
                raise
        # outside of the handler, which would keep the frames of what failed, and so its tensors
        settings = replace(settings, **{what: half})
        _say(f"out of memory: again with {half} {what}")
        torch.cuda.empty_cache()


def _say(line: str) -> None:
    print(line, flush=True)


def run_command(command: Callable[..., None]) -> None:
    """A module's command: a user's mistake is one line and exit code 2."""
    try:
        typer.run(command)
    except WorkbookError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    run_command(main)
