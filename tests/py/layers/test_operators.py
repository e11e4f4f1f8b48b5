"""Operators of compiled models tell the compiler the truth about what the functions return."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer.layers import operators
from flexinfer.layers import rows as row_ops
from flexinfer.layers.formats import FORMATS
from flexinfer.layers.linear import WeightFormat
from flexinfer.layers.onednn_linear import can_pack

# Shapes may change from batch to batch; autograd is not for these.
CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def opcheck(name: str, *arguments: Any) -> None:
    operators.register()
    operator = getattr(torch.ops.flexinfer, name).default
    torch.library.opcheck(operator, arguments, test_utils=CHECKS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_rotary_embedding(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    opcheck("rms_norm", torch.randn(1, 5, 64).to(dtype), torch.randn(64).to(dtype), 1e-6)
    qkv = torch.randn(1, 5, 4, 32).to(dtype).transpose(1, 2)
    cos, sin = torch.randn(2, 1, 5, 32).to(dtype)
    opcheck("rotate", qkv[:, :3], cos, sin)


@pytest.mark.parametrize("num_rows", [3, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_format", [WeightFormat.ONEDNN, WeightFormat.HOST])
def test_products(weight_format: WeightFormat, dtype: torch.dtype, num_rows: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(128, 64).to(dtype)
    x, residual = (torch.randn(1, num_rows, n).to(dtype) for n in (64, 128))
    if weight_format is WeightFormat.ONEDNN and not can_pack(dtype, weight.device):
        pytest.skip("oneDNN has no kernels of this dtype for this CPU")
    layer = FORMATS[weight_format](weight, None)
    for added in (None, residual):
        opcheck("linear", x, added, layer.number, 128)
    opcheck("gated_linear", x, layer.number, 64)
    gate, up = layer(x).chunk(2, dim=-1)
    gated = torch.ops.flexinfer.gated_linear(x, layer.number, 64)
    torch.testing.assert_close(gated, row_ops.silu_mul(gate, up))
    torch.testing.assert_close(gated, layer(x, gates=True))


@pytest.mark.parametrize("shape", [(1,), (127,), (256,), (1, 128), ()])
@pytest.mark.parametrize("weight_format", [WeightFormat.PLAIN, WeightFormat.HOST])
def test_a_bias_that_kernels_would_read_beyond_is_refused(
    weight_format: WeightFormat, shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="a layer of 128 outputs got a bias of"):
        FORMATS[weight_format](torch.zeros(128, 64), torch.zeros(shape))


def test_nothing_is_left_of_the_kernels_when_python_ends() -> None:
    """torch keeps operators to the very end, and with them all that they refer to."""
    program = (
        "import torch\n"
        "from flexinfer.layers import host_linear, linear, operators, rows\n"
        "operators.register(), linear.register()\n"
        "kernels = host_linear.kernel(), rows.kernel()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
