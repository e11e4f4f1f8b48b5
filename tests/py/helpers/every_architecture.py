"""A tiny model of each causal architecture of transformers that the engine may run.

Configs are made from whatever of `SMALL` a config class knows. Weights are wide and one channel of
the embedding is massive, as in trained models, so that clamps and caps in the layers are reached.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flexinfer.errors import UnsupportedModelError
from flexinfer.models.checks import check_config

VOCAB_SIZE = 128
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "sliding_window": 16,
    "clip_qkv": 2.0,
    "pad_token_id": 0,
    "default_language": "en_XX",  # of X-MOD
    "bos_token_id": None,
    "eos_token_id": None,
    # GPT-2's names for the same, OPT's
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "d_model": 64,
    "ffn_dim": 96,
    # mixtures of experts
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
}


def tiny_config(model_type: str) -> Any:
    """The config of this architecture; any exception where it cannot be made so small."""
    config = tf.AutoConfig.for_model(model_type).get_text_config()
    settings = {name: value for name, value in SMALL.items() if hasattr(config, name)}
    if model_type == "helium":
        settings["head_dim"] = 16  # its output layer takes no other width than the model's
    tiny = type(config)(**settings)
    for tower in ("vision_config", "audio_config"):  # of Phi-4 multimodal: 0.7 billion weights
        for name in ("num_hidden_layers", "num_blocks"):
            if hasattr(found := getattr(tiny, tower, None), name):
                setattr(found, name, 2)
    return tiny


def tiny_model(model_type: str) -> Any:
    """float32, in evaluation mode; None: not for this engine, or not to be made so small."""
    torch.manual_seed(0)
    try:
        config = tiny_config(model_type)
        check_config(config)
        model: Any = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except UnsupportedModelError:
        return None
    except (TypeError, ValueError, AttributeError, NotImplementedError, KeyError):
        return None
    except Exception as error:  # huggingface_hub's own, of a config that refuses what it is given
        if "validation" not in type(error).__name__.lower() and "PerLayer" not in str(type(error)):
            raise
        return None
    _widen(model)
    return model.eval()


@torch.no_grad()
def _widen(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.1)
        else:
            parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
    weight = model.get_input_embeddings().weight
    weight.normal_(0, 1)
    weight[:, 5] += 25.0


MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
