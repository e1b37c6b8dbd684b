"""The Triton kernels' logic without a GPU: each against its plain-torch reference, and compiled for real targets.

Triton's interpreter replaces `triton.jit` when Triton is imported, and a described GPU replaces its driver, so both
need processes of their own. What they cannot show: speed, tensor-core rounding, overlapping launches; `tests/gpu` does.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy
import pytest
from packaging.version import Version

HERE = Path(__file__).parent
HAS_TRITON = importlib.util.find_spec("triton") is not None
MISSING = "Triton is not installed: pip install 'specdec-workbook[kernels]' (x86-64 Linux)"


@pytest.mark.skipif(not HAS_TRITON, reason=MISSING)
def test_every_kernel_equals_its_reference_in_tritons_interpreter():
    version = metadata.version("triton")
    if Version(numpy.__version__) >= Version("2.4") and Version(version) < Version("3.9"):
        pytest.skip(f"the interpreter of Triton {version} does not work with numpy {numpy.__version__}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    done = subprocess.run(
        [*command, str(HERE / "interpreted_kernels.py")],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


# ---- compiling for a GPU that is not there --------------------------------------------------------------------------

COMPILE = """
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

arch, name, weights, cache = int(sys.argv[1]), *sys.argv[2:]

class Described:
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device=None: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", arch, 32))

driver.set_active(Described())
from gpu_models import gpu_model
from tutorial_lib.engine import kernels
from tutorial_lib.engine.compile_ahead import _uncompiled
from tutorial_lib.engine.gpu_build import plain_tactics
from tutorial_lib.engine.gpu_model import Ops
from tutorial_lib.engine.reference import Beam, Candidates

model = gpu_model(name, weights=weights, cache=cache, ops=Ops.make(pdl=arch >= 90), tactics=plain_tactics())
def everything():
    model.rehearse(11)
    kernels.stamp(torch.zeros(1, dtype=torch.long))
    long, ints = torch.zeros(4, dtype=torch.long), torch.zeros(4, 8, dtype=torch.int32)
    kernels.argmax(torch.zeros(4, 40_000), ints[:, 0], ids=long, damage=ints[0])
    kernels.begin_round(long, ints[0], ints, ints[0], ints, ints, ints, ints[0], 9, pdl=arch >= 90)
    kernels.finish_round(
        long, ints[0], ints, ints, ints[0], ints, ints, ints[0], None, long, ints, parents=ints, path=ints, kept=ints,
        pdl=arch >= 90,
    )
    kernels.keep_path(model.cache, ints, ints[0], ints[0], ints, pdl=arch >= 90)
    kernels.match_ngram(long, ints[0], ints, ints, ints[0], ints[0], 3, True, pdl=arch >= 90)
    floats, doubles, bytes = torch.zeros(4, 40), torch.zeros(4, 40, dtype=torch.double), ints.to(torch.int8)
    kernels.top_tokens(floats.view(2, 2, 40), ints, ints[0], 3, ids=long, scores=floats, pdl=arch >= 90)
    kernels.gather_pairs(long, ints[0], ints[0], ints, ints, floats.bfloat16(), 1, 3, pdl=arch >= 90)
    beam, found = Beam(ints, doubles, bytes, ints, ints), Candidates(ints, doubles, ints)
    kernels.grow_tree(found, 0, floats, ints, beam, beam, 5, pdl=arch >= 90)
    kernels.prune_tree(found, ints, ints, pdl=arch >= 90)
    kernels.tree_rows(ints, bytes, ints, 3, pdl=arch >= 90)

found = _uncompiled(everything)
each = {function.__name__: (function, request) for function, request in found}  # one of its forms is enough
for function, request in each.values():
    assert function.preload(request) is not None
print(*sorted(each))
"""


@pytest.mark.skipif(not HAS_TRITON, reason=MISSING)
@pytest.mark.parametrize(
    ("arch", "name", "weights", "cache"),
    [
        (80, "dummy:tiny-llama?layers=1", "bf16", "bf16"),  # heads of 16
        (89, "dummy:tiny-qwen3?layers=1&heads=3&kv_heads=1&head_dim=64", "fp8 calibrated", "fp8"),
    ],
)
def test_kernels_compile_for(arch, name, weights, cache, tmp_path):
    """The oldest GPUs that are supported: from 8.0 on bf16, from 8.9 on FP8; neither has dependent launches."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(HERE.parent)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE, str(arch), name, weights, cache],
        env=environment, cwd=HERE.parents[1], capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    names = ["add_norm", "argmax_finish", "argmax", "attention", "begin_round", "finish_round", "gate_up"]
    names += ["gather_pairs", "grow_tree", "keep_path", "linear", "match_ngram", "prune_tree", "stamp", "top_finish"]
    names += ["top_tile", "tree_rows"]
    assert done.stdout.split() == sorted(f"_{name}_kernel" for name in names)
