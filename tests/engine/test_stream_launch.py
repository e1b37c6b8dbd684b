"""Launching by the CUDA driver, against a driver that only notes what it is asked."""

from __future__ import annotations

import ctypes

import pytest

from tutorial_lib.engine.stream.launch import (
    Driver,
    DriverError,
    Kernel,
    LaunchShape,
    StreamError,
    _Attribute,
    _Config,
)

SHAPE = LaunchShape(grid=128, block=640, shared_bytes=220_000)


class Params(ctypes.Structure):
    _fields_ = [("weights", ctypes.c_void_p), ("rows", ctypes.c_int)]


class FakeDriver:
    """libcuda of a GPU where `resident` blocks fit a processor. fails: call -> the CUresult it gives."""

    def __init__(self, resident: int = 1, fails: dict[str, int] | None = None) -> None:
        self.resident, self.fails, self.calls, self.launched = resident, fails or {}, [], []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            if name in self.fails:
                return self.fails[name]
            return getattr(self, f"_{name}", lambda *_: 0)(*arguments) or 0

        if not name.startswith("cu"):
            raise AttributeError(name)
        return call

    def _cuGetErrorName(self, code, out):
        out._obj.value = b"CUDA_ERROR_OF_A_KIND"

    def _cuModuleLoadData(self, out, code):
        out._obj.value, self.code = 11, code

    def _cuModuleGetFunction(self, out, module, name):
        out._obj.value, self.function = 12, (module.value, name)

    def _cuFuncSetAttribute(self, function, attribute, value):
        self.attribute = (function.value, attribute, value)

    def _cuOccupancyMaxActiveBlocksPerMultiprocessor(self, out, function, block, shared):
        out._obj.value, self.asked = self.resident, (block, shared.value)

    def _cuLaunchKernelEx(self, config, function, arguments, extra):
        held = ctypes.cast(arguments[0], ctypes.POINTER(Params)).contents
        asked = config._obj
        attribute = asked.attributes[0]
        self.launched.append(
            {
                "grid": (asked.grid_x, asked.grid_y, asked.grid_z),
                "block": (asked.block_x, asked.block_y, asked.block_z),
                "shared_bytes": asked.shared_bytes,
                "stream": asked.stream,
                "attribute": (asked.attribute_count, attribute.id, attribute.value[0]),
                "params": (held.weights, held.rows),
                "function": function.value,
            }
        )


def kernel(fake: FakeDriver, processors: int = 132) -> Kernel:
    return Kernel(Driver(fake), b"ELF", "step", SHAPE, processors)


def test_the_structures_have_the_drivers_own_sizes():
    assert (ctypes.sizeof(_Attribute), _Attribute.value.offset) == (72, 8)
    assert (ctypes.sizeof(_Config), _Config.stream.offset, _Config.attribute_count.offset) == (56, 32, 48)


def test_a_kernel_is_loaded_given_its_memory_and_launched_as_a_cooperative_one():
    fake = FakeDriver()
    kernel(fake).launch(Params(0x1234, 16), stream=77)
    assert fake.code == b"ELF" and fake.function == (11, b"step")
    assert fake.attribute == (12, 8, 220_000) and fake.asked == (640, 220_000)
    assert fake.launched == [
        {
            "grid": (128, 1, 1),
            "block": (640, 1, 1),
            "shared_bytes": 220_000,
            "stream": 77,
            "attribute": (1, 2, 1),
            "params": (0x1234, 16),
            "function": 12,
        }
    ]


@pytest.mark.parametrize(("resident", "processors"), [(0, 132), (1, 127), (1, 66)])
def test_blocks_that_cannot_all_be_resident_are_refused_before_a_launch(resident, processors):
    fake = FakeDriver(resident)
    with pytest.raises(StreamError, match="all of its 128 blocks.*kernel='triton'"):
        kernel(fake, processors)
    assert fake.launched == []


def test_two_blocks_on_a_processor_count_twice():
    kernel(FakeDriver(resident=2), processors=66)


def test_a_gpu_that_has_filled_up_meanwhile_is_told_from_other_failures():
    fake = FakeDriver(fails={"cuLaunchKernelEx": 720})
    with pytest.raises(StreamError, match="no room for all blocks.*triton"):
        kernel(fake).launch(Params(), stream=0)
    fake.fails = {"cuLaunchKernelEx": 700}
    with pytest.raises(DriverError, match=r"cuLaunchKernelEx failed: CUDA_ERROR_OF_A_KIND \(700\)"):
        kernel(fake).launch(Params(), stream=0)


def test_a_cubin_of_another_gpu_or_compiler_is_known_as_such():
    with pytest.raises(DriverError) as caught:
        kernel(FakeDriver(fails={"cuModuleLoadData": 209}))
    assert caught.value.is_foreign_cubin
    with pytest.raises(DriverError) as caught:
        kernel(FakeDriver(fails={"cuModuleLoadData": 2}))
    assert not caught.value.is_foreign_cubin


def test_a_cubin_that_the_driver_does_not_know_is_compiled_again_once():
    fake = FakeDriver()
    load = fake._cuModuleLoadData

    def picky(out, code):
        return load(out, code) or (0 if code == b"fresh" else 209)

    fake._cuModuleLoadData = picky
    made = Kernel.open(Driver(fake), b"stored", lambda: b"fresh", "step", SHAPE, 132)
    made.launch(Params(1, 2), stream=0)
    assert fake.code == b"fresh" and len(fake.launched) == 1
    with pytest.raises(DriverError):
        Kernel.open(Driver(fake), b"stored", lambda: b"stored", "step", SHAPE, 132)
    fake.fails = {"cuModuleLoadData": 2}
    with pytest.raises(DriverError, match=r"\(2\)"):
        Kernel.open(Driver(fake), b"stored", lambda: pytest.fail("not the cubin's fault"), "step", SHAPE, 132)


def test_a_module_is_given_back_once():
    fake = FakeDriver()
    made = kernel(fake)
    made.unload()
    made.unload()
    assert fake.calls.count("cuModuleUnload") == 1
