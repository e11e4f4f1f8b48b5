"""Of a weight by which other code multiplies, a row's product hangs on no other row."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.nn import functional

from flexinfer.layers import host_linear
from flexinfer.layers.fuse import fuse_layers
from flexinfer.layers.rowwise_weight import RowwiseWeight, make_rowwise
from flexinfer.runtime.kernels import DTYPES as DTYPES_OF_KERNELS
from flexinfer.runtime.kernels import available_isas
from helpers.each_isa import each_isa
from helpers.every_architecture import tiny_model_or_skip

isa = each_isa(host_linear, available_isas())
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def every_isa_is_taken(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    """Models take torch's products on CPUs where the kernel is slower."""
    monkeypatch.setattr(host_linear, "ISAS", (isa,))


def hangs_on_rows(dtype: Any) -> bool:
    """As of every layer: see test_host_linear.py."""
    return not host_linear.kernel().has_gates(DTYPES_OF_KERNELS[dtype], 96)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("widens", [False, True])
def test_linear_is_that_of_torch(isa: str, dtype: Any, has_bias: bool, widens: bool) -> None:
    torch.manual_seed(0)
    plain = torch.randn(60, 96).to(dtype)
    weight, x = RowwiseWeight(plain), torch.randn(2, 70, 96).to(dtype)
    bias = torch.randn(60).to(dtype) if has_bias else None
    if widens:  # as routers write it
        x, bias = x.float(), None if bias is None else bias.float()
        found = functional.linear(x, weight.type(torch.float32), bias)
    else:
        found = functional.linear(x, weight, bias)
    expected = functional.linear(
        x.double(), plain.double(), None if bias is None else bias.double()
    )
    bound = 1e-4 if x.dtype == torch.float32 else 0.15
    torch.testing.assert_close(found.double(), expected, atol=bound, rtol=0.01)
    assert type(found) is torch.Tensor
    if not hangs_on_rows(x.dtype):
        used = weight.float() if widens else weight
        for rows in (x[0, :1], x[0, :7], x[0, 3:60]):
            first = 3 if len(rows) == 57 else 0
            alone = functional.linear(rows, used, bias)
            assert torch.equal(alone, found[0, first : first + len(rows)])


def test_all_else_sees_a_parameter() -> None:
    plain = torch.randn(16, 32).bfloat16()
    weight = RowwiseWeight(plain)
    assert isinstance(weight, nn.Parameter)
    assert weight.shape == (16, 32)
    assert weight.dtype == torch.bfloat16
    for found, expected in (
        (weight + 1, plain + 1),
        (weight.t(), plain.t()),
        (weight[3], plain[3]),
        (weight.double(), plain.double()),
        (weight.data, plain),
        (torch.cat([weight, weight]), torch.cat([plain, plain])),
        (functional.linear(torch.ones(2, 3), torch.ones(4, 3), weight[:4, 0].float()), None),
    ):
        assert type(found) is torch.Tensor
        assert expected is None or torch.equal(found, expected)
    assert weight.float() is weight.type(torch.float32) is weight.to(torch.float32)
    assert weight.float().float() is weight.float()
    assert torch.equal(copy.deepcopy(weight), plain)
    with pytest.raises(RuntimeError, match="dtype"):
        functional.linear(torch.ones(2, 32), weight)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmoe", "longcat_flash", "gpt_oss"])
def test_a_token_of_a_mixture_hangs_on_no_other(isa: str, kind: str) -> None:
    """Of those whose code has no sigmoid: torch's hangs on where in memory a number stands."""
    if hangs_on_rows(torch.float32):
        pytest.skip("as of every layer here: few rows are not split")
    model = copy.deepcopy(tiny_model_or_skip(kind))
    fuse_layers(model)
    rowwise = {n for n, w in model.named_parameters() if type(w) is RowwiseWeight}
    assert rowwise
    torch.manual_seed(0)
    path = sorted(rowwise)[0].rpartition(".")[0].rpartition(".")[0]  # what has the router
    block, x = model.get_submodule(path), torch.randn(1, 90, model.config.hidden_size)
    with torch.inference_mode():
        whole = in_whole(block(x))
        for first, end in ((0, 1), (5, 12), (20, 80)):
            part = in_whole(block(x[:, first:end]))
            for found, expected in zip(part, whole, strict=True):
                assert torch.equal(found, expected[first:end])


def in_whole(output: Any) -> list[torch.Tensor]:
    """What a block gives, by tokens."""
    outputs = output if isinstance(output, tuple) else (output,)
    return [part.flatten(0, -2) for part in outputs]


class Multiplies(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, width), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight)


def rowwise(model: nn.Module) -> int:
    uses = Counter(w.data_ptr() for m in model.modules() for w in m.parameters(recurse=False))
    return make_rowwise(model, uses)


def test_what_is_looked_up_shared_or_of_another_width_stays() -> None:
    model = nn.ModuleDict(
        {"a": Multiplies(), "b": Multiplies(), "c": Multiplies(width=40), "d": nn.Embedding(9, 32)}
    )
    model["b"].weight = model["a"].weight
    assert rowwise(model) == 0
    model["b"] = Multiplies()
    assert rowwise(model) == 2
    assert rowwise(model) == 0
    assert type(model["a"].weight) is RowwiseWeight
