"""Decode steps under CUDA's stream capture, on tensors that only pretend to be on a GPU.

torch's fake tensors know shapes and devices and have no values: whatever asks the GPU for a value
raises here, as it would end a capture; a copy from the host, whose contents a graph would repeat
for ever, is refused by `Strict`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.initialization import no_init_weights
from transformers.models.aria import modeling_aria

from flexinfer import UnsupportedModelError
from flexinfer.attention.base import LayerKV
from flexinfer.attention.flash import FlashAttention
from flexinfer.attention.flash_kernels import Flash2, Flash3
from flexinfer.attention.hook import NAMES, use_attention
from flexinfer.attention.token_index import index_tokens
from flexinfer.attention.torch_flash import TorchFlash
from flexinfer.models.checks import causal_class
from flexinfer.models.probe import probe
from flexinfer.runner.cuda_graphs import DecodeGraphs
from flexinfer.runner.inputs import StepInputs
from helpers.every_architecture import MODEL_TYPES, tiny_config, tiny_model
from helpers.tiny_models import CONFIGS

HAS_CUDA = torch.version.cuda is not None
DEVICE = torch.device("cuda", 0) if HAS_CUDA else torch.device("meta")
"""torch's CPU build cannot index what pretends to be CUDA's: tensors without a device stand in."""
MAX_SEQ_LEN = 256
COPIES = ("aten::_to_copy", "aten::copy_", "aten::_copy_from")
ASKS_THE_GPU = {"dbrx", "gemma3n", "gemma3n_text", "jetmoe", "xmod"}
"""Their code asks which rows an expert, or a language, gets, or copies a number of the config."""
if hasattr(modeling_aria, "sequential_experts_gemm"):  # as in transformers 5.17
    ASKS_THE_GPU.add("aria_text")
NO_SOURCE = {"gpt_oss": "attention sinks", "gemma2": "soft-capped scores"}


@contextmanager
def pretend() -> Iterator[None]:
    """An H100, for those who ask the driver what it can do."""
    if not HAS_CUDA:
        yield
        return
    with (
        FakeTensorMode(),
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
    ):
        yield


class Strict(TorchDispatchMode):
    """What a capture cannot record, or would record as it is now."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.name().partition(".")[0] in COPIES:
            tensors = [x for x in tree_leaves((args, output)) if isinstance(x, torch.Tensor)]
            devices = {x.device.type for x in tensors}
            assert len(devices) == 1, f"{func} copies between host and device"
        return output


class FakeRecorder:
    """`flexinfer.runner.cuda_graphs.Recorder`: records nothing, and raises what a capture would."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        function()
        with Strict():
            function()
        return lambda: None


class FakeFlash:
    """flash-attn's functions, by shape."""

    def flash_attn_with_kvcache(
        self, q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None,
        cache_seqlens: Any = None, cache_batch_idx: Any = None, softmax_scale: Any = None,
        causal: bool = False, window_size: Any = None, softcap: float = 0.0,
    ) -> torch.Tensor:  # fmt: skip
        for x in (q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx):
            assert x.device == DEVICE
        return torch.empty_like(q)

    def flash_attn_func(
        self, q: Any, k: Any, v: Any, softmax_scale: Any = None, causal: bool = False,
        window_size: Any = None, softcap: float = 0.0,
    ) -> torch.Tensor:  # fmt: skip
        return torch.empty_like(q)

    def flash_attn_varlen_func(
        self, q: Any, k: Any, v: Any, cu_seqlens_q: Any, softcap: float = 0.0, **others: Any
    ) -> torch.Tensor:
        return torch.empty_like(q)


def flash2(layers: Sequence[LayerKV]) -> FlashAttention:
    return FlashAttention(layers, Flash2(FakeFlash()), Flash3(FakeFlash()))


def torch_flash(layers: Sequence[LayerKV]) -> FlashAttention:
    kernel = TorchFlash()
    return FlashAttention(layers, kernel, kernel)


def capture(
    config: Any, make_backend: Callable[[Any], FlashAttention], model_class: Any = None
) -> DecodeGraphs:
    """The graphs of batches of 1 and 3 of this architecture, as far as they can be recorded."""
    with pretend():
        with DEVICE, no_init_weights():  # some draws ask for values
            make: Any = (model_class or causal_class(config))._from_config
            model = make(config, dtype=torch.bfloat16).eval()
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        num_layers = config.num_hidden_layers
        shape = (4, MAX_SEQ_LEN, num_layers, 2, kv_heads, head_dim)
        arena = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
        layers = [LayerKV(arena[:, :, i, 0], arena[:, :, i, 1]) for i in range(num_layers)]
        backend = make_backend(layers)

        def forward(step: StepInputs) -> torch.Tensor:
            with use_attention(model, backend, step.metadata):
                return model(
                    input_ids=step.token_ids[None],
                    position_ids=step.positions[None],
                    use_cache=False,
                    logits_to_keep=step.logits_rows,
                ).logits[0]

        graphs = DecodeGraphs(forward, FakeRecorder(), [1, 3], MAX_SEQ_LEN, DEVICE)
        with torch.inference_mode():
            graphs.capture(slot=0)
    return graphs


@pytest.mark.parametrize("make_backend", [flash2, torch_flash])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in NO_SOURCE])
def test_decodes_of_this_architecture_can_be_captured(
    name: str, make_backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        graphs = capture(CONFIGS[name](), make_backend)
    assert [record.message for record in caplog.records] == []
    assert len(graphs) == 2


@pytest.mark.parametrize(
    ("culprit", "message"),
    [
        (lambda ids: ids.sum().item(), "item|_local_scalar_dense"),
        (lambda ids: torch.tensor([1, 2]).to(DEVICE), "between host and device"),
        (lambda ids: ids.cpu(), "between host and device|copy out of meta"),
        (lambda ids: ids[ids > 0], "nonzero"),
    ],
)
def test_what_a_capture_cannot_record_is_seen(culprit: Any, message: str) -> None:
    with pretend():
        ids = torch.zeros(3, dtype=torch.int64, device=DEVICE)
        with pytest.raises(Exception, match=message):
            FakeRecorder().record(lambda: culprit(ids))


def of_several_shapes(model: Any) -> bool:
    """Whether flash kernels are not for it (attention/select.py), or not for its chunks, or the
    engine refuses it."""
    try:
        index_tokens(model, NAMES)
        calls = probe(model).values()
    except UnsupportedModelError:
        return True
    widths = {width for call in calls for width in (call.key_dim, call.value_dim)}
    heads = {call.num_kv_heads for call in calls}
    return len(widths) > 1 or len(heads) > 1 or any(call.chunk for call in calls)


@pytest.mark.slow
def test_which_architectures_cannot_be_captured(caplog: pytest.LogCaptureFixture) -> None:
    """All that the engine may run, by flash-attn; the others decode eagerly, and say so."""
    failed = {}
    for model_type in MODEL_TYPES:
        model = tiny_model(model_type)
        if model_type in ASKS_THE_GPU or model is None or of_several_shapes(model):
            continue
        caplog.clear()
        try:
            graphs = capture(tiny_config(model_type), flash2, type(model))
        except Exception as error:  # it cannot even be made, or run, so small
            failed[model_type] = f"{type(error).__name__}: {error}"
            continue
        if len(graphs) != 2:
            failed[model_type] = caplog.records[-1].message
    assert sorted(failed) == [], failed
