"""LoRARequest: which adapter a request is for. Names and fields are those of vLLM. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoRARequest:
    """LLM.generate(prompts, params, lora_request=LoRARequest("sql", 1, "path/to/folder"))"""

    lora_name: str
    lora_int_id: int
    """Of this adapter alone, from 1 on."""
    lora_path: str
    """A folder that PEFT has saved: adapter_config.json and adapter_model.safetensors."""
    base_model_name: str | None = None

    def __post_init__(self) -> None:
        number = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"lora_int_id must be a positive integer, got {number!r}")
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name} must be a string that is not empty, got {value!r}")
