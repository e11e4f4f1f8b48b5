"""The stand-in ``libcuda.so.1`` (tests/cpp/standin_cuda) for Python tests: CUDA over host memory.

Its device pointers are addresses of this process, every misuse of the driver's rules is counted as
a violation, and kernels in flight can be modelled. ``make test`` has built it with the C++ tests;
else it is compiled here, once.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

Span = tuple[int, int]
"""Address and bytes."""
ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "tests" / "cpp" / "standin_cuda"
BUILT_BY_MAKE = ROOT / "build" / "core" / "tests" / "cpp" / "standin_cuda" / "libcuda.so.1"
BUILT_HERE = ROOT / "build" / "standin_cuda" / "libcuda.so.1"


def _is_fresh(library: Path) -> bool:
    sources = [*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]
    sources.append(ROOT / "cpp" / "vtensor" / "driver" / "cuda" / "cuda_abi.h")
    return library.exists() and library.stat().st_mtime >= max(s.stat().st_mtime for s in sources)


def build() -> Path:
    """The path of an up-to-date library. Raises RuntimeError without a C++ compiler."""
    for library in (BUILT_BY_MAKE, BUILT_HERE):
        if _is_fresh(library):
            return library
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("no C++ compiler to build the stand-in CUDA driver with")
    BUILT_HERE.parent.mkdir(parents=True, exist_ok=True)
    fresh = BUILT_HERE.with_name(f"libcuda.{os.getpid()}.tmp")
    sources = [str(source) for source in sorted(SOURCES.glob("*.cpp"))]
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"]
    subprocess.run(
        [compiler, *flags, f"-I{ROOT / 'cpp'}", *sources, "-o", str(fresh), "-ldl"], check=True
    )
    fresh.replace(BUILT_HERE)  # another test process may be at it as well
    return BUILT_HERE


class StandinCuda:
    """The control functions; tests/cpp/standin_cuda/standin_cuda.h says what each does."""

    def __init__(self) -> None:
        self.path = str(build())
        self._library = ctypes.CDLL(self.path)
        for name in ("calls", "violations", "live", "begin_kernel", "running_kernels"):
            self._function(name).restype = ctypes.c_uint64
        self._function("last_violation").restype = ctypes.c_char_p

    def _function(self, name: str) -> ctypes._CFuncPtr:
        function: ctypes._CFuncPtr = getattr(self._library, f"standin_cuda_{name}")
        return function

    def reset(self, granularity: int = 2 << 20) -> None:
        """Forget counts, violations, injected failures and settings."""
        self._function("reset")()
        self._function("set_granularity")(ctypes.c_uint64(granularity))

    def fail(self, function: str, nth: int, code: int) -> None:
        """The nth call of ``function`` from now on (0: every one) answers ``code``."""
        self._function("fail")(function.encode(), nth, code)

    def calls(self, function: str) -> int:
        return int(self._function("calls")(function.encode()))

    def live(self, kind: str | None = None) -> int:
        """Objects alive in the driver; ``"bytes"``: physical memory."""
        return int(self._function("live")(None if kind is None else kind.encode()))

    def check(self) -> None:
        """Fails when a rule of CUDA's was broken, or when memory is alive that should not be.

        Addresses and contexts stay as long as their manager does, and pytest drops a test's
        fixtures only after this.
        """
        if any(self._alive().values()):
            gc.collect()  # exceptions keep the managers of their frames; costs 0.4 s beside torch
        assert self.violations == 0, self.last_violation
        alive = self._alive()
        assert not any(alive.values()), f"alive in the CUDA driver: {alive}"

    def _alive(self) -> dict[str, int]:
        return {kind: self.live(kind) for kind in ("mapping", "handle", "allocation", "event")}

    def set_capacity(self, bytes_per_device: int) -> None:
        self._function("set_capacity")(ctypes.c_uint64(bytes_per_device))

    def set_devices(self, num_devices: int) -> None:
        self._function("set_devices")(num_devices)

    def set_attribute(self, attribute: int, value: int) -> None:
        self._function("set_attribute")(attribute, value)

    def forget_init(self) -> None:
        self._function("forget_init")()

    def set_quiet(self) -> None:
        self._function("set_quiet")(1)

    def set_sync_timeout_ms(self, milliseconds: int) -> None:
        self._function("set_sync_timeout_ms")(milliseconds)

    @property
    def violations(self) -> int:
        return int(self._function("violations")())

    @property
    def last_violation(self) -> str:
        return bytes(self._function("last_violation")()).decode()

    def begin_kernel(self, address: int, num_bytes: int, stream: int = 0) -> int:
        """A kernel on ``stream`` that touches these bytes until it is ended; returns its id."""
        return int(
            self._function("begin_kernel")(
                ctypes.c_uint64(stream), ctypes.c_uint64(address), ctypes.c_uint64(num_bytes)
            )
        )

    def end_kernel(self, kernel: int) -> None:
        self._function("end_kernel")(ctypes.c_uint64(kernel))

    def launch(self, reads: Sequence[Span], writes: Sequence[Span]) -> bool:
        """One kernel over these (address, bytes), over at once. False, and a violation: it breaks
        CUDA's rule of virtual aliasing, or a range is not mapped."""
        numbers = [(ctypes.c_uint64 * (2 * len(x)))(*chain(*x)) for x in (reads, writes)]
        sizes = [ctypes.c_uint64(len(x)) for x in (reads, writes)]
        return bool(self._function("launch")(numbers[0], sizes[0], numbers[1], sizes[1]))
