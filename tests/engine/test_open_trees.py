"""Trees that every GPU round forms anew, run as plain torch on a CPU: EAGLE-3's dynamic tree, grown on the device, and
trees from a drafter on the host."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from gpu_models import PLAIN, Pages, engine, gpu_model
from gpu_models import TableModel as DeviceTable
from stand_ins import PROMPTS as SHORT
from stand_ins import Pieces, TableModel, Trees
from stand_ins import run as run_on_cpu
from test_graph import greedy
from test_head_drafting import DYNAMIC, PROMPTS, SLOTS, eagle, features_of, texts
from tiny_heads import SHORTLIST, TARGET, SlowEagle, eagle_tensors

from tutorial_lib.bench.methods import WIDE_TREES
from tutorial_lib.config import EagleDecodingConfig, LookaheadDecodingConfig, SamplingParams, SimulatedAcceptance
from tutorial_lib.drafters.base import SlotState
from tutorial_lib.drafters.eagle import EagleDrafter, dynamic_sizes
from tutorial_lib.drafters.lookahead import LookaheadDrafter
from tutorial_lib.engine.drafting import OpenTree
from tutorial_lib.engine.head_drafting import EagleGrowingDrafting, Growth
from tutorial_lib.errors import OptionError

TEXT = Pieces.for_vocabulary(320)
SHAPES = [(5, 3, 10), (4, 4, 63), (3, 8, 5), (1, 6, 4), (6, 1, 9), (2, 10, 1), (6, 5, 20)]  # depth, top k, total


# ---- the dynamic tree ------------------------------------------------------------------------------------------------


class TinyLayer:
    """Stands for the EAGLE layer, on the device and on the host: an output hangs on the parent's and on the word, row
    by row, so it is the same number in both. Logits of 40 tokens, the draft vocabulary."""

    def __init__(self, seed: int, sharpness: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.mix, self.words, self.out = (
            torch.randn(n, 8, generator=generator) * scale for n, scale in ((8, 0.6), (200, 1.0), (40, sharpness))
        )

    def output(self, g: torch.Tensor, word: int) -> torch.Tensor:
        return torch.tanh(self.mix @ g + self.words[word])

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.out @ row for row in x])


def host_trees(layer: TinyLayer, config, ids: torch.Tensor, roots: torch.Tensor):
    drafter = object.__new__(EagleDrafter)
    drafter.top_k, drafter.total = dynamic_sizes(config, len(ids))
    drafter.is_dynamic, drafter.is_chain, drafter.draft_ids = True, False, ids
    drafter._ids, drafter._rows = ids.tolist(), {token: row for row, token in enumerate(ids.tolist())}
    drafter._catch_up = lambda texts: roots
    drafter.layer = SimpleNamespace(
        logits=layer.logits,
        forward=lambda tokens, g, spans: torch.stack([layer.output(*pair) for pair in zip(g, tokens, strict=True)]),
    )
    budget = config.max_draft_len
    return drafter.propose([SlotState(i, [1, 2, 3], budget, SamplingParams(), 0) for i in range(len(roots))])


def device_trees(layer: TinyLayer, config, ids: torch.Tensor, roots: torch.Tensor, ops=PLAIN):
    growth, batch = Growth.of(config, len(ids)), len(roots)
    drafting = object.__new__(EagleGrowingDrafting)
    drafting.growth, drafting.draft_ids, drafting._rooms = growth, ids, {}
    drafting.target = SimpleNamespace(ops=ops, device=torch.device("cpu"))
    drafting.logits = layer.logits
    drafting.first_step = lambda round, rows: (roots.clone(), roots, torch.arange(batch))

    seen: dict[int, list[int]] = {root: [] for root in range(batch)}  # by where a node's output lies

    def step(words, g, parts, table, lengths, slots, rows, *, behind, tree, tap):
        before = tree[0].shape[1] - rows
        for i, (place, parent) in enumerate(zip(tap.rows.tolist(), behind.tolist(), strict=True)):
            seen[place] = [*seen[parent], (place - batch) % growth.run]
            assert tree[0][i].nonzero().flatten().tolist() == seen[place]
            assert before + tree[1][i] == len(seen[place]) - 1  # positions behind the first node's
        x = torch.stack([layer.output(g[i], word) for i, word in zip(behind.tolist(), words.tolist(), strict=True)])
        tap.out[tap.rows] = x
        return x, x

    drafting.step = step
    rows = OpenTree(growth.tokens, growth.depth, "cpu").over(batch)
    tokens = torch.zeros(batch, growth.tokens + 1, dtype=torch.int32)
    starts = torch.zeros(growth.reach + 2, batch, dtype=torch.int32)
    state = SimpleNamespace(table=None)
    drafting.draft(SimpleNamespace(batch=batch, state=state, starts=starts, slots32=None, tokens=tokens, rows=rows))
    return tokens[:, 1:].tolist(), [[p - 1 for p in row[1:]] for row in rows.parents.tolist()]


def check_growth(shape, sharpness: float, ops=PLAIN) -> None:
    depth, top_k, total = shape
    ids = torch.arange(40) * 4 + 3
    config = EagleDecodingConfig(
        max_draft_len=depth, use_dynamic_tree=True, dynamic_tree_max_topK=top_k, max_total_draft_tokens=total
    )
    for seed in range(3):
        layer, roots = TinyLayer(seed, sharpness), torch.randn(3, 8, generator=torch.Generator().manual_seed(seed + 50))
        expected = host_trees(layer, config, ids, roots)
        for batch in (1, 3):
            tokens, parents = device_trees(layer, config, ids, roots[:batch], ops)
            for own, its_parents, draft in zip(tokens, parents, expected, strict=False):
                assert own == list(draft.tokens) and its_parents == list(draft.tree), (seed, batch)


@pytest.mark.parametrize("sharpness", [0.3, 3.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_device_grows_the_tree_that_the_host_grows(shape, sharpness):
    check_growth(shape, sharpness)


def test_a_dynamic_tree_is_the_one_that_the_slow_reference_grows(tmp_path):
    """The layer too: true features, masks and positions of every node. bf16 against float32, so nodes at the margin may
    differ; nearly all are the same."""
    target = gpu_model(TARGET, slots=SLOTS, max_seq_len=200, draft_len=12)
    drafting, slow = eagle(target, tmp_path, **DYNAMIC), SlowEagle(eagle_tensors(), target.embed.float())
    same = count = 0
    for prompt, done in zip(PROMPTS[:3], texts(target, PROMPTS[:3], drafting, 4, 25), strict=True):
        text = [*prompt, *done.token_ids]
        features, length = features_of(target, text).float(), len(prompt) + 1
        for each in done.rounds[:-1]:
            x = slow.read(features[: length - 1], text[:length])
            paths = [()]
            for token, parent in zip(each.drafted, each.parents, strict=True):
                paths.append((*paths[parent + 1], token))
            expected = slow_paths(slow, x, depth=4, top_k=3, total=8)
            same += len(expected & set(paths[1:]))
            count += len(paths) - 1
            assert len(set(paths[1:])) == 8
            length += len(each.emitted)
    assert same > 0.93 * count > 200, (same, count)


def slow_paths(slow: SlowEagle, x: torch.Tensor, depth: int, top_k: int, total: int) -> set[tuple[int, ...]]:
    found, beam = {}, [((), 0.0)]
    for _ in range(depth):
        children = {}
        for path, score in beam:
            best = torch.log_softmax(slow.behind(x, list(path)), -1).topk(top_k)
            for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                children[(*path, int(SHORTLIST[index]))] = score + value
        beam = sorted(children.items(), key=lambda item: -item[1])[:top_k]
        found |= children
    return {path for path, _ in sorted(found.items(), key=lambda item: -item[1])[:total]}


def test_a_growth_that_no_step_holds_is_refused(tmp_path):
    config = EagleDecodingConfig(
        max_draft_len=8, use_dynamic_tree=True, dynamic_tree_max_topK=10, max_total_draft_tokens=30
    )
    with pytest.raises(OptionError, match="70 tokens.*63"):
        Growth.of(config, 320)
    growth = Growth.of(EagleDecodingConfig(max_draft_len=5, use_dynamic_tree=True), 2)
    assert (growth.width, growth.tokens, growth.reach) == (2, 10, 10)
    target = gpu_model(TARGET, slots=2)
    drafting = eagle(target, tmp_path, **DYNAMIC)
    with pytest.raises(OptionError, match="simulated_acceptance.*anew"):
        texts(target, [[1]], drafting, forced=2.0)


@pytest.mark.parametrize("name", ["eagle3_fixed15", "eagle3_fixed31", "eagle3_fixed63", "eagle3_dynamic31"])
def test_trees_of_the_shipped_sizes_change_no_text(name, tmp_path):
    """As many requests at a time as a step holds: one with 63 tokens, three with 15."""
    config = WIDE_TREES[name].make(5, "")
    tree = {key: getattr(config, key) for key in ("eagle_choices", *DYNAMIC)}
    target = gpu_model(TARGET, slots=SLOTS, max_seq_len=200, draft_len=63)
    drafting = eagle(target, tmp_path, **tree, max_draft_len=config.max_draft_len)
    plain, done = texts(target, PROMPTS, count=14), texts(target, PROMPTS, drafting, count=14)
    for prompt, ours, theirs in zip(PROMPTS, done, plain, strict=True):
        assert is_the_same(target, prompt, ours.token_ids, theirs.token_ids)
        assert all(len(r.drafted) == int(name[-2:]) and r.depth <= config.max_draft_len for r in ours.rounds)


# ---- trees from the host ---------------------------------------------------------------------------------------------

LENGTH = 30


@pytest.mark.parametrize("mixed", [False, True])
def test_random_trees_from_the_host_give_the_text_of_plain_decoding(mixed):
    """Accepted as deep as they are right, wherever the right branch stands; some rounds draft a chain or nothing."""
    target = gpu_model("dummy:tiny-llama?seed=11&layers=1", draft_len=24)
    known = [list(p) + greedy(target, p, LENGTH + 10) for p in SHORT]
    drafter = Trees(known, lambda number, budget: number % (budget + 1), width=2, mixed=mixed)
    made = engine(target, TEXT, host=drafter, host_tree=OpenTree(24, 3, "cpu"))
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (LENGTH, LENGTH - 7, LENGTH - 15)]
    branches = 0
    for batch in ([0, 1, 2], [2], [1, 0]):
        done = made.generate([SHORT[i] for i in batch], [params[i] for i in batch])
        for i, generation in zip(batch, done, strict=True):
            assert generation.token_ids == known[i][len(SHORT[i]) :][: params[i].max_tokens]
            left = params[i].max_tokens - 1
            for number, r in enumerate(generation.rounds):
                assert r.depth <= min(3, left - 1) and len(r.path) == r.accepted
                assert mixed or r.accepted == number % (min(3, left - 1) + 1)
                assert tuple(r.drafted[at] for at in r.path) == r.emitted[: r.accepted]
                branches += r.path != tuple(range(r.accepted))
                left -= len(r.emitted)
    assert branches > 10


SIZES = [(4, 3, 4), (1, 2, 1), (3, 5, 1), (1, 1, 0), (7, 4, 7)]  # W, N, G


def lookahead(sizes):
    """What an engine takes to draft so."""
    w, n, g = sizes
    config = LookaheadDecodingConfig(max_window_size=w, max_ngram_size=n, max_verification_set_size=g)
    drafter = LookaheadDrafter(config, ())
    tree = OpenTree(drafter.max_tokens, drafter.max_depth, "cpu") if drafter.max_tokens else None
    return {"host": drafter, "host_tree": tree}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_lookahead_on_a_gpu_has_the_rounds_it_has_on_a_cpu(sizes):
    """Targets whose next token hangs on the last one, with loops of 12 tokens: the same trees, the same branches."""
    generator = random.Random(1)
    table = torch.full((40, 40), -3.0)
    for token in range(40):
        table[token, (token + 1) % 12 if token < 12 else generator.randrange(40)] = 3.0
    prompts, params = [[1, 2], [30], [7, 20, 3]], SamplingParams(max_tokens=40)
    options = lookahead(sizes)
    device = DeviceTable(table, draft_len=options["host"].max_tokens)
    device.cache = torch.zeros(1, device.pages, 2, 1, 64, 1)
    made = engine(device, Pieces.for_vocabulary(40), **options)
    ours = made.generate(prompts, [params] * 3)
    drafter = lookahead(sizes)["host"]
    cpu = TableModel(table)
    theirs = run_on_cpu(cpu, Pieces.for_vocabulary(40), prompts, params, drafter=drafter, k=drafter.max_depth)

    def rounds(generation):
        return [(r.drafted, r.parents or (), r.path or (), r.emitted) for r in generation.rounds]

    for mine, other in zip(ours, theirs, strict=True):
        assert mine.token_ids == other.token_ids and rounds(mine) == rounds(other)
    assert sizes[1] == 1 or sum(r.accepted for g in ours for r in g.rounds) > 10


@pytest.mark.parametrize(
    ("sizes", "sampling"),
    [(SIZES[0], {}), (SIZES[0], {"temperature": 0.9, "seed": 5}), (SIZES[2], {}), (SIZES[4], {})],
    ids=["greedy", "sampled", "deep", "wide"],
)
def test_lookahead_changes_no_text(sizes, sampling):
    options = lookahead(sizes)
    target = gpu_model(TARGET, slots=SLOTS, max_seq_len=200, draft_len=options["host"].max_tokens)
    plain = [g.token_ids for g in texts(target, PROMPTS, count=24, **sampling)]
    made = engine(target, TEXT, **options)
    params = SamplingParams(max_tokens=24, ignore_eos=True, **sampling)
    alone = [made.generate([p], [params])[0] for p in PROMPTS[:2]]
    for prompt, done, expected in zip(
        PROMPTS + PROMPTS[:2], made.generate(PROMPTS, [params] * 5) + alone, plain + plain[:2], strict=True
    ):
        assert done.token_ids == expected or not sampling
        assert is_the_same(target, prompt, done.token_ids, expected)


def is_the_same(target, prompt, ours, theirs) -> bool:
    """Equal, or parted where the target finds two tokens nearly the same: sums of bf16 products hang on how many rows
    there are on a CPU."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    if at is None:
        return True
    logits = Pages(target).all_logits([*prompt, *ours[:at]])[-1]
    return abs(float(logits[ours[at]] - logits[theirs[at]])) < 0.02 * float(logits.std())


def test_a_tree_from_the_host_cannot_be_forced():
    with pytest.raises(OptionError, match="simulated_acceptance.*anew"):
        engine(
            gpu_model(TARGET), TEXT, **lookahead((4, 3, 4)),
            simulated_acceptance=SimulatedAcceptance(acceptance_length=2.0),
        )  # fmt: skip
