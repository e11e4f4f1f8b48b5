"""Lean layers: parts of a transformers model replaced by ones that compute the same in fewer calls.

A part is replaced only if its replacement gives the same result on random input, up to the rounding
of its dtype. What is not recognised stays as it is; so does everything on a GPU.

| part | is recognised by | becomes |
|---|---|---|
| linear | type Linear or Conv1D, bfloat16 | `PackedLinear` |
| gated MLP | packed gate_proj, up_proj, down_proj; act_fn | `PackedGatedMLP`: 3 calls for 5 |
| gated MLP | gate_proj, up_proj, down_proj; SiLU | `GatedMLP`: 4 calls for 5 |
| RMSNorm | one weight vector, an epsilon | `RMSNorm`: 1 call for 6 |
| rotary embedding | attention calls apply_rotary_pos_emb | `row_ops.rotate`: 2 calls for 14 |

In a compiled model all of them are plain torch operators, for the compiler to fuse.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch

from flexinfer import row_ops
from flexinfer.packed_linear import PackedLinear, linear_pointwise, pack_linears

logger = logging.getLogger(__name__)

NUM_TRIAL_TOKENS = 3
ACTIVATIONS: dict[str, tuple[str, str]] = {
    "SiLU": ("swish", ""),
    "SiLUActivation": ("swish", ""),
    "GELU": ("gelu", "none"),
    "GELUActivation": ("gelu", "none"),
    "GELUTanh": ("gelu", "tanh"),
    "PytorchGELUTanh": ("gelu", "tanh"),
}
"""Class of the activation -> oneDNN's name and algorithm."""
ROTARY_FUNCTION = "apply_rotary_pos_emb"

Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(q, k [1, heads, tokens, dim], cos, sin [1, tokens, dim]) -> q, k rotated."""


class PackedGatedMLP(torch.nn.Module):
    """down(act(gate(x)) * up(x)), activation and product inside the two matrix products."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.gate_proj = _packed(mlp.gate_proj)
        self.up_proj = _packed(mlp.up_proj)
        self.down_proj = _packed(mlp.down_proj)
        self._act_fn = mlp.act_fn
        self._activation, self._algorithm = ACTIVATIONS[type(mlp.act_fn).__name__]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj, self.up_proj
        if torch.compiler.is_compiling():
            return self.down_proj(self._act_fn(gate(x)) * up(x))  # type: ignore[no-any-return,operator]
        gated = linear_pointwise(x, gate.weight, gate.bias, self._activation, [], self._algorithm)
        return self.down_proj(linear_pointwise(x, gated, up.weight, up.bias, "mul"))  # type: ignore[no-any-return]


class GatedMLP(torch.nn.Module):
    """down(silu(gate(x)) * up(x)), activation and product in one pass."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj: torch.nn.Module = mlp.gate_proj
        self.up_proj: torch.nn.Module = mlp.up_proj
        self.down_proj: torch.nn.Module = mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if torch.compiler.is_compiling():
            return self.down_proj(torch.nn.functional.silu(gate) * up)  # type: ignore[no-any-return]
        return self.down_proj(row_ops.silu_mul(gate, up))  # type: ignore[no-any-return]


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in one call."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.detach().contiguous(), requires_grad=False)
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or x.dtype != self.weight.dtype:
            return torch.nn.functional.rms_norm(
                x, self.weight.shape, self.weight, self.variance_epsilon
            )
        return row_ops.rms_norm(x, self.weight, self.variance_epsilon)


def make_lean(model: torch.nn.Module) -> None:
    """Replace what can be replaced. The model is not for training any more."""
    counts = {
        "linear": pack_linears(model),
        "mlp": _replace(model, _lean_mlp),
        "norm": _replace(model, _lean_norm),
        "rotary": sum(_make_rotary_lean(module) for module in model.modules()),
    }
    logger.debug("lean layers: %s", counts)


def _replace(
    model: torch.nn.Module, lean: Callable[[torch.nn.Module], torch.nn.Module | None]
) -> int:
    """Replace each module for which `lean` gives one that computes the same."""
    num_replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            replacement = lean(child)
            if replacement is not None and not child._forward_hooks and same(child, replacement):
                setattr(parent, name, replacement)
                num_replaced += 1
    return num_replaced


@torch.inference_mode()
def same(module: torch.nn.Module, replacement: torch.nn.Module) -> bool:
    """Whether both give the same for random input, up to rounding."""
    width, dtype, device = _input_of(module)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, NUM_TRIAL_TOKENS, width, generator=generator).to(device, dtype)
    expected, output = module(x), replacement(x)
    if not isinstance(expected, torch.Tensor) or expected.shape != output.shape:
        return False
    tolerance = 20 * torch.finfo(dtype).eps * expected.abs().max().item()
    return expected.dtype == output.dtype and bool((expected - output).abs().max() <= tolerance)


def _input_of(module: torch.nn.Module) -> tuple[int, torch.dtype, torch.device]:
    """Width, dtype and device of a layer's input."""
    linear = getattr(module, "gate_proj", None)
    if linear is not None:
        return linear.in_features, linear.weight.dtype, linear.weight.device
    weight = next(module.parameters())
    return weight.shape[0], weight.dtype, weight.device


def _packed(module: torch.nn.Module | torch.Tensor) -> PackedLinear:
    assert isinstance(module, PackedLinear)
    return module


def _lean_mlp(module: torch.nn.Module) -> torch.nn.Module | None:
    children = dict(module.named_children())
    linears = [children.pop(name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    activation = ACTIVATIONS.get(type(children.pop("act_fn", None)).__name__)
    if activation is None or children:
        return None
    if all(isinstance(linear, PackedLinear) for linear in linears):
        return PackedGatedMLP(module)
    gate = linears[0]
    if activation[0] != "swish" or not all(type(x) is torch.nn.Linear for x in linears):
        return None
    assert isinstance(gate, torch.nn.Linear)
    weight = gate.weight
    can_run = row_ops.supports(weight.dtype, weight.device, gate.out_features)
    return GatedMLP(module) if can_run else None


def _lean_norm(module: torch.nn.Module) -> torch.nn.Module | None:
    parameters = list(module.parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or len(parameters) != 1 or eps is None:
        return None
    weight = parameters[0]
    if weight.device.type == "meta" or weight.dim() != 1 or isinstance(module, RMSNorm):
        return None
    can_run = row_ops.supports(weight.dtype, weight.device, weight.shape[0])
    return RMSNorm(weight, eps) if can_run else None


def _make_rotary_lean(module: torch.nn.Module) -> bool:
    """Have this attention module, and no other of its class, call the lean rotary embedding.

    transformers' attention modules call a function of their file by its name; the module gets its
    forward with another function under that name.
    """
    forward: Any = type(module).forward
    head_dim = getattr(module, "head_dim", None)
    weights = (getattr(child, "weight", None) for child in module.children())
    weight = next((weight for weight in weights if isinstance(weight, torch.Tensor)), None)
    if not isinstance(forward, FunctionType) or ROTARY_FUNCTION not in forward.__code__.co_names:
        return False
    plain: Any = forward.__globals__.get(ROTARY_FUNCTION)
    if plain is None or not isinstance(head_dim, int) or weight is None or head_dim % 2:
        return False
    lean = lean_rotary(plain)
    can_run = row_ops.supports(weight.dtype, weight.device, head_dim // 2)
    if not can_run or not same_rotary(plain, lean, head_dim, weight.dtype):
        return False
    names = {**forward.__globals__, ROTARY_FUNCTION: lean}
    copy = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(copy, module)
    return True


def lean_rotary(plain: Rotary) -> Rotary:
    """`plain` for what the kernel does not take and in compiled models, else the kernel."""

    def rotary(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_known = q.shape[0] == 1 and cos.shape == (1, q.shape[2], q.shape[3]) and not args
        if torch.compiler.is_compiling() or not is_known or not q.dtype == k.dtype == cos.dtype:
            return plain(q, k, cos, sin, *args)
        return row_ops.rotate(q, cos, sin), row_ops.rotate(k, cos, sin)

    return rotary


@torch.inference_mode()
def same_rotary(plain: Rotary, lean: Rotary, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether both rotate alike, for random angles and vectors, up to rounding."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 2, NUM_TRIAL_TOKENS, head_dim, generator=generator).to(dtype)
    angles = torch.randn(1, NUM_TRIAL_TOKENS, head_dim // 2, generator=generator).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    try:
        expected = plain(q, k, cos, sin)
    except (TypeError, ValueError, RuntimeError):
        return False  # a function of the same name for something else
    tolerance = 20 * torch.finfo(dtype).eps
    pairs = zip(expected, lean(q, k, cos, sin), strict=True)
    return all(a.shape == b.shape and bool((a - b).abs().max() <= tolerance) for a, b in pairs)
