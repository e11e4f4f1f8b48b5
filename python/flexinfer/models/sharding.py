"""Sharding: each rank's part of a model, by transformers' own plan for tensor parallelism.

    check_plan       before any weight is read: is there a plan that we know, do heads divide
    load_part        transformers reads this rank's slices straight from the safetensors
    split_layers     its hooks give way to our layers (layers/parallel.py), around fused ones

No rank ever holds the whole model. What the plan does not name (norms, routers, position
embeddings) every rank has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexinfer.errors import UnsupportedModelError
from flexinfer.layers.fuse import fuse_layers
from flexinfer.models.checks import check_complete, check_shapes
from flexinfer.models.ending_tokens import read_ending_tokens

if TYPE_CHECKING:
    import torch

    from flexinfer.layers.quantised import Scheme

STYLES = frozenset({"colwise", "rowwise", "replicated_with_grad_allreduce", "replicate"})
EXPERT_STYLES = STYLES | {"packed_colwise", "moe_tp_experts"}
EMBEDDING = "embedding_rowwise"
HEAD = "colwise_gather_output"
KEYS_AND_VALUES = ("self_attn.k_proj", "self_attn.v_proj")
WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


@dataclass(frozen=True, slots=True)
class RankOf:
    """Which of how many ranks this process is."""

    rank: int
    num_ranks: int


def check_plan(config: Any, num_ranks: int) -> None:
    """Raises UnsupportedModelError, with the reason, for a model that cannot be split so often."""
    text = config.get_text_config()
    kind = f"model type {text.model_type!r}"
    plan: dict[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    if not plan:
        raise UnsupportedModelError(
            f"{kind} has no tensor-parallel plan in transformers (base_model_tp_plan): it runs "
            "with tensor_parallel_size=1 only"
        )
    for name, style in plan.items():
        known = EXPERT_STYLES if ".experts" in name else {*STYLES, EMBEDDING}
        if style not in known or (style == EMBEDDING and "embed" not in name):
            raise UnsupportedModelError(
                f"{kind}: its tensor-parallel plan splits {name!r} by {style!r}, which is not "
                "supported; it runs with tensor_parallel_size=1 only"
            )
    missing = [name for name in KEYS_AND_VALUES if plan.get(f"layers.*.{name}") != "colwise"]
    if missing:
        raise UnsupportedModelError(
            f"{kind}: its tensor-parallel plan does not split {missing[0]!r} by heads; it runs "
            "with tensor_parallel_size=1 only"
        )
    if (_model_class(config)._tp_plan or {}).get("lm_head") != HEAD:
        raise UnsupportedModelError(
            f"{kind}: its tensor-parallel plan does not split its head by tokens; it runs with "
            "tensor_parallel_size=1 only"
        )
    num_heads = text.num_attention_heads
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    if num_heads % num_ranks:
        raise UnsupportedModelError(
            f"{kind} has {num_heads} attention heads, which {num_ranks} ranks cannot share equally"
        )
    if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
        raise UnsupportedModelError(
            f"{kind} has {num_kv_heads} KV heads: {num_ranks} ranks can neither share them equally "
            "nor hold each of them equally often"
        )
    for width in WIDTHS:
        size = getattr(text, width, None)
        if isinstance(size, int) and size % num_ranks:
            raise UnsupportedModelError(
                f"{kind} has {width} {size}, which {num_ranks} ranks cannot share equally"
            )


def load_part(name: str, config: Any, dtype: torch.dtype, part: RankOf) -> Any:
    """This rank's part of the model, as transformers makes it: DTensors, and hooks.

    REQUIRES: torch.distributed's default group is that of the ranks.
    """
    from transformers.distributed.configuration_utils import DistributedConfig

    base: Any = _model_class(config)

    class Part(base):  # type: ignore[misc]
        """Loads on CPUs without a device map, for which transformers would want accelerate."""

        @classmethod
        def prepare_distribute_model(cls, distributed_config: Any, device_map: Any = None) -> Any:
            settings, device, meshes = super().prepare_distribute_model(
                distributed_config, device_map
            )
            is_cpu = device is None or getattr(device, "type", device) == "cpu"
            return settings, None if is_cpu else device, meshes

    # transformers reads in the source of the module how experts may be computed: without it they
    # were computed one by one, which no compiler can follow.
    Part.__name__, Part.__module__ = base.__name__, base.__module__
    overrides: dict[str, str] = {}
    if _num_kv_heads(config) % part.num_ranks:  # heads are held by several ranks: cut here
        prefix = base.base_model_prefix
        overrides = {f"{prefix}.layers.*.{name}": "replicate" for name in KEYS_AND_VALUES}
    settings = DistributedConfig(tp_size=part.num_ranks, tp_plan=overrides or None)
    model, info = Part.from_pretrained(
        name,
        config=config,
        dtype=dtype,
        distributed_config=settings,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below, by name
        generation_config=read_ending_tokens(name),
    )
    check_shapes(info["mismatched_keys"])
    check_complete(base, info["missing_keys"])
    model.__class__ = base
    return model


def num_parts_of_inputs(config: Any, num_ranks: int) -> Callable[[str], int]:
    """(name of a layer) -> among how many ranks its inputs are divided. REQUIRES `check_plan`."""
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

    plan: dict[str, str] = config.get_text_config().base_model_tp_plan
    prefix = f"{_model_class(config).base_model_prefix}."

    def num_parts(name: str) -> int:
        style = plan.get(replace_layer_number_by_wildcard(name.removeprefix(prefix)))
        return num_ranks if style == "rowwise" else 1

    return num_parts


def split_layers(model: Any, part: RankOf, scheme: Scheme | None = None) -> int:
    """Put layers of ours in the place of transformers' hooks; fuse what can be fused, and quantise
    it by the scheme. Returns the bytes of this rank's weights."""
    from flexinfer.layers.exchanges import Exchanges
    from flexinfer.layers.parallel import (
        GatheredLinear,
        ReducedLinear,
        ReducedModule,
        VocabEmbedding,
    )

    exchanges = Exchanges(part.rank, part.num_ranks)
    styles = {name: style for name, style in _styles(model).items() if style is not None}
    modules = dict(model.named_modules())
    first_token, num_tokens = 0, 0
    for name in styles:
        module = modules.get(name)
        if module is not None:
            module.__dict__.pop("forward", None)
            module.__dict__.pop("_is_hooked", None)
    for name, module in modules.items():
        style = styles.get(name)
        if style == EMBEDDING:
            size = -(-module.weight.shape[0] // part.num_ranks)
            first_token = part.rank * size
            num_tokens = max(0, min(size, module.weight.shape[0] - first_token))
        _localise(module)
        if name.endswith(KEYS_AND_VALUES) and style == "replicate":
            _cut_heads(module, model.config, part)
        if style == "rowwise" and part.rank > 0 and getattr(module, "bias", None) is not None:
            module.bias = None
    for name, module in modules.items():
        _check_heads(name, module)
    model._device_mesh = model._mesh_manager = None  # they would keep the process group's sockets
    num_bytes = _num_bytes(model)
    fuse_layers(model, scheme)
    if scheme is not None:
        num_bytes = _num_bytes(model)
    for name, style in styles.items():
        if name not in modules or style not in ("rowwise", "moe_tp_experts", EMBEDDING, HEAD):
            continue  # a parameter, or whole as it is
        module = model.get_submodule(name)
        whole: torch.nn.Module
        if style == EMBEDDING:
            whole = VocabEmbedding(module, first_token, num_tokens, exchanges)
        elif style == HEAD:
            vocab_size = model.config.get_text_config().vocab_size
            whole = GatheredLinear(module, vocab_size, exchanges)
        elif style == "rowwise":
            whole = ReducedLinear(module, exchanges)
        else:
            whole = ReducedModule(module, exchanges)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, whole)
    return num_bytes


def _num_bytes(model: Any) -> int:
    """Of weights: as transformers has them, or with quantised layers among them."""
    from flexinfer.layers.experts import Experts
    from flexinfer.layers.quantised_linear import QuantisedLinear

    held = {weight.data_ptr(): weight.nbytes for weight in model.parameters()}
    quantised = [m for m in model.modules() if isinstance(m, QuantisedLinear | Experts)]
    held |= {id(module): module.nbytes for module in quantised}
    return sum(held.values())


def _model_class(config: Any) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _styles(model: Any) -> dict[str, str | None]:
    """The plan's style of each module and of each parameter, by its name in the model."""
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

    plan = model.tp_plan
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters()]
    return {name: plan.get(replace_layer_number_by_wildcard(name)) for name in names}


def _localise(module: Any) -> None:
    """This rank's slices as ordinary parameters."""
    import torch
    from torch.distributed.tensor import DTensor

    for name, parameter in list(module.named_parameters(recurse=False)):
        if isinstance(parameter, DTensor):
            local = torch.nn.Parameter(parameter.to_local().detach(), requires_grad=False)
            module._parameters[name] = local
    if type(module) is torch.nn.Linear:
        module.out_features, module.in_features = module.weight.shape


def _check_heads(name: str, module: Any) -> None:
    """Raises UnsupportedModelError where a rank would have a part of a head: layers may have other
    numbers of heads than the config's."""
    for projection in ("q_proj", "k_proj", "v_proj"):
        linear, head_dim = getattr(module, projection, None), getattr(module, "head_dim", None)
        if linear is not None and isinstance(head_dim, int) and linear.out_features % head_dim:
            raise UnsupportedModelError(
                f"{name}.{projection} cannot be split by heads: a rank would have "
                f"{linear.out_features} outputs, and a head has {head_dim}"
            )


def _cut_heads(linear: Any, config: Any, part: RankOf) -> None:
    """The one KV head of this rank, where several ranks hold the same."""
    import torch

    num_kv_heads = _num_kv_heads(config)
    head = part.rank * num_kv_heads // part.num_ranks
    size = linear.weight.shape[0] // num_kv_heads
    rows = slice(head * size, (head + 1) * size)
    for name in ("weight", "bias"):
        whole = getattr(linear, name)
        if whole is not None:
            cut = torch.nn.Parameter(whole.detach()[rows].clone(), requires_grad=False)
            setattr(linear, name, cut)
    linear.out_features = size


def _num_kv_heads(config: Any) -> int:
    text = config.get_text_config()
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
