"""How a model's weights are to be quantised, told before any of them is read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from flexinfer.errors import UnsupportedModelError

if TYPE_CHECKING:
    from flexinfer.layers.quantised import Scheme


def choose_scheme(
    model: Any, config: Any, dtype: Any, device: str | None, quantization: str
) -> Scheme | None:
    """What the weights become at load; None: they stay as they are. dtype, device: as
    `load_model`'s. Raises ValueError for a scheme that there is not, UnsupportedModelError for a
    model or device that it cannot be applied to."""
    if isinstance(model, (str, os.PathLike)):
        check_stored(config)
    if quantization == "auto":
        return None
    from flexinfer.layers.quantised import Scheme

    scheme = Scheme.parse(quantization)
    if not isinstance(model, (str, os.PathLike)):
        raise UnsupportedModelError(
            f"quantization={quantization!r} takes a folder or a hub id: a model that is loaded "
            "already stays as it is"
        )
    if device is not None and not device.startswith("cpu"):
        raise UnsupportedModelError(
            f"quantization={quantization!r} has kernels for the CPU alone, not for {device}"
        )
    _check_layers(config, scheme, dtype)
    return scheme


def check_stored(config: Any) -> None:
    """Refuse a checkpoint whose weights are quantised already. Reads none."""
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return
    method = stored.get("quant_method") if isinstance(stored, dict) else stored.quant_method
    raise UnsupportedModelError(
        f"this model's weights are quantised already, by {str(method)!r}, which cannot be read "
        "here; take the model that they were made of, and quantization='int8' or 'int4'"
    )


def _check_layers(config: Any, scheme: Scheme, dtype: Any) -> None:
    """Refuse a scheme that does not fit one of the model's layers."""
    import torch
    from transformers import AutoModelForCausalLM

    from flexinfer.layers.quantise import check_scheme
    from flexinfer.models.dtypes import weights_dtype

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    try:
        check_scheme(empty, scheme, weights_dtype(config, dtype, "cpu"))
    except ValueError as error:
        raise UnsupportedModelError(f"model type {config.model_type!r}: {error}") from None
