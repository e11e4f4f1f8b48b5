"""A short program over the manager for compute-sanitizer: python sanitized.py [cpu|cuda].

It aliases, copies on write, decodes over the arena, releases under running kernels and closes;
prints "ok" at the end. Small, because memcheck makes kernels tens of times slower.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.nn.functional import scaled_dot_product_attention

from helpers.gpu_kit import Arena, Kit


def main(device: str) -> None:
    kit = Kit(device)
    manager = kit.manager(chunks=16)
    arena = Arena(manager)
    length = kit.row_tokens(manager) + 5
    tokens = list(range(length))
    first = manager.create(tokens)
    first.extend(length)
    with kit.step(manager):
        values = arena.write(first, 0, length, kit)
    first.record_prefix(tokens)
    second = manager.create([*tokens, 7])
    second.extend(length + 1)
    with kit.step(manager):
        arena.write(second, length, length + 1, kit)
        keys = arena.planes[0][second.slot, : length + 1].transpose(0, 1)[None]
        query = kit.random_like(keys[:, :, :1])
        out = scaled_dot_product_attention(query, keys, keys)
        kit.busy(5.0)
        seen = arena.read(first, 0, length)
    first.release()
    second.release()
    manager.trim()
    assert torch.equal(seen, values)
    assert bool(out.isfinite().all())
    kit.close()
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda")
