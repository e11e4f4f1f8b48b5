"""Gemma 3n: embeddings of each layer, several states of a token of which one is computed (AltUp),
and matrices of low rank beside each attention (LAuReL)."""

from __future__ import annotations

from math import inf
from statistics import NormalDist
from typing import Any

import torch

from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.families.gemma import LOGIT_CAP, OTHER_BASE
from flexinfer.checkpoints.gguf.families.gemma4 import (
    EMBEDDED,
    EMBEDDINGS,
    OF_EACH_LAYER,
    SHARED,
    shared_layers,
)
from flexinfer.checkpoints.gguf.rope import (
    WINDOW,
    WINDOW_BASE,
    WINDOW_PATTERN,
    rope_of_kinds,
    windows_of,
)
from flexinfer.checkpoints.gguf.sources import Changed, Ordered, Source
from flexinfer.checkpoints.gguf.values import GgufValues
from flexinfer.errors import UnsupportedModelError

ACTIVE, STATES = "altup.active_idx", "altup.num_inputs"
SPARSITY = "activation_sparsity_scale"
STACKED = ("model.altup_projections", "model.altup_unembed_projections")
NAMES = OF_EACH_LAYER | {
    "altup_proj": STACKED[0],
    "altup_unembd_proj": STACKED[1],
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}


def _take_apart(sources: dict[str, Source], config: Any) -> None:
    """Matrices of the states, one behind the other in the file."""
    for module in STACKED:
        whole = sources.pop(f"{module}.weight", None)
        if whole is None:
            continue
        if len(whole.shape) != 3:
            raise UnsupportedModelError(f"it has {module} as {list(whole.shape)}: no matrices")
        for place in range(whole.shape[0]):
            one = Ordered(whole, torch.tensor([place]))
            sources[f"{module}.{place}.weight"] = Changed(_first, one, shape=whole.shape[1:])


def _first(matrices: torch.Tensor) -> torch.Tensor:
    return matrices[0]


def _gemma3n(values: GgufValues) -> dict[str, Any]:
    """The file has the sizes of some matrices as those of tensors alone. llama.cpp itself knows one
    number of layers with sparse gates, and one of those with keys of their own."""
    rank, rows = values.shape("blk.0.laurel_l.weight"), values.shape(f"{EMBEDDINGS}.weight")
    active, states = values.get(ACTIVE, 0), values.count(STATES)
    if type(active) is not int or not 0 <= active < states:
        values.refuse(ACTIVE, f"whole numbers from 0 on, less than {STATES}, {states}")
    return {
        **windows_of(values, 5),
        **({} if rank is None else {"laurel_rank": rank[0]}),
        **({} if rows is None else {"vocab_size_per_layer_input": rows[0]}),
        "hidden_size_per_layer_input": values.count(EMBEDDED),
        "num_kv_shared_layers": shared_layers(values),
        "altup_active_idx": active,
        "altup_num_inputs": states,
        "activation_sparsity_pattern": _sparsity(values),
        "final_logit_softcapping": values.factor(LOGIT_CAP, 30.0),
        "rope_parameters": rope_of_kinds(values, OTHER_BASE),
    }


def _sparsity(values: GgufValues) -> list[float]:
    """Which part of the gates of each layer is none: the file has the deviations from their mean
    that so many of a normal distribution are below."""
    count = values.count("block_count")
    scales = values.of_layers(SPARSITY) or []
    if len(scales) != count or not all(type(scale) is float and scale < inf for scale in scales):
        values.refuse(SPARSITY, f"a number for each of {count} layers")
    parts = [0.0 if scale == -inf else NormalDist().cdf(scale) for scale in scales]
    return [round(part, 6) for part in parts]


GEMMA3N = {
    "gemma3n": Architecture(
        "Gemma3nTextConfig",
        conversions=(_take_apart,),
        names=NAMES,
        keys=frozenset(
            {
                *(WINDOW, WINDOW_PATTERN, WINDOW_BASE, LOGIT_CAP),
                *(ACTIVE, STATES, SPARSITY, SHARED, EMBEDDED),
            }
        ),
        settings=_gemma3n,
    ),
}
