"""Operators of compiled models tell the compiler the truth about what the functions return."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer.layers import host_linear as panel_linear
from flexinfer.layers import operators as lean_operators
from flexinfer.layers import rows as row_ops
from flexinfer.layers.host_linear import PanelLinear
from flexinfer.layers.onednn_linear import PackedLinear, can_pack

# Shapes may change from batch to batch; autograd is not for these.
CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def opcheck(name: str, *arguments: Any) -> None:
    lean_operators.register()
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
def test_products(dtype: torch.dtype, num_rows: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(128, 64).to(dtype)
    x, residual = (torch.randn(1, num_rows, n).to(dtype) for n in (64, 128))
    if not panel_linear.supports(weight):
        pytest.skip("not this order of oneDNN's, or a CPU without AVX-512 or AMX")
    layer = PanelLinear(weight, None)
    for added in (None, residual):
        opcheck("packed_linear", x, added, layer.number, 128)
    opcheck("gated_linear", x, layer.number, 64)
    gate, up = PackedLinear.forward(layer, x).chunk(2, dim=-1)
    gated = lean_operators.gated_linear(x, layer)
    torch.testing.assert_close(gated, row_ops.silu_mul(gate, up))


def test_gates_inside_packed_products() -> None:
    """What an eager model computes, so that a compiled one rounds where it does."""
    if not can_pack(torch.bfloat16, torch.device("cpu")):
        pytest.skip("oneDNN has no bfloat16 kernels for this CPU")
    torch.manual_seed(0)
    gate, up = (PackedLinear(torch.randn(96, 64).bfloat16(), None) for _ in range(2))
    x = torch.randn(1, 7, 64).bfloat16()
    opcheck("packed_gates", x, gate.number, up.number, "swish", "", 96)
    expected = torch.nn.functional.silu(gate(x)) * up(x)
    torch.testing.assert_close(
        lean_operators.packed_gates(x, gate, up, "swish", ""), expected, atol=0.1, rtol=0.02
    )


def test_nothing_is_left_of_the_kernels_when_python_ends() -> None:
    """torch keeps operators to the very end, and with them all that they refer to."""
    program = (
        "import torch\n"
        "from flexinfer.layers import host_linear, operators, rows\n"
        "operators.register()\n"
        "kernels = host_linear.kernel(), rows.kernel()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
