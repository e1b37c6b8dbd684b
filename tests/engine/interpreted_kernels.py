"""The Triton kernels in Triton's interpreter, each against its plain-torch reference; run by `test_kernels.py`.

The interpreter's roundings are not a GPU's: bf16 is cut off instead of rounded (up to 2^-7 relative), and e4m3 rounds
its mantissa without carrying into the exponent (0.49 becomes 0.25) and drops numbers below 2^-6. Tolerances follow from
that: FP8 results are compared code by code (`codes_alike`), bf16 ones by relative norm.
"""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
import torch
from attention_cases import CASES, Case, check_attention, rand
from gpu_models import PLAIN, Pages, gpu_model, random_ids, relative, run
from stand_ins import Pieces
from test_open_trees import TinyLayer, check_growth, device_trees

from tutorial_lib.config import EagleDecodingConfig, NGramDecodingConfig, SamplingParams
from tutorial_lib.drafters.base import SlotState
from tutorial_lib.drafters.ngram import NGramDrafter
from tutorial_lib.engine import kernels, reference
from tutorial_lib.engine.drafting import DeviceTree, OpenTree
from tutorial_lib.engine.gpu_model import Ops
from tutorial_lib.engine.kernels import FP8, AttentionScratch, Tactic
from tutorial_lib.engine.reference import Beam, Candidates, Tap
from tutorial_lib.errors import OptionError

assert kernels.IS_INTERPRETED, "set TRITON_INTERPRET=1 before Triton is imported"

CUT = 0.01  # relative norm of cutting bf16 off, once or a few times over


def codes_alike(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal e4m3 codes up to the next one, and up to the interpreter's two faults."""
    ours, theirs = ours.float(), theirs.float()
    step = torch.maximum(theirs.abs() / 8, torch.tensor(2.0**-9))
    near = (ours - theirs).abs() <= step
    lost_carry = torch.isclose(ours * 2, theirs, rtol=0.07)
    dropped = (theirs.abs() <= 2.0**-6) & (ours == 0)
    return bool((near | lost_carry | dropped).all()) and float((~near).float().mean()) < 0.1


def test_the_comparison_of_codes_can_fail():
    x = rand(4000, scale=30)
    assert codes_alike(x.to(FP8), x.to(FP8)) and codes_alike((x * 1.02).to(FP8), x.to(FP8))
    assert not codes_alike((x * 1.3).to(FP8), x.to(FP8))
    assert not codes_alike((x + 3).to(FP8), x.to(FP8))
    assert not codes_alike((x / 2).to(FP8), x.to(FP8))


# ---- products -------------------------------------------------------------------------------------------------------

TACTICS = {"one split": (32, 64, 1), "three splits": (64, 32, 3), "more splits than tiles": (64, 128, 4)}


def operands(rows: int, n: int, k: int, kind: str, seed: int = 0):
    """(x, x_scale, weight, weight_scale), bf16 or FP8."""
    x, weight = rand(rows, k, seed=seed), rand(n, k, seed=seed + 1)
    if kind == "bf16":
        return x.bfloat16(), None, weight.bfloat16(), None
    generator = torch.Generator().manual_seed(seed)
    x_scale, w_scale = (torch.rand(count, generator=generator) + 0.5 for count in (64, n))
    return x.to(FP8), x_scale, weight.to(FP8), w_scale


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("tiles", list(TACTICS))
def test_linear(tiles, kind):
    """Shapes that no tile divides: 100 features, 200 deep; partials add up and lie where the next kernel reads them."""
    block_n, block_k, splits = TACTICS[tiles]
    tactic = Tactic(block_n, block_k, splits, 2, 4)
    for rows in (1, 17):
        args = operands(rows, 100, 200, kind)
        parts = kernels.linear(*args, tactic)
        assert parts.shape == (splits, rows, 100) and parts.dtype == torch.float32
        torch.testing.assert_close(parts.sum(0), reference.linear(*args)[0], rtol=1e-4, atol=1e-4)
        per_split = math.ceil(math.ceil(200 / block_k) / splits) * block_k
        for split in range(splits):
            x, x_scale, weight, w_scale = args
            part = slice(split * per_split, (split + 1) * per_split)
            own = reference.linear(x[:, part], x_scale, weight[:, part], w_scale)[0]
            torch.testing.assert_close(parts[split], own, rtol=1e-4, atol=1e-4)


def test_a_row_of_a_product_does_not_depend_on_the_others():
    tactic = Tactic(32, 64, 2, 2, 4)
    x, _, weight, _ = operands(16, 96, 192, "bf16")
    whole = kernels.linear(x, None, weight, None, tactic)
    for rows in (1, 2, 5, 11):
        assert torch.equal(kernels.linear(x[:rows], None, weight, None, tactic), whole[:, :rows]), rows


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_gate_up(kind):
    tactic = Tactic(32, 64, 1, 2, 4)
    for rows in (1, 17):
        args = operands(rows, 2 * 72, 200, kind, seed=3)
        got = kernels.gate_up(*args, None, tactic)
        expected = reference.gate_up(*args, None)
        assert got.dtype == torch.bfloat16 and got.shape == (rows, 72)
        assert relative(got, expected) < CUT
        scale = torch.tensor(0.05 * float(expected.abs().max()) / 448 * 8)  # so that the largest saturate
        quantized = kernels.gate_up(*args, scale, tactic)
        assert quantized.dtype == FP8 and codes_alike(quantized, reference.gate_up(*args, scale))
        assert quantized.float().abs().max() == 448 and (expected.abs() > 448 * scale).any()


# ---- norm and quantize ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["bf16", "given scale", "own scale"])
@pytest.mark.parametrize("splits", [0, 1, 3])
def test_add_norm(splits, form):
    width, rows = 72, 5
    residual = rand(rows, width).bfloat16()
    parts = rand(splits, rows, width, seed=1) if splits else None
    weight = (rand(width, seed=2, scale=0.2) + 1).bfloat16()
    scale = torch.tensor(0.004) if form == "given scale" else None  # 1.8 / 448: some saturate
    ours, theirs = residual.clone(), residual.clone()
    got, scales = kernels.add_norm(ours, parts, weight, 1e-3, scale, form != "bf16")
    expected, expected_scales = reference.add_norm(theirs, parts, weight, 1e-3, scale, form != "bf16")
    assert torch.equal(ours, residual) == (splits == 0)
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=2**-7, atol=1e-6)  # cut off, not rounded
    if form == "bf16":
        assert scales is None and relative(got, expected) < CUT
        return
    torch.testing.assert_close(scales, expected_scales, rtol=2**-6 if splits else 1e-5, atol=0)
    assert codes_alike(got, expected)
    if form == "given scale":
        assert (scales == scale).all() and got.float().abs().max() == 448


def test_quantize_rows_of_more_than_one_block():
    x = (rand(3, 9000) * torch.tensor([1e-3, 1.0, 300.0])[:, None]).bfloat16()
    got, scales = kernels.quantize_rows(x)
    expected, expected_scales = reference.quantize_rows(x)
    torch.testing.assert_close(scales, expected_scales)
    assert codes_alike(got, expected) and (got.float().abs().amax(1) == 448).all()
    zero, scale = kernels.quantize_rows(torch.zeros(2, 64).bfloat16())
    assert not zero.float().any() and (scale > 0).all()


# ---- attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(CASES))
def test_attention(name):
    check_attention(CASES[name], kernels, "cpu", tolerance=2 * CUT, alike=codes_alike)


def test_scratch_is_enough_for_every_way_to_spread_the_rows():
    """5 slots run as 1, 2, 4 or 5 sequences, each with as many rows as 64 allows; the counters decide who combines."""
    for heads, kv_heads in ((64, 8), (9, 3), (2, 2), (40, 1)):
        config = Case(heads=heads, kv_heads=kv_heads).config
        for most in (1, 5, 8, 40, 64, 100):
            scratch = AttentionScratch.for_steps(most, 64, config, 1024, "meta")
            for sequences in range(1, min(most, 64) + 1):
                for rows in range(1, 64 // sequences + 1):
                    lanes, blocks, _, programs = kernels.attention_shape(rows, heads // kv_heads, 1024)
                    count = sequences * kv_heads * blocks
                    assert scratch.counter.numel() >= count
                    assert scratch.top.numel() >= count * programs * lanes


# ---- argmax ---------------------------------------------------------------------------------------------------------


def test_argmax_of_rows_that_lie_apart():
    """As a drafter's first step leaves them: every second row, into one column of the drafts; the first of equals."""
    logits = rand(6, 5000)
    logits[1, [77, 4999]], logits[3, 4999], logits[5, 0] = 9.0, 9.0, 9.0
    out = torch.full((3, 4), -1, dtype=torch.int32)
    kernels.argmax(logits[1::2], out[:, 2])
    assert out[:, 2].tolist() == [77, 4999, 0] and (out[:, [0, 1, 3]] == -1).all()
    wide = torch.full((2, 2048), -5.0)
    wide[0, 3], wide[1, 2047] = -1.0, -1.0
    kernels.argmax(wide[:, :2047], out[:2, 0])  # a vocabulary that ends before its row does
    assert out[:2, 0].tolist() == [3, 0]
    kernels.argmax(torch.full((1, 5000), torch.nan), out[:1, 0])  # the next step looks its embedding up
    assert 0 <= out[0, 0] < 5000


def test_argmax_gives_the_ids_of_a_shortlist_and_reports_damage():
    for vocab in (900, 40_000):  # one program, and many
        logits = rand(6, vocab)
        ids = torch.arange(vocab) * 3 + 1
        out, expected = torch.zeros(2, 6, dtype=torch.int32)
        damage, none = torch.zeros(2, 3, dtype=torch.int32)
        for row, value in ((2, torch.nan), (3, -torch.inf), (5, torch.inf)):
            kernels.argmax(logits, out, ids=ids, damage=damage)
            reference.argmax(logits, expected, ids=ids, damage=none)
            assert torch.equal(out, expected) and torch.equal(damage, none)
            logits[row] = -torch.inf if value < 0 else logits[row]
            logits[row, 7] = value
        kernels.argmax(logits, out, ids=ids, damage=damage)
        reference.argmax(logits, expected, ids=ids, damage=none)
        assert damage.tolist() == none.tolist() == [0, 1, 1]
        assert torch.equal(out, expected) and out[5] == 22


TREES = {
    "two branches": (-1, 0, 0, 1, 2, 4),
    "comb": (-1, 0, 1, 2, 0, 1, 2, 3),
    "wide": (-1, 0, 0, 0, 1, 1, 3, 3, 6, 8),
}


@pytest.mark.parametrize("vocab", [900, 2500])
def test_the_likeliest_tokens_go_where_they_are_wanted(vocab):
    """Rows that lie apart, some columns left alone, one token wanted twice; of equals the first; ids of a shortlist."""
    wide = rand(2, 3, vocab + 7, seed=vocab)
    wide[0, 1, [5, vocab - 1, 70]] = 9.0
    logits = wide[:, :, :vocab].transpose(0, 1)  # 3 sequences of 2 nodes
    source = torch.tensor([5, -1, 0, 3, 2, 5, 6], dtype=torch.int32)
    ids = torch.arange(vocab) * 3 + 1
    found = []
    for made in (kernels, reference):
        tokens, scores = torch.full((3, 9), -7, dtype=torch.int32), torch.full((3, 7), -7.0)
        made.top_tokens(logits, tokens[:, 1:8], source, 4, ids=ids, scores=scores)
        plain = torch.full((3, 7), -7, dtype=torch.int32)
        made.top_tokens(logits, plain, source, 4)
        found.append((tokens, scores, plain))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    tokens, scores, plain = found[0]
    assert plain[1, [1, 2, 4]].tolist() == [-7, 5, vocab - 1] and (tokens[:, [0, 2, 8]] == -7).all()
    assert torch.equal(tokens[:, 1:8][:, source >= 0], ids[plain[:, source >= 0].long()].int())


@pytest.mark.parametrize("shape", [(4, 3, 10), (3, 8, 5), (1, 6, 4), (5, 2, 9)], ids=str)
def test_dynamic_trees_grow_as_they_do_on_the_host(shape):
    """The same check as for the references: candidates, beams, and what is kept of them, for 1 and 3 sequences."""
    ops = SimpleNamespace(**{**vars(PLAIN), **{name: getattr(kernels, name) for name in ("grow_tree", "prune_tree")}})
    check_growth(shape, 1.0, ops)
    depth, top_k, total = shape
    config = EagleDecodingConfig(
        max_draft_len=depth, use_dynamic_tree=True, dynamic_tree_max_topK=top_k, max_total_draft_tokens=total
    )
    equals = (TinyLayer(0, 0.0), config, torch.arange(40), torch.zeros(3, 8))  # all as likely: the first goes first
    assert device_trees(*equals, ops) == device_trees(*equals, PLAIN)


def test_damaged_scores_write_nowhere_else():
    found = Candidates(*(torch.zeros(2, 12, dtype=kind) for kind in (torch.int32, torch.float64, torch.int32)))
    rooms = [torch.full((2, 20), -7, dtype=torch.int32) for _ in range(2)]
    beam = Beam(
        torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.float64),
        torch.zeros(6, 3, dtype=torch.int8), *(torch.full((9,), -7, dtype=torch.int32)[:6] for _ in range(2)),
    )  # fmt: skip
    after = Beam(*(torch.cat([t, t + 77]) for t in beam[:3]), *(torch.full((9,), -7, dtype=torch.int32) for _ in "ab"))
    fresh = torch.full((2, 9), torch.nan)
    kernels.grow_tree(found, 3, fresh, torch.arange(6, dtype=torch.int32), beam, after, 3)
    assert (after.words[6:] == -7).all() and (after.sums[2:] == 77).all() and (after.behind[6:] == -7).all()
    kernels.prune_tree(found, rooms[0][:, :5], rooms[1][:, :5].contiguous())
    assert (rooms[0][:, 5:] == -7).all()


@pytest.mark.parametrize("name", list(TREES))
def test_the_rows_of_a_tree_follow_from_its_parents(name):
    """As a fixed tree's; rows without a draft see themselves."""
    parents = DeviceTree(TREES[name], "cpu").over(3).parents.clone()
    parents[1, -2:] = -2
    tree = OpenTree(parents.shape[1] - 1, DeviceTree(TREES[name], "cpu").depth, "cpu").over(3)
    for made in (kernels, reference):
        made.tree_rows(parents, tree.mask.fill_(9), tree.depths, 4)
        whole = DeviceTree(TREES[name], "cpu").over(1)
        rows = parents.shape[1]
        assert torch.equal(tree.mask[:rows], whole.mask) and torch.equal(tree.depths[:rows], whole.depths)
        for row in (2 * rows - 2, 2 * rows - 1):
            assert tree.depths[row] == 0 and tree.mask[row].nonzero().tolist() == [[row - rows]]


@pytest.mark.parametrize("is_tree", [True, False])
def test_pairs_are_gathered_from_what_was_accepted(is_tree):
    """Slots that accepted two rows, none, and all; features wider than a block of the kernel."""
    features, text = rand(4 * 9, 5000).bfloat16(), torch.arange(4 * 30, dtype=torch.int32).view(4, 30)
    length = torch.tensor([12, 3, 20, 2], dtype=torch.int32)
    kept = torch.tensor([[2, 5, 0], [0, 0, 0], [1, 4, 8], [0, 0, 0]], dtype=torch.int32)
    row = torch.tensor([2, 0, 3, 0], dtype=torch.int32)
    slots = torch.tensor([2, 0, 1])
    found = [
        made.gather_pairs(slots, length, row, kept if is_tree else None, text, features, 9, 4)
        for made in (kernels, reference)
    ]
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    first, last, words, out = found[0]
    assert first.tolist() == [15, 8, 1] and last.tolist() == [3, 6, 8]
    assert words.tolist()[4:7] == [9, 10, 11]  # slot 0: its last three tokens
    assert torch.equal(out[4:7], features[[0, 2, 5] if is_tree else [0, 1, 2]])


# ---- rounds ---------------------------------------------------------------------------------------------------------


def test_embed_norm_of_tokens_that_lie_apart():
    embed, weight = rand(50, 72).bfloat16(), (rand(72, seed=2, scale=0.2) + 1).bfloat16()
    tokens = torch.tensor([[3, 9], [49, 9], [0, 9]], dtype=torch.int32)[:, 0]
    places = torch.tensor([2, 2, 0, 1], dtype=torch.int32)
    looked_up, _, _ = kernels.embed_norm(tokens, embed, weight, 1e-3, None, False, places=places)
    assert torch.equal(looked_up, embed[[0, 0, 3, 49]])
    for quantized in (False, True):
        x, got, scales = kernels.embed_norm(tokens, embed, weight, 1e-3, None, quantized)
        again, expected, expected_scales = reference.embed_norm(tokens, embed, weight, 1e-3, None, quantized)
        assert torch.equal(x, again) and torch.equal(x, embed[[3, 49, 0]])
        if quantized:
            assert codes_alike(got, expected)
            torch.testing.assert_close(scales, expected_scales)
        else:
            assert relative(got, expected) < CUT


@pytest.mark.parametrize("k", [0, 1, 4, 7])
@pytest.mark.parametrize("kind", ["greedy", "forced", "decided"])
def test_rounds_begin_and_finish_as_their_reference(kind, k):
    """Batches of 1, 3 and 5, one of whose rows is the scratch slot; drafts right up to a place that differs by row."""
    generator = torch.Generator().manual_seed(k)

    def ints(*shape: int, high: int = 90) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator, dtype=torch.int32)

    for batch in (1, 3, 5):
        slots = torch.randperm(6, generator=generator)[:batch]
        first = {
            "length": ints(6, high=20) + 2, "last": ints(6, 2), "text": ints(6, 40), "row": ints(6),
            "tokens": ints(batch, k + 1),
            "choices": ints(batch, k + 1), "drafted_len": ints(batch, high=k + 1),
            "counter": torch.tensor([5]), "forced": ints(7, high=k + 1), "damage": ints(batch),
        }  # fmt: skip
        for row in range(batch):
            right = int(ints(1, high=k + 1))
            first["choices"][row, :right] = first["tokens"][row, 1 : 1 + right]
        decided = (ints(batch, high=k + 1).long(), ints(batch).long()) if kind == "decided" else None
        ends = []
        for made in (kernels, reference):
            has = {name: value.clone() for name, value in first.items()}
            out, seen, starts = ints(batch, k + 2) * 0, ints(batch) * 0, ints(k + 2, batch) * 0
            pair = ints(batch, 2) * 0
            made.begin_round(slots, has["length"], has["last"], seen, starts, has["tokens"], pair, has["damage"], 60)
            made.finish_round(
                slots, has["length"], has["last"], has["text"], has["row"], has["tokens"], has["choices"],
                has["drafted_len"], has["forced"] if kind == "forced" else None, has["counter"], out, decided=decided,
            )  # fmt: skip
            ends.append({**has, "out": out, "seen": seen, "starts": starts, "pair": pair})
        for name, ours in ends[0].items():
            if name in ("last", "text", "row"):  # where the scratch slot writes means nothing
                ours, ends[1][name] = ours[:5], ends[1][name][:5]
            assert torch.equal(ours, ends[1][name]), name
        assert ends[0]["length"][5] == first["length"][5] and ends[0]["counter"] == 6 and not ends[0]["damage"].any()
        real = [int(s) for s in slots if s < 5]
        grown = ends[0]["length"] - first["length"]
        assert all(1 <= grown[s] <= k + 1 for s in real) and grown.count_nonzero() == len(real)


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize("name", list(TREES))
def test_trees_are_walked_as_their_reference_walks_them(name, is_forced):
    """Siblings differ; in every row the target's choices follow some branch to a depth of its own. Sequences may have
    trees of their own: of every second one the last rows are no drafts."""
    tree = DeviceTree(TREES[name], "cpu")
    rows, generator = len(TREES[name]), random.Random(name)
    seen = set()
    for _ in range(12):
        batch = generator.choice([1, 2, 5])
        tokens = torch.tensor([generator.sample(range(90), rows) for _ in range(batch)], dtype=torch.int32)
        choices = torch.full((batch, rows), 95, dtype=torch.int32)
        for own in range(batch):
            at = generator.randrange(rows)
            while at > 0 and generator.random() < 0.9:
                choices[own, TREES[name][at]] = tokens[own, at]
                at = TREES[name][at]
        parents = tree.over(batch).parents
        if not is_forced:
            parents[1::2, -2:] = -2
        slots = torch.tensor(generator.sample(range(6), batch))
        first = {
            "length": torch.randint(2, 20, (6,), dtype=torch.int32), "last": torch.zeros(6, 2, dtype=torch.int32),
            "text": torch.randint(0, 90, (6, 40), dtype=torch.int32), "row": torch.zeros(6, dtype=torch.int32),
        }  # fmt: skip
        forced = torch.tensor([2, 0, 1], dtype=torch.int32) if is_forced else None
        ends = []
        for made in (kernels, reference):
            has = {key: value.clone() for key, value in first.items()}
            out = torch.zeros(batch, rows + 1, dtype=torch.int32)
            path, kept = (torch.zeros(n, tree.depth, dtype=torch.int32) for n in (batch, 6))
            made.finish_round(
                slots, has["length"], has["last"], has["text"], has["row"], tokens, choices,
                torch.zeros(batch, dtype=torch.int32), forced, torch.tensor([generator.randrange(1)]), out,
                parents=parents, path=path, kept=kept,
            )  # fmt: skip
            real = slots < 5
            assert torch.equal(kept[slots[real]], path[real]) and not kept[5].any()
            ends.append({**{key: value[:5] for key, value in has.items()}, "out": out, "path": path})
        for key, ours in ends[0].items():
            assert torch.equal(ours, ends[1][key]), key
        seen |= set(ends[0]["out"][:, 0].tolist())
    assert seen == ({2} if is_forced else set(range(tree.depth + 1)))


def test_the_accepted_branch_moves_up_in_every_layer():
    cache = rand(3, 5, 2, 2, 64, 8).bfloat16()
    table = torch.tensor([[4, 1], [0, 3], [2, 2]], dtype=torch.int32)
    slots, starts = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([61, 7], dtype=torch.int32)
    path = torch.tensor([[2, 5, 9], [1, 0, 0]], dtype=torch.int32)
    ours, theirs = cache.clone(), cache.clone()
    kernels.keep_path(ours, table, slots, starts, path)
    reference.keep_path(theirs, table, slots, starts, path)
    assert torch.equal(ours, theirs)
    at = {position: ours[:, table[1, position // 64], :, :, position % 64] for position in range(128)}
    was = {position: cache[:, table[1, position // 64], :, :, position % 64] for position in range(128)}
    for position in at:
        source = {62: 63, 63: 66, 64: 70}.get(position, position)
        assert torch.equal(at[position], was[source]), position
    assert torch.equal(ours[:, 4], cache[:, 4])  # the other sequence kept its first draft: nothing to move


@pytest.mark.parametrize("is_oldest", [True, False])
@pytest.mark.parametrize("size", [1, 3])
def test_ngrams_are_matched_as_the_host_does(size, is_oldest):
    generator = random.Random(size)
    config = NGramDecodingConfig(max_draft_len=5, max_matching_ngram_size=size, is_use_oldest=is_oldest)
    stop_ids = torch.tensor([3], dtype=torch.int32)
    for length in (2, 3, 9, 40, 1100):
        texts = [[generator.randrange(4 if length < 99 else 40) for _ in range(length - cut)] for cut in (0, 1)]
        drafter = NGramDrafter(config, [3])
        expected = []
        for slot, text in enumerate(texts):
            drafter.reset(slot, text)
            (draft,) = drafter.propose([SlotState(slot, text, 5, SamplingParams(), 0)])
            expected.append(list(draft.tokens))
        text = torch.full((3, 1200), 3, dtype=torch.int32)
        lengths = torch.tensor([len(texts[1]), 2, len(texts[0])], dtype=torch.int32)
        text[2, : len(texts[0])], text[0, : len(texts[1])] = torch.tensor(texts[0]), torch.tensor(texts[1])
        for made in (kernels, reference):
            tokens, found = torch.zeros(2, 6, dtype=torch.int32), torch.full((2,), 9, dtype=torch.int32)
            made.match_ngram(torch.tensor([2, 0]), lengths, text, tokens, found, stop_ids, size, is_oldest)
            assert [row[1 : 1 + n] for row, n in zip(tokens.tolist(), found.tolist(), strict=True)] == expected


@pytest.mark.parametrize("is_normed", [False, True])
def test_norms_leave_copies_where_they_are_told(is_normed):
    residual, parts = rand(4, 72).bfloat16(), rand(2, 4, 72, seed=1)
    weight = (rand(72, seed=2, scale=0.2) + 1).bfloat16()
    rows = torch.tensor([5, 0, 3, 1], dtype=torch.int32)
    found = []
    for made in (kernels, reference):
        store, cat = torch.zeros(7, 200).bfloat16(), torch.zeros(4, 150).bfloat16()
        tap = Tap(store[:, 72:144], rows, is_normed)
        result, _ = made.add_norm(residual.clone(), parts, weight, 1e-3, None, False, out=cat[:, 75:147], tap=tap)
        assert not cat[:, :75].any() and not cat[:, 147:].any() and torch.equal(result, cat[:, 75:147])
        assert not store[:, :72].any() and not store[:, 144:].any() and not store[[2, 4, 6]].any()
        found.append((store, cat))
    for ours, theirs in zip(*found, strict=True):
        assert relative(ours, theirs) < CUT and ours.any()


# ---- all of them together -------------------------------------------------------------------------------------------

KERNELS = Ops.make(pdl=False)
PLAIN_TACTICS = {
    kind: {"64": {"block_n": 128, "block_k": 64, "split_k": splits, "stages": 2, "warps": 4}}
    for kind, splits in {"qkv": 2, "o": 1, "gate_up": 1, "down": 2, "head": 1}.items()
}


SHORT = "dummy:tiny-llama?seed=5&layers=1&heads=2&kv_heads=1&intermediate=64"


@pytest.mark.parametrize(("name", "weights"), [(SHORT, "bf16"), ("dummy:tiny-qwen3?layers=1", "fp8 calibrated")])
def test_a_step_of_the_whole_model(name, weights):
    ids, sizes = random_ids(11), [7, 1, 3]
    ours = Pages(gpu_model(name, weights=weights, ops=KERNELS, tactics=PLAIN_TACTICS)).all_logits(ids, sizes)
    theirs = Pages(gpu_model(name, weights=weights, ops=PLAIN)).all_logits(ids, sizes)
    assert relative(ours, theirs) < (0.02 if weights == "bf16" else 0.12)


def test_a_batch_of_self_drafts_is_accepted_whole():
    """A round of two sequences through the kernels: drafts come from the right rows of the right sequences."""
    limits = {"max_seq_len": 20, "draft_len": 2}
    target, draft = (gpu_model(SHORT, ops=KERNELS, tactics=PLAIN_TACTICS, slots=2, **limits) for _ in range(2))
    done = run(
        target, Pieces.for_vocabulary(320), [[7], [3]], draft=draft, k=2, max_slots=2, max_seq_len=20,
        greedy={"max_tokens": 4},
    )  # fmt: skip
    assert [[r.accepted for r in g.rounds] for g in done] == [[2], [2]]
    assert done[0].token_ids != done[1].token_ids


def test_heads_that_no_tile_fits_are_refused():
    with pytest.raises(OptionError, match="24.*power of two"):
        gpu_model("dummy:tiny-llama?head_dim=24", ops=KERNELS)
    with pytest.raises(OptionError, match="heads of 16.*32"):
        gpu_model("dummy:tiny-llama", ops=KERNELS, weights="fp8 calibrated", cache="fp8")
    gpu_model("dummy:tiny-llama?head_dim=24", ops=Ops.make(off=["attention"], pdl=False))
