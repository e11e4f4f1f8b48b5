"""The checks of `flexinfer doctor`: each looks at one thing and says what to do about it."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from flexinfer.cli.doctor.machine import Machine, num_cpus
from flexinfer.cli.terminal_text import size_text
from flexinfer.runtime.process import check_threads, num_server_threads

Status = Literal["ok", "note", "warning", "problem"]

MIN_MAP_COUNT = 65530
"""The kernel's default. Each run of chunks behind a range is one mapping."""
MIN_OPEN_FILES = 1024
MIN_MEMORY_BYTES = 1 << 30
PROBE_TOKENS = 16384
PROBE_BUDGET = "32MiB"
HUGE_PAGES = "sys/kernel/mm/transparent_hugepage"

PACKAGES = {
    "numpy": "",
    "torch": "",
    "transformers": "",
    "fastapi": "serve",
    "uvicorn": "serve",
    "prometheus-client": "serve",
    "llguidance": "serve",
    "aiohttp": "bench",
    "matplotlib": "bench",
    "flash-attn": "flash",
}
"""Package -> the extra that brings it; '' for those that are always there."""


@dataclass(frozen=True)
class Check:
    """What was looked at, what was found, and what to do. A problem keeps FlexInfer from working;
    a warning makes it slow or small; a note is for those that need that part."""

    group: str
    name: str
    status: Status
    found: str
    advice: str = ""


def machine_checks(machine: Machine) -> Iterator[Check]:
    """The kernel, its limits and the container."""

    def check(name: str, status: Status, found: object, advice: str = "") -> Check:
        return Check("machine", name, status, str(found), advice if status != "ok" else "")

    yield check("kernel", "ok", f"{platform.system()} {platform.release()}")
    count = machine.number("proc/sys/vm/max_map_count")
    yield check(
        "vm.max_map_count",
        "note" if count is None else "warning" if count < MIN_MAP_COUNT else "ok",
        "cannot be read" if count is None else count,
        f"at least {MIN_MAP_COUNT} let many ranges be mapped: sysctl -w vm.max_map_count=262144",
    )
    overcommit = machine.number("proc/sys/vm/overcommit_memory")
    yield check(
        "vm.overcommit_memory",
        "warning" if overcommit == 2 else "ok",
        "cannot be read" if overcommit is None else overcommit,
        "2 counts reserved addresses as memory: set 0 or 1 (sysctl -w vm.overcommit_memory=0), "
        "or keep --max-num-seqs and --max-model-len small",
    )
    yield from _huge_pages(machine, check)
    yield from _limits(machine, check)
    yield from _capacity(machine, check)


def _limits(machine: Machine, check: Callable[..., Check]) -> Iterator[Check]:
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield check("memlock", "ok", "unlimited" if locked == -1 else size_text(locked))
    file_bytes = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    memory_bytes = machine.memory_bytes("MemAvailable") or 0
    yield check(
        "file size",
        "ok" if file_bytes == -1 or file_bytes > memory_bytes else "problem",
        "unlimited" if file_bytes == -1 else size_text(file_bytes),
        "KV memory on a CPU is a file as large as what is free: ulimit -f unlimited",
    )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield check(
        "open files",
        "warning" if files < MIN_OPEN_FILES else "ok",
        files,
        f"each connection of a server is one: ulimit -n {MIN_OPEN_FILES * 4}",
    )
    try:
        check_threads(None, num_server_threads())
    except OSError as error:
        yield check("threads", "problem", error, "a server would not start")
    else:
        yield check("threads", "ok", "as many as a server needs")


def _huge_pages(machine: Machine, check: Callable[..., Check]) -> Iterator[Check]:
    enabled = machine.choice(f"{HUGE_PAGES}/enabled")
    yield check(
        "transparent huge pages",
        "note" if enabled in (None, "never") else "ok",
        enabled or "not in this kernel",
        "chunks are mapped page by page, which costs more for each: "
        f"echo madvise > /{HUGE_PAGES}/enabled",
    )
    shmem = machine.choice(f"{HUGE_PAGES}/shmem_enabled")
    yield check("huge pages in shared memory", "ok", shmem or "not in this kernel")


def _capacity(machine: Machine, check: Callable[..., Check]) -> Iterator[Check]:
    quota, cpus = machine.cpu_quota(), num_cpus()
    yield check(
        "cores",
        "warning" if quota is not None and quota < cpus else "ok",
        f"{cpus}" + ("" if quota is None else f", of which the container may use {quota:g}"),
        "more threads than that are stopped again and again: set OMP_NUM_THREADS="
        f"{max(1, int(quota or cpus))}",
    )
    limit, total = machine.memory_limit_bytes(), machine.memory_bytes("MemTotal")
    free = machine.memory_bytes("MemAvailable")
    available = min((b for b in (limit, free) if b is not None), default=None)
    texts = [
        f"{size_text(size)} {what}"
        for size, what in ((total, "in all"), (free, "available"), (limit, "container limit"))
        if size is not None
    ]
    yield check(
        "memory",
        "warning" if available is not None and available < MIN_MEMORY_BYTES else "ok",
        ", ".join(texts) or "cannot be read",
        "little is left for weights and KV cache: stop something, raise the container's limit, "
        "or set a small budget with --memory",
    )


def package_checks() -> Iterator[Check]:
    """Versions of what FlexInfer stands on."""
    yield Check("packages", "python", "ok", platform.python_version())
    yield Check("packages", "flexinfer", "ok", version("flexinfer"))
    yield from (_package(name, extra) for name, extra in PACKAGES.items())


def _package(name: str, extra: str) -> Check:
    try:
        return Check("packages", name, "ok", version(name))
    except PackageNotFoundError:
        status: Status = "note" if extra else "problem"
        wanted = f"pip install 'flexinfer[{extra}]'" if extra else f"pip install {name}"
        return Check("packages", name, status, "not installed", wanted)


def driver_checks() -> Iterator[Check]:
    """Whether chunks can be mapped, and seen at two places, on each kind of device."""
    yield _try_manager("cpu")
    yield from _headroom()
    found = _cuda_library()
    if found is not None:
        yield Check("devices", "cuda", "note", f"no GPU: {found}", "fine on a CPU machine")
        return
    yield _try_manager("cuda")
    yield _torch_cuda()


def _try_manager(device: str) -> Check:
    """Real memory: one vTensor, a recorded prefix, and a second vTensor that shares its chunk."""
    try:
        from flexinfer.vtensor import KVSpec, VTensorManager

        spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=64, max_seq_len=PROBE_TOKENS)
        with VTensorManager(spec, device, max_requests=2, memory_budget=PROBE_BUDGET) as manager:
            tokens = list(range(PROBE_TOKENS))
            first = manager.create(tokens)
            first.extend(len(tokens))
            first.record_prefix(tokens)
            second = manager.create(tokens)
            shared = manager.stats().shared_bytes
            manager.check_integrity()
            second.release()
            first.release()
    except ImportError as error:
        advice = "the extension is not built: pip install --force-reinstall flexinfer"
        return Check("devices", device, "problem", str(error), advice)
    except Exception as error:
        status: Status = "problem" if device == "cpu" else "warning"
        found = f"{type(error).__name__}: {error}"
        return Check("devices", device, status, found, "docs/building.md: what each device needs")
    if shared == 0:
        advice = "prefixes are copied instead of shared; everything else works"
        return Check("devices", device, "warning", "maps, but does not alias", advice)
    size = size_text(manager.chunk_bytes)
    return Check("devices", device, "ok", f"maps and shares chunks of {size}")


def _headroom() -> Iterator[Check]:
    """Nothing where the extension cannot be loaded: the manager's row says so."""
    try:
        from flexinfer.memory.budget import HEADROOM_BYTES
        from flexinfer.vtensor import available_memory_bytes
    except ImportError:
        return
    free_bytes = available_memory_bytes()
    is_short = free_bytes <= HEADROOM_BYTES
    yield Check(
        "devices",
        "memory for KV",
        "problem" if is_short else "ok",
        f"{size_text(free_bytes)} can be taken, but for {size_text(HEADROOM_BYTES)} of headroom",
        "nothing is left for KV: stop something, or raise the container's limit"
        if is_short
        else "",
    )


def _cuda_library() -> str | None:
    """Why there is no CUDA device; None if there is one."""
    import ctypes

    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    count = ctypes.c_int(0)
    if code := cuda.cuInit(0):
        return f"cuInit answers {code}"
    cuda.cuDeviceGetCount(ctypes.byref(count))
    return None if count.value > 0 else "the driver finds no device"


def _torch_cuda() -> Check:
    try:
        import torch
    except ImportError as error:
        return Check("devices", "torch on cuda", "problem", str(error), "pip install torch")
    if torch.cuda.is_available():
        found = f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"
        return Check("devices", "torch on cuda", "ok", found)
    advice = "install a torch that is built for CUDA: https://pytorch.org/get-started"
    return Check("devices", "torch on cuda", "warning", f"torch {torch.__version__}", advice)


FLASH_PACKAGES = ("flash_attn", "flash_attn_interface", "flash_attn.cute")


def attention_checks() -> Iterator[Check]:
    """Which attention implementations load here, and what the kernels on the CPU use."""
    from flexinfer import attention

    yield from _instruction_set()
    yield from (_attention(name) for name in attention.BACKENDS if name != "auto")
    yield from map(_flash_package, FLASH_PACKAGES)


def _instruction_set() -> Iterator[Check]:
    """Nothing where the extension cannot be loaded: the backend's row says so."""
    try:
        from flexinfer.runtime.kernels import available_isas, available_quantised_isas
    except ImportError:
        return
    known = list(dict.fromkeys([*available_isas(), *available_quantised_isas()]))
    forced = os.environ.get("FLEXINFER_SIMD")
    if not forced or forced in known:
        yield Check("attention", "instruction set", "ok", forced or available_isas()[-1])
        return
    yield Check(
        "attention",
        "instruction set",
        "problem",
        f"FLEXINFER_SIMD={forced} is none of this machine's",
        f"unset it, or set one of {', '.join(known)}",
    )


def _flash_package(name: str) -> Check:
    try:
        version = getattr(import_module(name), "__version__", "no version")
    except Exception as error:  # built for another torch: undefined symbols
        return Check("attention", name, "note", str(error), "only for --attention-backend flash")
    return Check("attention", name, "ok", f"{version}; tried on the GPU when an engine starts")


def _attention(name: str) -> Check:
    try:
        import_module(f"flexinfer.attention.{name}")
    except ImportError as error:
        advice = f"--attention-backend {name} cannot be used here; the others can"
        return Check("attention", name, "note", str(error), advice)
    return Check("attention", name, "ok", "loads")


def all_checks(machine: Machine | None = None) -> list[Check]:
    return [
        *machine_checks(machine or Machine()),
        *package_checks(),
        *driver_checks(),
        *attention_checks(),
    ]
