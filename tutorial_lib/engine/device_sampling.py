"""`sampling.py` and `verify.py` for a whole batch on the device: no branch on data, nothing read back.

Random numbers come from a hash of (request seed, position, purpose), so they depend on nothing else; they are not the
CPU engine's numbers, and the two engines draw different texts from the same distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .sampling import Purpose

# splitmix64 (Steele et al. 2014): its finalizer over a weighted sum of seed and counter, with odd weights far apart so
# that no two of (seed, position, purpose) in use meet in one sum.
_SEED_STEP, _COUNTER_STEP = 0x5851F42D4C957F2D, 0x1E3779B97F4A7C15
_MIX = (-4658895280553007687, -7723592293110705685)


@dataclass
class SlotParams:
    """Sampling parameters of every slot, on the device. top_k 0 and top_p 1 keep everything; top_p 0 is greedy."""

    temperature: torch.Tensor  # float32 [slots]
    top_k: torch.Tensor  # int64 [slots]
    top_p: torch.Tensor  # float32 [slots]
    seed: torch.Tensor  # int64 [slots]

    @classmethod
    def make(cls, slots: int, device) -> SlotParams:
        return cls(
            torch.ones(slots, device=device),
            torch.zeros(slots, dtype=torch.long, device=device),
            torch.ones(slots, device=device),
            torch.zeros(slots, dtype=torch.long, device=device),
        )

    def select(self, slots: torch.Tensor) -> SlotParams:
        return SlotParams(self.temperature[slots], self.top_k[slots], self.top_p[slots], self.seed[slots])


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift right of int64 (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(seed: torch.Tensor, position: torch.Tensor, purpose: Purpose) -> torch.Tensor:
    """float32 in [0, 1), one for every (seed, position, purpose); int64 tensors that broadcast."""
    x = seed * _SEED_STEP + (position * 4 + int(purpose)) * _COUNTER_STEP
    for multiplier, bits in zip(_MIX, (30, 27), strict=True):
        x = (x ^ _shift(x, bits)) * multiplier
    x = x ^ _shift(x, 31)
    return _shift(x, 40).float() * 2.0**-24


def probabilities(logits: torch.Tensor, params: SlotParams) -> torch.Tensor:
    """float32 [rows, V] after temperature, top-k and top-p of each row (params: one entry for each row)."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    ordered = (ordered - ordered[:, :1]) / params.temperature[:, None]  # at most 0: a tiny temperature gives -inf only
    rank = torch.arange(logits.shape[-1], device=logits.device)
    limit = torch.where(params.top_k > 0, params.top_k, logits.shape[-1]).clamp(max=logits.shape[-1])
    kth = ordered.gather(1, (limit - 1)[:, None])
    probs = torch.softmax(ordered.masked_fill(ordered < kth, -torch.inf), dim=-1)
    before = probs.cumsum(-1) - probs
    top_p = torch.where(params.top_p < 1, params.top_p, 2.0)[:, None]  # rounded sums may reach 1 before the end
    probs = probs.masked_fill((before >= top_p) & (rank > 0), 0.0)
    probs = probs / probs.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(1, order, probs)


def draw(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: where the cumulative distribution of each row passes u [rows]; never an id of probability 0."""
    cumulative = probs.double().cumsum(-1)
    passed = (cumulative > (u.double() * cumulative[:, -1])[:, None]) & (probs > 0)
    return passed.int().argmax(-1)


def accept_greedy(drafted: torch.Tensor, choices: torch.Tensor, drafted_len: torch.Tensor) -> torch.Tensor:
    """int64 [B]: the leading run of drafted [B, K] that equals choices [B, K + 1], at most drafted_len [B]."""
    is_same = drafted == choices[:, :-1]
    is_same &= torch.arange(drafted.shape[1], device=drafted.device) < drafted_len[:, None]
    return is_same.long().cumprod(-1).sum(-1)


def accept_sampled(
    drafted: torch.Tensor,
    q: torch.Tensor | None,
    p: torch.Tensor,
    drafted_len: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rejection sampling for a batch. drafted [B, K], q [B, K, V] or None (certain drafts), p [B, K + 1, V], position
    [B]: of the first drafted token. Returns (accepted [B], the token after the accepted ones [B])."""
    rows, k = drafted.shape
    steps = torch.arange(k + 1, device=drafted.device)
    at = position[:, None] + steps
    if k:
        u = uniform(seed[:, None], at[:, :-1], Purpose.ACCEPT)
        p_token = p[:, :-1].gather(2, drafted[..., None].long())[..., 0]
        q_token = torch.ones_like(p_token) if q is None else q.gather(2, drafted[..., None].long())[..., 0]
        kept = (u * q_token < p_token) & (steps[:-1] < drafted_len[:, None])
        accepted = kept.long().cumprod(-1).sum(-1)
    else:
        accepted = torch.zeros(rows, dtype=torch.long, device=drafted.device)
    index = accepted[:, None, None]
    p_next = p.gather(1, index.expand(-1, 1, p.shape[-1]))[:, 0]
    if k:
        last = accepted.clamp(max=k - 1)
        if q is None:
            taken = torch.zeros_like(p_next).scatter_(1, drafted.gather(1, last[:, None]).long(), 1.0)
        else:
            taken = q.gather(1, last[:, None, None].expand(-1, 1, q.shape[-1]))[:, 0]
        left = (p_next - taken).clamp_min(0.0)
        is_rejected = (accepted < drafted_len)[:, None] & (left.sum(-1, keepdim=True) > 0)
        p_next = torch.where(is_rejected, left, p_next)
    return accepted, draw(p_next, uniform(seed, position + accepted, Purpose.TOKEN))
