"""Compiling the whole-step kernel's source: what ptxas says is read, a cubin is known by all that went into it.

Compiling needs no GPU; where neither NVRTC nor nvcc is installed, those tests say so.
"""

from __future__ import annotations

import json

import pytest

from tutorial_lib.engine.model import ModelConfig
from tutorial_lib.engine.stream import compile as stream_compile
from tutorial_lib.engine.stream.budget import Formats, bucket, defines, memory
from tutorial_lib.engine.stream.compile import (
    CompileError,
    Cubin,
    compile_cubin,
    cubin_for,
    cubin_key,
    cubins_for,
    find_compiler,
    problems,
    read_cubin,
    read_log,
    write_cubin,
)
from tutorial_lib.engine.stream.plan import plan
from tutorial_lib.engine.stream.steps import kernel_source
from tutorial_lib.errors import BackendUnavailable
from tutorial_lib.shapes import dummy_config

LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'step' for 'sm_90a'
ptxas info    : Function properties for step
ptxas         .     40 bytes stack frame, 24 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 96 registers, used 2 barriers, 40 bytes cumulative stack size, 384 bytes smem
ptxas info    : (C7519) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x in 'step'
ptxas info    : Compiling entry function 'other' for 'sm_90a'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""
FINE = """
extern "C" __global__ void __launch_bounds__(128, 1) fine(float* x) { x[threadIdx.x] *= FACTOR; }
"""
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* x) {
  float kept[96];
#pragma unroll
  for (int i = 0; i < 96; i++) kept[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; i++) x[i * 1024 + threadIdx.x] = kept[95 - i] * kept[i];
}
"""
# Reading an accumulator while its product is under way forces ptxas to wait for every instruction on its own.
SERIALIZED = """
extern "C" __global__ void __launch_bounds__(128, 1) serialized(float* x, unsigned long long a) {
  float d0 = x[0], d1 = x[1], d2 = x[2], d3 = x[3];
  for (int i = 0; i < 4; i++) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 "
                 "{%0, %1, %2, %3}, %4, %4, p, 1, 1;}" : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3) : "l"(a));
    d0 += x[i];
  }
  x[threadIdx.x] = d0 + d1 + d2 + d3;
}
"""


def compiler():
    try:
        return find_compiler()
    except BackendUnavailable:
        pytest.skip("neither NVRTC nor nvcc is installed")


class Counting:
    """Stands in for a compiler: the code is the source, `log` what it says."""

    name = "counting 1.0"

    def __init__(self, log: str = LOG) -> None:
        self.log, self.calls = log, 0

    def compile(self, source, defines, arch):
        self.calls += 1
        return (None if "error" in source else f"{source}{sorted(defines.items())}{arch}".encode()), self.log


def test_a_log_becomes_figures_kernel_by_kernel():
    found = read_log(LOG)
    assert found["kernels"]["step"] == {"registers": 96, "stack_bytes": 40, "spill_bytes": 40, "shared_bytes": 384}
    assert found["kernels"]["other"] == {"registers": 8, "stack_bytes": 0, "spill_bytes": 0, "shared_bytes": 0}
    assert len(found["serialized"]) == 1 and "C7519" in found["serialized"][0]


def test_problems_are_sentences_and_a_clean_report_has_none():
    said = " | ".join(problems(read_log(LOG), registers=90))
    assert "step spills registers: 40 bytes" in said and "96 registers, and 90" in said and "serialized" in said
    clean = {"kernels": {"step": {"registers": 90, "stack_bytes": 0, "spill_bytes": 0}}, "serialized": []}
    assert problems(clean, registers=90) == []
    assert problems(read_log("nothing")) == ["the compiler's log names no kernel"]


def test_real_source_compiles_for_hopper_and_its_macros_count():
    made = compile_cubin(FINE, {"FACTOR": 3}, compiler=compiler())
    assert made.code[:4] == b"\x7fELF"
    assert problems(made.report) == [] and made.report["arch"] == "sm_90a"
    assert 0 < made.report["kernels"]["fine"]["registers"] < 64
    assert made.code != compile_cubin(FINE, {"FACTOR": 5}, compiler=compiler()).code


def test_spills_and_serialized_products_are_found_in_what_the_compiler_says():
    spilling = compile_cubin(SPILLING, {}, compiler=compiler())
    assert any("spilling spills" in problem for problem in problems(spilling.report))
    serialized = compile_cubin(SERIALIZED, {}, compiler=compiler())
    assert any("serialized" in problem for problem in problems(serialized.report))


def test_source_with_a_mistake_is_refused_with_the_compilers_words():
    with pytest.raises(CompileError, match="no_such_type"):
        compile_cubin("no_such_type x;", {}, compiler=compiler())


def test_without_a_compiler_one_hears_what_to_install_and_what_works_without(monkeypatch):
    monkeypatch.setattr(stream_compile, "_nvrtc_libraries", lambda: ["/nowhere/libnvrtc.so"])
    monkeypatch.setattr(stream_compile.shutil, "which", lambda name: None)
    with pytest.raises(BackendUnavailable, match="nvidia-cuda-nvrtc.*kernel='triton'"):
        find_compiler()


def test_the_key_depends_on_source_macros_and_architecture():
    key = cubin_key("a", {"N": 1})
    assert key == cubin_key("a", {"N": 1})
    assert len({key, cubin_key("b", {"N": 1}), cubin_key("a", {"N": 2}), cubin_key("a", {"N": 1}, "sm_100a")}) == 4


def test_a_stored_cubin_is_used_and_anything_else_compiled_once_and_said(cache, tmp_path):
    compiler, said = Counting(), []
    folder = tmp_path / "engine"
    write_cubin(folder, compile_cubin("x", {"N": 1}, compiler=compiler))
    again = cubin_for("x", {"N": 1}, folder=folder, compiler=compiler, say=said.append)
    assert (compiler.calls, said) == (1, []) and again.code.startswith(b"x")

    cubin_for("x", {"N": 2}, folder=folder, what="the kernel of 2 rows", compiler=compiler, say=said.append)
    assert compiler.calls == 2 and said == [
        "compiling the kernel of 2 rows again: the engine directory has none that fits"
    ]
    cubin_for("x", {"N": 2}, folder=folder, compiler=compiler, say=said.append)
    assert compiler.calls == 2 and len(said) == 1, "the second time it is in the user's cache"
    cubin_for("x", {"N": 1}, folder=folder, is_fresh=True, compiler=compiler, say=said.append)
    assert compiler.calls == 3 and "does not run here" in said[-1]


def test_several_are_compiled_together_and_a_build_keeps_them_all(cache, tmp_path):
    compiler, said = Counting(), []
    wanted = {1: {"ROWS": 1}, 16: {"ROWS": 16}}
    made = cubins_for("x", wanted, store=tmp_path, compiler=compiler, say=said.append)
    assert list(made) == [1, 16] and compiler.calls == 2 and said == []
    assert made[1].code != made[16].code and len(list(tmp_path.glob("*.cubin"))) == 2
    assert cubins_for("x", wanted, folder=tmp_path, compiler=compiler, say=said.append) == made
    assert compiler.calls == 2 and said == []


def test_a_damaged_or_foreign_cubin_is_not_taken(tmp_path):
    made = compile_cubin("x", {}, compiler=Counting())
    write_cubin(tmp_path, made)
    key = made.report["key"]
    assert read_cubin(tmp_path, key) == made
    assert read_cubin(tmp_path, key[:16] + "0" * 48) is None, "the same file name, another key"
    report = tmp_path / f"{key[:16]}.json"
    kept = report.read_text()
    report.write_text(json.dumps({"key": key}))
    assert read_cubin(tmp_path, key) is None
    report.write_text(kept)
    (tmp_path / f"{key[:16]}.cubin").write_bytes(made.code[:-1])
    assert read_cubin(tmp_path, key) is None
    assert read_cubin(tmp_path / "missing", key) is None


def test_nothing_half_written_stays(tmp_path):
    write_cubin(tmp_path, Cubin(b"code", {"key": "k" * 64}))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["kkkkkkkkkkkkkkkk.cubin", "kkkkkkkkkkkkkkkk.json"]


@pytest.mark.parametrize(
    ("name", "weight_bytes", "rows"),
    [("dummy:llama-3.3-70b", 1, 12), ("dummy:llama-3.2-1b", 1, 2), ("dummy:tiny-qwen3?head_dim=128", 2, 16)],
)
def test_the_whole_step_kernel_fits_its_registers_and_overlaps_its_products(name, weight_bytes, rows):
    config = ModelConfig.from_hf(dummy_config(name)[0])
    made = plan(config, 132, weight_bytes=weight_bytes, head_bytes=2)
    formats = Formats(weights=weight_bytes == 1, head=False, cache=False, qk_norm="qwen3" in name)
    room = memory(made, config, 1024)
    macros = defines(made, config, formats, bucket(made, config, formats, rows), room)
    report = compile_cubin(kernel_source(), macros, compiler=compiler()).report
    assert problems(report, registers=65536 // 640 // 8 * 8) == []
