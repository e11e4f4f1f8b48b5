"""Models whose weights are read one layer at a time: from checkpoints that are quantised already,
and from GGUF files.

The model is made without weights; `fuse_layers` asks for those of a layer when its turn comes. So
the most that is held is the model in its last form and one layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from flexinfer.checkpoints.checkpoint import EXPERT_PARTS, Checkpoint, expert_weight
from flexinfer.errors import UnsupportedModelError
from flexinfer.layers.embedding import QuantisedEmbedding, is_embedding, scale_of
from flexinfer.layers.expert_layout import ExpertLayout, layout_of
from flexinfer.layers.expert_weights import Weight
from flexinfer.layers.formats import is_linear
from flexinfer.layers.fuse_experts import store as store_experts
from flexinfer.layers.quantise import stays, store
from flexinfer.layers.quantised import QuantisedTensor
from flexinfer.layers.quantised_rows import QuantisedRows
from flexinfer.layers.tied_head import find_ties
from flexinfer.models.checks import check_complete, listed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CORRECTIONS = ("e_score_correction_bias", "expert_bias")
"""What is added to scores where experts are chosen. It stays in float32, as in most models of
transformers: with rounded ones other experts may be chosen."""


def open_stored(
    checkpoint: Checkpoint, config: Any, dtype: torch.dtype, byte_inputs: bool = False
) -> StoredModel:
    """byte_inputs: whether quantised layers, but routers, get inputs of 8 bits.

    Raises UnsupportedModelError where names or shapes are not the model's; reads no weight."""
    try:
        model = _make_empty(config, dtype)
    except RuntimeError as error:  # torch's, of sizes that no memory has
        raise UnsupportedModelError(
            f"a model of type {config.model_type!r} of such sizes cannot be made: {error}"
        ) from error
    except (ArithmeticError, LookupError, ValueError) as error:  # transformers trusts a config
        raise UnsupportedModelError(
            f"a model of type {config.model_type!r} cannot be made of its config: {error}"
        ) from error
    return StoredModel(model, checkpoint, dtype, byte_inputs)


class StoredModel:
    """A model and where its weights come from."""

    def __init__(
        self,
        model: PreTrainedModel,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        byte_inputs: bool = False,
    ) -> None:
        self.model = model
        self._checkpoint, self._dtype, self._byte_inputs = checkpoint, dtype, byte_inputs
        self._experts, self._joined_experts = self._find_experts()
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._buffers = {
            name: buffer
            for name, buffer in model.state_dict(keep_vars=True).items()
            if name not in parameters
        }
        """Which files have: a correction of DeepSeek's routers is one."""
        self._sources = self._match_names()
        self._untie()
        self._check_shapes()
        self._read: dict[str, torch.nn.Parameter] = {}
        """Weights that several modules share."""
        checkpoint.adjust(model)

    def fill(self, path: str) -> None:
        """Read the weights of a module; of one that has a list of layers, only its own."""
        module = self.model.get_submodule(path)
        if any(isinstance(part, torch.nn.ModuleList) for part in module.modules()):
            return self._fill_one(path, module)
        if is_linear(module) and self._is_quantised(f"{path}.weight"):
            return self._fill_linear(path, module, is_alone=True)
        for name, part in list(module.named_modules()):
            self._fill_one(".".join(filter(None, (path, name))), part)
        return None

    def _fill_one(self, path: str, module: torch.nn.Module) -> None:
        if path in self._experts:
            store_experts(module, partial(self._read_expert, path))
        elif path in self._joined_experts:
            store_experts(module, partial(self._read_joined_expert, path))
        if is_linear(module) and self._is_quantised(f"{path}.weight"):
            return self._fill_linear(path, module, is_alone=False)
        if is_embedding(module) and self._is_quantised(f"{path}.weight"):
            return self._fill_embedding(path, module)
        for name, parameter in list(module.named_parameters(recurse=False)):
            full_name = f"{path}.{name}" if path else name
            if parameter.is_meta and not self._is_of_experts(full_name):
                setattr(module, name, self._parameter(full_name))
        for name, _ in list(module.named_buffers(recurse=False)):
            full_name = f"{path}.{name}" if path else name
            if full_name in self._buffers:
                setattr(module, name, self._read_buffer(full_name))
        return None

    def _fill_linear(self, path: str, module: Any, is_alone: bool) -> None:
        """is_alone: nothing will compute with its weight before it is laid out."""
        source = self._read_quantised(self._sources[f"{path}.weight"])
        if self._byte_inputs and not stays(path):
            source = source.with_byte_inputs()
        store(module, source)
        if not is_alone:
            weight = source.dequantised_to(self._dtype)
            module.weight = torch.nn.Parameter(weight, requires_grad=False)
        if f"{path}.bias" in self._sources:
            module.bias = self._parameter(f"{path}.bias")

    def _fill_embedding(self, path: str, module: Any) -> None:
        """Nothing is read for one that will look up rows of the head's (`tied_head.py`)."""
        if any(path in tie.embeddings for tie in find_ties(self.model)):
            return
        rows, decode = self._checkpoint.read_rows(self._sources[f"{path}.weight"])
        embedding = QuantisedEmbedding(
            lambda ids: decode(rows[ids]), self._dtype, scale_of(module), rows.nbytes
        )
        self.model.set_submodule(path, embedding)

    def _read_expert(self, path: str, expert: int) -> tuple[list[Weight], Weight]:
        parts = _parts_of(self._experts[path])
        *first, down = (self._read_part(path, expert, part) for part in parts)
        return first, down

    def _read_joined_expert(self, path: str, expert: int) -> tuple[list[Weight], Weight]:
        layout = self._joined_experts[path]
        names = (self._sources[f"{path}.{name}"] for name in layout.weight_names)
        first, down = layout.in_order(*(self._read_plain(name, expert) for name in names))
        return [first], down

    def _read_part(self, path: str, expert: int, part: str) -> Weight:
        name = expert_weight(path, expert, part)
        if not self._checkpoint.weights[name].is_quantised:
            return self._read_plain(name)
        source = self._read_quantised(name)
        # In their groups: of experts by output, some may have minimums where others have none.
        return source.with_byte_inputs(in_groups=True) if self._byte_inputs else source

    def _parameter(self, name: str) -> torch.nn.Parameter:
        source = self._sources[name]
        if source in self._read:
            return self._read[source]
        if self._is_quantised(name):
            weight = self._read_quantised(source).dequantised_to(self._dtype)
        else:
            weight = self._read_plain(source)
        parameter = torch.nn.Parameter(weight, requires_grad=False)
        if sum(other == source for other in self._sources.values()) > 1:
            self._read[source] = parameter
        return parameter

    def _read_quantised(self, name: str) -> QuantisedRows:
        source = self._checkpoint.read_quantised(name)

        def read(outputs: slice) -> QuantisedTensor:
            part = source[outputs]
            if not part.is_finite:
                raise UnsupportedModelError(
                    f"{name} has scales in the checkpoint that are no finite numbers: it is damaged"
                )
            return part

        return QuantisedRows(source.shape, read)

    def _read_plain(self, name: str, index: int | None = None) -> torch.Tensor:
        """One that is not quantised, or an entry of it, in the model's dtype."""
        files = self._checkpoint
        weight = files.read(name) if index is None else files.read_entry(name, index)
        if not weight.is_floating_point() or weight.itemsize < 2:
            raise UnsupportedModelError(
                f"{name} is of {weight.dtype} in the checkpoint and has no scales: it cannot be "
                "read; take a checkpoint that has it in floating-point numbers of 16 bits or more"
            )
        is_correction = name.endswith(CORRECTIONS)
        return weight.to(torch.float32 if is_correction else self._dtype)

    def _read_buffer(self, name: str) -> torch.Tensor:
        dtype = self._buffers[name].dtype
        kept = (*(self.model._keep_in_fp32_modules_strict or ()), *CORRECTIONS)
        if any(part in name.split(".") for part in kept):
            dtype = torch.float32
        return self._checkpoint.read(name).to(dtype)

    def _is_quantised(self, name: str) -> bool:
        return self._checkpoint.weights[self._sources[name]].is_quantised

    def _find_experts(self) -> tuple[dict[str, ExpertLayout], dict[str, ExpertLayout]]:
        """The modules of whose experts the checkpoint has the weights one by one, and those of
        which it has the module's own parameters, of all experts."""
        weights = self._checkpoint.weights
        apart, joined = {}, {}
        for path, module in self.model.named_modules():
            layout = layout_of(module)
            if layout is None:
                continue
            own = [weights.get(f"{path}.{name}") for name in layout.weight_names]
            if expert_weight(path, 0, _parts_of(layout)[0]) in weights:
                apart[path] = layout
            elif all(weight is not None and not weight.is_quantised for weight in own):
                joined[path] = layout
        return apart, joined

    def _is_of_experts(self, name: str) -> bool:
        """Whether the parameter has the weights of experts, which are read one by one."""
        path, _, own = name.rpartition(".")
        layout = self._experts.get(path) or self._joined_experts.get(path)
        return layout is not None and own in layout.weight_names

    def _expert_shapes(self, path: str) -> dict[str, tuple[int, ...]]:
        """Each weight of the experts of a module."""
        layout = self._experts[path]
        count, width, hidden = layout.sizes(self.model.get_submodule(path))
        shapes = [(hidden, width)] * (2 if layout.has_gates else 1) + [(width, hidden)]
        return {
            expert_weight(path, expert, part): shape
            for expert in range(count)
            for part, shape in zip(_parts_of(layout), shapes, strict=True)
        }

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Those that have a weight of their own."""
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            path, _, own = name.rpartition(".")
            layout = self._experts.get(path)
            if layout is None or own not in layout.weight_names:
                yield name, parameter

    def _match_names(self) -> dict[str, str]:
        """Each parameter of the model -> the checkpoint's weight; tied ones have the same. Experts'
        weights are checked, and not among them."""
        weights = self._checkpoint.weights
        groups: dict[int, list[str]] = {}
        for name, parameter in self._parameters():
            groups.setdefault(id(parameter), []).append(name)
        sources: dict[str, str] = {}
        missing: list[str] = []
        for names in groups.values():
            there = [name for name in names if name in weights]
            missing += [] if there else names[:1]
            sources |= {name: name if name in weights else (there or names)[0] for name in names}
        of_experts = {name for path in self._experts for name in self._expert_shapes(path)}
        missing += sorted(of_experts - weights.keys())
        missing += sorted(self._buffers.keys() - weights.keys())
        known = {*sources, *of_experts, *self._buffers}
        # Layers that predict tokens beyond the next are among them.
        passed_over = self.model._keys_to_ignore_on_load_unexpected or ()
        unknown = [
            name
            for name in weights
            if name not in known and not any(re.search(pattern, name) for pattern in passed_over)
        ]
        for name in list(unknown):
            # Some programs write a bias for each layer that they quantise, of zeros if need be.
            layer = self._linear(name, sources)
            if layer is not None and layer.bias is None:
                sources[name] = name
                unknown.remove(name)
        check_complete(type(self.model), missing)
        if unknown:
            raise UnsupportedModelError(
                f"the checkpoint has {listed(unknown)}, which a {type(self.model).__name__} has not"
            )
        return sources

    def _untie(self) -> None:
        """Parameters that are one by the config, and several in the checkpoint, are several."""
        first: dict[int, str] = {}
        twins: dict[tuple[int, str], torch.nn.Parameter] = {}
        for name, parameter in list(self._parameters()):
            source = self._sources[name]
            if first.setdefault(id(parameter), source) != source:
                twin = torch.nn.Parameter(torch.empty_like(parameter), requires_grad=False)
                path, _, own = name.rpartition(".")
                setattr(
                    self.model.get_submodule(path),
                    own,
                    twins.setdefault((id(parameter), source), twin),
                )

    def _linear(self, bias: str, sources: Mapping[str, str]) -> Any:
        """The quantised layer of the model that has this bias."""
        path, _, ending = bias.rpartition(".")
        weight = self._checkpoint.weights.get(f"{path}.weight")
        is_layer = f"{path}.weight" in sources and weight is not None and weight.is_quantised
        if ending != "bias" or not is_layer:
            return None
        module = self.model.get_submodule(path)
        return module if is_linear(module) else None

    def _check_shapes(self) -> None:
        """And that experts of one layer are all quantised, or none of them."""
        wanted = {name: (self._sources[name], tuple(p.shape)) for name, p in self._parameters()}
        for bias in sorted(self._sources.keys() - wanted.keys()):  # the model has none there
            weight = self._checkpoint.weights[f"{bias.removesuffix('bias')}weight"]
            wanted[bias] = (bias, weight.shape[:1])
        for path in sorted(self._experts):
            shapes = self._expert_shapes(path)
            wanted |= {name: (name, shape) for name, shape in shapes.items()}
            plain = [name for name in shapes if not self._checkpoint.weights[name].is_quantised]
            if 0 < len(plain) < len(shapes):
                raise UnsupportedModelError(
                    f"{path} has experts whose weights are quantised and others whose are not "
                    f"({listed(plain)}), which cannot be read here"
                )
        wanted |= {name: (name, tuple(b.shape)) for name, b in self._buffers.items()}
        for name, (source, shape) in wanted.items():
            found = self._checkpoint.weights[source].shape
            if found != shape:
                raise UnsupportedModelError(
                    f"{name} is {list(found)} in the checkpoint, and {list(shape)} in a "
                    f"{type(self.model).__name__} of its config"
                )


def _parts_of(layout: ExpertLayout) -> tuple[str, ...]:
    """Which of EXPERT_PARTS its experts have."""
    return EXPERT_PARTS if layout.has_gates else EXPERT_PARTS[1:]


def _make_empty(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The model with parameters of no memory, and buffers as they should be."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights(), _parameters_without_memory():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.tie_weights()  # transformers does it with the initialisation
    return model


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Parameters that modules register meanwhile go to the meta device. They had memory for a
    moment, which nobody has touched."""
    register = torch.nn.Module.register_parameter

    def register_empty(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = torch.nn.Parameter(param.detach().to("meta"), requires_grad=False)
        register(self, name, param)

    torch.nn.Module.register_parameter = register_empty  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
