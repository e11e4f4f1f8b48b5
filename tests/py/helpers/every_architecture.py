"""A tiny model of each causal architecture of transformers that the engine may run.

Configs are made from whatever of `SMALL` a config class knows. Weights are wide and one channel of
the embedding is massive, as in trained models, so that clamps and caps in the layers are reached.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flexinfer.errors import UnsupportedModelError
from flexinfer.models.checks import causal_class, check_config

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
    # an index of tokens: it chooses among the prompts of the trials; with few heads scores are tied
    "index_topk": 16,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "num_dense_layers": 1,
    "zero_expert_num": 4,  # LongCat's
    "num_layers": 2,
    "linear_head_dim": 16,  # Kimi Linear's
    "linear_num_heads": 4,
    "unpadded_vocab_size": VOCAB_SIZE,  # Inkling 2's
}


MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}
# Of single architectures, where the names above are not all that makes them large.
MORE: dict[str, dict[str, Any]] = {
    "dbrx": {
        "n_heads": 4,
        "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "dory": {"num_hidden_layers": 3, "n_input_layers": 1, "n_output_layers": 1},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
    "helium": {"head_dim": 16},  # its output layer takes no other width than the model's
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
    },
    "gemma4_text": {
        "num_kv_shared_layers": 2,
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    },
    "gemma4_unified_text": {"global_head_dim": 64},
    "llama4_text": {"attention_chunk_size": 16, "floor_scale": 4, "intermediate_size_mlp": 96},
    "mimo_v2_flash": {"v_head_dim": 16},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "bamba": {**MAMBA2, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "granitemoehybrid": {**MAMBA2, "layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 128},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_key_value_heads": 4,
        "n_mamba_heads": 4,
        "mamba_d_state": 16,
        "chunk_size": 8,
    },
    # the third attends to an image alone
    "mllama_text_model": {"num_hidden_layers": 4, "cross_attention_layers": [2]},
    # layers with a window have heads and widths of their own
    "dots3_note_text": {
        "shared_experts_intermediate_size": 32,
        "per_layer_config": {
            layer: {
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "q_lora_rank": 48,
                "kv_lora_rank": 48,
                "head_dim": 32,
                "qk_nope_head_dim": 24,
                "qk_rope_head_dim": 8,
                "v_head_dim": 24,
            }
            for layer in ("1", "3")
        },
    },
    "minimax": {"sliding_window": None, "block_size": 8},  # as its own defaults
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
}
LATENTS: dict[str, Any] = {
    "head_dim": 16,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 48,
    "v_head_dim": 16,
}
TOWER = {
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_blocks": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "ext_pw_out_channel": 64,
    "depthwise_separable_out_channel": 64,
    "nemo_conv_channels": 64,
}
TOKENS = ("bos_token_id", "eos_token_id")
# Without these the architecture's own defaults make no config.
NEEDED: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    }
}


def own_config(model_type: str) -> Any:
    """The config of this architecture by its own defaults; any exception where they make none."""
    return tf.AutoConfig.for_model(model_type, **NEEDED.get(model_type, {}))


def tiny_config(model_type: str) -> Any:
    """The config of this architecture, with a layer of each kind that its own defaults have; any
    exception where it cannot be made so small."""
    config = own_config(model_type).get_text_config()
    small = {**SMALL, **(LATENTS if has_setting(config, "kv_lora_rank") else {})}
    settings = {name: value for name, value in small.items() if has_setting(config, name)}
    settings.update(MORE.get(config.model_type, {}))
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if (
        len(kinds) > 1
        and has_setting(config, "layer_types")
        and "layers_block_type" not in settings
    ):
        settings["layer_types"] = kinds * (4 // len(kinds) if 4 % len(kinds) == 0 else 1)
        settings["num_hidden_layers"] = len(settings["layer_types"])
    try:
        tiny = type(config)(**settings)
    except Exception as error:
        if "token_id" not in str(error):
            raise
        tiny = type(config)(**{k: v for k, v in settings.items() if k not in TOKENS})
    for tower in ("vision_config", "audio_config"):  # of Phi-4 multimodal: 0.7 billion weights
        for name, value in TOWER.items():
            if hasattr(found := getattr(tiny, tower, None), name):
                setattr(found, name, value)
    return tiny


def has_setting(config: Any, name: str) -> bool:
    """Whether a config of this class takes it; some ask for it layer by layer."""
    if isinstance(getattr(type(config), name, None), property):
        return False
    try:
        return hasattr(config, name)
    except Exception as error:
        if "PerLayer" not in type(error).__name__:
            raise
        return True


def tiny_class(model_type: str, config: Any) -> Any:
    """Of a config by `tiny_config`: the class for it, or else for the config around it."""
    try:
        return causal_class(config)
    except UnsupportedModelError:
        return causal_class(own_config(model_type))


def tiny_model(model_type: str) -> Any:
    """float32, in evaluation mode; None: not for this engine, or not to be made so small."""
    torch.manual_seed(0)
    try:
        config = tiny_config(model_type)
        model_class = tiny_class(model_type, config)
        check_config(config, model_class)
        model: Any = model_class(config).float()
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


def tiny_model_or_skip(model_type: str) -> Any:
    model = tiny_model(model_type)
    if model is None:
        pytest.skip("not for this engine, or not to be made so small")
    return model
