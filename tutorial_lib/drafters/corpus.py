"""Text for training drafters, written by the target itself: thousands of chats at once.

A step gives every row one token. What the chat template dictates is forced, what user and assistant say is drawn from
the target; a row whose document has ended begins the next one, so the batch stays full. Kept beside each token are
the target's 16 most likely next tokens: whoever learns from the text need not run the target again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ..engine.model import ModelConfig, pack, rotary_table
from ..errors import ModelError, OptionError
from ..models import Checkpoint, load_tokenizer
from .openers import Opener, draw_opener

TOP = 16  # target candidates kept per position: what a drafter learns from
SAMPLED_FROM = 64  # candidates a sampled token is drawn from
FORCED, USER, ANSWER = 0, 1, 2  # who wrote a token: the template, the target as user, the target as assistant

Say = Callable[[str], None]

# ------------------------------------------------------------------------------------------ many rows at once


class BatchDecoder:
    """A Llama that decodes many rows together, one token each and each at its own position.

    Matrices run in `dtype`, the residual stream, norms and logits in float32. cache [layers, 2, rows, kv_heads,
    length, head_dim]; what lies at and after a row's position is never read, so a row begins anew by going back to 0.
    """

    def __init__(self, target: Checkpoint, *, rows: int, length: int, device: str, dtype: torch.dtype) -> None:
        self.config = config = ModelConfig.from_hf(target.config)
        if config.architecture != "LlamaForCausalLM":
            raise ModelError(
                f"{target.name} is a {config.architecture}", "a Llama", "train a drafter for a Llama target"
            )
        packed = pack(target.tensors(device, dtype), config)
        self.weights = {k: (v.float() if v.dim() == 1 else v).contiguous() for k, v in packed.items()}
        self.head = self.weights.get("head", self.weights["embed"])
        self.rotations = rotary_table(config, length).to(device)
        self.rows, self.length, self.dtype = rows, length, dtype
        self.every_row = torch.arange(rows, device=device)
        shape = (config.num_layers, 2, rows, config.num_kv_heads, length, config.head_dim)
        self.cache = torch.zeros(shape, dtype=dtype, device=device)

    @torch.no_grad()
    def step(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Feed `tokens` [rows] at `positions` [rows]; hidden states [rows, width] for `logits`."""
        config, weights, rows = self.config, self.weights, self.rows
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        width, rotations, attend = (config.hidden_size,), self.rotations[positions], self._attention(positions + 1)
        x = F.embedding(tokens, weights["embed"]).float()
        for layer in range(config.num_layers):
            h = F.rms_norm(x, width, weights[f"{layer}.input_norm"], config.rms_norm_eps).to(self.dtype)
            qkv = F.linear(h, weights[f"{layer}.qkv"]).view(rows, -1, head_dim).float()
            torch.view_as_complex(qkv[:, : heads + kv_heads].unflatten(-1, (-1, 2))).mul_(rotations)
            qkv = qkv.to(self.dtype)
            keys, values = self.cache[layer]
            keys[self.every_row, :, positions] = qkv[:, heads : heads + kv_heads]
            values[self.every_row, :, positions] = qkv[:, heads + kv_heads :]
            # query heads that share a key head are rows of one product: grouped attention reads each key once
            queries = qkv[:, :heads].contiguous().view(rows, kv_heads, heads // kv_heads, head_dim)
            x = x + F.linear(attend(queries, keys, values).view(rows, -1), weights[f"{layer}.o"])
            h = F.rms_norm(x, width, weights[f"{layer}.post_norm"], config.rms_norm_eps).to(self.dtype)
            gate, up = F.linear(h, weights[f"{layer}.gate_up"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, weights[f"{layer}.down"])
        return F.rms_norm(x, width, weights["norm"], config.rms_norm_eps).to(self.dtype)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocab] of the next token; float32 sums also where the matrices are bf16."""
        if hidden.is_cuda and self.dtype == torch.bfloat16:
            return torch.mm(hidden, self.head.t(), out_dtype=torch.float32)
        return F.linear(hidden, self.head).float()

    def _attention(self, lengths: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """queries [rows, kv_heads, group, D], keys, values [rows, kv_heads, length, D] -> like queries, contiguous;
        row r sees its first lengths[r] positions."""
        if lengths.is_cuda and self.dtype == torch.bfloat16:
            from .decode_attention import decode_attention

            filled = lengths.int()
            return lambda q, k, v: decode_attention(q, k, v, filled)
        longest = int(lengths.max())
        mask = (torch.arange(longest, device=lengths.device) < lengths[:, None])[:, None, None]

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = F.scaled_dot_product_attention(q, k[:, :, :longest], v[:, :, :longest], attn_mask=mask)
            return out.contiguous()

        return attend


@torch.no_grad()
def greedy_texts(
    target: Checkpoint,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[list[int]]:
    """The target's greedy answer to every prompt, EOS included, at most `max_tokens` ids; all prompts in one batch."""
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    total = max(len(p) for p in prompts) + max_tokens
    text = torch.zeros(len(prompts), total, dtype=torch.long)
    for row, prompt in zip(text, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    text = text.to(device)
    stops = torch.tensor(sorted(target.eos_token_ids()), device=device)
    decoder = BatchDecoder(target, rows=len(prompts), length=total, device=device, dtype=dtype)
    is_open = torch.ones(len(prompts), dtype=torch.bool, device=device)
    first_free = int(lengths.min())
    for position in range(total - 1):
        positions = torch.full_like(lengths, position)
        hidden = decoder.step(text[:, position], positions)
        if position + 1 < first_free:
            continue
        is_free = position + 1 >= lengths
        text[:, position + 1] = torch.where(is_free, decoder.logits(hidden).argmax(-1), text[:, position + 1])
        is_open &= ~(is_free & torch.isin(text[:, position + 1], stops))
        is_open &= position + 2 < lengths + max_tokens
        if position % 16 == 0 and not is_open.any():
            break
    answers = []
    for row, prompt in zip(text.tolist(), prompts, strict=True):
        answer = row[len(prompt) : len(prompt) + max_tokens]
        end = next((i + 1 for i, token in enumerate(answer) if token in target.eos_token_ids()), max_tokens)
        answers.append(answer[:end])
    return answers


class Threads:
    """One thread or all of them for the steps of a loop on a processor, whichever is faster in its first steps.

    Threads that wait for each other lose more than they win where other programs want the same cores. Results differ in
    rounding, so a loop that must come out the same twice does not try (is_tried). `with` puts the number back.
    """

    def __init__(self, *, is_tried: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.before, self.clock = torch.get_num_threads(), clock
        self.plan = [1, 1, 1, self.before, self.before] if is_tried and self.before > 1 else []
        self.step, self.since = 0, 0.0
        self.took: dict[int, float] = {}  # the faster step of each number

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self.before)

    def before_step(self) -> None:
        """To be called before every step of the loop."""
        if self.step > len(self.plan) or not self.plan:
            return
        now, count = self.clock(), torch.get_num_threads()
        if self.step > 1:  # the very first step warms up
            self.took[count] = min(self.took.get(count, now - self.since), now - self.since)
        if self.step > 3 and self.took[self.before] > 1.5 * self.took[1]:
            self.step = len(self.plan)  # clear enough
        if self.step == len(self.plan):
            torch.set_num_threads(min(self.took, key=lambda n: self.took[n]))
        else:
            torch.set_num_threads(self.plan[self.step])
        self.step, self.since = self.step + 1, now


# ---------------------------------------------------------------------------------------------------------- the corpus


@dataclass
class Corpus:
    """Documents end to end. tokens int32 [N]; kinds uint8 [N]: who wrote each token (FORCED, USER, ANSWER); top_ids
    int32 [N, 16] and top_logprobs float16 [N, 16]: the target's candidates for the token AFTER each position;
    offsets int64 [D + 1]: where documents begin; temperatures float32 [D]: how the answers were sampled, 0 = greedy."""

    tokens: torch.Tensor
    kinds: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    offsets: torch.Tensor
    temperatures: torch.Tensor

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def join(cls, parts: Sequence[Corpus]) -> Corpus:
        flat = {f.name: torch.cat([getattr(p, f.name) for p in parts]) for f in fields(cls) if f.name != "offsets"}
        lengths = torch.cat([p.offsets.diff() for p in parts])
        return cls(offsets=F.pad(lengths.cumsum(0), (1, 0)), **flat)

    def save(self, path: Path) -> None:
        from safetensors.torch import save_file

        save_file({f.name: getattr(self, f.name) for f in fields(self)}, str(path))

    @classmethod
    def load(cls, path: Path, device: str = "cpu") -> Corpus:
        from safetensors.torch import load_file

        return cls(**load_file(str(path), device=device))

    def summary(self) -> dict[str, Any]:
        counts = torch.bincount(self.kinds.long(), minlength=3).tolist()
        return {
            "documents": self.documents,
            "tokens": len(self.tokens),
            "template_tokens": counts[FORCED],
            "user_tokens": counts[USER],
            "answer_tokens": counts[ANSWER],
            "greedy_documents": int((self.temperatures == 0).sum()),
            "mean_document_tokens": round(len(self.tokens) / max(1, self.documents), 1),
        }


@dataclass(frozen=True)
class Template:
    """A chat template cut into the pieces between which the target writes."""

    head: list[int]  # before the user's first turn
    to_answer: list[int]  # from the end of a user's turn to the answer; begins with the end-of-turn token
    to_user: list[int]  # from the end of an answer (its end token not included) to the next user's turn

    @classmethod
    def of(cls, tokenizer: Any) -> Template:
        first, second, third = "\u2460", "\u2461", "\u2462"  # stand-ins that no template contains
        turns = [{"role": "user", "content": first}, {"role": "assistant", "content": second}]
        turns.append({"role": "user", "content": third})
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError("the target has no chat template", "an instruct model", "train against a chat model")
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        head, rest = text.split(first)
        after_answer, to_answer = rest.split(second)[1].split(third)
        ids = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (head, to_answer, after_answer)]
        return cls(ids[0], ids[1], ids[2][1:])


@dataclass(frozen=True, kw_only=True)
class CorpusSettings:
    """How the target is made to talk: `rows` documents at a time, none longer than `length` tokens.

    Answers are greedy in `greedy_share` of the documents and else sampled at a temperature from the given range, users'
    turns always. max_user, max_answer: tokens per turn. complete_share, plain_share, categories: see
    `openers.draw_opener`; max_opener: characters of an opener, longer ones are drawn anew (None: all are taken).
    is_distinct: no two documents begin with the same opener in different words, so that what is held out of a small
    corpus is not known in all but a name; the corpus ends when none is left. follow_up_share: chance of one more user's
    turn after an answer that ended early enough.

    complete_share is low because complete requests come again and are learned by heart: with 0.6 a draft model came to
    3.57 on held-out text and 2.54 on the bundled prompts (K = 4), with 0.25 and twice the text to 3.44 and 2.63.
    """

    rows: int = 6144
    length: int = 704
    greedy_share: float = 0.75
    answer_temperatures: tuple[float, float] = (0.3, 1.0)
    user_temperatures: tuple[float, float] = (0.8, 1.0)
    top_p: float = 0.95
    max_user: int = 256
    max_answer: int = 224
    complete_share: float = 0.2
    plain_share: float = 0.06
    categories: tuple[str, ...] = ()
    max_opener: int | None = None
    is_distinct: bool = False
    follow_up_share: float = 0.35


def generate_corpus(
    target: Checkpoint,
    settings: CorpusSettings | None = None,
    *,
    seconds: float | None = None,
    documents: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    say: Say = print,
) -> Corpus:
    """Text that the target writes by itself, on `device`: so many `documents`, or for so many `seconds` (what is half
    written then is kept as it is)."""
    if (seconds is None) == (documents is None):
        raise OptionError("generate_corpus got both or neither of seconds and documents", "exactly one of them")
    settings = settings or CorpusSettings()
    start, next_word = time.monotonic(), 0.0
    writer = _Writer(target, settings, documents, device, dtype, seed)
    with Threads(is_tried=device == "cpu" and seconds is not None) as threads:
        while writer.begin_rows() and (seconds is None or time.monotonic() - start < seconds):
            for _ in range(16):  # between two looks at the clock and at the rows that have ended
                threads.before_step()
                writer.step()
            writer.collect(~writer.is_open)
            passed = time.monotonic() - start
            if passed > next_word:
                say(f"corpus: {writer.written:,} tokens in {passed:.0f} s")
                next_word = passed + 30
    writer.collect(writer.is_busy)
    return Corpus.join(writer.parts)


@dataclass(frozen=True)
class _Beginning:
    ids: list[int]  # forced
    phase: int  # who writes first
    user_temperature: float
    answer_temperature: float
    follow_ups: int


class _Writer:
    """Rows in which documents are being written. A row is busy while it holds one, open while that goes on."""

    def __init__(
        self, target: Checkpoint, settings: CorpusSettings, documents: int | None, device: str, dtype: Any, seed: int
    ) -> None:
        self.settings, self.documents_left = settings, documents
        self.tokenizer, self.rng = load_tokenizer(target), random.Random(seed)
        self.template = template = Template.of(self.tokenizer)
        rows, length = settings.rows, settings.length
        self.decoder = BatchDecoder(target, rows=rows, length=length, device=device, dtype=dtype)
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.rows = self.decoder.every_row
        self.to_answer, self.to_user = (torch.tensor(x, device=device) for x in (template.to_answer, template.to_user))
        self.stops = torch.tensor(sorted({*target.eos_token_ids(), template.to_answer[0]}), device=device)
        self.limits = torch.tensor([0, settings.max_user, settings.max_answer], device=device)
        self.parts: list[Corpus] = []
        self.written = 0
        self.taken: set[str] = set()  # sources of openers

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        # the documents, as they will be kept
        self.tokens, self.kinds = zeros(length, dtype=torch.int32), zeros(length, dtype=torch.uint8)
        self.top_ids = zeros(length, TOP, dtype=torch.int32)
        self.top_logprobs = zeros(length, TOP, dtype=torch.float16)
        # their state
        self.forced = zeros(length + 64)  # -1 where the target speaks
        self.positions, self.phase, self.turn_length, self.follow_ups = zeros(), zeros(), zeros(), zeros()
        self.user_temperature, self.answer_temperature = zeros(dtype=torch.float32), zeros(dtype=torch.float32)
        self.is_busy, self.is_open = zeros(dtype=torch.bool), zeros(dtype=torch.bool)

    def begin_rows(self) -> bool:
        """Begin a document in every idle row, as far as documents are left; False if no row is busy then."""
        idle = (~self.is_busy).nonzero()[:, 0]
        if self.documents_left is not None:
            idle = idle[: self.documents_left]
            self.documents_left -= len(idle)
        if len(idle):
            begun = self._draw(len(idle))
            idle = idle[: len(begun)]
        if len(idle):
            forced = torch.full((len(idle), self.forced.shape[1]), -1)
            for line, beginning in zip(forced, begun, strict=True):
                line[: len(beginning.ids)] = torch.tensor(beginning.ids)
            self.forced[idle] = forced.to(self.forced.device)
            self.tokens[idle, 0] = self.forced[idle, 0].int()
            self.kinds[idle] = FORCED
            self.positions[idle] = self.turn_length[idle] = 0
            for name in ("phase", "follow_ups", "user_temperature", "answer_temperature"):
                kept = getattr(self, name)
                kept[idle] = torch.tensor([getattr(b, name) for b in begun], dtype=kept.dtype).to(kept.device)
            self.is_busy[idle] = self.is_open[idle] = True
        return len(idle) > 0 or bool(self.is_busy.any())

    def _opener(self) -> Opener | None:
        """An opener as the settings want it; None when every one has been taken that may be taken once."""
        s = self.settings
        for _ in range(1000):
            opener = draw_opener(
                self.rng, complete_share=s.complete_share, plain_share=s.plain_share, categories=s.categories
            )
            is_short = s.max_opener is None or len(opener.text) <= s.max_opener
            if is_short and not (s.is_distinct and opener.source in self.taken):
                self.taken.add(opener.source)
                return opener
        if self.taken:
            return None
        raise OptionError(f"no opener of at most {s.max_opener} characters was found", "some", "raise max_opener")

    def _draw(self, count: int) -> list[_Beginning]:
        rng, s, template = self.rng, self.settings, self.template
        openers = [opener for opener in (self._opener() for _ in range(count)) if opener is not None]
        if not openers:
            return []
        texts = self.tokenizer([o.text for o in openers], add_special_tokens=False)["input_ids"]
        begun = []
        for opener, ids in zip(openers, texts, strict=True):
            room = s.length // 2
            if opener.is_chat:
                # what is too long loses its own end, never the template's words behind it
                after = template.to_answer if opener.is_complete else []
                ids = template.head + ids[: max(1, room - len(template.head) - len(after))] + after
            greedy, follow_ups = rng.random() < s.greedy_share, 0
            while opener.is_chat and rng.random() < s.follow_up_share:
                follow_ups += 1
            begun.append(
                _Beginning(
                    ids if opener.is_chat else ids[:room],
                    ANSWER if opener.is_complete else USER,
                    rng.uniform(*s.user_temperatures),
                    0.0 if greedy else rng.uniform(*s.answer_temperatures),
                    follow_ups,
                )
            )
        return begun

    @torch.no_grad()
    def step(self) -> None:
        """One token in every open row. Closed rows run along: nothing of theirs changes."""
        rows, positions, settings = self.rows, self.positions, self.settings
        logits = self.decoder.logits(self.decoder.step(self.tokens[rows, positions].long(), positions))
        values, ids = _largest(logits, SAMPLED_FROM)
        self.top_ids[rows, positions] = ids[:, :TOP].int()
        self.top_logprobs[rows, positions] = (values[:, :TOP] - logits.logsumexp(-1, keepdim=True)).half()
        temperature = torch.where(self.phase == USER, self.user_temperature, self.answer_temperature)
        drawn = ids.gather(1, _draw(values, temperature, settings.top_p, self.generator)[:, None])[:, 0]
        following = positions + 1
        fixed = self.forced[rows, following]
        is_free = (fixed < 0) & self.is_open
        self.turn_length = torch.where(is_free, self.turn_length + 1, 0)
        is_stop = torch.isin(drawn, self.stops)
        ends_turn = is_free & (is_stop | (self.turn_length >= self.limits[self.phase]))
        is_user_end, is_answer_end = ends_turn & (self.phase == USER), ends_turn & (self.phase == ANSWER)
        chosen = torch.where(is_user_end, self.to_answer[0], torch.where(is_free, drawn, fixed)).int()
        self.tokens[rows, following] = torch.where(self.is_open, chosen, self.tokens[rows, following])
        kind = torch.where(is_free, self.phase, FORCED).to(torch.uint8)
        self.kinds[rows, following] = torch.where(self.is_open, kind, self.kinds[rows, following])
        # the template speaks between turns
        goes_on = is_answer_end & is_stop & (self.follow_ups > 0) & (positions < 0.7 * settings.length)
        self._force(is_user_end, self.to_answer[1:])
        self._force(goes_on, self.to_user)
        self.phase = torch.where(is_user_end, ANSWER, torch.where(goes_on, USER, self.phase))
        self.follow_ups -= goes_on.long()
        self.is_open &= ~(is_answer_end & ~goes_on) & (following + 1 < settings.length)
        self.positions = torch.where(self.is_open, following, positions)

    def _force(self, which: torch.Tensor, ids: torch.Tensor) -> None:
        """Where `which` [rows] holds, `ids` stand after the token that is being written now."""
        places = self.positions[:, None] + 2 + torch.arange(len(ids), device=ids.device)
        self.forced.scatter_(1, places, torch.where(which[:, None], ids, self.forced.gather(1, places)))

    def collect(self, which: torch.Tensor) -> None:
        """Take the documents out of the busy rows among `which` and make these rows idle."""
        rows = (which & self.is_busy).nonzero()[:, 0]
        if len(rows):
            # an open row's next token is in place already; a closed one stands at its last but one
            lengths = self.positions[rows] + torch.where(self.is_open[rows], 1, 2)
            is_text = torch.arange(self.settings.length, device=rows.device) < lengths[:, None]
            part = Corpus(
                tokens=self.tokens[rows][is_text],
                kinds=self.kinds[rows][is_text],
                top_ids=self.top_ids[rows][is_text],
                top_logprobs=self.top_logprobs[rows][is_text],
                offsets=F.pad(lengths.cumsum(0), (1, 0)),
                temperatures=self.answer_temperature[rows],
            )
            self.parts.append(part)
            self.written += len(part.tokens)
        self.is_busy[rows] = self.is_open[rows] = False


def _largest(logits: torch.Tensor, count: int, block: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """`topk` over [rows, vocab] that reads the logits once: the `count` largest lie in the `count` blocks with the
    largest maxima, and those are few enough to sort."""
    rows, vocab = logits.shape
    if vocab % block or vocab // block < count:
        return logits.topk(min(count, vocab), dim=-1)
    blocks = logits.view(rows, vocab // block, block)
    best = blocks.amax(-1).topk(count, dim=-1, sorted=False).indices
    candidates = blocks.gather(1, best[..., None].expand(-1, -1, block)).flatten(1)
    values, places = candidates.topk(count, dim=-1)
    return values, best.gather(1, places // block) * block + places % block


def _draw(values: torch.Tensor, temperature: torch.Tensor, top_p: float, generator: torch.Generator) -> torch.Tensor:
    """Index into descending `values` [rows, n] per row: the first where temperature is 0, else a draw within top_p."""
    probs = (values / temperature.clamp(min=1e-3)[:, None]).softmax(-1)
    probs = torch.where(probs.cumsum(-1) - probs < top_p, probs, 0)
    noise = torch.empty_like(probs).exponential_(generator=generator).clamp_(min=1e-20)
    return torch.where(temperature > 0, (probs / noise).argmax(-1), 0)


# ------------------------------------------------------------------------------------------------------- the shortlist


def choose_shortlist(corpus: Corpus, vocab_size: int, size: int, always: Sequence[int] = ()) -> torch.Tensor:
    """The `size` ids that the target most often ranks first inside answers, `always` among them; int64, ascending.
    Ids ranked first equally often, those never seen among them, come in the order of their number (see `widened`)."""
    counts = first_choices(corpus, vocab_size)
    counts[list(always)] = counts.max() + 1
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def widened(shortlist: torch.Tensor, size: int, vocab_size: int) -> torch.Tensor:
    """`shortlist` and as many more ids as make it `size` (int64, ascending), in the order of their number: a BPE
    tokenizer numbers its tokens as it merged them, frequent ones first. A shortlist as long as that stays as it is."""
    is_in = torch.zeros(vocab_size, dtype=torch.bool, device=shortlist.device)
    is_in[shortlist] = True
    more = (~is_in).nonzero()[:, 0][: max(0, size - len(shortlist))]
    return torch.cat([shortlist, more]).sort().values


def coverage(counts: torch.Tensor, shortlist: torch.Tensor) -> float:
    """Share of the counted tokens [vocab] that a shortlist can propose."""
    return float(counts[shortlist].sum() / counts.sum().clamp(min=1))


def first_choices(corpus: Corpus, vocab_size: int) -> torch.Tensor:
    """How often each id is the target's first choice for an answer token; float64 [vocab_size]."""
    is_answer = corpus.kinds[1:] == ANSWER
    return torch.bincount(corpus.top_ids[:-1, 0][is_answer].long(), minlength=vocab_size).double()
