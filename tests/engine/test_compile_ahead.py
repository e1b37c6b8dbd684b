"""Compiling ahead for a GPU that is only described: what is found, where it lands, that a launch then compiles none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]

# A process of its own: Triton keeps one driver, and here it must be one that is not there.
SCRIPT = """
import json, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

class Described:
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device=None: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

driver.set_active(Described())
from tutorial_lib.engine import kernels
from tutorial_lib.engine.compile_ahead import compile_ahead

hits = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
x, w = torch.zeros(16, 256, dtype=kernels.FP8), torch.zeros(128, 256, dtype=kernels.FP8)
scale, norm = torch.ones(128), torch.ones(256, dtype=torch.bfloat16)
fits, too_wide = kernels.Tactic(64, 128, 1, 2, 4), kernels.Tactic(64, 96, 1, 2, 4)

def work():
    kernels.add_norm(torch.zeros(2, 256, dtype=torch.bfloat16), None, norm, 1e-5, torch.ones(()), True, True)
    for _ in range(2):  # the same twice
        kernels.linear(x, scale, w, scale, fits, True)
    kernels.linear(x, scale, w, scale, too_wide, True)  # 96 is no power of two: cannot be compiled

first = compile_ahead(work, threads=2)
compiled, hits[:] = list(hits), []
in_memory = {k: len(getattr(kernels, k).device_caches[0][0]) for k in ("_linear_kernel", "_add_norm_kernel")}
for kernel in (kernels._linear_kernel, kernels._add_norm_kernel):
    kernel.device_caches.clear()  # as in a new process
again = compile_ahead(work, threads=2)
print(json.dumps([first, compiled, in_memory, again, hits, triton.knobs.runtime.jit_cache_hook is None]))
"""


def test_kernels_are_compiled_once_and_found_again(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    first, compiled, in_memory, again, hits, is_restored = json.loads(done.stdout.splitlines()[-1])
    assert first == 2 and compiled == [False, False]  # the one that cannot be compiled is left to its launch
    assert in_memory == {"_linear_kernel": 1, "_add_norm_kernel": 1}
    assert again == 2 and hits == [True, True]  # from the cache on disk, where any later process looks
    assert is_restored
