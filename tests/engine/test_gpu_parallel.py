"""The GPU path divided among ranks, run as plain torch on a CPU; ranks are threads. Nothing here runs NCCL."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from gpu_models import PLAIN, Pages, gpu_model, packed_dummy, random_ids, run
from safetensors.torch import save_file
from stand_ins import PROMPTS, Pieces
from thread_ranks import on_ranks

from tutorial_lib.engine.build import WEIGHTS
from tutorial_lib.engine.gpu_build import quantized, random_packed
from tutorial_lib.engine.gpu_model import PAGE
from tutorial_lib.engine.gpu_parallel import assemble_rank, assemble_share, rank_tensors
from tutorial_lib.engine.graph import position_limit
from tutorial_lib.engine.parallel import Ranks, shard
from tutorial_lib.engine.quantize import calibrate
from tutorial_lib.errors import OptionError
from tutorial_lib.models import resolve

NAME = "dummy:tiny-llama?seed=5&heads=6&kv_heads=3&intermediate=96"  # 320 ids do not divide by three
SLOTS, LENGTH = 5, 200


def rank_gpu_model(name, ranks, *, weights="bf16", draft_len=8):
    config, packed = packed_dummy(name)
    if weights != "bf16":
        whole = gpu_model(name)
        texts = [random_ids(64, config.vocab_size, seed) for seed in range(4)]
        packed = quantized(
            packed, config, calibrate(whole, texts) if weights == "fp8 calibrated" else None, is_head=False
        )
    blocks = -(-position_limit(LENGTH, draft_len) // PAGE)
    return assemble_rank(
        config, packed, ranks, pages=SLOTS * blocks + 1, max_positions=blocks * PAGE, ops=PLAIN, max_sequences=SLOTS
    )


@pytest.mark.parametrize(
    ("name", "size", "weights", "least"),
    [
        (NAME, 3, "bf16", 0.9999),
        ("dummy:tiny-qwen2", 2, "bf16", 0.9999),
        ("dummy:tiny-qwen3", 2, "bf16", 0.9999),
        (NAME, 3, "fp8 calibrated", 0.9999),  # one scale for all activations of a product, the same on every rank
        (NAME, 3, "fp8", 0.995),  # a row's scale is that of a rank's own part of it
    ],
)
def test_logits_of_ranks_together(name, size, weights, least):
    ids = random_ids(40)
    expected = Pages(gpu_model(name, weights=weights)).all_logits(ids, [30, 1, 9])
    found = on_ranks(
        size, lambda ranks: Pages(rank_gpu_model(name, ranks, weights=weights)).all_logits(ids, [30, 1, 9])
    )
    assert found[0].shape == expected.shape
    assert torch.nn.functional.cosine_similarity(found[0], expected, dim=-1).min() > least
    assert all(torch.equal(other, found[0]) for other in found[1:])


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 4}])
def test_rounds_of_all_ranks_emit_the_same_and_what_one_model_does(sampling):
    """The engine's loop on every rank, plain and with a whole drafter of its own; in bf16 rounding could turn a tie,
    and with these weights turns none."""
    tokenizer, wanted = Pieces.for_vocabulary(320), {"greedy": {"max_tokens": 30, **sampling}}
    draft = "dummy:tiny-llama?seed=5&heads=6&kv_heads=3&intermediate=96&layers=1"
    plain = [g.token_ids for g in run(gpu_model(NAME), tokenizer, PROMPTS, **wanted)]
    for k in (0, 3):
        options = {**wanted, "k": k}

        def work(ranks, k=k, options=options):
            target = rank_gpu_model(NAME, ranks)
            drafter = {"draft": gpu_model(draft)} if k else {}
            return run(target, tokenizer, PROMPTS, **options, **drafter)

        found = on_ranks(3, work)
        assert [g.token_ids for g in found[0]] == plain or (sampling and k)
        for other in found[1:]:
            assert [[r.emitted for r in g.rounds] for g in other] == [[r.emitted for r in g.rounds] for g in found[0]]
        if k:
            assert sum(r.accepted for g in found[0] for r in g.rounds) > 0


def test_a_part_of_the_layers_is_divided_as_the_whole_is():
    ids = random_ids(20)
    expected = Pages(gpu_model(NAME).without_layers([1])).all_logits(ids)
    found = on_ranks(3, lambda ranks: Pages(rank_gpu_model(NAME, ranks).without_layers([1])).all_logits(ids))
    assert torch.nn.functional.cosine_similarity(found[2], expected, dim=-1).min() > 0.9999


def directory(folder, *, is_dummy, fp8=None, dtype="fp8"):
    """What `rank_tensors` asks of an engine directory, which only a machine with a GPU can build."""
    return SimpleNamespace(
        path=folder,
        checkpoint=NAME,
        model_config=dict(resolve(NAME, say=lambda line: None).config),
        dtype=dtype,
        manifest={"build": {"is_dummy": is_dummy, "seed": 7}, "fp8": fp8},
    )


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name].float(), tensor.float()), name
        assert found[name].untyped_storage().nbytes() == found[name].nbytes, name  # nothing of the whole is kept


@pytest.mark.parametrize("is_head", [False, True])
@pytest.mark.parametrize("is_per_channel", [False, True])
def test_a_rank_reads_its_share_of_stored_fp8_weights_and_runs_with_it(tmp_path, is_head, is_per_channel):
    config, packed = packed_dummy(NAME)
    scales = calibrate(gpu_model(NAME), [random_ids(64, config.vocab_size, seed) for seed in range(4)])
    packed = quantized(packed, config, scales, is_head=is_head, is_per_channel=is_per_channel)
    save_file({name: t.contiguous() for name, t in packed.items()}, tmp_path / WEIGHTS)
    info = directory(tmp_path, is_dummy=False)
    for rank in range(3):
        assert_same(rank_tensors(info, Ranks(rank, 3), "cpu"), shard(packed, config, rank, 3))

    def logits(ranks, make):
        limits = {"pages": 8, "max_positions": 4 * PAGE, "ops": PLAIN, "max_sequences": 1}
        return Pages(make(ranks, limits)).all_logits(random_ids(20))

    read = on_ranks(3, lambda r: logits(r, lambda r, o: assemble_share(config, rank_tensors(info, r, "cpu"), r, **o)))
    cut = on_ranks(3, lambda r: logits(r, lambda r, o: assemble_rank(config, packed, r, **o)))
    assert torch.equal(read[0], cut[0]) and read[0].isfinite().all()


@pytest.mark.parametrize("made", [("calibrated", True), ("dynamic", False)])
def test_a_rank_makes_its_share_of_the_same_dummy_that_one_gpu_makes(tmp_path, made):
    activations, is_head = made
    info = directory(tmp_path, is_dummy=True, fp8={"quantize_head": is_head, "activation_scales": activations})
    config, _ = packed_dummy(NAME)
    whole = random_packed(config, "cpu", seed=7, is_head_fp8=is_head, is_dynamic=activations == "dynamic")
    for rank in range(3):
        assert_same(rank_tensors(info, Ranks(rank, 3), "cpu"), shard(whole, config, rank, 3))


def test_shares_that_cannot_be_made_are_refused(tmp_path):
    with pytest.raises(OptionError, match="1, 3"):
        rank_tensors(directory(tmp_path, is_dummy=True), Ranks(0, 2), "cpu")
    with pytest.raises(OptionError, match="bfloat16.*fp8"):
        rank_tensors(directory(tmp_path, is_dummy=True, dtype="bfloat16"), Ranks(0, 3), "cpu")
