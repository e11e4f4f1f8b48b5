"""What a long request holds where most layers have a window: little more than they read."""

from __future__ import annotations

from flexinfer.vtensor import KVGroup, KVSpec, VTensorManager


def test_a_model_like_gemma_3_holds_little_more_than_its_windows() -> None:
    """32K tokens, five layers with a window of 1,024 to one that keeps all, chunks by default."""
    near = KVGroup(tuple(range(5)), 16, 128, 128, "bfloat16", window=1024, layers_per_plane=1)
    full = KVGroup((5,), 16, 128, 128, "bfloat16", layers_per_plane=1)
    spec = KVSpec.of_groups([near, full], max_seq_len=33_000)
    with VTensorManager(spec, "sim", max_requests=1, memory_budget="8GiB") as manager:
        vtensor = manager.create()
        layer_bytes = spec.bytes_per_token // 6
        for length in [*range(512, 32_001, 512), *range(32_001, 32_769, 16)]:
            step = length - vtensor.num_tokens
            vtensor.extend(length)
            held = layer_bytes * (length + 5 * min(length, 1024 + step))
            if length > 8192:
                assert manager.stats().mapped_bytes <= 1.1 * held
            manager.forget([vtensor], [length])
            manager.drain()
        formula = layer_bytes * (32_769 + 5 * 1024)
        assert formula < manager.stats().mapped_bytes + layer_bytes * 256
        assert manager.stats().mapped_bytes <= 1.1 * formula


def test_of_gemma_3_27b_in_chunks_of_2_mib_too() -> None:
    """52 layers with a window and 10 without, just after a prompt of two windows: the worst."""
    near = KVGroup(tuple(range(52)), 16, 128, 128, "bfloat16", window=1024)
    full = KVGroup(tuple(range(52, 62)), 16, 128, 128, "bfloat16")
    spec = KVSpec.of_groups([near, full], max_seq_len=33_000)
    options = {"memory_budget": "8GiB", "chunk_bytes": 2 << 20, "step_tokens": 512}
    with VTensorManager(spec, "sim", max_requests=1, **options) as manager:  # type: ignore[arg-type]
        vtensor = manager.create()
        for length in [*range(512, 2048, 512), *range(2048, 2560)]:
            vtensor.extend(length)
            manager.forget([vtensor], [length])
            manager.drain()
            formula = near.layer_bytes * (52 * min(length, 1024) + 10 * length)
            assert manager.stats().mapped_bytes <= 1.1 * formula or length <= 2048
        assert manager.stats().mapped_bytes <= manager.bytes_for(length)
