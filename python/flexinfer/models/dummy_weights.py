"""Dummy weights: drawn at random for a config, where speed and memory are of interest alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexinfer.errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from flexinfer.checkpoints.checkpoint import Checkpoint

SEED = 1234
"""Two processes draw the same. vLLM's, whose weights are others."""


def check_drawable(name: str, checkpoint: Checkpoint | None) -> None:
    """Raises UnsupportedModelError for what is more than a config and floats."""
    if checkpoint is not None:
        raise UnsupportedModelError(
            f"load_format='dummy' draws weights that are not quantised, and those of {name!r} are "
            f"in {checkpoint.method!r}: take the model that it was made of, and `quantization`"
        )


def draw_weights(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """A model as transformers begins to train it. Others' random numbers stay as they are."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model
