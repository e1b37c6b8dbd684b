"""What others have published, as data: the two posts that this workbook reproduces, and figures to compare with.

Every row says where it is from and how sure it is: `stated` (in the source), `derived` (computed here from stated
figures; `how` says how) or `second-hand` (quoted elsewhere). Rows of the posts' tables that could not be verified are
left out. These are other machines and other models: never draw them beside own runs without their labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Certainty = Literal["stated", "derived", "second-hand"]

POST_31 = "NVIDIA Developer Blog, 2024: Llama 3.1 on H200, TensorRT-LLM 0.14"
POST_33 = "NVIDIA Developer Blog, December 2024: Llama 3.3 70B on H200, TensorRT-LLM 0.15.0, Model Optimizer 0.21"
POSTS_DEFINITION = (
    "Output tokens/s = total generated tokens / total latency, time to first token included; FP8, batch size 1."
)


@dataclass(frozen=True)
class PostRow:
    """One bar of the posts. drafter None is plain decoding; speedup is over the plain row of the same target."""

    target: str
    gpus: str
    drafter: str | None
    output_tok_s: float
    speedup: float
    certainty: Certainty
    source: str
    how: str = ""


POSTS: tuple[PostRow, ...] = (
    PostRow("Llama 3.1 405B", "4x H200", None, 33.4, 1.0, "derived", POST_31, "111.34 / 3.33"),
    PostRow("Llama 3.1 405B", "4x H200", "Llama 3.2 1B", 111.34, 3.33, "stated", POST_31),
    PostRow(
        "Llama 3.1 405B", "4x H200", "Llama 3.2 3B", 120.75, 3.61, "second-hand", POST_31,
        "the post's title says: up to 3.6x",
    ),
    PostRow("Llama 3.1 70B", "1x H200", None, 51.14, 1.0, "stated", POST_31),
    PostRow("Llama 3.1 70B", "1x H200", "Llama 3.2 1B", 146.05, 2.86, "stated", POST_31),
    PostRow("Llama 3.3 70B", "1x H200", None, 51.14, 1.0, "stated", POST_33),
    PostRow(
        "Llama 3.3 70B", "1x H200", "Llama 3.2 1B", 181.74, 3.55, "stated", POST_33,
        "the drafter's size is from a second source",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class OtherRow:
    """A figure of another engine or method. None where the source gives none; speedup is over its own baseline."""

    method: str
    setting: str
    source: str
    certainty: Certainty = "stated"
    output_tok_s: float | None = None
    speedup: float | None = None
    acceptance_length: float | None = None
    bandwidth_share: float | None = None
    note: str = ""


SPEC_BENCH = "Spec-Bench leaderboard"
SPEC_BENCH_SETTING = "Vicuna 13B, A100"

OTHERS: tuple[OtherRow, ...] = (
    OtherRow(
        "TensorRT-LLM 0.15, 70B FP8, plain", "1x H200, batch 1", POST_33, output_tok_s=51.14, bandwidth_share=0.75,
        note="share of 4.8 TB/s",
    ),
    OtherRow(
        "Hazy megakernel, Llama-1B bf16, plain", "H100, batch 1", "hazyresearch.stanford.edu, May 2025",
        bandwidth_share=0.78,
    ),
    OtherRow(
        "gpt-fast, Llama-2-7B bf16, plain", "A100, batch 1", "gpt-fast README", output_tok_s=104.9,
        bandwidth_share=0.69, note="1397 GB/s",
    ),
    OtherRow(
        "gpt-fast, 70B int4 + 7B int4 draft model, K = 4", "A100", "gpt-fast README", output_tok_s=48.4, speedup=1.92,
        note="plain: 25.25",
    ),
    OtherRow(
        "EAGLE-3, Llama-3.1-8B, T = 0, mean of five sets", "transformers", "arXiv 2503.01840, table 1", speedup=4.44,
        acceptance_length=6.23,
    ),
    OtherRow(
        "EAGLE-3, Llama-3.3-70B, T = 0, mean of five sets", "transformers", "arXiv 2503.01840, table 1", speedup=4.12,
        acceptance_length=5.88,
    ),
    OtherRow(
        "EAGLE-3, 8B, MT-bench", "SGLang, H100, batch 1", "arXiv 2503.01840, table 4", output_tok_s=373.25,
        speedup=2.36, note="plain: 158.34",
    ),
    OtherRow(
        "SpecForge EAGLE-3, 8B, MATH500", "SGLang, batch 1", "SpecForge spec_bundle data", output_tok_s=638,
        speedup=3.34, acceptance_length=5.40, note="plain: 191",
    ),
    OtherRow(
        "DFlash, Llama-3.1-8B", "SGLang, B200, batch 1", "arXiv 2602.06036, table 5", note="2.2x to 2.8x",
    ),
    OtherRow(
        "draft model, Llama 3.3 70B + 1B, K = 3", "TensorRT-LLM 1.2, B200, batch 32",
        "SPEED-Bench, arXiv 2604.09557, table 1", speedup=1.60, acceptance_length=2.44,
    ),
    OtherRow(
        "EAGLE-3, Llama 3.3 70B", "TensorRT-LLM 1.2, B200, batch 32", "SPEED-Bench, arXiv 2604.09557, table 1",
        speedup=1.90,
    ),
    OtherRow("EAGLE-3", SPEC_BENCH_SETTING, SPEC_BENCH, speedup=3.02, acceptance_length=5.71),
    OtherRow("EAGLE-2", SPEC_BENCH_SETTING, SPEC_BENCH, speedup=2.46),
    OtherRow("Medusa", SPEC_BENCH_SETTING, SPEC_BENCH, speedup=1.80),
    OtherRow("prompt lookup", SPEC_BENCH_SETTING, SPEC_BENCH, speedup=1.56),
    OtherRow("draft model", SPEC_BENCH_SETTING, SPEC_BENCH, speedup=1.54),
    OtherRow("Lookahead", SPEC_BENCH_SETTING, SPEC_BENCH, speedup=1.30),
)  # fmt: skip
