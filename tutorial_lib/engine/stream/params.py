"""The parameters of one launch of the whole-step kernel: one list, from which Python's structure and CUDA's both come.

Every address is of dense memory on the device. What changes from launch to launch is named as `steps.LaunchedSteps`
sets it; the rest stands for the life of a model.
"""

from __future__ import annotations

import ctypes

_ADDRESS, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float

FIELDS: tuple[tuple[str, type, str], ...] = (
    # of the launch
    ("tokens", _ADDRESS, "int32 [sequences x rows]"),
    ("table", _ADDRESS, "int32 [slots, table_stride]: pages of the cache"),
    ("lengths", _ADDRESS, "int32 [sequences]: positions before the first row"),
    ("slots", _ADDRESS, "int32 [sequences]: rows of the table"),
    ("mask", _ADDRESS, "int8 [sequences x rows, rows]: which rows of its sequence a row sees, or 0 for a chain"),
    ("depths", _ADDRESS, "int32 [sequences x rows], or 0 for a chain"),
    ("choices", _ADDRESS, "int32 [sequences x rows], the argmax of each row; of a chain of steps [steps, sequences]"),
    ("damage", _ADDRESS, "int32: not 0 where logits were no numbers"),
    ("logits", _ADDRESS, "float32 [sequences x rows, head rows], or 0 for none"),
    ("ids", _ADDRESS, "int64: shortlist row -> token, or 0 for none"),
    ("table_stride", _INT, "entries from one slot to the next"),
    ("sequences", _INT, ""),
    ("rows", _INT, "of each sequence, in the first step"),
    ("steps", _INT, "each takes the tokens that the one before chose"),
    ("is_chain", _INT, "choices are of a chain"),
    ("damage_rows", _INT, "rows that share an entry of damage"),
    ("vocab_limit", _INT, "rows of the head from here on are never chosen"),
    # of the model
    ("layers", _INT, ""),
    ("window", _INT, "positions that attention sees, 0 for all"),
    ("pages", _INT, "of the cache"),
    ("eps", _FLOAT, "of RMSNorm"),
    ("embedding", _ADDRESS, "bf16 [vocabulary, hidden]"),
    ("weights", _ADDRESS, "uint64 [layers, 4]: addresses of the packed qkv, o, gate_up, down"),
    ("scales", _ADDRESS, "uint64 [layers, 4]: float32 by row in stream order, or 0"),
    ("input_scales", _ADDRESS, "float32 [layers, 4], or 0 for bf16 weights"),
    ("norms", _ADDRESS, "bf16 [2 layers + 1, hidden]"),
    ("qkv_bias", _ADDRESS, "bf16 [layers, rows of qkv], or 0"),
    ("q_norm", _ADDRESS, "bf16 [layers, head_dim], or 0"),
    ("k_norm", _ADDRESS, "bf16 [layers, head_dim], or 0"),
    ("cos", _ADDRESS, "float32 [positions, head_dim / 2]"),
    ("sin", _ADDRESS, "float32 [positions, head_dim / 2]"),
    ("head", _ADDRESS, "packed"),
    ("head_scale", _ADDRESS, "float32 by row, or 0"),
    ("cache", _ADDRESS, "[layers, pages, 2, kv_heads, page, head_dim] bf16 or FP8"),
    ("kv_scale", _ADDRESS, "float32 [layers, 2] of an FP8 cache, or 0"),
    # scratch
    ("counters", _ADDRESS, "uint32: of the barriers, 0 before each launch"),
    ("scratch", _ADDRESS, "activations and partial sums; need not be cleared"),
    ("trouble", _ADDRESS, "int32: error word, phase, block, barrier; 0 while all is well"),
    ("clock", _ADDRESS, "uint64: times of the phases, or 0"),
)

_C_NAMES: dict[type, str] = {_ADDRESS: "unsigned long long", _INT: "int", _FLOAT: "float"}


class Params(ctypes.Structure):
    """`FIELDS`, in their order, aligned as C aligns them."""

    _fields_ = [(name, kind) for name, kind, _ in FIELDS]


def declaration() -> str:
    """`struct Params` in C, to stand before the kernel's source."""
    lines = [f"  {_C_NAMES[kind]} {name};{f'  // {says}' if says else ''}" for name, kind, says in FIELDS]
    return "\n".join(["struct Params {", *lines, "};", ""])
