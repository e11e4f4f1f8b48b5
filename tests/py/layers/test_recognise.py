"""A module is known by its code: by all of it, and by nothing else."""

from __future__ import annotations

from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import transformers as tf
from torch import nn
from transformers.models.llama import modeling_llama

from flexinfer.layers.attention import FusedAttention, fuse_attention, random_positions
from flexinfer.layers.fuse import fuse_layers
from flexinfer.layers.known import ATTENTIONS, DECODER_LAYERS, NEWEST_TRANSFORMERS, NORMS
from flexinfer.layers.recognise import is_known, modules_read_by, weights_read_by

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}


class Norm(nn.Module):
    """Llama's, under another name."""

    def __init__(self, limit: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.variance_epsilon = 1e-6
        self.limit = limit
        self.dropout = 0.1

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The docstring, the annotations: none of it matters."""
        input_dtype: Any = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class ClampingNorm(Norm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        if self.limit is not None:
            hidden_states = hidden_states.clamp(-self.limit, self.limit)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class DroppingNorm(Norm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = nn.functional.dropout(hidden_states, p=self.dropout, training=self.training)
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class DataDependentNorm(Norm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        if hidden_states.abs().max() > 100:
            hidden_states = hidden_states / 100
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


@pytest.mark.parametrize(
    ("module", "known"),
    [
        (Norm(), True),
        (ClampingNorm(None), True),
        (ClampingNorm(8.0), False),
        (DroppingNorm().eval(), True),
        (DroppingNorm().train(), False),
        (DataDependentNorm(), False),
        (nn.LayerNorm(32), False),
        (nn.Identity(), False),
    ],
)
def test_only_the_code_decides(module: Any, known: bool) -> None:
    assert is_known(module, NORMS) is known


@pytest.fixture
def attention_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str, told: str
) -> Any:
    """Llama's, with this name of its cache, which is told so much."""
    forward = ATTENTIONS[0].replace(", cache,", ", cache=None,").replace("cache", argument)
    source = (
        "import torch\n"
        "from transformers.models.llama.modeling_llama import (\n"
        "    ALL_ATTENTION_FUNCTIONS, LlamaAttention, eager_attention_forward\n"
        f")\n{forward.replace('self.layer_idx)', told)}\n"
        "class Attention(LlamaAttention):\n    pass\nAttention.forward = forward\n"
    )
    name = f"attention_with_{argument}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    return import_module(name).Attention


@pytest.mark.parametrize(
    ("argument", "told"),
    [("past_key_values", "self.layer_idx)"), ("cache", "self.layer_idx, kwargs=kwargs)")],
    ids=["5.23", "5.24"],
)
@torch.inference_mode()
def test_a_cache_may_have_the_name_of_old_and_of_new_transformers(
    attention_class: Any, argument: str
) -> None:
    """And a fused module keeps to it: keys and values go through the cache."""
    config = tf.LlamaConfig(**SMALL)
    config._attn_implementation = "sdpa"
    module = attention_class(config, 0).eval()
    fused = fuse_attention(module)
    assert isinstance(fused, FusedAttention)
    x, positions = torch.randn(1, 3, 64), random_positions(module, torch.float32)
    caches = [tf.DynamicCache(config=config) for _ in range(2)]
    for part in (slice(0, 2), slice(2, 3)):
        angles = tuple(angle[:, part] for angle in positions)
        mask = torch.ones(x[:, part].shape[1], part.stop, dtype=torch.bool).tril(part.start)
        outputs = [
            layer(x[:, part], angles, mask[None, None], **{argument: cache})[0]
            for layer, cache in zip((module, fused), caches, strict=True)
        ]
        torch.testing.assert_close(*outputs)
    assert [cache.get_seq_length() for cache in caches] == [3, 3]


def test_what_was_read_is_of_the_version_that_is_tested(root: Path) -> None:
    """A newer one is to be read before it stands in constraints.txt."""
    release = ".".join(map(str, NEWEST_TRANSFORMERS))
    assert f"\ntransformers=={release}." in (root / "constraints.txt").read_text()
    layer = modeling_llama.LlamaDecoderLayer(tf.LlamaConfig(**SMALL), 0)
    assert is_known(layer, DECODER_LAYERS)
    assert is_known(layer.self_attn, ATTENTIONS)


def test_modules_of_one_class_may_differ() -> None:
    assert [is_known(ClampingNorm(limit), NORMS) for limit in (None, 8.0, None)] == [1, 0, 1]


def test_a_forward_of_its_own_and_a_hook_are_seen() -> None:
    patched, watched = Norm(), Norm()
    patched.forward = lambda hidden_states: hidden_states  # type: ignore[method-assign]
    watched.register_forward_hook(lambda *_: None)
    assert not is_known(patched, NORMS)
    assert not is_known(watched, NORMS)


def clamped(function: Any) -> Any:
    """Around it, as a user may put it there: no trial's input reaches the clamp."""

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        return output.clamp(-1e6, 1e6) if isinstance(output, torch.Tensor) else output

    return wrapper


def test_what_somebody_has_put_around_code_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tf.AutoModelForCausalLM.from_config(tf.LlamaConfig(**SMALL)).eval()
    attention = model.model.layers[0].self_attn
    for known in (True, False, True):  # whatever has been looked at before
        assert is_known(Norm(), NORMS) is known
        assert is_known(attention, ATTENTIONS) is known
        if known:
            monkeypatch.setattr(Norm, "forward", clamped(Norm.forward))
            rotate = clamped(modeling_llama.apply_rotary_pos_emb)
            monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotate)
        else:
            monkeypatch.undo()


def test_a_class_that_has_got_other_code_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_known(Norm(), NORMS)
    monkeypatch.setattr(Norm, "forward", DataDependentNorm.forward)
    assert not is_known(Norm(), NORMS)


def test_what_the_forward_calls_belongs_to_its_code() -> None:
    """ERNIE 4.5 has Llama's attention, but its rotary embedding turns pairs of neighbours."""
    ernie = tf.AutoModelForCausalLM.from_config(tf.Ernie4_5Config(**SMALL))
    llama = tf.AutoModelForCausalLM.from_config(tf.LlamaConfig(**SMALL))
    assert is_known(llama.model.layers[0].self_attn.eval(), ATTENTIONS)
    assert not is_known(ernie.model.layers[0].self_attn.eval(), ATTENTIONS)


class Reads(nn.Module):
    """Multiplies by one child's weight itself, and asks the others' for something else or never."""

    def __init__(self, slow: bool = False) -> None:
        super().__init__()
        self.read, self.asked, self.called, self.idle = (nn.Linear(32, 32) for _ in range(4))
        self.slow = slow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.linear(x.float(), self.read.weight.type(torch.float32))
        x = self.called(x.to(self.asked.weight.dtype).to(self.asked.weight.device))
        if self.slow:
            x = x @ self.idle.weight.t()
        return x


class ReadsInTraining(Reads):
    """As Mamba-2 does with its last layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad and self.training:
            return x @ self.read.weight.t()
        return self.read(x)


def test_a_condition_is_decided_by_the_part_of_it_that_the_module_says() -> None:
    assert weights_read_by(ReadsInTraining()) == {"read"}
    assert weights_read_by(ReadsInTraining().eval()) == frozenset()


class ReadsBeyondALimit(Reads):
    """What it has no limit for is not compared where the first part is false."""

    limit: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad and self.limit > 3:
            return x @ self.read.weight.t()
        return self.read(x)


def test_a_part_that_this_module_cannot_say_decides_nothing() -> None:
    """It raised TypeError, though it may never be reached."""
    assert weights_read_by(ReadsBeyondALimit()) == {"read"}


def test_children_whose_weights_are_read_are_told() -> None:
    assert weights_read_by(Reads()) == {"read"}
    assert weights_read_by(Reads(slow=True)) == {"read", "idle"}
    assert weights_read_by(nn.Linear(32, 32)) == frozenset()
    reads = Reads()
    fuse_layers(reads)
    assert type(reads.read) is nn.Linear


class ReadsBelow(nn.Module):
    """As Gemma 4 reads the embedding of its language model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Reads()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        asked = self.inner.asked.weight.dtype
        return x.to(asked) + self.inner.called.weight[0] + self.inner.none_there.weight


def test_so_are_those_further_below() -> None:
    outer = ReadsBelow()
    assert weights_read_by(outer) == {"inner.called", "inner.none_there"}
    assert modules_read_by(outer) == [outer.inner.called]
    assert modules_read_by(outer.inner) == [outer.inner.read]
