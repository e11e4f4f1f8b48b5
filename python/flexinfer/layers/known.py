"""The code of transformers that fused layers stand for, as `recognise.py` brings it into one form.

A module is replaced only if its class computes, statement by statement, what stands here. Where a
new version of transformers writes it in another way, its modules stay as they are, which is slower
but right; `test_every_architecture.py` then names them.
"""

from __future__ import annotations

NEWEST_TRANSFORMERS = (5, 24)
"""Of which this was read. A newer one may write everything in another way, as 5.24 did."""

_ROTATE_HALF = """
def rotate_half(x):
    x1 = x[..., :x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2:]
    return torch.cat((-x2, x1), dim=-1)
"""
_ROTARY = f"""
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = q * cos + rotate_half(q) * sin
    k_embed = k * cos + rotate_half(k) * sin
    return (q_embed, k_embed)
{_ROTATE_HALF}"""
_ROTARY_OF_OLMO = f"""
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    q_type, k_type = (q.dtype, k.dtype)
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = q * cos + rotate_half(q) * sin
    k_embed = k * cos + rotate_half(k) * sin
    return (q_embed.to(q_type), k_embed.to(k_type))
{_ROTATE_HALF}"""
_ROTARY_BY_HALVES = """
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = _apply_rotary_emb(q, cos, sin)
    k_embed = _apply_rotary_emb(k, cos, sin)
    return (q_embed, k_embed)

def _apply_rotary_emb(x, cos, sin):
    first_half, second_half = torch.chunk(x, 2, dim=-1)
    first_ = first_half * cos - second_half * sin
    second_ = second_half * cos + first_half * sin
    return torch.cat((first_, second_), dim=-1)
"""
_HEADS = """
    query_states = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
    key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
    value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
"""
_HEADS_OF_OLMO = """
    query_states = self.q_proj(hidden_states)
    key_states = self.k_proj(hidden_states)
    value_states = self.v_proj(hidden_states)
    query_states = query_states.view(hidden_shape).transpose(1, 2)
    key_states = key_states.view(hidden_shape).transpose(1, 2)
    value_states = value_states.view(hidden_shape).transpose(1, 2)
"""
_NORM_THEN_TRANSPOSE = """
    query_states = self.q_norm(self.q_proj(hidden_states).view(hidden_shape)).transpose(1, 2)
    key_states = self.k_norm(self.k_proj(hidden_states).view(hidden_shape)).transpose(1, 2)
    value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
"""
_TRANSPOSE_THEN_NORM = f"""{_HEADS}
    query_states = self.q_norm(query_states)
    key_states = self.k_norm(key_states)
"""


def _attention(heads: str, rotary: str) -> str:
    """The options of the call (scaling, window, soft cap, sinks) are left out: they are probed."""
    return f"""
def forward(self, hidden_states, position_embeddings, attention_mask, cache, **kwargs):
    input_shape = hidden_states.shape[:-1]
    hidden_shape = (*input_shape, -1, self.head_dim)
{heads}
    cos, sin = position_embeddings
    query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
    if cache is not None:
        key_states, value_states = cache.update(key_states, value_states, self.layer_idx)
    attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
        self.config._attn_implementation, eager_attention_forward
    )
    attn_output, attn_weights = attention_interface(
        self, query_states, key_states, value_states, attention_mask, **kwargs
    )
    attn_output = attn_output.reshape(*input_shape, -1).contiguous()
    attn_output = self.o_proj(attn_output)
    return (attn_output, attn_weights)
{rotary}"""


ATTENTIONS = (
    _attention(_HEADS, _ROTARY),  # Llama, Qwen2, Mistral, Gemma, Gemma 2, Granite, ...
    _attention(_HEADS_OF_OLMO, _ROTARY_OF_OLMO),  # OLMo without clip_qkv
)
ATTENTIONS_BY_HALVES = (_attention(_HEADS, _ROTARY_BY_HALVES),)
"""gpt-oss's: cosines and sines are those of half a head."""
ATTENTIONS_WITH_NORMS = (
    _attention(_NORM_THEN_TRANSPOSE, _ROTARY),  # Qwen3, ...
    _attention(_TRANSPOSE_THEN_NORM, _ROTARY),  # Gemma 3, EXAONE 4, Apertus, ...
)


def _norm(result: str) -> str:
    return f"""
def forward(self, hidden_states):
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return {result}
"""


NORMS = (
    _norm("self.weight * hidden_states.to(input_dtype)"),  # Llama and most others
    _norm("(self.weight * hidden_states).to(input_dtype)"),  # OLMo 2, gpt-oss, ...
    _norm("(self.weight.to(torch.float32) * hidden_states).to(input_dtype)"),  # Helium
)
NORMS_AROUND_ONE = (
    """
def forward(self, x):
    output = self._norm(x.float())
    output = output * (1.0 + self.weight.float())
    return output.type_as(x)

def _norm(self, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
""",
)
"""Gemma's up to Gemma 3, Qwen3-Next's and Qwen3.5's: their weight is what is added to 1."""
NORMS_WITH_SCALE = (
    """
def forward(self, hidden_states):
    normed_output = self._norm(hidden_states.float())
    normed_output = normed_output * self.weight.float()
    return normed_output.type_as(hidden_states)

def _norm(self, hidden_states):
    mean_squared = hidden_states.pow(2).mean(-1, keepdim=True) + self.eps
    return hidden_states * torch.pow(mean_squared, -0.5)
""",
)
"""Gemma 3n's and 4's, those of them that have a weight."""
GATED_MLPS = (
    """
def forward(self, x):
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj
""",
)


def _decoder_layer(parameters: str, arguments: str, output: str = "hidden_states") -> str:
    """output: what the MLP's is bound to."""
    return f"""
def forward(self, hidden_states, {parameters}, **kwargs):
    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)
    hidden_states, _ = self.self_attn({arguments}, **kwargs)
    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.post_attention_layernorm(hidden_states)
    {output} = self.mlp(hidden_states)
    hidden_states = residual + hidden_states
    return hidden_states
"""


_OF_LLAMA = (
    "attention_mask, position_ids, cache, use_cache, position_embeddings",
    "hidden_states=hidden_states, attention_mask=attention_mask, position_ids=position_ids, "
    "cache=cache, use_cache=use_cache, position_embeddings=position_embeddings",
)
DECODER_LAYERS = (
    _decoder_layer(*_OF_LLAMA),
    _decoder_layer(  # Mixtral
        "position_embeddings, attention_mask, position_ids, cache",
        "hidden_states=hidden_states, position_embeddings=position_embeddings, "
        "attention_mask=attention_mask, position_ids=position_ids, cache=cache",
    ),
)
SANDWICH_LAYERS = (
    """
def forward(
    self, hidden_states, position_embeddings, attention_mask, position_ids, cache, **kwargs
):
    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)
    hidden_states, _ = self.self_attn(
        hidden_states=hidden_states, position_embeddings=position_embeddings,
        attention_mask=attention_mask, position_ids=position_ids, cache=cache, **kwargs
    )
    hidden_states = self.post_attention_layernorm(hidden_states)
    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.pre_feedforward_layernorm(hidden_states)
    hidden_states = self.mlp(hidden_states)
    hidden_states = self.post_feedforward_layernorm(hidden_states)
    hidden_states = residual + hidden_states
    return hidden_states
""",
)
"""Gemma 2's and 3's."""
DECODER_LAYERS_WITH_SCORES = (_decoder_layer(*_OF_LLAMA, output="hidden_states, _"),)
"""gpt-oss's: their MLP tells the weights of the experts, too."""
_OF_EXPERTS = ("self.num_experts + 1", "self.num_experts")
"""Numbers of classes, of which the last of the first form is for no expert, and 5.17 has none."""


def _experts(num_classes: str) -> str:
    return f"""
def forward(self, hidden_states, top_k_index, top_k_weights):
    final_hidden_states = torch.zeros_like(hidden_states)
    with torch.no_grad():
        expert_mask = torch.nn.functional.one_hot(top_k_index, num_classes={num_classes})
        expert_mask = expert_mask.permute(2, 1, 0)
        expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
    for expert_idx in expert_hit:
        expert_idx = expert_idx[0]
        if expert_idx == self.num_experts:
            continue
        top_k_pos, token_idx = torch.where(expert_mask[expert_idx])
        current_state = hidden_states[token_idx]
        gate, up = nn.functional.linear(
            current_state, self.gate_up_proj[expert_idx]
        ).chunk(2, dim=-1)
        current_hidden_states = self.act_fn(gate) * up
        current_hidden_states = nn.functional.linear(
            current_hidden_states, self.down_proj[expert_idx]
        )
        current_hidden_states = (
            current_hidden_states * top_k_weights[token_idx, top_k_pos, None]
        )
        final_hidden_states.index_add_(
            0, token_idx, current_hidden_states.to(final_hidden_states.dtype)
        )
    return final_hidden_states
"""


EXPERTS = tuple(map(_experts, _OF_EXPERTS))
CLAMPED_EXPERTS = (
    """
def forward(self, hidden_states, router_indices, routing_weights):
    next_states = torch.zeros_like(
        hidden_states, dtype=hidden_states.dtype, device=hidden_states.device
    )
    with torch.no_grad():
        expert_mask = torch.nn.functional.one_hot(router_indices, num_classes=self.num_experts)
        expert_mask = expert_mask.permute(2, 1, 0)
        expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
    for expert_idx in expert_hit:
        expert_idx = expert_idx[0]
        if expert_idx == self.num_experts:
            continue
        top_k_pos, token_idx = torch.where(expert_mask[expert_idx])
        current_state = hidden_states[token_idx]
        gate_up = (
            current_state @ self.gate_up_proj[expert_idx] + self.gate_up_proj_bias[expert_idx]
        )
        gated_output = self._apply_gate(gate_up)
        out = gated_output @ self.down_proj[expert_idx] + self.down_proj_bias[expert_idx]
        weighted_output = out * routing_weights[token_idx, top_k_pos, None]
        next_states.index_add_(0, token_idx, weighted_output.to(hidden_states.dtype))
    return next_states

def _apply_gate(self, gate_up):
    gate, up = (gate_up[..., ::2], gate_up[..., 1::2])
    gate = gate.clamp(min=None, max=self.limit)
    up = up.clamp(min=-self.limit, max=self.limit)
    glu = gate * torch.sigmoid(gate * self.alpha)
    gated_output = (up + 1) * glu
    return gated_output
""",
)
"""gpt-oss's, with biases; gates and factors of their weights in turns."""


def _experts_without_gates(num_classes: str) -> str:
    return f"""
def forward(self, hidden_states, top_k_index, top_k_weights):
    final_hidden_states = torch.zeros_like(hidden_states, dtype=top_k_weights.dtype)
    with torch.no_grad():
        expert_mask = torch.nn.functional.one_hot(top_k_index, num_classes={num_classes})
        expert_mask = expert_mask.permute(2, 1, 0)
        expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero().squeeze(-1)
    for expert_idx in expert_hit:
        expert_idx = expert_idx.item()
        top_k_pos, token_idx = torch.where(expert_mask[expert_idx])
        if token_idx.numel() == 0:
            continue
        current_state = hidden_states[token_idx]
        current_hidden_states = torch.nn.functional.linear(current_state, self.up_proj[expert_idx])
        current_hidden_states = self.act_fn(current_hidden_states)
        current_hidden_states = torch.nn.functional.linear(
            current_hidden_states, self.down_proj[expert_idx]
        )
        current_hidden_states = (
            current_hidden_states * top_k_weights[token_idx, top_k_pos, None]
        )
        final_hidden_states.index_add_(
            0, token_idx, current_hidden_states.to(final_hidden_states.dtype)
        )
    return final_hidden_states.to(hidden_states.dtype)
"""


EXPERTS_WITHOUT_GATES = tuple(map(_experts_without_gates, _OF_EXPERTS))
"""Nemotron-H's."""
SCALED_EMBEDDINGS = (
    """
def forward(self, input_ids):
    return super().forward(input_ids) * self.embed_scale.to(self.weight.dtype)
""",
)
"""Of classes of which torch.nn.Embedding is the base: Gemma's."""
ROTARY_EMBEDDINGS = (
    """
@dynamic_rope_update
def forward(self, x, position_ids):
    freqs = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
    emb = torch.cat((freqs, freqs), dim=-1)
    cos = emb.cos() * self.attention_scaling
    sin = emb.sin() * self.attention_scaling
    return (cos.to(dtype=x.dtype), sin.to(dtype=x.dtype))
""",
    """
@dynamic_rope_update
def forward(self, x, position_ids):
    freqs = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
    emb = freqs
    cos = emb.cos() * self.attention_scaling
    sin = emb.sin() * self.attention_scaling
    return (cos.to(x.dtype), sin.to(x.dtype))
""",
)
"""Of those whose frequencies do not change (`RotaryTable`)."""
