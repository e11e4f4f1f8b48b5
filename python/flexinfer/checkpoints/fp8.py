"""Fp8Checkpoint: layers in fp8, as DeepSeek, Qwen, Mistral and others publish them.

weight            float8_e4m3fn [outputs, inputs]
weight_scale_inv  [rows, columns] of blocks, most often of 128 outputs and inputs, or one number;
                  weights are multiplied by it. AutoFP8 calls it weight_scale
input_scale       with inputs that are rounded by known scales (activation_scheme "static");
                  transformers calls it activation_scale

Source: transformers/integrations/finegrained_fp8.py; the paper of DeepSeek-V3, 3.3.
"""

from __future__ import annotations

from typing import Any

from flexinfer.checkpoints.parts import MODULES, Settings, refuse_other, refuse_unknown
from flexinfer.checkpoints.scaled import WHOLE, Block, ScaledCheckpoint
from flexinfer.checkpoints.tensor_files import TensorFiles
from flexinfer.errors import UnsupportedModelError

METHOD = "fp8"
SCALES = ("weight_scale_inv", "weight_scale")
INPUT_SCALES = ("input_scale", "activation_scale")
KNOWN_VALUES: dict[str, tuple[Any, ...]] = {
    "fmt": ("e4m3", "float8_e4m3fn", None),
    "activation_scheme": ("dynamic", "static"),
    "scale_fmt": ("float", "ue8m0", None),  # the scales' numbers, which are float32 all the same
    "expert_dtype": ("fp8", None),
    "modules_to_convert": (None, []),
    "kv_cache_scheme": (None, {}),
    "dequantize": (False, True, None),  # done in any case
    "weight_per_tensor": (False, None),
    "act_per_tensor": (False, None),
}


class Fp8Checkpoint(ScaledCheckpoint):
    method = METHOD

    def __init__(self, files: TensorFiles, settings: Settings) -> None:
        """Raises UnsupportedModelError for what cannot be read; reads no weight."""
        refuse_unknown(
            settings, METHOD, {"quant_method", "weight_block_size", *MODULES, *KNOWN_VALUES}
        )
        for name, known in KNOWN_VALUES.items():
            refuse_other(settings, METHOD, name, known)
        block = block_of(METHOD, "weight_block_size", settings.get("weight_block_size"))
        endings = {name.rpartition(".")[2] for name in files}
        found = [name for name in SCALES if name in endings] or [SCALES[0]]
        if len(found) > 1:
            raise UnsupportedModelError(
                f"weights quantised by {METHOD!r} with scales of two names ({', '.join(found)}) "
                "cannot be read here: which of them is meant is not known"
            )
        has_input_scales = settings.get("activation_scheme") == "static"
        super().__init__(files, found[0], block, INPUT_SCALES if has_input_scales else ())


def block_of(method: str, name: str, value: Any) -> Block:
    """What a setting says of blocks; None: a scale for each weight as a whole."""
    if value is None:
        return WHOLE
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in value):
        raise UnsupportedModelError(
            f"weights quantised by {method!r} with {name} = {value!r} cannot be read here: it has "
            "to be two numbers, of outputs and inputs"
        )
    return value[0], value[1]
