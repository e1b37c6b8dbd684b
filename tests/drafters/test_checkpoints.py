"""Heads in every project's form come out the same; one that does not fit, or is not understood, is refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_heads import (
    DEFAULT_LAYERS,
    EAGLE_CONFIG,
    LAYERS,
    SHORTLIST,
    TARGET,
    H,
    V,
    as_int8,
    eagle_project,
    eagle_tensors,
    medusa_own,
    medusa_project,
    medusa_tensors,
    medusa_vllm,
    specforge,
    speculators,
    write,
)

from tutorial_lib import models
from tutorial_lib.drafters.checkpoints import read_eagle3, read_medusa
from tutorial_lib.engine.model import ModelConfig
from tutorial_lib.errors import ModelError, WorkbookError
from tutorial_lib.models import resolve
from tutorial_lib.shapes import dummy_config

CONFIG = ModelConfig.from_hf(dummy_config(TARGET)[0])


# ---- EAGLE-3 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "layers"), [(specforge, LAYERS), (speculators, LAYERS), (eagle_project, DEFAULT_LAYERS)]
)
def test_every_projects_eagle_head_reads_the_same(form, layers, tmp_path):
    tensors = eagle_tensors()
    checkpoint = form(tmp_path, tensors)
    head = read_eagle3(checkpoint, CONFIG)
    assert checkpoint.head_kind == "eagle3" and head.feature_layers == layers
    assert torch.equal(head.draft_ids, SHORTLIST) and head.embed is None and not head.is_residual_normed
    assert (head.shape.num_heads, head.shape.num_kv_heads, head.shape.head_dim) == (4, 2, 16)
    attention = [tensors[f"midlayer.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert torch.equal(head.qkv.dense(), torch.cat(attention))
    assert torch.equal(head.fc.dense(), tensors["fc.weight"])
    assert torch.equal(head.hidden_norm, tensors["midlayer.hidden_norm.weight"])
    assert torch.equal(head.input_norm, tensors["midlayer.input_layernorm.weight"])
    assert torch.equal(head.lm_head.dense(), tensors["lm_head.weight"])


def test_d2t_is_an_offset_and_not_an_id(tmp_path):
    tensors = eagle_tensors(ids=torch.tensor([0, 2, 3, 8]))
    assert tensors["d2t"].tolist() == [0, 1, 1, 5]
    del tensors["t2d"]  # says nothing that d2t does not; some exporters leave it out
    assert read_eagle3(specforge(tmp_path, tensors), CONFIG).draft_ids.tolist() == [0, 2, 3, 8]


def test_a_head_of_the_whole_vocabulary_needs_no_map(tmp_path):
    tensors = eagle_tensors(ids=None)
    assert read_eagle3(specforge(tmp_path / "a", tensors), CONFIG).draft_ids is None
    del tensors["lm_head.weight"]  # the target's own is meant
    assert read_eagle3(specforge(tmp_path / "b", tensors), CONFIG).lm_head is None


def test_what_this_workbook_ships(tmp_path):
    """int8 with scales; no output matrix: it is the target's rows of the shortlist."""
    tensors = eagle_tensors()
    stored = as_int8({n: t for n, t in tensors.items() if n != "lm_head.weight"})
    own = {"tie_lm_head_to_target": True, "draft_vocab_size": len(SHORTLIST)}
    head = read_eagle3(specforge(tmp_path / "a", stored, eagle_aux_hidden_state_layer_ids=list(LAYERS), **own), CONFIG)
    assert head.lm_head is None and head.feature_layers == LAYERS and head.qkv.weight.dtype == torch.int8
    expected = torch.cat([tensors[f"midlayer.self_attn.{x}_proj.weight"] for x in "qkv"])
    torch.testing.assert_close(head.qkv.dense(), expected, rtol=0, atol=float(expected.abs().max()) / 200)
    with pytest.raises(ModelError, match=r"only inside eagle_config .* needed: .* at the top"):
        read_eagle3(specforge(tmp_path / "b", stored, **own), CONFIG)


def test_embeddings_and_norm_placement_of_the_speculators_library(tmp_path):
    own = torch.randn(V, H)
    tensors = eagle_tensors() | {"embed_tokens.weight": own, "verifier_norm.weight": torch.ones(H)}
    head = read_eagle3(speculators(tmp_path, tensors, norm_before_residual=True), CONFIG)
    assert torch.equal(head.embed, own) and head.is_residual_normed


def drop(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


DAMAGED_EAGLES = {
    "no map": (drop("d2t", "t2d"), {}, f"drafts over {len(SHORTLIST)} of 320 ids and has no map d2t"),
    "map too short": (put("d2t", torch.zeros(7, dtype=torch.long)), {}, r"d2t of .* has shape \[7\]"),
    "map never filled": (put("d2t", torch.zeros_like(SHORTLIST)), {}, "different ids: d2t was never filled in"),
    "map never filled, no t2d": (
        lambda t: (t.pop("t2d"), t.update(d2t=torch.zeros_like(SHORTLIST))),
        {},
        "zero everywhere: it was never filled in",
    ),
    "ids for offsets": (put("d2t", SHORTLIST), {}, "leads to ids from 0 to"),
    "an id twice": (put("d2t", -torch.arange(len(SHORTLIST))), {}, "names a target id twice"),
    "reverse map too short": (put("t2d", torch.ones(100, dtype=torch.bool)), {}, "t2d of .* has 100 entries"),
    "reverse map of others": (put("t2d", torch.arange(V) < len(SHORTLIST)), {}, "d2t and t2d of .* different ids"),
    "two layers": (lambda t: None, {"num_hidden_layers": 2}, "has 2 layers"),
    "tensors of two layers": (put("layers.1.mlp.up_proj.weight", torch.ones(2, 2)), {}, "more than one layer"),
    "another hidden size": (lambda t: None, {"hidden_size": 128}, "hidden size 128; needed: 64"),
    "another target's hidden size": (lambda t: None, {"target_hidden_size": 128}, "hidden size 128; needed: 64"),
    "another vocabulary": (lambda t: None, {"vocab_size": 512}, "vocabulary size 512; needed: 320"),
    "another head size": (lambda t: None, {"head_dim": 8}, r"self_attn.q_proj.weight of .* is \[64, 128\]"),
    "fc of another width": (put("fc.weight", torch.ones(H, 100)), {}, "fc.weight of .* a multiple of 64"),
    "fc for four layers": (put("fc.weight", torch.ones(H, 4 * H)), {}, "fc.weight joins 4; needed: 4 different ones"),
    "a layer that is not there": (
        lambda t: None,
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}},
        r"hidden states \[2, 4, 8\] .* from 0 to 7",
    ),
    "layers that disagree": (lambda t: None, {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}, "twice and differently"),
    "EAGLE-1": (lambda t: None, {"eagle_config": {"use_aux_hidden_state": False}}, "an EAGLE-1 head"),
    "no output matrix": (drop("lm_head.weight"), {"draft_vocab_size": len(SHORTLIST)}, "no lm_head.weight"),
    "a tensor missing": (drop("midlayer.mlp.up_proj.weight"), {}, "no tensor midlayer.mlp.up_proj.weight"),
    "an unknown tensor": (put("midlayer.self_attn.q_norm.weight", torch.ones(16)), {}, "q_norm.weight"),
    "a norm before fc": (lambda t: None, {"norm_before_fc": True}, "norms features"),
    "attention bias": (lambda t: None, {"attention_bias": True}, "adds a bias"),
    "another rope": (lambda t: None, {"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "'yarn'"),
    "a config without sizes": (lambda t: None, {"intermediate_size": None}, "intermediate_size = None"),
    "NaN": (put("norm.weight", torch.full((H,), float("nan"))), {}, "norm.weight of .* holds NaN or infinity"),
    "integers": (put("fc.weight", torch.ones(H, 3 * H, dtype=torch.int32)), {}, "fc.weight .* stored as torch.int32"),
    "no table": (lambda t: None, {"eagle_config": 5}, "eagle_config = 5; needed: an object"),
    "no list": (lambda t: None, {"eagle_aux_hidden_state_layer_ids": 5}, "layer_ids of .* is 5; needed: a list"),
    "no layers": (lambda t: None, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1.5, 2, 3]}}, r"is \[1.5"),
    "int8 without scales": (put("fc.weight", torch.ones(H, 3 * H, dtype=torch.int8)), {}, "fc.weight_scale"),
}


@pytest.mark.parametrize("case", DAMAGED_EAGLES)
def test_an_eagle_head_that_does_not_fit_is_refused(case, tmp_path):
    damage, config, message = DAMAGED_EAGLES[case]
    tensors = eagle_tensors()
    damage(tensors)
    checkpoint = specforge(tmp_path, tensors, **config)
    with pytest.raises(ModelError, match=message):
        read_eagle3(checkpoint, CONFIG)


def test_another_kind_of_head_is_refused(tmp_path):
    eagle, medusa = specforge(tmp_path / "e", eagle_tensors()), medusa_own(tmp_path / "m", medusa_tensors())
    with pytest.raises(ModelError, match="is of kind 'medusa'; needed: an EAGLE-3 head"):
        read_eagle3(medusa, CONFIG)
    with pytest.raises(ModelError, match="is of kind 'eagle3'; needed: Medusa heads"):
        read_medusa(eagle, CONFIG)
    with pytest.raises(ModelError, match="is of kind 'dflash'"):
        read_eagle3(speculators(tmp_path / "d", eagle_tensors(), speculators_model_type="dflash"), CONFIG)


# ---- Medusa ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [0, 3])
@pytest.mark.parametrize("form", [medusa_project, medusa_vllm, medusa_own])
def test_every_projects_medusa_heads_read_the_same(form, outputs, tmp_path):
    tensors = medusa_tensors(outputs=outputs)
    checkpoint = form(tmp_path, tensors)
    heads = read_medusa(checkpoint, CONFIG)
    assert checkpoint.head_kind == "medusa" and heads.num_heads == 3 and len(heads.blocks) == 2
    for block, (weight, bias) in enumerate(heads.blocks):
        for h in range(3):
            assert torch.equal(weight[h], tensors[f"{h}.{block}.linear.weight"])
            assert torch.equal(bias[h], tensors[f"{h}.{block}.linear.bias"])
    assert [o.dense().tolist() for o in heads.outputs] == [tensors[f"{h}.2.weight"].tolist() for h in range(outputs)]
    assert heads.choices == (((0,), (1,), (0, 0), (0, 0, 0)) if form is medusa_own else None)
    assert heads.draft_ids is None


def test_medusa_shortlists_are_ids(tmp_path):
    tensors = medusa_tensors(outputs=3)
    ours = medusa_own(
        tmp_path / "a", as_int8(medusa_tensors()) | {"draft_vocab": SHORTLIST.int()}, draft_vocab_size=len(SHORTLIST)
    )
    heads = read_medusa(ours, CONFIG)
    assert torch.equal(heads.draft_ids, SHORTLIST) and heads.is_int8
    vllm = medusa_vllm(tmp_path / "b", tensors | {"token_map": SHORTLIST}, truncated_vocab_size=len(SHORTLIST))
    heads = read_medusa(vllm, CONFIG)
    assert torch.equal(heads.draft_ids, SHORTLIST)
    assert torch.equal(heads.outputs[1].dense(), tensors["1.2.weight"][SHORTLIST])


def test_vllm_heads_without_biases_and_with_one_matrix_for_all(tmp_path):
    tensors = {n: t for n, t in medusa_tensors(outputs=1).items() if "bias" not in n}
    heads = read_medusa(medusa_vllm(tmp_path, tensors, original_lm_head=True), CONFIG)
    assert len(heads.outputs) == 1 and not any(bias.any() for _, bias in heads.blocks)


DAMAGED_MEDUSAS = {
    "another number of heads": (lambda t: None, {"medusa_num_heads": 5}, "says 5 heads and its weights hold 3"),
    "another number of blocks": (lambda t: None, {"medusa_num_layers": 1}, "says 1 residual blocks"),
    "another hidden size": (lambda t: None, {"hidden_size": 128}, "hidden size 128; needed: 64"),
    "another vocabulary": (lambda t: None, {"vocab_size": 300}, "vocabulary size 300; needed: 320"),
    "blocks of another width": (put("1.0.linear.weight", torch.ones(H, 32)), {}, r"1.0.linear.weight of .* \[64, 32\]"),
    "no map": (lambda t: None, {"draft_vocab_size": 50}, "drafts over 50 of 320 ids and has no map"),
    "map too short": (put("draft_vocab", torch.arange(9)), {"draft_vocab_size": 50}, r"map of .* has shape \[9\]"),
    "map out of range": (put("draft_vocab", torch.arange(300, 350)), {"draft_vocab_size": 50}, "ids from 300 to 349"),
    "output for some heads": (lambda t: t.update(medusa_tensors(outputs=2)), {}, "matrices for 2 of 3 heads"),
    "output of another vocabulary": (
        lambda t: t.update({f"{h}.2.weight": torch.ones(300, H) for h in range(3)}),
        {},
        r"0.2.weight of .* is \[300, 64\]",
    ),
    "a block missing": (drop("2.1.linear.weight"), {}, "no tensor 2.1.linear.weight"),
    "another layout": (lambda t: (t.clear(), t.update({"fc.weight": torch.ones(2, 2)})), {}, "no residual block"),
    "unknown tensors": (put("hydra.0.weight", torch.ones(2)), {}, "hydra.0.weight"),
    "a broken tree": (lambda t: None, {"medusa_choices": [[0], [1, 0]]}, r"\[1, 0\] without \[1\]"),
}


@pytest.mark.parametrize("case", DAMAGED_MEDUSAS)
def test_medusa_heads_that_do_not_fit_are_refused(case, tmp_path):
    damage, config, message = DAMAGED_MEDUSAS[case]
    tensors = medusa_tensors()
    damage(tensors)
    checkpoint = medusa_own(tmp_path, tensors, **config)
    with pytest.raises(WorkbookError, match=message):
        read_medusa(checkpoint, CONFIG)


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "medusa_lm_head.pt"])
def test_pickled_heads_are_refused_unopened(pickle, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**EAGLE_CONFIG, "draft_vocab_size": 81}))
    (tmp_path / pickle).write_bytes(b"\x80\x04 not to be opened")
    with pytest.raises(ModelError, match=f"only as pickle .{pickle}.*needed: safetensors; do this: .*save_file"):
        resolve(tmp_path)


def test_a_head_cut_short_or_without_weights_is_refused(tmp_path):
    folder = write(tmp_path / "cut", EAGLE_CONFIG, eagle_tensors())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ModelError, match="bytes, as its header says"):
        resolve(folder)
    weights.unlink()
    with pytest.raises(ModelError, match=r"lacks model\.safetensors"):
        resolve(folder)


def test_heads_in_several_files(tmp_path):
    folder = write(tmp_path, {**EAGLE_CONFIG, "draft_vocab_size": len(SHORTLIST)}, eagle_tensors())
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for part in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == part}, folder / part)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert read_eagle3(resolve(folder), CONFIG).feature_layers == DEFAULT_LAYERS


def test_embedded_heads_come_from_the_packages_data_or_are_said_to_be_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(
        models, "EMBEDDED_HEADS", {f"embedded:{x}": tmp_path / f"embedded_{x}" for x in ("medusa", "eagle3")}
    )
    with pytest.raises(ModelError, match=r"embedded:eagle3 is not here: .*needed: config.json and model.safetensors"):
        resolve("embedded:eagle3")
    specforge(tmp_path / "embedded_eagle3", eagle_tensors())
    medusa_own(tmp_path / "embedded_medusa", medusa_tensors())
    for kind in ("medusa", "eagle3"):
        found = resolve(f"embedded:{kind}")
        assert (found.name, found.head_kind) == (f"embedded:{kind}", kind)
