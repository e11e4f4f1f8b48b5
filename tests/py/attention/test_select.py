"""Which attention a GPU gets: the first kernel that gives right results, and why not another.

References with the real functions' demands stand in their place: see flash_reference.py.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import attention
from flexinfer.attention import select as choose
from flexinfer.attention.base import AttentionMetadata, LayerKV
from flexinfer.attention.flash import FlashAttention
from flexinfer.attention.flash_kernels import DecodeStep, Flash2, Flash3, Scores
from flexinfer.attention.sdpa import SdpaAttention
from flexinfer.attention.torch_flash import TorchFlash
from helpers.flash_kit import half_layers, make_layers
from helpers.flash_reference import FlashAttn2, FlashAttn3, TorchOperator

torch.set_num_threads(1)


def candidate(name: str, load: Callable[[], Any]) -> choose.Candidate:
    return choose.Candidate(name, load)


def fail(error: Exception) -> Callable[[], Any]:
    def load() -> Any:
        raise error

    return load


def good2() -> Flash2:
    return Flash2(FlashAttn2(), "2.8.3")


def good3() -> Flash3:
    return Flash3(FlashAttn3(), "3.0")


def test_the_first_kernel_that_works_is_taken_for_each_job() -> None:
    backend, reasons = choose.choose(half_layers(), [candidate("a", good3), candidate("b", good2)])
    assert isinstance(backend, FlashAttention)
    assert backend.name == "decode: flash-attn 2.8.3, prefill: flash-attn 3.0"
    assert reasons == []


def test_torch_alone_does_both_jobs() -> None:
    load = candidate("torch", lambda: TorchFlash(TorchOperator()))
    backend, reasons = choose.choose(half_layers(), [load])
    assert isinstance(backend, FlashAttention)
    assert not reasons


class WrongResults(FlashAttn2):
    @wraps(FlashAttn2.flash_attn_func)
    def flash_attn_func(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return FlashAttn2.flash_attn_func(self, *args, **{**kwargs, "causal": False})


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (fail(ModuleNotFoundError("No module", name="a")), "a is not installed"),
        (
            fail(ModuleNotFoundError("No module", name="cutlass")),
            "a needs cutlass, which is not installed",
        ),
        (
            fail(ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c10\nmore")),
            "a cannot be used: flash_attn_2_cuda.so: undefined symbol: _ZN3c10",
        ),
        (lambda: Flash2(ModuleType("a")), "a cannot be used: module 'a' has no attribute"),
    ],
)
def test_what_can_not_be_loaded_is_named_with_the_reason(
    load: Callable[[], Any], reason: str
) -> None:
    backend, reasons = choose.choose(half_layers(), [candidate("a", load)])
    assert isinstance(backend, SdpaAttention)
    assert len(reasons) == 1
    assert reasons[0].startswith(reason)


def test_a_build_for_another_gpu_is_found_out_before_any_request() -> None:
    class OtherGpu(FlashAttn2):
        @wraps(FlashAttn2.flash_attn_varlen_func)
        def flash_attn_varlen_func(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise RuntimeError("CUDA error: no kernel image is available for execution\nhint")

        @wraps(FlashAttn2.flash_attn_with_kvcache)
        def flash_attn_with_kvcache(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise RuntimeError("CUDA error: no kernel image is available for execution\nhint")

    backend, reasons = choose.choose(
        half_layers(), [candidate("a", lambda: Flash2(OtherGpu())), candidate("b", good2)]
    )
    text = "a does not work here: CUDA error: no kernel image is available for execution"
    assert isinstance(backend, FlashAttention)
    assert "2.8.3" in backend.name
    assert reasons == [text, text]


def test_a_kernel_with_wrong_results_is_not_used() -> None:
    backend, reasons = choose.choose(
        half_layers(), [candidate("a", lambda: Flash2(WrongResults())), candidate("b", good3)]
    )
    assert isinstance(backend, FlashAttention)
    assert backend.name == "decode: flash-attn 2, prefill: flash-attn 3.0"
    assert reasons[0].startswith("a gives wrong results here (off by ")


def test_the_trial_sees_whether_new_keys_are_stored() -> None:
    class Forgets(TorchFlash):
        def decode(
            self,
            layer: LayerKV,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            metadata: AttentionMetadata,
            step: DecodeStep,
            scores: Scores,
        ) -> torch.Tensor:
            copy = LayerKV(layer.k.clone(), layer.v.clone())
            return super().decode(copy, query, key, value, metadata, step, scores)

    error = choose.try_decode(Forgets(TorchOperator()), half_layers()[0].k)
    assert error > 10 * choose.TOLERANCE


@pytest.mark.parametrize(
    ("dtype", "head_dim", "reason"),
    [
        (torch.float32, 64, "not float32"),
        (torch.bfloat16, 260, "not 260"),
        (torch.float16, 12, "not 12"),
        (torch.bfloat16, 256, None),
    ],
)
def test_head_sizes_and_dtypes_that_no_kernel_knows(
    dtype: torch.dtype, head_dim: int, reason: str | None
) -> None:
    found = choose.unsupported(torch.empty(1, 1, 1, head_dim, dtype=dtype))
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(
    ("capability", "names"),
    [
        ((8, 0), ["flash_attn"]),
        ((9, 0), ["flash_attn_interface", "flash_attn"]),
        ((10, 0), ["flash_attn.cute", "flash_attn"]),
    ],
)
def test_packages_are_tried_as_the_gpu_deserves(
    capability: tuple[int, int], names: list[str]
) -> None:
    assert [found.name for found in choose.packages(capability)] == names


def test_an_installed_module_is_wrapped_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flash_attn")
    reference = FlashAttn2()
    for name in ("flash_attn_with_kvcache", "flash_attn_func", "flash_attn_varlen_func"):
        setattr(module, name, getattr(reference, name))
    module.__version__ = "2.8.3"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    backend, reasons = choose.choose(half_layers(), choose.packages((8, 0)))
    assert isinstance(backend, FlashAttention)
    assert not reasons
    assert backend.name == "decode: flash-attn 2.8.3, prefill: flash-attn 2.8.3"


def test_a_version_without_softcap_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_attn_with_kvcache(
        q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, cache_batch_idx: Any
    ) -> None: ...

    module = ModuleType("flash_attn")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    _, reasons = choose.choose(half_layers(), choose.packages((8, 0)))
    assert reasons == [
        "flash_attn cannot be used: flash_attn_with_kvcache has no argument softcap: too old"
    ]


def test_flash_on_a_cpu_says_what_is_taken_instead(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        backend = attention.create("flash", make_layers(1))
    assert not isinstance(backend, FlashAttention)
    assert 'needs a CUDA device: "auto" is taken' in caplog.text


@pytest.mark.parametrize(
    ("name", "known"), [("FLASH_ATTN", "flash"), ("torch_sdpa", "sdpa"), ("Auto", "auto")]
)
def test_vllms_names_are_known(name: str, known: str) -> None:
    assert attention.check_name(name) == known


def test_calls_that_share_are_tried_before_they_are_used() -> None:
    class WrongLse(FlashAttn2):
        @wraps(FlashAttn2.flash_attn_with_kvcache)
        def flash_attn_with_kvcache(self, *args: Any, **kwargs: Any) -> Any:
            result = FlashAttn2.flash_attn_with_kvcache(self, *args, **kwargs)
            return (result[0], 2 * result[1]) if isinstance(result, tuple) else result

    backend, reasons = choose.choose(half_layers(), [candidate("a", good2)])
    assert backend.sharing_cost is not None
    assert not reasons
    backend, reasons = choose.choose(half_layers(), [candidate("a", lambda: Flash2(WrongLse()))])
    assert isinstance(backend, FlashAttention)
    assert backend.sharing_cost is None
    assert reasons[0].startswith("two-phase attention gives wrong results here (off by ")


def test_a_version_without_log_sum_exp_decodes_but_does_not_share() -> None:
    class Older(FlashAttn2):
        def flash_attn_with_kvcache(  # type: ignore[override]
            self, q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, cache_seqlens: Any,
            cache_batch_idx: Any, softmax_scale: float, causal: bool, window_size: tuple[int, int],
            softcap: float,
        ) -> Any:  # fmt: skip
            return FlashAttn2.flash_attn_with_kvcache(
                self, q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens,
                cache_batch_idx=cache_batch_idx, softmax_scale=softmax_scale, causal=causal,
                window_size=window_size, softcap=softcap,
            )  # fmt: skip

    backend, reasons = choose.choose(half_layers(), [candidate("a", lambda: Flash2(Older()))])
    assert isinstance(backend, FlashAttention)
    assert backend.sharing_cost is None
    assert reasons == [
        "two-phase attention cannot be used: flash_attn_with_kvcache has no argument "
        "return_softmax_lse: too old"
    ]
