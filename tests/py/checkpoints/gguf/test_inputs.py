"""GGUF files with inputs of 8 bits (`quantization="a8"`): the products of their integers."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

from flexinfer.checkpoints.checkpoint import EXPERT_PARTS
from flexinfer.checkpoints.gguf.checkpoint import GgufCheckpoint
from flexinfer.errors import UnsupportedModelError
from flexinfer.layers.experts import slow_experts
from flexinfer.layers.quantised import QuantisedTensor
from flexinfer.models.loading import load_model
from helpers.gguf.files import Type, write_gguf
from helpers.gguf.models import CONFIGS, TYPES, same
from helpers.mixtures import generate
from helpers.slow_products import BY_ROUNDING, furthest_behind, with_byte_inputs
from helpers.tiny_models import draw_model, random_prompts


@pytest.mark.parametrize(
    ("name", "types"),
    [
        *product(
            ("llama", "qwen2", "mixtral", "qwen3moe", "gpt-oss"),
            ("Q8_0", "Q4_0", "Q4_K", "Q6_K", "Q4_K_M"),
        ),
        *product(("llama", "gpt-oss"), ("MXFP4", "IQ4_NL", "IQ4_XS")),
    ],
)
def test_with_inputs_of_8_bits_tokens_are_those_of_slow_products(
    name: str, types: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    written = write_gguf(path, draw_model(CONFIGS[name]()), TYPES[types])
    slow = with_byte_inputs(written, GgufCheckpoint(str(path)))
    prompts = random_prompts((6, 40))
    for prompt, generated in zip(prompts, generate(path, prompts, quantization="a8"), strict=True):
        # A rounded input may also choose another expert, and such prompts are no test.
        assert furthest_behind(slow, prompt, generated) <= BY_ROUNDING


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("types", ["Q8_0", "Q4_K_M"])
def test_inputs_of_all_quantised_layers_get_8_bits(
    types: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, draw_model(CONFIGS["mixtral"](tie_word_embeddings=True)), TYPES[types])
    model: Any = load_model(str(path), dtype=dtype, quantization="a8").model
    checkpoint = GgufCheckpoint(str(path))

    def read(name: str) -> QuantisedTensor:
        return checkpoint.read_quantised(f"{name}.weight")[:].with_byte_inputs()

    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    layer, own = model.model.layers[1], "model.layers.1"
    parts = [read(f"{own}.self_attn.{part}_proj").reference(x) for part in ("q", "k", "v")]
    bound = 5e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for module, expected in (
        (layer.self_attn.qkv_proj, torch.cat(parts, dim=-1)),
        (layer.self_attn.o_proj, read(f"{own}.self_attn.o_proj").reference(x)),
        (model.lm_head, read("model.embed_tokens").reference(x)),
    ):
        torch.testing.assert_close(module(x).double(), expected, atol=bound, rtol=bound)
    experts = f"{own}.mlp.experts"
    rows = [[read(f"{experts}.{i}.{part}") for part in EXPERT_PARTS] for i in range(4)]
    gate_up = [QuantisedTensor.join([gate, up]) for gate, up, _ in rows]
    index, weights = torch.arange(14).view(7, 2) % 4, torch.full((7, 2), 0.5, dtype=dtype)
    output = layer.mlp.experts(x, index, weights)
    slow = slow_experts(gate_up, [down for *_, down in rows], x, index, weights).double()
    assert (output.double() - slow).norm() <= (
        2e-3 if dtype == torch.float32 else 0.02
    ) * slow.norm()


def test_a_file_that_is_not_quantised_has_no_use_for_inputs_of_8_bits_alone(
    tmp_path: Path,
) -> None:
    write_gguf(tmp_path / "model.gguf", draw_model(CONFIGS["llama"]()), same(Type.F16))
    with pytest.raises(UnsupportedModelError, match=r"'a8'.*are not: take 'int8' or 'int4-a8'"):
        load_model(str(tmp_path / "model.gguf"), quantization="a8")
