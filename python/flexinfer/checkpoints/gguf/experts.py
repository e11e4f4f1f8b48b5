"""What the config says of experts, of the keys of a GGUF file."""

from __future__ import annotations

from typing import Any

from flexinfer.checkpoints.gguf.values import NEXT_LAYERS, GgufValues

DENSE, STEP = "leading_dense_block_count", "interleave_moe_layer_step"
"""How many layers at the beginning have no experts; every which layer behind them has."""
SHARED, SHARED_WIDTH = "expert_shared_count", "expert_shared_feed_forward_length"
WIDTH = "expert_feed_forward_length"
SCALE, NORM = "expert_weights_scale", "expert_weights_norm"
GATING = "expert_gating_func"
GROUPS, GROUPS_USED = "expert_group_count", "expert_group_used_count"
SOFTMAX, SIGMOID = 1, 2
"""Values of GATING."""
DEEPSEEK_KEYS = frozenset({DENSE, SHARED, SCALE, NORM, GATING, GROUPS, GROUPS_USED, NEXT_LAYERS})
CORRECTION = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
"""As names of an architecture, of what is added to scores where experts are chosen."""


def deepseek_experts(values: GgufValues) -> dict[str, Any]:
    """As DeepSeek's configs, and those that follow them, have it."""
    count, groups = values.count("expert_count"), values.count(GROUPS, 1)
    if count % groups:
        values.refuse(GROUPS, f"only divisors of the expert_count, {count}")
    used = values.count(GROUPS_USED, 1)
    if used > groups:
        values.refuse(GROUPS_USED, f"at most the {GROUPS}, {groups}")
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": values.count("expert_used_count"),
        "moe_intermediate_size": values.count(WIDTH),
        "n_shared_experts": values.count(SHARED),
        "first_k_dense_replace": values.count(DENSE, 0, least=0),
        "routed_scaling_factor": values.factor(SCALE, 1.0),
        "norm_topk_prob": values.flag(NORM, False),
        "n_group": groups,
        "topk_group": used,
    }


def experts_as_wide_as_others(values: GgufValues) -> dict[str, Any]:
    """Experts as wide as the MLPs of layers without."""
    values.mlp_width(WIDTH)
    used = values.count("expert_used_count")
    return {"num_experts": values.count("expert_count"), "num_experts_per_tok": used}


def only_gating(values: GgufValues, wanted: int) -> None:
    """Raises UnsupportedModelError where scores are made of what routers give in another way."""
    if values.get(GATING, wanted) != wanted:
        values.refuse(GATING, f"only {wanted}")
