"""FP8 (e4m3) weights, and what activations need to follow them.

Weights: one float32 scale per output row, the largest magnitude mapped to 448. Activations: one calibrated scale for
each of a layer's four products (`calibrate`: the largest value seen on the calibration text, as the posts'
`--calib_size` does), or, without calibration, each row's own scale at run time. FP8 KV: one scale for keys and one for
values of each layer, likewise calibrated. Values beyond a scale's range saturate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .reference import FP8, FP8_MAX, rotate

MARGIN = 1.1  # calibration sees a sample: leave some room above its largest value


def quantize_fp8(weight: torch.Tensor, *, is_per_channel: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [n, k] -> (e4m3 [n, k], float32 scale [n]); per tensor gives every row the same scale."""
    size = weight.float().abs()
    largest = (size.amax(dim=1) if is_per_channel else size.max()).clamp_min(1e-12)
    scale = (largest / FP8_MAX).expand(weight.shape[0]).contiguous()
    return (weight.float() / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def random_fp8(n: int, k: int, device, generator: torch.Generator) -> torch.Tensor:
    """Random e4m3 codes without NaN (bit pattern x1111111), uniform over the codes below 2 in magnitude."""
    bits = torch.randint(0, 256, (n, k), dtype=torch.uint8, device=device, generator=generator)
    return (bits & 0xBF).view(FP8)


@torch.inference_mode()
def calibrate(model: Any, texts: Sequence[Sequence[int]]) -> list[dict[str, float]]:
    """Largest activation of every layer's four products, and of its keys and values, over `texts` (token ids).

    model: a `GpuModel` with bf16 weights. Returns one dict per layer with "qkv_in", "o_in", "gate_up_in", "down_in",
    "k", "v": scales, that is the largest value times `MARGIN` / 448.
    """
    config, eps = model.config, model.config.rms_norm_eps
    largest = [dict.fromkeys(("qkv_in", "o_in", "gate_up_in", "down_in", "k", "v"), 0.0) for _ in model.layers]

    def see(layer: int, name: str, x: torch.Tensor) -> torch.Tensor:
        largest[layer][name] = max(largest[layer][name], float(x.abs().max()))
        return x

    for ids in texts:
        x = F.embedding(torch.tensor(list(ids), device=model.device), model.embed).float()
        position = torch.arange(len(ids), device=model.device)
        back = position[:, None] - position
        seen = (back >= 0) & (back < (config.sliding_window or len(ids)))
        for i, layer in enumerate(model.layers):
            h = see(i, "qkv_in", _norm(x, layer.input_norm, eps))
            qkv = h @ layer.qkv.data.float().t()
            if layer.qkv_bias is not None:
                qkv = qkv + layer.qkv_bias.float()
            q, k, v = qkv.view(len(ids), -1, config.head_dim).split(
                [config.num_heads, config.num_kv_heads, config.num_kv_heads], 1
            )
            if layer.q_norm is not None:
                q, k = (_norm(t, w, eps) for t, w in ((q, layer.q_norm), (k, layer.k_norm)))
            cos, sin = layer.cos[: len(ids)], layer.sin[: len(ids)]
            q, k = rotate(q, cos, sin), see(i, "k", rotate(k, cos, sin))
            see(i, "v", v)
            group = config.num_heads // config.num_kv_heads
            k, v = (t.repeat_interleave(group, 1).transpose(0, 1)[None] for t in (k, v))
            out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=seen)
            h = see(i, "o_in", out[0].transpose(0, 1).reshape(len(ids), -1))
            x = x + h @ layer.o.data.float().t()
            h = see(i, "gate_up_in", _norm(x, layer.post_norm, eps))
            gate, up = (h @ layer.gate_up.data.float().t()).chunk(2, -1)
            h = see(i, "down_in", F.silu(gate) * up)
            x = x + h @ layer.down.data.float().t()
    return [{name: max(value, 1e-6) * MARGIN / FP8_MAX for name, value in layer.items()} for layer in largest]


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
