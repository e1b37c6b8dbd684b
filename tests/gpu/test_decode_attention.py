"""The Triton attention of the corpus writer against PyTorch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("kv_heads, group, head_dim", [(3, 3, 64), (8, 4, 128), (1, 16, 64), (2, 1, 64)])
def test_every_row_sees_its_own_past_alone(kv_heads, group, head_dim):
    from tutorial_lib.drafters.decode_attention import decode_attention

    rows, room = 300, 200
    shape = (rows, kv_heads, room, head_dim)
    q = torch.randn(rows, kv_heads, group, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.randint(1, room + 1, (rows,), device="cuda")
    lengths[0], lengths[1] = 1, room
    is_past = torch.arange(room, device="cuda") < lengths[:, None]
    expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=is_past[:, None, None])
    for tensor in (k, v):  # what lies beyond must not matter
        tensor.masked_fill_(~is_past[:, None, :, None], float("inf"))
    found = decode_attention(q, k, v, lengths.int())
    assert (found.float() - expected).norm() / expected.norm() < 6e-3
