"""The GPU path divided among ranks, run as plain torch on a CPU; ranks are threads. Nothing here runs NCCL."""

from __future__ import annotations

import pytest
import torch
from gpu_models import PLAIN, Pages, gpu_model, packed_dummy, random_ids, run
from stand_ins import PROMPTS, Pieces
from thread_ranks import on_ranks

from tutorial_lib.engine.gpu_build import quantized
from tutorial_lib.engine.gpu_model import PAGE
from tutorial_lib.engine.gpu_parallel import assemble_rank
from tutorial_lib.engine.graph import position_limit
from tutorial_lib.engine.quantize import calibrate

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
