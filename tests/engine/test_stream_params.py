"""The parameters of the whole-step kernel: Python and C agree where each field lies, and a launch finds its fields."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest
import torch

from tutorial_lib.engine.stream.launch import LaunchShape
from tutorial_lib.engine.stream.params import FIELDS, Params, declaration
from tutorial_lib.engine.stream.steps import LaunchedSteps


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to lay the structure out")
def test_c_lays_the_fields_out_as_python_does(tmp_path):
    shown = "".join(f'printf("%zu ", offsetof(Params, {name}));' for name, *_ in FIELDS)
    main = f'int main() {{ {shown} printf("%zu", sizeof(Params)); }}'
    source, program = tmp_path / "layout.cpp", tmp_path / "layout"
    source.write_text(f"#include <cstddef>\n#include <cstdio>\n{declaration()}{main}\n")
    subprocess.run(["g++", "-o", program, source], check=True, timeout=60)
    found = subprocess.run([program], check=True, timeout=10, capture_output=True, text=True).stdout
    expected = [getattr(Params, name).offset for name, *_ in FIELDS]
    assert [int(n) for n in found.split()] == [*expected, ctypes.sizeof(Params)]


def test_a_launch_sets_fields_that_exist():
    seen = []

    class Kernel:
        shape = LaunchShape(1, 1, 0)

        def launch(self, params, stream):
            seen.append(params)

    def numbers(*shape):
        return torch.zeros(shape, dtype=torch.int32)

    steps = LaunchedSteps(
        {16: Kernel()}, Params, {"layers": 2, "eps": 1e-5}, head_rows=100, trouble=numbers(4), zeroed=[],
        words=lambda words: "", report={},
    )  # fmt: skip
    tokens = numbers(3)
    steps.step(
        tokens, numbers(1, 4), numbers(1), numbers(1), 3, choices=numbers(3), damage=numbers(1), logits=None, tree=None
    )
    given = seen[0]
    assert (given.layers, given.rows, given.steps, given.table_stride, given.vocab_limit) == (2, 3, 1, 4, 100)
    assert given.tokens == tokens.data_ptr() and not given.logits and not given.mask
    assert set(vars(given)) <= {name for name, *_ in FIELDS}, "a misspelt field would become an attribute"
