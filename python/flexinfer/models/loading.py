"""Loading: a model through transformers, checked before and after, its layers fused.

Two gates, each with a clear refusal (`UnsupportedModelError`):
1. `check_config` before any weight is read: architecture, layer types, position encoding;
2. `probe` after loading, by which `describe` finds out what the model really does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexinfer.errors import UnsupportedModelError
from flexinfer.models.checks import check_class, check_complete, check_plain, check_shapes
from flexinfer.models.describe import LoadedModel, describe
from flexinfer.models.ending_tokens import read_ending_tokens
from flexinfer.models.model_config import Overrides, first_line, resolve_config, unusable_config

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from flexinfer.checkpoints.checkpoint import Checkpoint
    from flexinfer.config import EngineConfig
    from flexinfer.layers.quantised import Scheme
    from flexinfer.models.sharding import RankOf
    from flexinfer.models.stored import StoredModel

_loading = threading.Lock()
"""transformers changes its own functions while it makes a model: two threads at once leave them
changed, and no tied head would be found in any later checkpoint."""


def load_model(
    model: Any,
    dtype: Any = "auto",
    device: str | None = None,
    quantization: str = "auto",
    load_format: str = "auto",
    hf_overrides: Overrides | None = None,
) -> LoadedModel:
    """Load (a folder, a GGUF file or a hub id) or take over (a loaded model) and check.

    Layers of a model that is loaded here are replaced by fused ones where there are any; a model
    that is taken over stays as it is. quantization: "auto" is the checkpoint's own, "a8" too, with
    inputs of 8 bits; else a name that `Scheme.parse` knows. load_format, hf_overrides: of
    EngineConfig. Threads load one model after the other.

    Raises UnsupportedModelError, before any weight is read where the config tells enough, and
    ValueError for overrides of what the config does not have.
    """
    from flexinfer.runtime.library_pages import let_go_of_library_pages
    from flexinfer.runtime.malloc import large_blocks_apart, return_freed_memory

    check_format(model, load_format)
    config = resolve_config(model, hf_overrides)
    with _loading, large_blocks_apart():
        loaded, name = _place(model, config, dtype, device, quantization, load_format)
    described = describe(loaded, name)
    return_freed_memory()
    let_go_of_library_pages()
    return described


def check_format(model: Any, load_format: str) -> None:
    """Raises UnsupportedModelError for a model that is not in this format."""
    from flexinfer.checkpoints.gguf.hub import gguf_file

    if load_format == "auto":
        return
    if not isinstance(model, (str, os.PathLike)):
        raise UnsupportedModelError(
            f"load_format={load_format!r} is for a path or hub id; the model given is loaded"
        )
    is_gguf = gguf_file(os.fspath(model)) is not None
    if is_gguf != (load_format == "gguf"):
        what = "a GGUF file" if is_gguf else "no GGUF file: name one, as USER/REPOSITORY:Q4_K_M"
        raise UnsupportedModelError(
            f"load_format={load_format!r} does not go with {os.fspath(model)!r}, which is {what}"
        )


def choose_scheme_of_parts(config: EngineConfig) -> Scheme | None:
    """What the weights of each rank become. Raises UnsupportedModelError, before any is read, for
    ranks' parts that cannot be quantised so, or are quantised already."""
    from flexinfer.models.quantisation import choose_scheme, open_checkpoint
    from flexinfer.models.sharding import num_parts_of_inputs

    name, num_ranks = os.fspath(config.model), config.tensor_parallel_size
    model_config = resolve_config(name, config.overrides)
    if (checkpoint := open_checkpoint(name, model_config)) is not None:
        raise UnsupportedModelError(
            f"weights in {checkpoint.method!r} do not go with tensor_parallel_size > 1: ranks read "
            "their parts of weights that are not quantised, and quantise them by `quantization`"
        )
    return choose_scheme(
        name,
        model_config,
        config.dtype,
        config.device,
        config.quantization or "auto",
        num_parts=num_parts_of_inputs(model_config, num_ranks),
    )


def load_part_of_model(
    settings: EngineConfig, device: str, part: RankOf
) -> tuple[PreTrainedModel, int]:
    """One rank's part of a model (`sharding.py`), to be described when all ranks have theirs, and
    the bytes of its weights."""
    from flexinfer.models.dtypes import weights_dtype
    from flexinfer.models.eager_experts import use_eager_experts
    from flexinfer.models.sharding import load_part, split_layers
    from flexinfer.runtime.library_pages import let_go_of_library_pages
    from flexinfer.runtime.malloc import large_blocks_apart, return_freed_memory
    from flexinfer.runtime.weight_files import converting_one_by_one, let_go_of_files

    name = os.fspath(settings.model)
    config = resolve_config(name, settings.overrides)
    scheme = choose_scheme_of_parts(settings)
    with large_blocks_apart():
        with _refusing_by_name(name), converting_one_by_one():
            dtype = weights_dtype(config, settings.dtype, device)
            model: PreTrainedModel = load_part(name, config, dtype, part)
        model.eval()
        num_bytes = split_layers(model, part, scheme)
        use_eager_experts(model)
        let_go_of_files(model)
    return_freed_memory()
    let_go_of_library_pages()
    return model, num_bytes


def _place(
    model: Any,
    config: Any,
    dtype: Any,
    device: str | None,
    quantization: str,
    load_format: str,
) -> tuple[PreTrainedModel, str]:
    """The model on its device, fused where it is loaded here, and its name."""
    from flexinfer.attention.hook import NAMES
    from flexinfer.attention.latent import keep_latents
    from flexinfer.attention.token_index import index_tokens
    from flexinfer.layers.fuse import fuse_layers
    from flexinfer.models.eager_experts import use_eager_experts
    from flexinfer.models.quantisation import choose_scheme, open_checkpoint
    from flexinfer.runtime.weight_files import let_go_of_files

    is_named = isinstance(model, (str, os.PathLike))
    checkpoint = open_checkpoint(os.fspath(model), config) if is_named else None
    scheme = choose_scheme(model, config, dtype, device, quantization, checkpoint)
    fill, name = None, str(getattr(config, "name_or_path", "")) or type(model).__name__
    loaded: PreTrainedModel = model
    if is_named:
        name = os.fspath(model)
        source = _Source(name, config, dtype, device or "cpu")
        if load_format == "dummy":
            loaded = source.draw(checkpoint)
        else:
            loaded, fill = source.open(checkpoint, scheme, quantization)
    check_class(type(loaded))
    module: torch.nn.Module = loaded
    if device is not None and fill is None:
        module.to(device)
    module.eval()
    keep_latents(module, NAMES)
    index_tokens(module, NAMES)
    if loaded is not model:
        fuse_layers(loaded, scheme, fill)
        let_go_of_files(loaded)
    use_eager_experts(loaded)
    return loaded, name


@dataclass(frozen=True, slots=True)
class _Source:
    """A path or hub id of a model, and as what its weights are wanted."""

    name: str
    config: Any
    dtype: Any
    device: str

    def open(
        self, checkpoint: Checkpoint | None, scheme: Scheme | None, quantization: str
    ) -> tuple[PreTrainedModel, Callable[[str], None] | None]:
        """The model with its weights, or without and with what reads those of a part of it."""
        from flexinfer.models.quantisation import open_experts, warn_of_growth

        if checkpoint is not None:
            stored = self._without_weights(checkpoint, quantization)
            if scheme is None:
                warn_of_growth(checkpoint, stored.model.dtype)
        elif scheme is None or (found := open_experts(self.name, self.config, self.dtype)) is None:
            return _load_weights(self.name, self.config, self.dtype, self.device), None
        else:
            stored = found
        if checkpoint is None or checkpoint.method != "gguf":  # whose config has all of them
            self._read_ending_tokens(stored.model)
        return stored.model, stored.fill

    def draw(self, checkpoint: Checkpoint | None) -> PreTrainedModel:
        """The model with random weights, of which none are read."""
        from flexinfer.models.dtypes import weights_dtype
        from flexinfer.models.dummy_weights import check_drawable, draw_weights

        check_drawable(self.name, checkpoint)
        model = draw_weights(self.config, weights_dtype(self.config, self.dtype, self.device))
        self._read_ending_tokens(model)
        return model

    def _read_ending_tokens(self, model: PreTrainedModel) -> None:
        if (found := read_ending_tokens(self.name)) is not None:
            model.generation_config = found

    def _without_weights(self, checkpoint: Checkpoint, quantization: str) -> StoredModel:
        from flexinfer.layers.quantised import BYTE_INPUTS
        from flexinfer.models.dtypes import weights_dtype
        from flexinfer.models.stored import open_stored

        if not self.device.startswith("cpu"):
            raise UnsupportedModelError(
                f"model {self.name!r} is read by kernels for the CPU alone, not for {self.device}"
            )
        dtype = weights_dtype(self.config, self.dtype, self.device)
        return open_stored(checkpoint, self.config, dtype, quantization == BYTE_INPUTS)


def _load_weights(name: str, config: Any, dtype: Any, device: str) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    from flexinfer.models.dtypes import weights_dtype
    from flexinfer.runtime.weight_files import converting_one_by_one

    with _refusing_by_name(name), converting_one_by_one():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=weights_dtype(config, dtype, device),
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            generation_config=read_ending_tokens(name),
        )
    model: PreTrainedModel = loaded[0]
    check_shapes(loaded[1]["mismatched_keys"])
    check_complete(type(model), loaded[1]["missing_keys"])
    check_plain(name, loaded[1]["unexpected_keys"])
    return model


@contextmanager
def _refusing_by_name(name: str) -> Iterator[None]:
    """What transformers raises of a folder's files: it names neither the file nor the remedy."""
    from flexinfer.checkpoints.tensor_files import check_files

    try:
        yield
    except Exception as error:  # of any kind: safetensors has one that is a plain Exception
        with suppress(OSError):  # a file that cannot be opened: the error at hand says as much
            check_files(name)
        if isinstance(error, OSError):
            raise UnsupportedModelError(
                f"model {name!r} has no safetensors weights that can be read: {first_line(error)}"
            ) from error
        if isinstance(error, (LookupError, ArithmeticError, AssertionError)):
            raise unusable_config(name, error) from error
        raise
