"""Blocks of GGUF files: exactly the numbers that gguf says, in matrices and in embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

from flexinfer.checkpoints.gguf.blocks import decode
from flexinfer.checkpoints.gguf.grids import GRID_DECODERS
from flexinfer.layers.quantised_linear import QuantisedLinear
from flexinfer.layers.quantised_panels import QuantisedPanels
from flexinfer.models.loading import load_model
from helpers.gguf.files import Type, quantise, random_blocks, write_gguf
from helpers.gguf.models import CONFIGS, QUANTISED, TYPES
from helpers.tiny_models import draw_model

LEVELS = {Type.Q2_K: 2, Type.Q4_K: 2, Type.Q5_K: 2}
LEVELS |= {Type[name]: 1 for name in ("Q3_K", "Q6_K", "IQ4_XS", *GRID_DECODERS)}


@pytest.mark.parametrize("kind", QUANTISED)
def test_blocks_are_the_numbers_that_gguf_says(kind: Type) -> None:
    weight = torch.randn(24, 1024, generator=torch.Generator().manual_seed(1)).numpy()
    rows = quantise(weight, kind, 1)
    numbers = torch.from_numpy(gguf.quants.dequantize(rows, kind))
    decoded = decode(kind.name, torch.from_numpy(rows))
    assert len(decoded.levels) == LEVELS.get(kind, 0)
    if decoded.minimums is not None:  # scale * n + lowest is scale * (n - 8) + (8 * scale + lowest)
        bound = torch.finfo(torch.float32).eps * numbers.abs().max()
        assert (decoded.dequantised() - numbers).abs().max() <= bound
    else:
        assert torch.equal(decoded.dequantised(), numbers)


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_block_alone_is_the_same_as_among_others(kind: Type) -> None:
    """Of one, words of four bytes may begin at any even byte."""
    rows = torch.from_numpy(quantise(np.ones((3, 256), np.float32), kind, 1))
    several = decode(kind.name, rows).dequantised()
    assert torch.equal(decode(kind.name, rows[1:2]).dequantised(), several[1:2])


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        (Type.MXFP4, 4.25),
        (Type.IQ4_NL, 4.5),
        *((Type[name], 4.3125) for name in ("IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_XXS", "IQ1_S")),
        *((Type[name], 4.5625) for name in ("IQ2_S", "IQ2_XS", "IQ1_M")),
        *((Type[name], 4.0625) for name in ("TQ1_0", "TQ2_0")),
    ],
)
def test_places_in_a_table_stay_in_four_bits(kind: Type, bits: float) -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(1)).numpy()
    panels = QuantisedPanels(decode(kind.name, torch.from_numpy(quantise(weight, kind, 1))))
    assert 8 * sum(part.nbytes for part in panels.parts.values()) == bits * weight.size


@pytest.mark.parametrize("name", [*GRID_DECODERS, "IQ4_XS", "Q6_K", "TQ2_0"])
@pytest.mark.parametrize("factor", [-0.02, 5e-7])
def test_factors_below_zero_and_next_to_it_lose_no_bit(name: str, factor: float) -> None:
    """An eighth of the least float16 numbers is none."""
    rows = torch.from_numpy(random_blocks(Type[name], 64, 1024, 2, factor))
    numbers = torch.from_numpy(gguf.quants.dequantize(rows.numpy(), Type[name]))
    source = decode(name, rows)
    assert torch.equal(source.dequantised(), numbers)
    products = QuantisedLinear(source, None, torch.float32)(torch.eye(1024)[:9])
    assert torch.equal(products.T, numbers[:, :9])


@pytest.mark.parametrize("types", TYPES)
def test_a_tied_embedding_looks_up_the_rows_of_the_head(types: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = draw_model(CONFIGS["llama"](tie_word_embeddings=True))
    written = write_gguf(path, model, TYPES[types])
    loaded: Any = load_model(str(path), dtype="float32").model
    embedding, ids = loaded.model.embed_tokens, torch.tensor([[3, 127, 0], [64, 63, 3]])
    torch.testing.assert_close(
        embedding(ids), written.model.embed_tokens(ids).float(), rtol=0, atol=1e-7
    )
    if isinstance(loaded.lm_head, QuantisedLinear):
        assert embedding.nbytes == 0
        assert loaded.model.embed_tokens.weight.numel() == 0
