"""Which device is taken, what of a GPU the KV cache gets, and what is refused before loading."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import LLMEngine
from flexinfer.config import EngineConfig
from flexinfer.memory.budget import HEADROOM_BYTES, choose_kv_memory
from flexinfer.memory.kv_setup import (
    _reservation_advice,
    check_kv_sizes,
    make_manager,
    whole_slot_tokens,
)
from flexinfer.models.describe import warm_up
from flexinfer.models.loading import load_model
from flexinfer.runtime.device import choose_device
from flexinfer.vtensor import KVSpec
from flexinfer.vtensor.settings import shorten_rows
from helpers.tiny_models import make_model

GIB = 1 << 30


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_a_gpu_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 1)
    assert choose_device(None) == "cuda"
    assert choose_device("cpu") == "cpu"
    pretend_gpus(monkeypatch, 0)
    assert choose_device(None) == "cpu"


def test_a_loaded_model_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 1)
    assert choose_device(None, is_loaded=True) is None


@pytest.mark.parametrize(
    ("wanted", "count", "message"),
    [
        ("cuda", 0, r"device is 'cuda', but torch .* sees no GPU"),
        ("cuda:1", 1, "there is only cuda:0$"),
        ("cuda:4", 3, "there is only cuda:0 to cuda:2"),
        ("tpu", 1, "device must be 'cpu', 'cuda' or 'cuda:N', got 'tpu'"),
        ("cuda:-1", 1, "device must be"),
    ],
)
def test_devices_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, wanted: str, count: int, message: str
) -> None:
    pretend_gpus(monkeypatch, count)
    with pytest.raises(ValueError, match=message):
        choose_device(wanted)


def test_the_device_is_checked_before_weights_are_read(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"sees no GPU|there is only"):
        LLMEngine.from_engine_args(EngineConfig(model=str(tmp_path / "none"), device="cuda:99"))


def test_kv_gets_the_rest_of_the_gpus_share() -> None:
    memory = choose_kv_memory(None, 60 * GIB, gpu_bytes=80 * GIB, gpu_memory_utilization=0.9)
    assert memory.budget_bytes == 52 * GIB
    assert "90% of the GPU's 80.0 GiB, less 20.0 GiB taken" in str(memory)
    assert choose_kv_memory("1GiB", 60 * GIB, gpu_bytes=80 * GIB).budget_bytes == GIB


def test_a_gpu_without_room_for_kv_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"70.0 GiB of 80.0 GiB are taken.*utilization is 0.85"):
        choose_kv_memory(None, 10 * GIB, gpu_bytes=80 * GIB, gpu_memory_utilization=0.85)


def test_kv_leaves_the_headroom_that_the_driver_keeps() -> None:
    """With less the driver gives nothing: a server started, and refused all requests."""
    text = Path(__file__).parents[3] / "cpp/vtensor/driver/host/host_driver.h"
    assert f"reserve_headroom_bytes = size_t{{{HEADROOM_BYTES >> 20}}} << 20" in text.read_text()
    for wanted in (None, "1MiB"):
        with pytest.raises(ValueError, match=r"255.0 MiB are available.*256.0 MiB .* headroom"):
            choose_kv_memory(wanted, 255 << 20)
    least = choose_kv_memory(None, 300 << 20)
    assert least.budget_bytes == 44 << 20
    assert "all but 256.0 MiB of headroom of 300.0 MiB available" in str(least)
    assert choose_kv_memory(None, GIB).budget_bytes == GIB // 2


@pytest.mark.parametrize(
    ("gpu_bytes", "says"),
    [
        (None, "24.0 GiB that are available (the least of free memory and what the container's"),
        (80 * GIB, "24.0 GiB that are available: memory is mapped as it is needed"),
    ],
)
def test_a_budget_beyond_what_there_is_is_warned_of(
    gpu_bytes: int | None, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    for wanted in ("24GiB", "900GiB"):
        memory = choose_kv_memory(wanted, 24 * GIB, gpu_bytes=gpu_bytes)
        assert memory.reason == "as asked for"
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert f"the KV budget of 900.0 GiB is more than the {says}" in warning.getMessage()


def test_where_addresses_are_limited_the_advice_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (3 * GIB, 3 * GIB))
    assert "may have 3.0 GiB of addresses" in _reservation_advice()
    assert "ulimit -v unlimited" in _reservation_advice()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert _reservation_advice() == "lower max_model_len or max_num_seqs"


def test_where_files_are_limited_kv_memory_on_the_host_is_refused_before_any_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is a file in memory; the driver said EFBIG after the model was loaded."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    with pytest.raises(ValueError, match=r"may have 1\.0 MiB.*ulimit -f unlimited"):
        check_kv_sizes(EngineConfig(model="x", device="cpu"))
    check_kv_sizes(EngineConfig(model="x", device="cuda"))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    check_kv_sizes(EngineConfig(model="x", device="cpu"))


@pytest.mark.parametrize("part", [0, 1.5, -0.1, True, "0.9"])
def test_impossible_shares_of_a_gpu(part: Any) -> None:
    with pytest.raises(ValueError, match="gpu_memory_utilization must be above 0 and at most 1"):
        EngineConfig(model="x", gpu_memory_utilization=part)


@pytest.mark.parametrize("num_layers", [28, 30, 32, 61])
@pytest.mark.parametrize("layers_per_plane", [1, None])
@pytest.mark.parametrize("max_seq_len", [1, 1000, 32768])
def test_a_slot_of_whole_chunks_is_whole_tokens(
    num_layers: int, layers_per_plane: int | None, max_seq_len: int
) -> None:
    spec = KVSpec(num_layers, 5, 96, "bfloat16", max_seq_len, layers_per_plane)
    chunk_bytes = 2 << 20
    num_tokens = whole_slot_tokens(spec, chunk_bytes)
    assert num_tokens >= max_seq_len
    assert num_tokens * spec.plane_token_bytes % chunk_bytes == 0
    assert num_tokens - max_seq_len < chunk_bytes


def test_a_slot_on_a_gpu_is_whole_tokens_of_the_rows_that_the_manager_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gemma-3-4B: room for a 30th layer with a window makes rows of 102 tokens in place of 512."""
    layers = [
        SimpleNamespace(
            owner=idx, window=None if idx % 6 == 5 else 1024, chunk=None, num_kv_heads=4,
            key_dim=256, value_dim=256, is_latent=False,
        )
        for idx in range(34)
    ]  # fmt: skip
    loaded = SimpleNamespace(
        layers=layers, device=torch.device("cuda"), dtype=torch.bfloat16, is_indexed=False, state=()
    )
    opened: list[KVSpec] = []
    monkeypatch.setattr("flexinfer.vtensor.VTensorManager", lambda spec, **_: opened.append(spec))
    memory = choose_kv_memory(None, 60 * GIB, gpu_bytes=80 * GIB, gpu_memory_utilization=0.9)
    make_manager(EngineConfig(model="x"), loaded, 32_768, memory)  # type: ignore[arg-type]
    (spec,) = opened
    assert (2 << 20) // spec.plane_token_bytes == 102
    assert shorten_rows(spec, 2 << 20) is spec
    assert spec.max_seq_len * spec.plane_token_bytes % (2 << 20) == 0


def test_the_warm_up_runs_the_largest_step() -> None:
    loaded = load_model(make_model("gemma2"))
    seen: list[tuple[int, int]] = []

    def watch(module: Any, args: Any, kwargs: Any) -> None:
        assert int(kwargs["position_ids"].max()) < 24
        seen.append((kwargs["input_ids"].shape[1], len(kwargs["logits_to_keep"])))

    limits = EngineConfig(model="x", max_num_seqs=3, max_num_batched_tokens=50)
    with torch.no_grad():
        handle = loaded.model.register_forward_pre_hook(watch, with_kwargs=True)
        warm_up(loaded, limits.scheduler_config(24), 24)
        handle.remove()
    assert seen == [(50, 3)]
