"""Loading a cubin and launching its kernel through the CUDA driver, by ctypes: no extension to compile, no dependency.

A launch goes to torch's current stream like any kernel of torch, so `torch.cuda.graph` captures it; the driver copies
the parameters at the launch (or capture), what they point to has to stay. The kernel waits for all of its blocks at
every barrier, so all of them have to be on the GPU at once. That is asked of the driver before the first launch, and
every launch is a cooperative one, which the driver refuses rather than start a part of the blocks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import WorkbookError

GO_ON = "go on with kernel='triton' (--kernel triton)"

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_NOT_FOR_THIS_GPU = (200, 209, 218, 222, 223, 300)  # CUDA_ERROR_INVALID_IMAGE, NO_BINARY_FOR_GPU, INVALID_PTX, ...
_TOO_LARGE = 720  # CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE


class DriverError(RuntimeError):
    """A call of the driver that failed. `code`: its CUresult."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call} failed: {name} ({code})")
        self.code = code

    @property
    def is_foreign_cubin(self) -> bool:
        """The cubin is for another GPU, or from a newer compiler than the driver knows."""
        return self.code in _NOT_FOR_THIS_GPU


class StreamError(WorkbookError):
    """The whole-step kernel gave up, or cannot be launched; the Triton path can still serve."""


class Driver:
    """The few calls of libcuda that are needed, each with its error as an exception. library: a stand-in for tests."""

    def __init__(self, library: Any = None) -> None:
        self._library = ctypes.CDLL("libcuda.so.1") if library is None else library

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith("cu"):
            raise AttributeError(name)
        call = getattr(self._library, name)

        def checked(*arguments: Any) -> None:
            if code := call(*arguments):
                raise DriverError(name, code, self._name_of(code))

        self.__dict__[name] = checked
        return checked

    def _name_of(self, code: int) -> str:
        name = ctypes.c_char_p()
        known = self._library.cuGetErrorName(code, ctypes.byref(name)) == 0
        return name.value.decode() if known and name.value else "unknown error"


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint64 * 8)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


@dataclass(frozen=True)
class LaunchShape:
    """grid: blocks, one on each processor. block: threads of each. shared_bytes: dynamic shared memory of each."""

    grid: int
    block: int
    shared_bytes: int


class Kernel:
    """One kernel of a cubin, ready to launch. processors: how many the GPU (or our part of it) has.

    Raises `StreamError` if its blocks cannot all be resident, `DriverError` for what else the driver refuses.
    """

    def __init__(self, driver: Driver, code: bytes, name: str, shape: LaunchShape, processors: int) -> None:
        self._driver, self.shape, self.name = driver, shape, name
        self._code = code  # cuModuleLoadData may read it until it returns; kept for its lifetime all the same
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        driver.cuModuleLoadData(ctypes.byref(self._module), code)
        driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode())
        driver.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shape.shared_bytes)
        self._check_residency(processors)
        self._cooperative = _Attribute(id=_COOPERATIVE)
        ctypes.c_int.from_buffer(self._cooperative.value).value = 1

    def _check_residency(self, processors: int) -> None:
        each, shape = ctypes.c_int(), self.shape
        self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(each), self._function, shape.block, ctypes.c_size_t(shape.shared_bytes)
        )
        if each.value * processors < shape.grid:
            raise StreamError(
                f"{processors} processors hold {each.value} blocks each of the whole-step kernel "
                f"({shape.block} threads, {shape.shared_bytes} bytes of shared memory)",
                f"all of its {shape.grid} blocks at once",
                GO_ON,
            )

    def launch(self, params: ctypes.Structure, stream: int) -> None:
        """Launch on `stream`, a CUstream. `params` is copied by the driver before this returns."""
        shape = self.shape
        config = _Config(
            shape.grid, 1, 1, shape.block, 1, 1, shape.shared_bytes, stream, ctypes.pointer(self._cooperative), 1
        )
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        try:
            self._driver.cuLaunchKernelEx(ctypes.byref(config), self._function, arguments, None)
        except DriverError as error:
            if error.code == _TOO_LARGE:
                raise StreamError(
                    "the GPU has no room for all blocks of the whole-step kernel at once any more",
                    f"{shape.grid} free processors",
                    f"end what else runs on it, or {GO_ON}",
                ) from error
            raise

    @classmethod
    def open(
        cls,
        driver: Driver,
        code: bytes,
        compile_again: Callable[[], bytes],
        name: str,
        shape: LaunchShape,
        processors: int,
    ) -> Kernel:
        """The kernel in `code`, or in what `compile_again()` gives if the driver knows nothing to do with `code`."""
        try:
            return cls(driver, code, name, shape, processors)
        except DriverError as error:
            if not error.is_foreign_cubin:
                raise
            return cls(driver, compile_again(), name, shape, processors)

    def unload(self) -> None:
        """Give the module back; nothing of it may be in flight or in a graph."""
        if self._module:
            self._driver.cuModuleUnload(self._module)
            self._module = ctypes.c_void_p()
