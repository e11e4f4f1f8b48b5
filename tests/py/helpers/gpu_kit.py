"""What the GPU tests share: managers, KV written and read by kernels, and a stream kept busy.

Nothing here knows which device it runs on beyond `Kit.device`; on the CPU kernels are over when
they return, so `busy` does nothing and a stream's handle is 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flexinfer.vtensor import KVSpec, VTensor, VTensorManager
from helpers import dlpack
from helpers.standin_cuda import StandinCuda

SPEC = KVSpec(
    num_layers=2,
    num_kv_heads=8,
    head_dim=128,
    dtype="float32",
    max_seq_len=4096,
    layers_per_plane=2,
)
"""16 KiB a token interleaved: 128 tokens a 2 MiB chunk, 4 tokens a 64 KiB chunk."""

CHUNK_BYTES = {"cpu": 64 << 10, "cuda": 2 << 20}
"""The smallest that CUDA admits; small on the CPU, where a test is to be quick."""


class Kit:
    """Makes managers on one device and closes them. Contents are drawn from one generator."""

    def __init__(self, device: str, seed: int = 0) -> None:
        self.device = device
        self.is_cuda = device == "cuda"
        self.chunk_bytes = CHUNK_BYTES[device]
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self._managers: list[VTensorManager] = []

    def manager(self, spec: KVSpec = SPEC, *, chunks: int = 64, **options: Any) -> VTensorManager:
        """A manager with room for `chunks` chunks."""
        defaults = {
            "max_requests": 8,
            "chunk_bytes": self.chunk_bytes,
            "memory_budget": chunks * self.chunk_bytes,
            "unmapped": "guard",
        }
        manager = VTensorManager(spec, self.device, **{**defaults, **options})
        self._managers.append(manager)
        return manager

    def close(self) -> None:
        self.synchronize()
        for manager in self._managers:
            if not manager.closed:
                manager.check_integrity()
                manager.close()

    def row_tokens(self, manager: VTensorManager) -> int:
        """Tokens of one chunk."""
        return manager.chunk_bytes // manager.spec.plane_token_bytes

    def random_like(self, tensor: torch.Tensor) -> torch.Tensor:
        values = torch.rand(tensor.shape, generator=self.generator, device=self.device)
        return values.to(tensor.dtype)

    def synchronize(self) -> None:
        """Wait for all kernels; on CUDA this also reports their faults."""
        if self.is_cuda:
            torch.cuda.synchronize()

    @property
    def stream(self) -> int:
        """Handle of the current stream."""
        return torch.cuda.current_stream().cuda_stream if self.is_cuda else 0

    @contextmanager
    def step(self, manager: VTensorManager) -> Iterator[None]:
        """Kernels issued inside are the manager's to wait for, not ours."""
        manager.begin_step()
        try:
            yield
        finally:
            manager.end_step(self.stream)

    def busy(self, milliseconds: float) -> None:
        """Keep the current stream busy, so that what is issued next has not run yet."""
        if self.is_cuda:
            torch.cuda._sleep(int(milliseconds * 1.5e6))  # cycles, at about 1.5 GHz

    # ------------------------------------------------------------------------ the device's memory

    def free_bytes(self) -> int:
        """Of the device, now."""
        return int(torch.cuda.mem_get_info()[0])

    def occupy(self, num_bytes: int) -> Callable[[], None]:
        """Takes memory of the device; returns what gives it back."""
        ballast = [torch.empty(num_bytes, dtype=torch.uint8, device=self.device)]

        def give_back() -> None:
            ballast.clear()
            torch.cuda.empty_cache()

        return give_back


class StandinKit(Kit):
    """The CUDA driver over the stand-in: torch sees its device memory as the host memory it is."""

    def __init__(self, standin: StandinCuda, capacity_bytes: int = 256 << 20) -> None:
        super().__init__("cpu")
        self._standin = standin
        self._capacity_bytes = capacity_bytes
        standin.set_capacity(capacity_bytes)

    def manager(self, spec: KVSpec = SPEC, *, chunks: int = 64, **options: Any) -> VTensorManager:
        self.device = "cuda"
        try:
            return super().manager(spec, chunks=chunks, **{"from_dlpack": host_tensor, **options})
        finally:
            self.device = "cpu"

    def free_bytes(self) -> int:
        return self._capacity_bytes - self._standin.live("bytes")

    def occupy(self, num_bytes: int) -> Callable[[], None]:
        self._standin.set_capacity(self._capacity_bytes - num_bytes)
        return lambda: self._standin.set_capacity(self._capacity_bytes)


def host_tensor(exported: Any) -> torch.Tensor:
    """Of what DLPack calls device memory: right only for the stand-in."""
    tensor = torch.from_numpy(dlpack.host_array(exported))
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor


class Arena:
    """The K and V of all slots, as a kernel sees them; made once, as an engine does."""

    def __init__(self, manager: VTensorManager) -> None:
        layers = range(manager.spec.num_layers)
        self.planes = [which(layer) for layer in layers for which in (manager.k, manager.v)]

    def write(self, vtensor: VTensor, start: int, end: int, kit: Kit) -> torch.Tensor:
        """Random KV for tokens [start, end); returns it, [planes, tokens, heads, dim]."""
        values = torch.stack(
            [kit.random_like(plane[vtensor.slot, start:end]) for plane in self.planes]
        )
        self.store(vtensor, start, values)
        return values

    def store(self, vtensor: VTensor, start: int, values: torch.Tensor) -> None:
        """Write `values`, [planes, tokens, heads, dim], from token `start` on."""
        for plane, value in zip(self.planes, values, strict=True):
            plane[vtensor.slot, start : start + values.shape[1]] = value

    def read(self, vtensor: VTensor, start: int, end: int) -> torch.Tensor:
        """A copy of the KV of tokens [start, end), made by kernels."""
        return torch.stack([plane[vtensor.slot, start:end] for plane in self.planes])


def with_layout(layers_per_plane: int) -> KVSpec:
    """SPEC in another layout."""
    return dataclasses.replace(SPEC, layers_per_plane=layers_per_plane)
