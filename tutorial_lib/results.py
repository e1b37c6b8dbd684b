"""What a run yields: `Round`, `Generation`, and the record that keeps a measured run with its provenance.

Everything the notebooks show is computed from these. A round is one draft plus one verification; the first token
comes from prefill and belongs to no round. Nothing here measures or plots.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Round:
    """One draft and one verification for one request.

    drafted: token ids proposed (may be empty: nothing was proposed). accepted: how many of them, a leading run, were
    accepted. emitted: ids that entered the text in this round: the accepted ones and the bonus token, cut where the
    request stopped. draft_s, verify_s: seconds this round spent drafting and verifying (shared by all requests of
    the batch). end_s: seconds since the request's start when its tokens were known.
    """

    drafted: tuple[int, ...]
    accepted: int
    emitted: tuple[int, ...]
    draft_s: float
    verify_s: float
    end_s: float


@dataclass
class Generation:
    """One finished request: tokens, text, why it ended, its rounds and times. `len(token_ids)` counts output tokens,
    the stop token included. With plain decoding every round has an empty `drafted` and one emitted token.

    `outputs` returns `[self]` so that TensorRT-LLM's `result.outputs[0].text` reads the same here.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str  # "stop" (EOS, stop token, stop string) or "length"
    rounds: list[Round] = field(default_factory=list)
    ttft_s: float = 0.0  # request start to first token known
    latency_s: float = 0.0  # request start to last token known
    logprobs: list[dict[int, float]] | None = None  # one dict per emitted token: id -> raw log-probability
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it, None for EOS and length
    is_simulated: bool = False  # acceptance was forced: the text is meaningless and must not be shown

    @property
    def outputs(self) -> list[Generation]:
        return [self]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
