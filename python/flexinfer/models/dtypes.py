"""In which dtype a model's weights are loaded."""

from __future__ import annotations

import logging
from typing import Any

from flexinfer.config import dtype_name

logger = logging.getLogger(__name__)


def weights_dtype(config: Any, dtype: Any, device: str) -> Any:
    """The torch dtype to load in. "auto" is the config's, except float16, which is slow on CPUs."""
    import torch

    if dtype == "auto":
        dtype = getattr(config.get_text_config(), "dtype", None) or config.dtype or torch.float32
        if dtype_name(dtype) == "float16" and device.startswith("cpu"):
            logger.warning(
                "these weights are float16, which is slow on CPUs: loading them in bfloat16, which "
                "rounds more coarsely; dtype='float16' keeps them as they are"
            )
            dtype = torch.bfloat16
    return getattr(torch, dtype_name(dtype))
