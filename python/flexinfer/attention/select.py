"""Which attention a GPU gets, and why not the faster one.

    auto, flash   the installed flash-attn packages, then torch's own flash kernel, then SDPA;
                  for latents (MLA) FlashMLA, then SDPA
    sdpa          torch's own kernels: its flash kernel for float16 and bfloat16, else SDPA

A kernel is taken if it gives the right answer on a small arena of the same shape and dtype: so a
build for another GPU or another torch is found out here, and not in a request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from flexinfer.attention import flash_mla
from flexinfer.attention.base import AttentionBackend, AttentionMetadata, AttentionOptions, LayerKV
from flexinfer.attention.flash import FlashAttention
from flexinfer.attention.flash_kernels import (
    MAX_HEAD_DIM,
    DecodeKernel,
    DecodeStep,
    Flash2,
    Flash3,
    Flash4,
    PrefillKernel,
    Scores,
    installed,
    require,
)
from flexinfer.attention.flash_mla import FlashMla, FlashMlaAttention
from flexinfer.attention.sdpa import ExactAttention, SdpaAttention
from flexinfer.attention.segments import Segment, SharedRange
from flexinfer.attention.torch_flash import TorchFlash, count_rows_per_slot
from flexinfer.attention.two_phase import TwoPhasePlan, attend
from flexinfer.attention.two_phase_flash import FlashPartial

logger = logging.getLogger(__name__)

KERNEL_DTYPES = (torch.float16, torch.bfloat16)
TRIAL_TOKENS = 64
TOLERANCE = 3e-2
"""Absolute, of a trial whose values are near 1: bfloat16 has 8 bits."""


@dataclass(frozen=True)
class Candidate:
    """A source of kernels; `load` raises ImportError, TypeError or AttributeError if it is none."""

    name: str
    load: Callable[[], DecodeKernel | PrefillKernel | FlashMla]


def packages(capability: tuple[int, int]) -> list[Candidate]:
    """Installed packages worth trying on this GPU, the best prefill first."""
    flash2 = Candidate("flash_attn", lambda: installed(Flash2, "flash_attn"))
    flash3 = Candidate("flash_attn_interface", lambda: installed(Flash3, "flash_attn_interface"))
    flash4 = Candidate("flash_attn.cute", lambda: installed(Flash4, "flash_attn.cute"))
    if capability[0] == 9:
        return [flash3, flash2]  # FA4 works on Hopper too, but FA3 is made for it
    if capability[0] in (10, 11):
        return [flash4, flash2]
    return [flash2]


TORCH = Candidate("torch", TorchFlash)
FLASH_MLA = Candidate("flash_mla", lambda: installed(FlashMla, "flash_mla"))


def choose_cuda(name: str, layers: Sequence[LayerKV]) -> AttentionBackend:
    """The attention for an arena on a GPU: flash kernels if any work, else plain SDPA; the reasons
    are logged, once, as a warning where something slower than asked for is taken."""
    k = layers[0].k
    if any(layer.k.data_ptr() == layer.v.data_ptr() for layer in layers):
        return choose_latents(name, layers)
    reason = unsupported(k) or of_several_shapes(layers)
    if reason is not None:
        logger.warning("attention through torch's SDPA, request by request: %s", reason)
        return SdpaAttention(layers)
    capability = torch.cuda.get_device_capability(k.device)
    candidates = [TORCH] if name == "sdpa" else [*packages(capability), TORCH]
    with torch.cuda.device(k.device):  # not all packages look at their arguments for it
        backend, reasons = choose(layers, candidates)
    told = "; ".join(reasons)
    if isinstance(backend, SdpaAttention):
        logger.warning("attention through torch's SDPA, request by request: %s", told)
    elif isinstance(backend, FlashAttention):
        level = logging.WARNING if name == "flash" and reasons else logging.INFO
        logger.log(level, "attention: %s%s", backend.name, f" ({told})" if told else "")
    return backend


def choose_latents(name: str, layers: Sequence[LayerKV]) -> AttentionBackend:
    """For values that are a part of their keys (MLA), which flash kernels do not know: FlashMLA
    where it is asked for, installed and right, else SDPA; the log says why."""
    k = layers[0].k
    reason = flash_mla.unsupported(layers, torch.cuda.get_device_capability(k.device))
    reasons = [] if reason is None else [reason]
    if name == "sdpa":
        reasons = ["SDPA is asked for"]
    kernel = None if reasons else load(FLASH_MLA, k, reasons)
    if isinstance(kernel, FlashMla):
        with torch.cuda.device(k.device):
            works = tried(kernel.name, partial(try_latents, kernel, k), reasons)
        if works:
            logger.info("attention: %s", kernel.name)
            return FlashMlaAttention(layers, kernel)
    logger.warning(
        "attention through torch's SDPA, request by request: flash kernels know no latents (MLA); "
        "%s",
        reasons[0],
    )
    return SdpaAttention(layers)


def choose(
    layers: Sequence[LayerKV], candidates: Sequence[Candidate]
) -> tuple[AttentionBackend, list[str]]:
    """The first prefill and the first decode kernel that work, and why others do not.

    SdpaAttention if there is no such pair.
    """
    prefill: PrefillKernel | None = None
    decode: DecodeKernel | None = None
    reasons: list[str] = []
    arena = layers[0].k
    for candidate in candidates:
        if prefill is not None and decode is not None:
            break
        kernel = load(candidate, arena, reasons)
        if (
            isinstance(kernel, PrefillKernel)
            and prefill is None
            and tried(candidate.name, partial(try_prefill, kernel, arena), reasons)
        ):
            prefill = kernel
        if (
            isinstance(kernel, DecodeKernel)
            and decode is None
            and tried(candidate.name, partial(try_decode, kernel, arena), reasons)
        ):
            decode = kernel
    if prefill is None or decode is None:
        return SdpaAttention(layers), reasons
    sharing = sharing_calls(decode, arena, reasons)
    return FlashAttention(layers, decode, prefill, sharing), reasons


def sharing_calls(
    decode: DecodeKernel, arena: torch.Tensor, reasons: list[str]
) -> FlashPartial | None:
    """The calls of two-phase attention by the kernel that decodes, if it has them and they work."""
    if not isinstance(decode, Flash2):
        return None
    name = "two-phase attention"
    try:
        require(decode.with_kvcache, ("return_softmax_lse",))
    except TypeError as error:
        reasons.append(f"{name} cannot be used: {first_line(error)}")
        return None
    calls = FlashPartial(decode.with_kvcache)
    return calls if tried(name, lambda: try_sharing(calls, arena), reasons) else None


def unsupported(arena: torch.Tensor) -> str | None:
    """Why no flash kernel can read this arena; None if one may."""
    head_dim = arena.shape[3]
    if arena.dtype not in KERNEL_DTYPES:
        return f"flash kernels know float16 and bfloat16, not {str(arena.dtype)[6:]}"
    if head_dim > MAX_HEAD_DIM or head_dim % 8:
        return f"flash kernels know head sizes up to {MAX_HEAD_DIM} in steps of 8, not {head_dim}"
    return None


def of_several_shapes(layers: Sequence[LayerKV]) -> str | None:
    """Why kernels that are tried on one arena may not do for all layers; None if they do."""
    shapes = {tuple(t.shape[2:]) for layer in layers for t in (layer.k, layer.v)}
    if len(shapes) == 1:
        return None
    return f"flash kernels are tried for K and V of one shape, not for {sorted(shapes)}"


def load(
    candidate: Candidate, arena: torch.Tensor, reasons: list[str]
) -> DecodeKernel | PrefillKernel | FlashMla | None:
    try:
        kernel = candidate.load()
    except ModuleNotFoundError as error:
        what = f"needs {error.name}, which is" if error.name != candidate.name else "is"
        reasons.append(f"{candidate.name} {what} not installed")
        return None
    except Exception as error:  # undefined symbols, or code of another version
        reasons.append(f"{candidate.name} cannot be used: {first_line(error)}")
        return None
    if isinstance(kernel, TorchFlash) and count_rows_per_slot(arena) == 0:
        reasons.append(f"{kernel.name} needs slots that are whole numbers of token strides")
        return None
    return kernel


def tried(name: str, trial: Callable[[], float], reasons: list[str]) -> bool:
    """Whether the trial gives the reference's answer; else the reason is noted."""
    try:
        error = trial()
    except Exception as failure:  # no kernel image for this GPU, unknown arguments, ...
        reasons.append(f"{name} does not work here: {first_line(failure)}")
        return False
    if not error <= TOLERANCE:  # NaN as well
        reasons.append(f"{name} gives wrong results here (off by {error:.2g})")
        return False
    return True


def try_decode(kernel: DecodeKernel, arena: torch.Tensor) -> float:
    """Largest error of two decodes on a small arena like `arena`, in the output and the new KV."""
    layer, (q, k, v) = small_arena(arena, num_tokens=2)
    segments = [Segment(1, 0, 5, 6), Segment(0, 1, 40, 41)]
    metadata = AttentionMetadata.build(segments, arena.device)
    expected_layer = LayerKV(layer.k.clone(), layer.v.clone())
    expected = ExactAttention([expected_layer]).forward(0, q, k, v, AttentionOptions(), metadata)
    scores = Scores.of(AttentionOptions(), q.shape[2])
    q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    output = kernel.decode(layer, q, k, v, metadata, DecodeStep.of(metadata), scores)
    return max(
        largest_error(output, expected),
        largest_error(layer.k, expected_layer.k),
        largest_error(layer.v, expected_layer.v),
    )


def try_sharing(calls: FlashPartial, arena: torch.Tensor) -> float:
    """Largest error of three decodes, of which two share 32 tokens, in two phases."""
    layer, (q, k, v) = small_arena(arena, num_tokens=3, num_slots=3)
    for x in (layer.k, layer.v):
        x[2, :32] = x[0, :32]
    segments = [Segment(2, 0, 40, 41), Segment(1, 1, 5, 6), Segment(0, 2, 32, 33)]
    shared = [SharedRange(2, 0, 32, (0, 2))]
    metadata = AttentionMetadata.build(segments, arena.device, shared)
    options = AttentionOptions()
    expected = ExactAttention([layer]).forward(0, q, k, v, options, metadata)  # and stores k, v
    plan = TwoPhasePlan.build(metadata, all_decodes=True)
    assert plan is not None
    return largest_error(attend(calls, plan, layer, q.transpose(0, 1), options), expected)


def try_prefill(kernel: PrefillKernel, arena: torch.Tensor) -> float:
    """Largest error of two packed prompts, and of a prompt with a prefix."""
    layer, (q, k, v) = small_arena(arena, num_tokens=12)
    scores = Scores.of(AttentionOptions(), q.shape[2])
    segments = [Segment(0, 0, 0, 7), Segment(1, 7, 0, 12 - 7)]
    metadata = AttentionMetadata.build(segments, arena.device)
    reference = ExactAttention([layer])
    expected = reference.forward(0, q, k, v, AttentionOptions(), metadata)
    cu_seqlens = torch.tensor([0, 7, 12], dtype=torch.int32, device=arena.device)
    flat_q, flat_k, flat_v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    output = kernel.fresh(flat_q, flat_k, flat_v, cu_seqlens, 7, scores)
    error = largest_error(output, expected)
    prefixed = AttentionMetadata.build([Segment(1, 0, 20, 32)], arena.device)
    expected = reference.forward(0, q, k, v, AttentionOptions(), prefixed)
    output = kernel.prefixed(flat_q, layer.k[1, :32], layer.v[1, :32], scores)
    return max(error, largest_error(output, expected))


def try_latents(kernel: FlashMla, arena: torch.Tensor) -> float:
    """Largest error of a decode within its first page and of two behind some, in slots that are no
    whole pages, as the arena's may be."""
    numbers, (q, k, _) = small_arena(arena, num_tokens=3, num_slots=3, tokens_per_slot=260)
    layer = LayerKV(numbers.k, numbers.k[..., : flash_mla.WIDTHS[1]])
    # The first has as many tokens in its last page as before it: wrong log-sum-exps would show.
    segments = [Segment(2, 0, 127, 128), Segment(0, 1, 40, 41), Segment(1, 2, 200, 201)]
    metadata = AttentionMetadata.build(segments, k.device)
    options = AttentionOptions(scaling=0.25)  # some keys weigh much more than others
    value = k[..., : layer.value_dim]
    expected = ExactAttention([layer]).forward(0, q, k, value, options, metadata)
    output = FlashMlaAttention([layer], kernel).forward(0, q, k, value, options, metadata)
    return largest_error(output, expected)


def small_arena(
    like: torch.Tensor,
    num_tokens: int,
    num_slots: int = 2,
    tokens_per_slot: int = TRIAL_TOKENS,
) -> tuple[LayerKV, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Slots with random KV, K and V interleaved; and q, k, v [heads, num_tokens, head_dim]."""
    num_kv_heads, head_dim = like.shape[2:]
    generator = torch.Generator(like.device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        numbers = torch.empty(shape, dtype=torch.float32, device=like.device)
        return numbers.uniform_(-1, 1, generator=generator).to(like.dtype)

    arena = random(num_slots, tokens_per_slot, 2, num_kv_heads, head_dim)
    q = random(2 * num_kv_heads, num_tokens, head_dim)
    k, v = random(num_kv_heads, num_tokens, head_dim), random(num_kv_heads, num_tokens, head_dim)
    return LayerKV(arena[:, :, 0], arena[:, :, 1]), (q, k, v)


def largest_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    return float((output.float() - expected.float()).abs().max())


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
