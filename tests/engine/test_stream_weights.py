"""A model's weights in the order of the stream: every one of them comes back, in place or not."""

from __future__ import annotations

import ctypes

import pytest
import torch
from gpu_models import gpu_model

from tutorial_lib.engine.stream.pack import unpack
from tutorial_lib.engine.stream.params import Params
from tutorial_lib.engine.stream.plan import plan
from tutorial_lib.engine.stream.weights import pack_weights, stream_orders

MODELS = [
    ("dummy:tiny-llama", "bf16"),
    ("dummy:tiny-llama", "fp8 calibrated"),
    ("dummy:tiny-qwen2", "bf16"),
    ("dummy:tiny-qwen3", "bf16"),
]
PRODUCTS = ("qkv", "o", "gate_up", "down")


def planned(model, blocks: int = 6):
    size = model.layers[0].qkv.data.element_size()
    return plan(model.config, blocks, weight_bytes=size, head_bytes=2, head_rows=model.head.data.shape[0])


@pytest.mark.parametrize(("name", "weights"), MODELS)
@pytest.mark.parametrize("in_place", [False, True])
def test_every_matrix_comes_back_from_its_address(name, weights, in_place):
    model, natural = gpu_model(name, weights=weights), gpu_model(name, weights=weights)
    made, orders = planned(model), stream_orders(model.config)
    packed = pack_weights(model, made, in_place=in_place)
    assert set(packed.fields) <= {field for field, _ in Params._fields_}
    addresses = packed.fields["weights"].tolist()
    for i, layer in enumerate(natural.layers):
        for kind, address, matrix in zip(PRODUCTS, addresses[i], made.matrices, strict=True):
            weight = getattr(layer, kind).data
            raw = torch.frombuffer((ctypes.c_uint8 * matrix.packed_bytes).from_address(address), dtype=torch.uint8)
            back = unpack(raw, matrix, weight.dtype, orders.get(kind))
            assert torch.equal(back.view(torch.uint8), weight.view(torch.uint8))
            kept = getattr(model.layers[i], kind).data
            assert kept.dim() == (1 if in_place else 2), "a model that is packed in place cannot be read by mistake"
    head = unpack(packed.fields["head"], made.head, torch.bfloat16)
    assert torch.equal(head, natural.head.data) and torch.equal(model.embed, natural.embed)


def test_scales_go_with_their_rows():
    model = gpu_model("dummy:tiny-llama", weights="fp8 calibrated")
    made, orders = planned(model), stream_orders(model.config)
    packed = pack_weights(model, made, in_place=False)
    matrix, scale = made.matrices[2], model.layers[1].gate_up.scale
    address = packed.fields["scales"].tolist()[1][2]
    count = matrix.groups * matrix.group
    found = torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)
    assert torch.equal(found[: matrix.rows], scale[orders["gate_up"]]) and not found[matrix.rows :].any()
    expected = torch.stack(
        [model.layers[1].qkv_in, model.layers[1].o_in, model.layers[1].gate_up_in, model.layers[1].down_in]
    )
    assert torch.equal(packed.fields["input_scales"][1], expected)


def test_a_tied_head_is_packed_beside_the_embedding():
    model = gpu_model("dummy:tiny-llama")
    model.head.data = model.embed
    before = model.embed.clone()
    packed = pack_weights(model, planned(model), in_place=True)
    assert torch.equal(model.embed, before) and packed.fields["head"].data_ptr() != model.embed.data_ptr()


def test_what_a_model_has_not_is_left_out():
    def fields(name):
        model = gpu_model(name)
        return set(pack_weights(model, planned(model), in_place=False).fields)

    own = {"scales", "input_scales", "qkv_bias", "q_norm", "k_norm", "kv_scale", "head_scale"}
    assert not own & fields("dummy:tiny-llama")
    assert own & fields("dummy:tiny-qwen2") == {"qkv_bias"}
    assert own & fields("dummy:tiny-qwen3") == {"q_norm", "k_norm"}
