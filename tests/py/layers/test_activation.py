"""Activations of MLPs: what they are of transformers' functions, and how they are defined."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from transformers.activations import ACT2CLS, ACT2FN

from flexinfer.layers.activation import GELU_TANH, RELU2, SILU, Activation, activation_of

KNOWN = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GELU_TANH, "relu2": RELU2}


@pytest.mark.parametrize("name", ACT2CLS)
def test_those_of_transformers_are_known_that_compute_the_same(name: str) -> None:
    """gelu without tanh among those that are not, and that by tanh written out in Python."""
    if name == "xielu":  # asks for a file of a hub's
        return
    assert activation_of(ACT2FN[name]) == KNOWN.get(name)


@pytest.mark.parametrize(
    ("function", "known"),
    [
        (torch.nn.functional.silu, SILU),
        (torch.nn.GELU(approximate="tanh"), GELU_TANH),
        (torch.nn.GELU(), None),
        (torch.nn.functional.gelu, None),
        (torch.nn.functional.relu, None),
        (torch.nn.ReLU(), None),
        (None, None),
    ],
)
def test_torchs_own(function: Any, known: Activation | None) -> None:
    assert activation_of(function) == known


def test_one_whose_function_somebody_has_changed_is_not_known() -> None:
    changed = ACT2FN["gelu_pytorch_tanh"]
    changed.act = torch.nn.functional.gelu
    assert activation_of(changed) is None


@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
def test_gates_come_before_factors(name: str) -> None:
    outputs = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    expected = ACT2FN[name](outputs[:, :4]) * outputs[:, 4:]
    assert KNOWN[name].has_gates
    assert torch.equal(KNOWN[name](outputs), expected)


def test_without_gates_all_outputs_are_factors() -> None:
    outputs = torch.tensor([[-2.0, -0.5, 0.0, 3.0]])
    assert not RELU2.has_gates
    assert RELU2(outputs).tolist() == [[0.0, 0.0, 0.0, 9.0]]
