"""Shares of the whole-step kernel's blocks and the order in which weights are streamed."""

from __future__ import annotations

import pytest
import torch

from tutorial_lib.engine.model import ModelConfig
from tutorial_lib.engine.stream.pack import halves_together, pack, unpack
from tutorial_lib.engine.stream.plan import Matrix, Unfit, plan


def config(hidden, heads, kv_heads, intermediate, vocab, head_dim):
    return ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": 2,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": 8192,
        }
    )


LLAMA_70B = config(8192, 64, 8, 28672, 128256, 128)
LLAMA_405B = config(16384, 128, 8, 53248, 128256, 128)
SMOLLM2 = config(576, 9, 3, 1536, 49152, 64)


def test_405b_takes_an_even_division_though_131_blocks_would_have_smaller_shares():
    found = plan(LLAMA_405B, 132, weight_bytes=1, head_bytes=2)
    assert found.blocks == 128 and [m.group for m in found.matrices] == [16, 64, 64, 64]


def test_70b_goes_to_128_blocks_without_padding():
    found = plan(LLAMA_70B, 132, weight_bytes=1, head_bytes=2)
    assert found.blocks == 128
    assert [m.group for m in found.matrices] == [16, 64, 64, 64]
    for matrix in found.matrices:
        assert matrix.packed_bytes == matrix.rows * matrix.k_bytes and matrix.width == 256
        assert {matrix.share(block) for block in range(128)} == {matrix.groups // 128}


def test_the_embedded_model_fits_with_uneven_shares_and_without_padding():
    found = plan(SMOLLM2, 132, weight_bytes=2, head_bytes=2, head_rows=5001)
    for matrix in (*found.matrices, found.head):
        shares = [matrix.share(block) for block in range(found.blocks)]
        assert sum(shares) == matrix.groups and matrix.padded_k_bytes == matrix.k_bytes
        assert [matrix.first(block) for block in range(found.blocks)] == [sum(shares[:b]) for b in range(found.blocks)]
    assert found.matrices[1].share(found.blocks - 1) == 0, "o has 36 groups: the last block passes"
    assert found.head.groups == 313


def test_what_does_not_divide_is_refused_in_words():
    with pytest.raises(Unfit, match=r"heads of 40; needed: a multiple of 16"):
        plan(config(320, 8, 8, 640, 512, 40), 132, weight_bytes=2, head_bytes=2)
    with pytest.raises(Unfit, match=r"down is 128 x 200; needed: rows by 16 and columns by 32"):
        plan(config(128, 2, 2, 200, 512, 64), 132, weight_bytes=1, head_bytes=1)


@pytest.mark.parametrize(
    "matrix",
    [
        Matrix("diagonal", 80, 1152, 16, 96, 3, 3),
        Matrix("whole", 256, 512, 64, 256, 2, 2),
        Matrix("padded", 70, 1100, 16, 160, 2, 4),
    ],
)
def test_every_byte_lies_where_the_stream_has_it_and_comes_back(matrix):
    weight = torch.randint(1, 256, (matrix.rows, matrix.k_bytes), dtype=torch.uint8)
    stream = pack(weight, matrix)
    assert stream.numel() == matrix.packed_bytes
    for row, k in ((0, 0), (17, 300), (matrix.rows - 1, matrix.k_bytes - 1)):
        group, r = divmod(row, matrix.group)
        place = matrix.first(group % matrix.blocks) + group // matrix.blocks
        tile, k_in_tile = divmod(k, matrix.pieces * matrix.width)
        piece, byte = divmod(k_in_tile, matrix.width)
        column = byte // 16
        at = ((place * matrix.tiles + tile) * matrix.width * 64) + column * 1024
        assert stream[at + (piece * matrix.group + r) * 16 + byte % 16] == weight[row, k]
    assert torch.equal(unpack(stream, matrix, torch.uint8), weight)


def test_rows_that_belong_together_stand_in_one_group():
    order = halves_together(128, 64)
    assert order[:18].tolist() == [*range(8), *range(32, 40), 8, 9]
    assert sorted(order.tolist()) == list(range(128))
    matrix = Matrix("q", 128, 256, 16, 64, 1, 3)
    weight = torch.randn(128, 128).bfloat16()
    assert torch.equal(unpack(pack(weight, matrix, order), matrix, torch.bfloat16, order), weight)
    with pytest.raises(ValueError, match="100 rows"):
        halves_together(100, 64)
    with pytest.raises(ValueError, match="planned"):
        pack(weight[:64], matrix)
