"""How a model's weights are quantised or to be quantised, told before any of them is read."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flexinfer.errors import UnsupportedModelError

if TYPE_CHECKING:
    from flexinfer.checkpoints.checkpoint import Checkpoint
    from flexinfer.layers.quantised import Scheme
    from flexinfer.models.stored import StoredModel

logger = logging.getLogger(__name__)

METHODS = ("gguf", "awq", "compressed-tensors", "fp8", "gptq", "mxfp4")
"""By which weights may be quantised already."""


def open_checkpoint(name: str, config: Any) -> Checkpoint | None:
    """What has to be read weight by weight; None: transformers reads it. Reads no weight. Raises
    UnsupportedModelError for weights that are quantised in a way that is not known."""
    from flexinfer.checkpoints.awq import AwqCheckpoint
    from flexinfer.checkpoints.compressed_formats import open_compressed
    from flexinfer.checkpoints.fp8 import Fp8Checkpoint
    from flexinfer.checkpoints.gguf.checkpoint import GgufCheckpoint
    from flexinfer.checkpoints.gguf.hub import gguf_file
    from flexinfer.checkpoints.gptq import GptqCheckpoint
    from flexinfer.checkpoints.mxfp4 import Mxfp4Checkpoint
    from flexinfer.checkpoints.tensor_files import TensorFiles

    if (file := gguf_file(name)) is not None:
        return GgufCheckpoint(file)
    settings = getattr(config, "quantization_config", None)
    if settings is None:  # early compressed-tensors
        settings = getattr(config, "compression_config", None)
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    known: dict[Any, Callable[..., Checkpoint]] = {
        "awq": AwqCheckpoint,
        "compressed-tensors": open_compressed,
        "fp8": Fp8Checkpoint,
        "gptq": GptqCheckpoint,
        "mxfp4": Mxfp4Checkpoint,
    }
    if not isinstance(method, str) or method not in known or not isinstance(settings, dict):
        raise UnsupportedModelError(
            f"this model's weights are quantised already, by {str(method)!r}, which cannot be read "
            f"here (known: gguf, {', '.join(known)}); take the model that they were made of, and "
            "quantization='int8' or 'int4'"
        )
    return known[method](TensorFiles(name, config.model_type), settings)


def warn_of_growth(checkpoint: Checkpoint, dtype: Any) -> None:
    """Say what is not to be seen from the size of the files. dtype: of torch, which the weights
    become where they are not quantised."""
    grown = checkpoint.growing_bytes
    if grown:
        logger.warning(
            "%d MiB of weights by %r take %d MiB in %s, as there are no products with them here: "
            "quantization='int8' or 'int4' gives them 8 or 4.5 bits",
            grown >> 20,
            checkpoint.method,
            grown * dtype.itemsize >> 20,
            str(dtype).removeprefix("torch."),
        )


def open_experts(name: str, config: Any, dtype: Any) -> StoredModel | None:
    """A folder that is not quantised, to be read weight by weight, so that its experts are
    quantised one by one. None: transformers reads it, as it does all but some mixtures."""
    from flexinfer.checkpoints.plain import MODEL_TYPES, PlainCheckpoint
    from flexinfer.checkpoints.tensor_files import TensorFiles
    from flexinfer.models.dtypes import weights_dtype
    from flexinfer.models.stored import open_stored

    if config.model_type not in MODEL_TYPES:
        return None
    try:
        checkpoint = PlainCheckpoint(TensorFiles(os.fspath(name), config.model_type))
        return open_stored(checkpoint, config, weights_dtype(config, dtype, "cpu"))
    except UnsupportedModelError:
        return None  # transformers passes over what it does not know, or says what is wrong


def choose_scheme(
    model: Any,
    config: Any,
    dtype: Any,
    device: str | None,
    quantization: str,
    checkpoint: Checkpoint | None = None,
    num_parts: Callable[[str], int] = lambda name: 1,
) -> Scheme | None:
    """What the weights become at load; None: they stay as they are, whatever becomes of inputs
    (`BYTE_INPUTS`). dtype, device: as `load_model`'s; num_parts: among how many ranks the inputs of
    a layer are divided.

    Raises ValueError for a scheme that there is not, UnsupportedModelError for a model or device
    that it cannot be applied to."""
    method = checkpoint.method if checkpoint is not None and checkpoint.is_quantised else None
    if method is not None:
        _check_inputs(config, dtype, device, method)
    if _is_own(quantization, None if checkpoint is None else checkpoint.method):
        return None
    from flexinfer.layers.quantised import BYTE_INPUTS, Scheme

    scheme = None if quantization == BYTE_INPUTS else Scheme.parse(quantization)
    if not isinstance(model, (str, os.PathLike)):
        raise UnsupportedModelError(
            f"quantization={quantization!r} takes a folder or a hub id: a model that is loaded "
            "already stays as it is"
        )
    if scheme is None:
        if method is None:
            raise UnsupportedModelError(
                f"quantization={quantization!r} gives inputs of 8 bits to weights that are "
                "quantised already, which this model's are not: take 'int8' or 'int4-a8'"
            )
        return None
    if method is not None:
        raise UnsupportedModelError(
            f"quantization={quantization!r}: this model's weights are quantised already, by "
            f"{method!r}, and are used as they are; leave quantization out, or take "
            f"{BYTE_INPUTS!r} for inputs of 8 bits"
        )
    if device is not None and not device.startswith("cpu"):
        raise UnsupportedModelError(
            f"quantization={quantization!r} has kernels for the CPU alone, not for {device}"
        )
    _check_layers(config, scheme, dtype, num_parts)
    return scheme


def _is_own(quantization: str, method: str | None) -> bool:
    """Whether it is the checkpoint's own; vLLM's programs name the method. Raises
    UnsupportedModelError for another one."""
    if quantization not in METHODS:
        return quantization == "auto"
    if quantization != method:
        found = "not quantised" if method is None else f"quantised by {method!r}"
        raise UnsupportedModelError(
            f"quantization={quantization!r} is a method by which checkpoints are quantised, and "
            f"this model's weights are {found}; leave quantization out, or take 'int8' or 'int4' "
            "to quantise weights at load"
        )
    return True


def _check_inputs(config: Any, dtype: Any, device: str | None, method: str) -> None:
    """Refuse devices and dtypes that products with quantised weights are not made for."""
    from flexinfer.layers.quantised_linear import DTYPES_OF_INPUTS
    from flexinfer.models.dtypes import weights_dtype

    if device is not None and not device.startswith("cpu"):
        raise UnsupportedModelError(
            f"weights quantised by {method!r} have kernels for the CPU alone, not for {device}"
        )
    chosen = weights_dtype(config, dtype, "cpu")
    if chosen not in DTYPES_OF_INPUTS:
        raise UnsupportedModelError(
            f"layers with weights quantised by {method!r} compute in float32 or bfloat16, not in "
            f"{chosen}: set dtype to one of them"
        )


def _check_layers(config: Any, scheme: Scheme, dtype: Any, num_parts: Callable[[str], int]) -> None:
    """Refuse a scheme that does not fit one of the model's layers."""
    import torch
    from transformers import AutoModelForCausalLM

    from flexinfer.layers.quantise import check_scheme
    from flexinfer.models.dtypes import weights_dtype

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    try:
        check_scheme(empty, scheme, weights_dtype(config, dtype, "cpu"), num_parts)
    except ValueError as error:
        raise UnsupportedModelError(f"model type {config.model_type!r}: {error}") from None
