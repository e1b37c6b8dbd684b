"""What the whole-step kernel takes of shared memory and of scratch, shape by shape."""

from __future__ import annotations

import re

import pytest

from tutorial_lib.engine.model import ModelConfig
from tutorial_lib.engine.stream import budget
from tutorial_lib.engine.stream.budget import ROW_BUCKETS, SHARED_BYTES, Formats, bucket, defines, memory
from tutorial_lib.engine.stream.plan import Unfit, plan
from tutorial_lib.engine.stream.steps import kernel_source
from tutorial_lib.shapes import dummy_config

SHAPES = {
    "405B": ("dummy:llama-3.1-405b", 1),
    "70B": ("dummy:llama-3.3-70b", 1),
    "8B bf16": ("dummy:llama-3.1-8b", 2),
    "1B": ("dummy:llama-3.2-1b", 1),
    "135M": ("dummy:llama-3.2-1b?layers=4&hidden=576&heads=9&kv_heads=3&intermediate=1536&vocab=49152", 2),
}


def shape(name: str, head_bytes: int = 2):
    model, weight_bytes = SHAPES[name]
    config = ModelConfig.from_hf(dummy_config(model)[0])
    made = plan(config, 132, weight_bytes=weight_bytes, head_bytes=head_bytes)
    return config, made, Formats(weight_bytes == 1, head_bytes == 1, False, False)


@pytest.mark.parametrize("name", list(SHAPES))
def test_every_bucket_fits_a_processor_with_a_ring_that_can_hide_a_wait(name):
    config, made, formats = shape(name)
    for rows in ROW_BUCKETS:
        found = bucket(made, config, formats, rows)
        used = found.stages * found.slot_bytes + found.area_bytes + found.slabs * 16 * rows * 80
        assert budget.FEWEST_STAGES <= found.stages <= budget.MOST_STAGES
        assert used < SHARED_BYTES and found.slot_bytes % 128 == found.area_bytes % 128 == 0
        assert {"o", "down"} <= found.streamed
        assert found.area_bytes >= budget.attention_bytes(config, rows)
    fewest, most = (bucket(made, config, formats, rows).stages for rows in (2, 16))
    assert fewest >= most, "more rows leave less room for the ring"


def test_the_70b_keeps_its_norms_in_shared_memory_and_streams_what_its_head_reads():
    config, made, formats = shape("70B")
    for rows in ROW_BUCKETS:
        assert not {"qkv", "gate_up"} & bucket(made, config, formats, rows).streamed
    assert "head" in bucket(made, config, formats, 12).streamed, "twice as wide as the others', in bf16"
    config, made, formats = shape("405B")
    assert {"qkv", "gate_up", "head"} <= bucket(made, config, formats, 16).streamed, "256 KB would not fit"


def test_an_fp8_head_is_never_streamed_since_its_scale_takes_the_whole_row():
    for name in ("70B", "1B"):
        config, made, formats = shape(name, head_bytes=1)
        assert all("head" not in bucket(made, config, formats, rows).streamed for rows in ROW_BUCKETS)
    config, made, formats = shape("405B", head_bytes=1)
    with pytest.raises(Unfit, match="16 rows of the model leave room for .* tiles in the ring; needed: 2"):
        bucket(made, config, formats, 16)


def test_scratch_grows_with_the_context_up_to_a_limit_that_is_told():
    config, made, _ = shape("70B")
    short, long = (memory(made, config, positions) for positions in (1024, 8192))
    assert short.scratch_bytes < long.scratch_bytes < 128 << 20
    ends = sorted(long.at.values()) + [long.scratch_bytes]
    assert ends[0] == 0 and all(a < b for a, b in zip(ends, ends[1:], strict=False)), "nothing overlaps"
    assert long.pairs_at < long.choices_at < long.counters
    with pytest.raises(Unfit, match=r"a context of 1000000 takes \d+ MiB; needed: at most 1024 MiB"):
        memory(made, config, 1_000_000)


def test_every_macro_that_the_source_reads_is_defined():
    config, made, formats = shape("135M")
    macros = defines(made, config, formats, bucket(made, config, formats, 4), memory(made, config, 512))
    source = re.sub(r"//.*", "", kernel_source())
    read = set(
        re.findall(
            r"\b(?:AT_[A-Z]+|PAIRS_AT|CHOICES_AT|IS_FP8|IS_FP8_HEAD|IS_FP8_CACHE|HAS_QK_NORM|LONGEST_WAIT_MS|KNOWN_UNITS)\b",
            source,
        )
    )
    assert read and read <= set(macros)
    assert {f"SHAPE_{m}_{f}" for m in ("QKV", "O", "GATE_UP", "DOWN", "HEAD") for f in ("ROWS", "STREAMED")} <= set(
        macros
    )
