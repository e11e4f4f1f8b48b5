"""Apertus: an activation with numbers of its own in each layer, which are no tensors in files."""

from __future__ import annotations

from typing import Any

import torch

from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.sources import Given, Source
from flexinfer.checkpoints.gguf.values import GgufValues

PARAMETERS = ("alpha_p", "alpha_n")
NUMBERS = (*PARAMETERS, "beta", "eps")


def _settings(values: GgufValues) -> dict[str, Any]:
    """The config takes the numbers along, to where weights are placed."""
    return {"xielu": {name: values.of_each_layer(f"xielu.{name}") for name in NUMBERS}}


def _place_numbers(sources: dict[str, Source], config: Any) -> None:
    for name, numbers in config.xielu.items():
        shape = (1,) if name in PARAMETERS else ()
        for layer, number in enumerate(numbers):
            given = Given(torch.tensor(number).reshape(shape))
            sources[f"model.layers.{layer}.mlp.act_fn.{name}"] = given


APERTUS = {
    "apertus": Architecture(
        "ApertusConfig",
        conversions=(_place_numbers,),
        names={"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        settings=_settings,
    )
}
