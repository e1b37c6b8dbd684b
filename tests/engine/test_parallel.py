"""Tensor parallelism in one process: ranks are threads that meet at a barrier. Slices, sums, choices, the decode loop.

Sums over ranks round differently from one long sum, so logits are compared within a tolerance; what is chosen from
them is compared exactly.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from stand_ins import PROMPTS, Pieces, Trees, greedy, model_of, tiny_tensors
from thread_ranks import on_ranks

from tutorial_lib.api import build
from tutorial_lib.config import LayerSkipDecodingConfig, SamplingParams
from tutorial_lib.drafters.layer_skip import LayerSkipDrafter
from tutorial_lib.engine.build import load_model, machine_arch
from tutorial_lib.engine.engine import Engine
from tutorial_lib.engine.linear import make_linear
from tutorial_lib.engine.model import ModelConfig, Segment, pack
from tutorial_lib.engine.parallel import ParallelModel, ShardedLogits, check_split, load_rank, shard
from tutorial_lib.engine_dir import open_engine
from tutorial_lib.errors import OptionError
from tutorial_lib.shapes import dummy_config, random_tensors

THREE = "dummy:tiny-llama?seed=5&heads=6&kv_heads=3&intermediate=96"  # 320 ids do not divide by three
SHAPES = ((THREE, 3), ("dummy:tiny-qwen2", 2), ("dummy:tiny-qwen3", 2), ("dummy:tiny-mistral", 2))
IDS = torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(0)).tolist()


def rank_model(name, ranks, **limits) -> ParallelModel:
    """A rank's part of `stand_ins.tiny_model`, without an engine directory."""
    shape = ModelConfig.from_hf(dummy_config(name)[0])
    own = shard(pack(tiny_tensors(name), shape), shape, ranks.rank, ranks.size)
    names = [f"{i}.{kind}" for i in range(shape.num_layers) for kind in ("qkv", "o", "gate_up", "down")] + ["head"]
    linears = {n: make_linear(own[n], own.get(f"{n}.bias"), {"1": "plain"}) for n in names}
    vectors = {n: t for n, t in own.items() if n.endswith("norm")}
    return ParallelModel(
        shape, linears, vectors, own["embed"], ranks=ranks, **{"max_slots": 5, "max_seq_len": 256, **limits}
    )


def a_chain_then_a_tree(model):
    """Logits of a prompt, of a tree behind it, and of the token behind the branch that is kept."""
    prompt = model.logits(model.forward(IDS[:30], [Segment(1, 0, 30)]))
    tree = model.logits(model.forward(IDS[30:34], [Segment(1, 30, 4, (-1, -1, 1))], feature_layers=(1, 2)))
    features = model.features
    model.keep(1, 30, (2, 3))
    after = model.logits(model.forward(IDS[34:35], [Segment(1, 33, 1)]))
    return torch.cat([prompt, tree, after]), features


@pytest.mark.parametrize(("name", "size"), SHAPES)
def test_ranks_together_compute_what_one_model_does(name, size):
    expected = a_chain_then_a_tree(model_of(tiny_tensors(name), dummy_config(name)[0], ring_room=64))
    found = on_ranks(size, lambda ranks: a_chain_then_a_tree(rank_model(name, ranks, ring_room=64)))
    for part, whole in zip(found[0], expected, strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-4)
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0])), "ranks differ among themselves"


def test_a_rank_holds_a_share_and_all_shares_are_the_whole():
    shape = ModelConfig.from_hf(dummy_config(THREE)[0])
    packed = pack(tiny_tensors(THREE), shape)
    shares = [shard(packed, shape, rank, 3) for rank in range(3)]
    for name in ("0.qkv", "1.gate_up", "0.o", "1.down", "head"):
        rows = torch.cat([s[name].flatten() for s in shares]).sort().values
        torch.testing.assert_close(rows, packed[name].flatten().sort().values, rtol=0, atol=0)
    assert [s["head"].shape[0] for s in shares] == [107, 107, 106]
    assert shares[2]["0.qkv"].shape == (4 * 16, 64) and shares[2]["0.o"].shape == (64, 2 * 16)
    on_ranks(3, lambda ranks: rank_model(THREE, ranks).cache.shape == (2, 5, 2, 256, 16) or pytest.fail("cache"))


def test_the_bias_of_a_sum_is_added_once():
    name = "dummy:tiny-llama?seed=5"
    config = {**dummy_config(name)[0], "attention_bias": True, "mlp_bias": True}
    tensors = dict(random_tensors(config, 5, "cpu", torch.float32))
    shape = ModelConfig.from_hf(config)
    packed = pack(tensors, shape)
    assert {"0.o.bias", "0.down.bias", "0.qkv.bias"} <= set(packed)
    shares = [shard(packed, shape, rank, 2) for rank in range(2)]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    for kind, width in (("o", 32), ("down", 64)):
        wide = torch.cat([x, x], -1)[:, : 2 * width]
        parts = [
            torch.nn.functional.linear(wide[:, i * width : (i + 1) * width], s[f"0.{kind}"], s.get(f"0.{kind}.bias"))
            for i, s in enumerate(shares)
        ]
        whole = torch.nn.functional.linear(wide, packed[f"0.{kind}"], packed[f"0.{kind}.bias"])
        torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-5)


# ---- choices --------------------------------------------------------------------------------------------------------


def split(logits, ranks) -> ShardedLogits:
    most = -(-logits.shape[1] // ranks.size)
    return ShardedLogits(logits[:, ranks.rank * most : (ranks.rank + 1) * most], logits.shape[1], ranks)


def test_the_best_id_over_ranks_is_the_lowest_of_equals_and_nan_is_seen():
    logits = torch.randn(40, 10, generator=torch.Generator().manual_seed(2))
    logits[:20] = logits[:20].round()  # ties within a rank and across ranks
    logits[20, 9], logits[21, 0], logits[22, 5] = torch.nan, torch.inf, torch.nan
    for values, ids in on_ranks(4, lambda ranks: split(logits, ranks).max(-1)):  # 3, 3, 3 and 1 of ten ids
        expected = logits.max(-1)
        sane = ~expected.values.isnan()
        assert torch.equal(values.isnan(), ~sane) and torch.equal(values[sane], expected.values[sane])
        assert torch.equal(ids[sane], expected.indices[sane])


def test_rows_are_gathered_when_one_is_asked_for_and_only_once():
    logits = torch.randn(6, 10, generator=torch.Generator().manual_seed(3))

    def work(ranks):
        found, calls = split(logits, ranks), []
        ranks.gather = lambda x, inner=ranks.gather: calls.append(x.shape) or inner(x)
        found.max(-1)
        own = found[2:5]
        assert len(calls) == 1
        return torch.equal(own[1], logits[3]) and torch.equal(found[5], logits[5]) and len(calls) == 2

    assert on_ranks(3, work) == [True] * 3


def test_sizes_that_do_not_divide_are_refused_with_those_that_do():
    shape = ModelConfig.from_hf(dummy_config("dummy:llama-3.1-405b")[0])
    for size in (1, 2, 4, 8):
        check_split(shape, size)
    for size in (3, 16):
        with pytest.raises(OptionError, match=f"is {size} .*8 KV heads.*: 1, 2, 4, 8;"):
            check_split(shape, size)


# ---- the decode loop ------------------------------------------------------------------------------------------------


def decode(model, engine_model, make_drafter, params):
    drafter = make_drafter(model) if make_drafter else None
    engine = Engine(engine_model, Pieces.for_vocabulary(320), (), drafter=drafter, max_draft_len=3 if drafter else 0)
    return engine.generate(PROMPTS, params)


def skipping(model):
    return LayerSkipDrafter(LayerSkipDecodingConfig(max_draft_len=3, skip_layers=[1]), model)


SAMPLED, PENALIZED = {"temperature": 1.0, "seed": 4, "logprobs": 1}, {"repetition_penalty": 1.3}


@pytest.mark.parametrize(
    ("method", "sampling"),
    [("plain", {}), ("plain", SAMPLED), ("tree", {}), ("layer skip", {}), ("layer skip", SAMPLED | PENALIZED)],
)
def test_text_and_rounds_are_those_of_one_process(method, sampling):
    whole = model_of(tiny_tensors(THREE), dummy_config(THREE)[0])
    texts = [greedy(whole, prompt, 40) for prompt in PROMPTS]
    drafters = {
        "plain": None,
        "tree": lambda model: Trees(texts, lambda number, budget: number % (budget + 1)),
        "layer skip": skipping,
    }
    params = [SamplingParams(max_tokens=20, **sampling)] * len(PROMPTS)
    expected = decode(whole, whole, drafters[method], params)

    def work(ranks):
        model = rank_model(THREE, ranks)
        return decode(model, model.deciding(), drafters[method], params)

    for found in on_ranks(3, work):
        assert [g.token_ids for g in found] == [g.token_ids for g in expected]
        assert [[r.drafted for r in g.rounds] for g in found] == [[r.drafted for r in g.rounds] for g in expected]
    if method != "plain":
        assert sum(r.accepted for g in expected for r in g.rounds) > 0


# ---- engine directories ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_ranks_load_their_slices_of_one_engine_directory(dtype, tmp_path):
    build(THREE, tmp_path / "e", dtype=dtype, max_seq_len=64, max_batch_size=2, say=lambda line: None)
    info = open_engine(tmp_path / "e", backend="torch", arch=machine_arch())
    rows = partial(Segment, 0, 0, len(IDS))

    def logits(model):
        return model.logits(model.forward(IDS, [rows()]))

    expected = logits(load_model(info)[0])
    for found in on_ranks(3, lambda ranks: logits(load_rank(info, ranks))):
        if dtype == "float32":
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert torch.nn.functional.cosine_similarity(found, expected, dim=-1).min() > 0.999
