"""Train heads that read the target's hidden states: Medusa heads and an EAGLE-3 head, by self-distillation.

The frozen target runs over batches of its own text and its hidden states are what the students see. A student is
"unrolled": step s of `unroll` gives, for every base position b at once, the hidden state from which the token s + 2
places behind b is drafted, if the tokens between are those of the text. So one pass gives both the loss of every step
and, on a text, the rank of every right token at every step, which decides exactly what a chain or a tree would have got
accepted there (see `acceptance.py`).

Medusa: Cai et al. 2024 (arXiv 2401.10774), heads on a frozen model. EAGLE-3: Li et al. 2025 (arXiv 2503.01840), one
layer on three hidden states, trained with "training-time test": its own outputs take the place of features.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..engine.model import ModelConfig, inverse_frequencies
from ..errors import ModelError, OptionError
from ..models import Checkpoint
from .acceptance import (
    Ranks,
    Text,
    best_tree,
    chain_leads,
    held_out_texts,
    rank_shares,
    summary,
    tree_summary,
)
from .corpus import TOP, Corpus, Say
from .distill import (
    Batch,
    Trained,
    TrainingSettings,
    average_if_better,
    corpus_shortlist,
    fit,
    read_weights,
    shortlist_loss,
    widen,
)
from .training import DraftModel, check_average, made, new_draft_model, read_card, rotate_halves

UNSEEN = 1 << 20  # rank of a token that cannot be drafted
SHIPPED_TREE = 16  # nodes of the tree that config.json recommends; the card has the whole order

# ---------------------------------------------------------------------------------------------------- the frozen target


class TargetStates:
    """The frozen target as a source of hidden states.

    layers: numbered as `Drafter.feature_layers`. What was found is kept for the next time that the training or a
    measurement comes by, as far as `keep_bytes` reach.
    """

    def __init__(self, target: Checkpoint, layers: Sequence[int], device: str, keep_bytes: int = 0) -> None:
        total = target.config["num_hidden_layers"]
        if target.config["architectures"] != ["LlamaForCausalLM"]:
            kind = target.config["architectures"][0]
            raise ModelError(f"{target.name} is a {kind}", "a Llama", "train a drafter for a Llama target")
        every_id = torch.arange(target.config["vocab_size"])
        self.model = new_draft_model(target, every_id, range(total), device).requires_grad_(False)
        self.layers, self.keep_bytes = tuple(layers), keep_bytes
        self.kept: dict[tuple[bool, int], list[torch.Tensor]] = {}
        self.is_cuda = device.startswith("cuda")

    @torch.no_grad()
    def __call__(self, tokens: torch.Tensor, group: int | None = None) -> list[torch.Tensor]:
        """tokens [rows, length] -> for every wanted layer [rows, length, width]: for training, with a group, what bf16
        matrices give on a GPU; without one, for measuring, float32."""
        is_exact = group is None
        key = hash((tokens.shape, tokens.cpu().numpy().tobytes())) if group is None else group
        if (found := self.kept.get((is_exact, key))) is not None:
            return found
        if is_exact:
            with torch.compiler.set_stance("force_eager"):
                found = self._run(tokens)
        else:
            with torch.autocast(device_type=tokens.device.type, dtype=torch.bfloat16, enabled=self.is_cuda):
                found = [state.to(torch.bfloat16 if self.is_cuda else torch.float32) for state in self._run(tokens)]
        size = sum(state.nbytes for state in found)
        if size <= self.keep_bytes:
            self.keep_bytes -= size
            self.kept[is_exact, key] = found
        return found

    def _run(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for n, state in enumerate(self.model.states(tokens)):
            if n in self.layers:
                found[n] = state
            if n == max(self.layers):
                break
        return [found[n] for n in self.layers]

    def compile(self, say: Say) -> None:
        """Compile the layers; if this machine cannot, say so and go on without."""

        def rehearse() -> None:
            for layer in self.model.layers:
                layer.compile(dynamic=True)
            for rows in (3, 5):
                self(torch.zeros(rows, 128, dtype=torch.long, device=self.model.embed.device), group=-rows)

        if not _is_compiled("the target's layers", rehearse, say):
            for layer in self.model.layers:
                layer._compiled_call_impl = None
        self.kept.clear()


def _is_compiled(what: str, rehearse: Callable[[], None], say: Say) -> bool:
    try:
        rehearse()
    except Exception as problem:  # noqa: BLE001 - whatever a compiler may raise, training goes on without it
        say(f"{what} stay uncompiled: {type(problem).__name__}: {str(problem).splitlines()[0]}")
        return False
    return True


def eagle_layers(total: int) -> tuple[int, int, int]:
    """A low, a middle and a high layer, as the EAGLE-3 projects choose them: 2, half, the third from the end; the last
    three of a target too small for that."""
    return (2, total // 2, total - 3) if total >= 7 else (total - 2, total - 1, total)


# ------------------------------------------------------------------------------------------------------------- students


class _Head(nn.Module):
    """What both students share: a shortlist head that belongs to the target, loss and evaluation by unrolling.

    depth: steps trained. reach_power: at step s a base position counts by the probability that the student gives to the
    right tokens of the steps before, to this power (0: all alike), since a draft that failed earlier is not continued;
    below 1, because a tree continues second and third choices too.
    """

    kind: str
    prefix = ""
    head: torch.Tensor
    shortlist: torch.Tensor
    rank: torch.Tensor

    def __init__(self, see: TargetStates, shortlist: torch.Tensor, depth: int, reach_power: float) -> None:
        super().__init__()
        self._see, self.depth, self.reach_power = [see], depth, reach_power  # in a list: no part of this module
        model = see.model
        self.tree: list[tuple[int, ...]] = []
        self.facts: dict[str, Any] = {"depth": depth, "reach_power": reach_power}
        for name in ("shortlist", "head", "rank"):
            self.register_buffer(name, None, persistent=False)
        self.cover(shortlist, model.head)

    @property
    def see(self) -> TargetStates:
        return self._see[0]

    def cover(self, shortlist: torch.Tensor, whole_head: torch.Tensor) -> None:
        """Propose the ids of `shortlist` [V_d] from now on; whole_head [vocab, width] is the target's."""
        device = whole_head.device
        self.shortlist = shortlist.to(device)
        self.head = whole_head[self.shortlist].contiguous()
        self.rank = torch.full((len(whole_head),), -1, device=device)
        self.rank[self.shortlist] = torch.arange(len(shortlist), device=device)

    def unroll(self, tokens: torch.Tensor, states: Sequence[torch.Tensor], depth: int) -> Iterator[torch.Tensor]:
        """For step 0, 1, … [rows, length, width], normed for the head: row b drafts token b + 2 + step."""
        raise NotImplementedError

    def loss(self, batch: Batch) -> torch.Tensor:
        """Cross-entropy of all steps per trained token."""
        length, device = batch.tokens.shape[1], batch.tokens.device
        head = self.head.bfloat16() if batch.tokens.is_cuda else self.head
        reach = torch.ones(batch.tokens.numel(), device=device)
        total = torch.zeros((), device=device)
        with torch.autocast(device_type=device.type, dtype=torch.bfloat16, enabled=batch.tokens.is_cuda):
            for step, hidden in enumerate(self.unroll(batch.tokens, batch.states, self.depth)):
                bases = batch.where - 1 - step  # `where` is the place before the token that is foreseen
                is_there = (batch.where % length > step) & (reach[bases] > 0)
                bases, labels, probs = bases[is_there], batch.labels[is_there], batch.probs[is_there]
                weights = reach[bases]
                loss, first = shortlist_loss(hidden.flatten(0, 1)[bases], head, labels, probs, weights)
                total = total + loss
                reach = torch.zeros_like(reach)  # a token that is not trained on ends the draft
                reach[bases] = weights * first**self.reach_power
        return total / max(1, len(batch.where))

    @torch.inference_mode()
    @torch.compiler.set_stance("force_eager")
    def ranks(self, texts: Sequence[Text], depth: int | None = None, tokens_per_pass: int = 16384) -> Ranks:
        """For every text and output token but the last, the ranks that the student gives to the tokens that follow it,
        one per step (float32); `UNSEEN` outside the shortlist and behind the end of the text."""
        depth, device = depth or self.depth, self.head.device
        found: Ranks = [[] for _ in texts]
        sizes = [len(text.prompt_ids) + len(text.output_ids) for text in texts]
        order = sorted(range(len(texts)), key=sizes.__getitem__, reverse=True)
        while order:
            count = max(1, tokens_per_pass // sizes[order[0]])
            rows, order = order[:count], order[count:]
            batch = torch.zeros(len(rows), sizes[rows[0]] + depth, dtype=torch.long)
            is_text = torch.zeros(batch.shape, dtype=torch.bool)
            for i, line, filled in zip(rows, batch, is_text, strict=True):
                ids = texts[i].prompt_ids + texts[i].output_ids
                line[: len(ids)], filled[: len(ids)] = torch.tensor(ids), True
            for i, ranks in zip(rows, self._ranks(batch.to(device), is_text.to(device), depth).tolist(), strict=True):
                start = len(texts[i].prompt_ids) - 1  # the base of output token 0 is the place before it
                found[i] = ranks[start : start + len(texts[i].output_ids) - 1]
        return found

    def _ranks(self, tokens: torch.Tensor, is_text: torch.Tensor, depth: int) -> torch.Tensor:
        ranks = torch.full((*tokens.shape, depth), UNSEEN, device=tokens.device)
        for step, hidden in enumerate(self.unroll(tokens, self.see(tokens), depth)):
            following = F.pad(self.rank[tokens], (0, step + 2), value=-1)[:, step + 2 :]
            can_be = (following >= 0) & F.pad(is_text, (0, step + 2))[:, step + 2 :]
            for part in can_be.nonzero().split(8192):
                row, base = part.unbind(1)
                logits = F.linear(hidden[row, base], self.head)
                wanted = logits.gather(1, following[row, base][:, None])
                ranks[row, base, step] = (logits > wanted).sum(-1)
        return ranks

    def evaluate(self, texts: Sequence[Text], max_draft_len: int | None = None) -> dict[str, Any]:
        """Exact greedy acceptance of chains and of the trees that `self.tree` begins with."""
        depth = self.eval_depth
        ranks = self.ranks(texts, depth)
        found = summary(texts, chain_leads(ranks), max_draft_len or min(5, depth), depth)
        found["rank_shares"] = rank_shares(ranks)
        if self.tree:
            found["acceptance_length_by_tree_nodes"] = tree_summary(ranks, self.tree)
        return found

    @property
    def eval_depth(self) -> int:
        return self.depth

    def choose_tree(self, texts: Sequence[Text]) -> None:
        """The best tree of 63 nodes on these texts; smaller ones are its beginnings."""
        self.tree = best_tree(self.ranks(texts, min(self.eval_depth, 6)))
        self.facts |= {"tree_texts": len(texts), "tree": [list(path) for path in self.tree]}


class MedusaHeads(_Head):
    """Heads on the target's final state: head h drafts the token h + 2 places ahead, whatever the others draft.

    Each is `blocks` residual blocks x + SiLU(Wx + b), zero at first (so a head begins as the target's own), before the
    target's output matrix.
    """

    kind = "medusa"

    def __init__(
        self, see: TargetStates, shortlist: torch.Tensor, *, heads: int = 4, blocks: int = 4, reach_power: float = 0.5
    ) -> None:
        super().__init__(see, shortlist, heads, reach_power)
        width = see.model.config["hidden_size"]

        def block() -> nn.ModuleDict:
            linear = nn.Linear(width, width)
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
            return nn.ModuleDict({"linear": linear})

        self.medusa_heads = nn.ModuleList(nn.ModuleList(block() for _ in range(blocks)) for _ in range(heads))
        self.facts |= {"heads": heads, "blocks": blocks}
        self.to(see.model.embed.device)

    def unroll(self, tokens: torch.Tensor, states: Sequence[torch.Tensor], depth: int) -> Iterator[torch.Tensor]:
        heads: Any = self.medusa_heads
        for head in heads[:depth]:
            x = states[-1].float()
            for block in head:
                x = x + F.silu(block["linear"](x))
            yield x

    @property
    def config(self) -> dict[str, Any]:
        model = self.see.model
        return {
            "architectures": ["MedusaModel"],
            "medusa_num_heads": len(self.medusa_heads),
            "medusa_num_layers": self.facts["blocks"],
            "hidden_size": model.config["hidden_size"],
            "vocab_size": model.config["vocab_size"],
            "draft_vocab_size": len(self.shortlist),
            "tie_lm_head_to_target": True,
            "medusa_choices": [list(path) for path in sorted(self.tree[:SHIPPED_TREE], key=lambda p: (len(p), p))],
        }

    def vocabulary(self) -> dict[str, torch.Tensor]:
        return {"draft_vocab": self.shortlist.to("cpu", torch.int32)}


class EagleLayer(nn.Module):
    """The layer of an EAGLE-3 head: a Llama layer whose attention reads embedding and feature side by side."""

    def __init__(self, config: ModelConfig, intermediate_size: int) -> None:
        super().__init__()
        width, head_dim = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, head_dim
        self.intermediate_size = intermediate_size
        sizes = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        projections = {name: nn.Linear(2 * width, count * head_dim, bias=False) for name, count in sizes.items()}
        projections["o_proj"] = nn.Linear(self.heads * head_dim, width, bias=False)
        self.self_attn = nn.ModuleDict(projections)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(width, intermediate_size, bias=False),
                "up_proj": nn.Linear(width, intermediate_size, bias=False),
                "down_proj": nn.Linear(intermediate_size, width, bias=False),
            }
        )
        self.input_layernorm = nn.RMSNorm(width, config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(width, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(width, config.rms_norm_eps)

    def forward(
        self,
        embedded: torch.Tensor,
        g: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        before: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """embedded, g [rows, length, width]; cos, sin [length, head_dim] of this step's positions. before: keys and
        values of the steps before, each [rows, kv_heads, length, head_dim]; this step's are appended."""
        q, k, v = self.project(embedded, g, cos, sin)
        before.append((k, v))
        return self.finish(g, unrolled_attention(q, before))

    def project(
        self, embedded: torch.Tensor, g: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What stands before the attention: its q, k, v."""
        rows, length, _ = g.shape
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(g)], dim=-1)
        q = self.self_attn["q_proj"](x).view(rows, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.self_attn["k_proj"](x).view(rows, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.self_attn["v_proj"](x).view(rows, length, self.kv_heads, self.head_dim).transpose(1, 2)
        return rotate_halves(q, cos, sin), rotate_halves(k, cos, sin), v

    def finish(self, g: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """What stands behind it; out [rows, heads, length, head_dim]."""
        rows, length, _ = g.shape
        h = g + self.self_attn["o_proj"](out.transpose(1, 2).reshape(rows, length, -1))
        x = self.post_attention_layernorm(h)
        return h + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x))


def unrolled_attention(q: torch.Tensor, steps: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Attention of the last of `steps`: row b sees the first step's keys 0 … b (true features) and, of every later
    step, row b alone (what was drafted from there). q [rows, heads, length, D]; k, v [rows, kv_heads, length, D]."""
    keys, values = steps[0]
    if len(steps) == 1:
        return F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
    rows, heads, length, width = q.shape
    kv_heads = keys.shape[1]
    q = q.view(rows, kv_heads, heads // kv_heads, length, width) * width**-0.5
    scores = (q.flatten(2, 3) @ keys.transpose(-1, -2)).view(*q.shape[:4], length)
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    own = [(q * k[:, :, None]).sum(-1, keepdim=True).to(scores.dtype) for k, _ in steps[1:]]
    weights = torch.cat([scores.masked_fill(future, -torch.inf), *own], dim=-1).softmax(-1).to(values.dtype)
    out = (weights[..., :length].flatten(2, 3) @ values).view(q.shape)
    for i, (_, v) in enumerate(steps[1:]):
        out = out + weights[..., length + i, None] * v[:, :, None]
    return out.view(rows, heads, length, width)


class EagleHead(_Head):
    """An EAGLE-3 head: `fc` joins three hidden states of the target into one feature g, a layer reads (g of token i,
    embedding of token i + 1) at position i and its output stands in for g of token i + 1 when drafting goes on.

    It begins as a layer of the target on the highest feature (`start_from`). In training, `fc` reads features divided
    by their usual size (`scale`): one learning rate must suit all of them. `fold` puts that into its weights.
    """

    kind = "eagle3"
    inverse_frequencies: torch.Tensor
    scale: torch.Tensor

    def __init__(
        self,
        see: TargetStates,
        shortlist: torch.Tensor,
        *,
        depth: int = 5,
        intermediate_size: int | None = None,
        reach_power: float = 0.5,
    ) -> None:
        super().__init__(see, shortlist, depth, reach_power)
        model = see.model
        shape = ModelConfig.from_hf(model.config)
        width = shape.hidden_size
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.midlayer = EagleLayer(shape, intermediate_size or shape.intermediate_size)
        self.norm = nn.RMSNorm(width, shape.rms_norm_eps)
        self.register_buffer("inverse_frequencies", inverse_frequencies(shape), persistent=False)
        self.register_buffer("scale", torch.ones(3 * width), persistent=False)
        self.to(model.embed.device)

    def compile_parts(self, say: Say) -> None:
        """Compile what stands around the attention, and the loss; measurements run without."""
        layer, device = self.midlayer, self.head.device
        as_written = layer.project, layer.finish

        def rehearse() -> None:
            layer.project = torch.compile(layer.project, dynamic=True)  # type: ignore[method-assign]
            layer.finish = torch.compile(layer.finish, dynamic=True)  # type: ignore[method-assign]
            for rows in (3, 5):
                tokens = torch.zeros(rows, 128, dtype=torch.long, device=device)
                where = torch.arange(tokens.numel() - 1, device=device)
                labels = torch.zeros(len(where), TOP, dtype=torch.long, device=device)
                probs = torch.full(labels.shape, 1 / TOP, device=device)
                self.loss(Batch(tokens, where, labels, probs, states=self.see(tokens, group=-rows))).backward()

        if not _is_compiled("the head's parts", rehearse, say):
            layer.project, layer.finish = as_written  # type: ignore[method-assign]
        self.zero_grad(set_to_none=True)
        self.see.kept.clear()

    @torch.no_grad()
    def start_from(self, layer: int, tokens: torch.Tensor) -> None:
        """Begin as the target's `layer` (from 0) on the highest feature; `tokens` [rows, length] show usual sizes."""
        layers: Any = self.see.model.layers
        mlp: Any = self.midlayer.mlp
        attention: Any = self.midlayer.self_attn
        first, source, width = layers[0], layers[layer], self.head.shape[1]
        sizes = [float(state.float().pow(2).mean(-1).median().sqrt()) for state in self.see(tokens)[:3]]
        self.scale.copy_(torch.tensor([1 / size for size in sizes]).repeat_interleave(width))
        self.fc.weight.zero_()
        self.fc.weight[:, -width:] = torch.eye(width)
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = attention[name].weight
            weight[:, :width] = first.self_attn[name].weight
            weight[:, width:] = source.self_attn[name].weight
        # g is the residual stream divided by its usual size, so what is added to it is divided too
        attention["o_proj"].weight.copy_(source.self_attn["o_proj"].weight / sizes[-1])
        # a wider MLP takes the neurons of the layers before as well
        wanted, spare = len(mlp["gate_proj"].weight), list(range(layer, -1, -1))
        parts = [layers[i].mlp for i in spare[: -(-wanted // source.mlp["gate_proj"].out_features)]]
        for name in ("gate_proj", "up_proj"):
            found = torch.cat([part[name].weight for part in parts])
            mlp[name].weight[: len(found)] = found[:wanted]
        down = torch.cat([part["down_proj"].weight for part in parts], dim=1) / len(parts)
        mlp["down_proj"].weight[:, : down.shape[1]] = down[:, :wanted] / sizes[-1]
        self.midlayer.input_layernorm.weight.copy_(first.input_layernorm.weight)
        self.midlayer.hidden_norm.weight.copy_(source.input_layernorm.weight)
        self.midlayer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
        self.norm.weight.copy_(self.see.model.norm.weight)
        self.facts |= {"init_layer": layer, "intermediate_size": wanted}

    @torch.no_grad()
    def go_on_from(self, before: EagleHead) -> None:
        """Take the weights of a head that was trained before; after `start_from`, whose `scale` its `fc` must undo."""
        self.load_state_dict(before.state_dict())
        self.fc.weight.div_(self.scale)
        self.facts["before"] = before.facts["made"]

    @torch.no_grad()
    def fold(self) -> None:
        """Let `fc` read the target's features as they are."""
        self.fc.weight.mul_(self.scale)
        self.scale.fill_(1)

    def unroll(self, tokens: torch.Tensor, states: Sequence[torch.Tensor], depth: int) -> Iterator[torch.Tensor]:
        length = tokens.shape[1]
        places = torch.arange(length + depth, device=tokens.device)
        angles = torch.outer(places, self.inverse_frequencies).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        following = F.pad(tokens, (0, depth + 1))
        g = self.fc(torch.cat([state.float() for state in states[:3]], dim=-1) * self.scale).float()
        steps: list[tuple[torch.Tensor, torch.Tensor]] = []
        for step in range(depth):
            embedded = F.embedding(following[:, step + 1 : step + 1 + length], self.see.model.embed).float()
            at = slice(step, step + length)
            g = self.midlayer(embedded, g, cos[at], sin[at], steps)
            yield self.norm(g)

    @property
    def eval_depth(self) -> int:
        return self.depth + 3  # it may draft deeper than it was trained

    @property
    def config(self) -> dict[str, Any]:
        config = self.see.model.config
        kept = (
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "rms_norm_eps",
            "rope_theta",
            "rope_scaling",
            "max_position_embeddings",
            "vocab_size",
            "hidden_act",
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
        )
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **{key: config[key] for key in kept if key in config},
            "intermediate_size": self.midlayer.intermediate_size,
            "num_hidden_layers": 1,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "tie_lm_head_to_target": True,
            "draft_vocab_size": len(self.shortlist),
            # the states after so many layers at the top, as vLLM reads them; SpecForge and SGLang count layers from 0
            "eagle_aux_hidden_state_layer_ids": list(self.see.layers[:3]),
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [n - 1 for n in self.see.layers[:3]],
                "use_aux_hidden_state": True,
            },
        }

    def vocabulary(self) -> dict[str, torch.Tensor]:
        """d2t: target id - draft id of every draft id; t2d: whether a target id is in the shortlist."""
        shortlist = self.shortlist.cpu()
        return {"d2t": shortlist - torch.arange(len(shortlist)), "t2d": self.rank.cpu() >= 0}


# ------------------------------------------------------------------------------------------------------------- training


def train_heads(
    kinds: Sequence[str],
    target: Checkpoint,
    corpus: Corpus,
    settings: TrainingSettings,
    *,
    device: str = "cpu",
    depth: int = 5,
    heads: int = 4,
    blocks: int = 4,
    intermediate_size: int | None = None,
    reach_power: float = 0.5,
    keep_bytes: int | None = None,
    go_on_from: str | Path | None = None,
    measure_every: float = 0.1,
    say: Say = print,
) -> dict[str, Trained]:
    """Train the students of `kinds` ('medusa', 'eagle3') together: one pass of the target serves both.

    depth: steps that EAGLE-3 is unrolled. keep_bytes: how much of the target's states may be kept in memory; None: half
    of what a GPU has free, 2 GiB on a CPU. go_on_from: the exported folder of an EAGLE-3 head whose weights,
    and size, are the start.
    """
    if not kinds or set(kinds) - {"medusa", "eagle3"}:
        raise OptionError(f"heads to train are {list(kinds)}", "'medusa', 'eagle3' or both")
    check_average(settings, go_on_from)
    before = None if go_on_from is None else _earlier_head(kinds, go_on_from, target, device)
    if before is not None:
        intermediate_size = before.midlayer.intermediate_size
    torch.manual_seed(settings.seed)
    shortlist = corpus_shortlist(target, corpus, settings)
    total = target.config["num_hidden_layers"]
    layers = (*(eagle_layers(total) if "eagle3" in kinds else ()), *((total + 1,) if "medusa" in kinds else ()))
    is_cuda = device.startswith("cuda")
    if keep_bytes is None:
        keep_bytes = torch.cuda.mem_get_info()[0] // 2 if is_cuda else 2 << 30
    see = TargetStates(target, layers, device, keep_bytes)
    students: list[Any] = []
    if "eagle3" in kinds:
        eagle = EagleHead(see, shortlist, depth=depth, intermediate_size=intermediate_size, reach_power=reach_power)
        eagle.start_from(settings.init_layers[0] if settings.init_layers else total - 1, _sample(corpus))
        if before is not None:
            eagle.go_on_from(before)
        students.append(eagle)
    if "medusa" in kinds:
        students.append(MedusaHeads(see, shortlist, heads=heads, blocks=blocks, reach_power=reach_power))
    if is_cuda:
        see.compile(say)
        if "eagle3" in kinds:
            eagle.compile_parts(say)
    vocab_size = target.config["vocab_size"]
    found = fit(students, corpus, settings, vocab_size, look=see, measure_every=measure_every, say=say)
    see.kept.clear()
    apart = set(found[0].held_out)
    seen = [document for document in range(min(corpus.documents, 2000)) if document not in apart][:256]
    tree_texts = held_out_texts(corpus, seen)
    for one in found:
        if one.draft.kind == "eagle3":
            one.draft.fold()
        average_if_better(one, before, corpus, say)
        if settings.export_shortlist is not None:
            widen(one.draft, settings.export_shortlist, see.model.head)
        one.draft.choose_tree(tree_texts)
    return {one.draft.kind: one for one in found}


def _sample(corpus: Corpus, rows: int = 16, length: int = 64) -> torch.Tensor:
    """Some text in equal pieces, across documents."""
    length = min(length, len(corpus.tokens))
    rows = max(1, min(rows, len(corpus.tokens) // length))
    return corpus.tokens[: rows * length].long().view(rows, length)


# --------------------------------------------------------------------------------------------------------------- reload


def load_heads(folder: str | Path, target: Checkpoint, device: str = "cpu") -> MedusaHeads | EagleHead:
    """The student that was exported to `folder`, completed with what it shares with the target."""
    from safetensors.torch import load_file

    stored = load_file(str(Path(folder) / "model.safetensors"), device=device)
    config: Mapping[str, Any] = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    student: MedusaHeads | EagleHead
    if "medusa_num_heads" in config:
        see = TargetStates(target, (target.config["num_hidden_layers"] + 1,), device)
        shortlist = stored["draft_vocab"].long()
        student = MedusaHeads(see, shortlist, heads=config["medusa_num_heads"], blocks=config["medusa_num_layers"])
    else:
        see = TargetStates(target, config["eagle_aux_hidden_state_layer_ids"], device)
        shortlist = stored["d2t"] + torch.arange(len(stored["d2t"]), device=device)
        student = EagleHead(see, shortlist, intermediate_size=config["intermediate_size"])
    read_weights(student, stored)
    card = read_card(folder)
    student.tree = [tuple(path) for path in card["tree"]]
    student.facts["made"] = made(card)
    return student


def _earlier_head(kinds: Sequence[str], folder: str | Path, target: Checkpoint, device: str) -> EagleHead:
    kind = read_card(folder)["kind"]
    if list(kinds) == [kind] == ["eagle3"]:
        head = load_heads(folder, target, device)
        assert isinstance(head, EagleHead)
        return head
    raise OptionError(
        f"training of {', '.join(kinds)} should go on from {Path(folder).name!r}, which holds {kind}",
        "an EAGLE-3 head, and eagle3 as the only kind",
    )


__all__ = [
    "DraftModel",
    "EagleHead",
    "MedusaHeads",
    "TargetStates",
    "load_heads",
    "train_heads",
    "unrolled_attention",
]
