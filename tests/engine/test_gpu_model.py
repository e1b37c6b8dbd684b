"""`GpuModel` on a CPU, with plain torch in the place of its kernels: the right numbers, what its paged cache promises.

Weights and what is kept between operations are bf16, so equality with float32 models is up to a few roundings; equality
between two orders of the same work is exact wherever the operations see the same shapes.
"""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from gpu_models import PLAIN, Pages, gpu_model, packed_dummy, random_ids, relative
from stand_ins import model_of

from tutorial_lib.engine.gpu_build import assemble
from tutorial_lib.engine.gpu_model import KERNELS, Ops
from tutorial_lib.engine.model import ModelConfig, Segment, pack
from tutorial_lib.errors import ModelError, OptionError
from tutorial_lib.shapes import dummy_config, random_tensors

FAMILIES = ("dummy:tiny-llama?seed=5", "dummy:tiny-qwen2", "dummy:tiny-qwen3", "dummy:tiny-mistral")
ROUNDED = 0.02  # relative norm of a few bf16 roundings, one after the other
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def rounded_tensors(config: dict, seed: int) -> dict[str, torch.Tensor]:
    """The tensors of a dummy, rounded to bf16, in float32."""
    return {name: t.float() for name, t in random_tensors(config, seed, "cpu", torch.bfloat16).items()}


def transformers_model(config: dict, tensors: dict[str, torch.Tensor]):
    family = config["architectures"][0].removesuffix("ForCausalLM")
    settings = getattr(transformers, f"{family}Config")(**config, attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(settings).float().eval()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


# ---- against models that nobody here, or somebody else here, wrote --------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_logits_equal_transformers_and_the_cpu_engine(name):
    ids = random_ids(100)  # more than a step of 64, more than Mistral's window of 32
    config, seed = dummy_config(name)
    tensors = rounded_tensors(config, seed)
    theirs = transformers_model(config, tensors)(torch.tensor([ids])).logits[0]
    ours = Pages(gpu_model(name)).all_logits(ids)
    assert ours.dtype == torch.float32 and ours.shape == theirs.shape
    errors = [relative(a, b) for a, b in zip(ours, theirs, strict=True)]
    assert max(errors) < 2 * ROUNDED and sum(errors) / 100 < ROUNDED
    model = model_of(tensors, config)
    assert relative(ours, model.logits(model.forward(ids, [Segment(0, 0, 100)]))) < ROUNDED


@torch.inference_mode()
def test_scaled_rope_eps_and_a_shortlist_head():
    config, seed = dummy_config("dummy:tiny-llama?seed=2")
    scaling = {**LLAMA3, "original_max_position_embeddings": 32}
    config = {**config, "rope_scaling": scaling, "rope_theta": 1000.0, "rms_norm_eps": 0.1}
    tensors, shape, head_ids = (
        rounded_tensors(config, seed),
        ModelConfig.from_hf(config),
        torch.tensor([3, 17, 200, 319]),
    )
    halves = {name: t.bfloat16() for name, t in tensors.items()}
    ids = random_ids(60)
    for head in (None, head_ids):
        packed = pack(halves, shape, head, is_interleaved=False)
        ours = Pages(assemble(shape, packed, {}, pages=2, max_positions=64, ops=PLAIN)).all_logits(ids)
        model = model_of(tensors, config, head_ids=head)
        assert relative(ours, model.logits(model.forward(ids, [Segment(0, 0, 60)]))) < ROUNDED


@pytest.mark.parametrize("bias", ["self_attn.o_proj", "mlp.down_proj"])
def test_a_bias_that_no_kernel_adds_is_refused(bias):
    which = {"self_attn.o_proj": "attention_bias", "mlp.down_proj": "mlp_bias"}[bias]
    config = {**dummy_config("dummy:tiny-llama")[0], which: True}
    shape = ModelConfig.from_hf(config)
    packed = pack(random_tensors(config, 0, "cpu", torch.bfloat16), shape, is_interleaved=False)
    with pytest.raises(ModelError, match="bias.*device='cpu'"):
        assemble(shape, packed, {}, pages=2, max_positions=64, ops=PLAIN)


# ---- one order of work is as good as another ------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_steps_of_any_size_give_the_same_logits(name):
    ids = random_ids(80, seed=1)
    model = gpu_model(name)
    whole = Pages(model).all_logits(ids)
    for sizes in ([1] * 80, [7, 1, 64, 8], [16] * 5):
        assert relative(Pages(model).all_logits(ids, sizes), whole) < ROUNDED, sizes


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 128, 130])
def test_prefill_is_steps_without_logits(count):
    """`count` tokens by `prefill`, the next ones by steps. Its last step is filled up, within the slot's own pages."""
    ids = random_ids(count + 5, seed=count)
    model = gpu_model(slots=2)
    expected = Pages(model).all_logits(ids)[count:]
    for cache in model.cache:
        cache.fill_(math.nan)
    pages = Pages(model, sequences=2)
    model.prefill(ids[:count], pages.table, 1)
    got = torch.cat([pages.logits([token], count + i, slot=1) for i, token in enumerate(ids[count:])])
    assert relative(got, expected) < ROUNDED
    untouched = [int(p) for p in pages.table[0]] + [model.pages - 1]
    assert all(torch.isnan(cache[page]).all() for cache in model.cache for page in untouched)


def test_prefill_follows_the_table_that_it_is_given():
    """Another table for the same slot, as timing a step uses: each prefill goes where its own table says."""
    model, ids = gpu_model(slots=2), random_ids(70)
    here, there = Pages(model, range(5)), Pages(model, range(5, 10))
    expected = Pages(model).all_logits(ids)[-1:]
    for pages in (here, there):
        for cache in model.cache:
            cache.fill_(math.nan)
        model.prefill(ids[:-1], pages.table, 0)
        assert relative(pages.logits(ids[-1:], len(ids) - 1), expected) < ROUNDED


def test_sequences_of_one_step_do_not_see_each_other():
    model = gpu_model(slots=5)
    pages = Pages(model, torch.randperm(model.pages - 1, generator=torch.Generator().manual_seed(0)), sequences=5)
    texts, lengths, slots = [random_ids(n + 3, seed=n) for n in (40, 0, 64, 90)], [40, 0, 64, 90], [3, 0, 4, 1]
    alone = [Pages(model).all_logits(text)[-3:] for text in texts]
    for cache in model.cache:
        cache.fill_(math.nan)
    for text, length, slot in zip(texts, lengths, slots, strict=True):
        if length:
            model.prefill(text[:length], pages.table, slot)
    together = model.step(
        torch.tensor([t for text in texts for t in text[-3:]]), pages.table,
        torch.tensor(lengths, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32), 3,
    ).view(4, 3, -1)  # fmt: skip
    for ours, theirs in zip(together, alone, strict=True):
        assert relative(ours, theirs) < ROUNDED


# ---- trees ----------------------------------------------------------------------------------------------------------


def tree_of(parents: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(mask int8 [rows, rows], depth int32 [rows]) of a tree whose first row is the root; parents point backwards."""
    mask, depth = torch.zeros(len(parents), len(parents), dtype=torch.int8), [0] * len(parents)
    for row, parent in enumerate(parents):
        if row:
            mask[row], depth[row] = mask[parent], depth[parent] + 1
        mask[row, row] = 1
    return mask, torch.tensor(depth, dtype=torch.int32)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_chain_written_as_a_tree_gives_the_chains_logits(name):
    ids, model = random_ids(50), gpu_model(name)
    pages = Pages(model)
    model.prefill(ids[:44], pages.table, 0)
    chain = pages.logits(ids[44:], 44).clone()
    assert torch.equal(pages.logits(ids[44:], 44, tree=tree_of([-1, 0, 1, 2, 3, 4])), chain)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_path_of_a_tree_is_a_chain_of_its_own(name):
    ids, model = random_ids(60, seed=3), gpu_model(name)
    parents = [-1, 0, 0, 1, 1, 2, 5]
    tokens, pages = random_ids(7, seed=4), Pages(model)
    model.prefill(ids, pages.table, 0)
    together = pages.logits(tokens, 60, tree=tree_of(parents)).clone()
    for leaf in (3, 4, 6):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        alone = pages.logits([tokens[i] for i in path], 60)
        assert relative(together[path], alone) < ROUNDED


# ---- the paged cache ------------------------------------------------------------------------------------------------


def test_shuffled_pages_give_the_very_same_logits():
    ids, model = random_ids(150), gpu_model()
    ordered = Pages(model).all_logits(ids)
    shuffled = torch.randperm(model.pages - 1, generator=torch.Generator().manual_seed(1)).tolist()
    assert torch.equal(Pages(model, shuffled).all_logits(ids), ordered)


@pytest.mark.parametrize("name", FAMILIES)
def test_stale_rows_foreign_pages_and_the_scratch_page_are_never_read(name):
    ids, model = random_ids(75), gpu_model(name)
    pages = Pages(model, [4, 9, 2])
    expected = pages.all_logits(ids, [64, 6, 5])
    for cache in model.cache:
        keep = cache[[4, 9]].clone()
        cache.fill_(math.nan)
        keep[1, :, :, 6:] = math.nan  # what follows position 69: written by drafts that were rejected
        cache[[4, 9]] = keep
    addresses = [cache.data_ptr() for cache in model.cache]
    assert torch.equal(pages.logits(ids[70:], 70), expected[70:])
    assert [cache.data_ptr() for cache in model.cache] == addresses
    assert all(torch.isnan(cache[-1]).all() for cache in model.cache)


def test_the_last_position_of_the_last_page_can_be_used():
    config, packed = packed_dummy("dummy:tiny-llama")
    small = Pages(assemble(config, packed, {}, pages=3, max_positions=128, ops=PLAIN))
    ids = random_ids(128)
    assert relative(small.all_logits(ids), Pages(gpu_model("dummy:tiny-llama")).all_logits(ids)) < ROUNDED


# ---- kernels switched off by name -----------------------------------------------------------------------------------


def test_all_off_needs_no_triton_and_wrong_names_are_refused():
    off = Ops.make(off=["all"])
    assert all(getattr(off, name).__module__.endswith("reference") for name in KERNELS)
    with pytest.raises(OptionError, match="'softmax'.*attention"):
        Ops.make(off=["linear", "softmax"])


def test_each_kernel_can_be_switched_off_alone():
    pytest.importorskip("triton")
    for name in KERNELS:
        ops = Ops.make(off=[name])
        sources = {kernel: getattr(ops, kernel).__module__.rsplit(".", 1)[1] for kernel in KERNELS}
        assert sources == {kernel: "reference" if kernel == name else "kernels" for kernel in KERNELS}
