"""The architectures of GGUF files that are known here, by llama.cpp's names."""

from __future__ import annotations

from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.families.apertus import APERTUS
from flexinfer.checkpoints.gguf.families.cohere import COHERE
from flexinfer.checkpoints.gguf.families.deepseek import DEEPSEEK
from flexinfer.checkpoints.gguf.families.exaone import EXAONE
from flexinfer.checkpoints.gguf.families.falcon_h1 import FALCON_H1
from flexinfer.checkpoints.gguf.families.gated_delta import GATED_DELTA
from flexinfer.checkpoints.gguf.families.gemma import GEMMA
from flexinfer.checkpoints.gguf.families.gemma3n import GEMMA3N
from flexinfer.checkpoints.gguf.families.gemma4 import GEMMA4
from flexinfer.checkpoints.gguf.families.glm import GLM
from flexinfer.checkpoints.gguf.families.gpt_oss import GPT_OSS
from flexinfer.checkpoints.gguf.families.granite import GRANITE
from flexinfer.checkpoints.gguf.families.jamba import JAMBA
from flexinfer.checkpoints.gguf.families.layer_norm import LAYER_NORM
from flexinfer.checkpoints.gguf.families.lfm2 import LFM2
from flexinfer.checkpoints.gguf.families.llama import LLAMA
from flexinfer.checkpoints.gguf.families.mistral import MISTRAL
from flexinfer.checkpoints.gguf.families.mixtures import MIXTURES
from flexinfer.checkpoints.gguf.families.nemotron import NEMOTRON
from flexinfer.checkpoints.gguf.families.olmo import OLMO
from flexinfer.checkpoints.gguf.families.phi import PHI
from flexinfer.checkpoints.gguf.header import GgufHeader
from flexinfer.errors import UnsupportedModelError

ARCHITECTURES: dict[str, Architecture] = {
    **LLAMA,
    **MISTRAL,
    **OLMO,
    **GRANITE,
    **PHI,
    **GPT_OSS,
    **GEMMA,
    **GEMMA3N,
    **GEMMA4,
    **GLM,
    **EXAONE,
    **COHERE,
    **LAYER_NORM,
    **APERTUS,
    **DEEPSEEK,
    **MIXTURES,
    **GATED_DELTA,
    **LFM2,
    **NEMOTRON,
    **FALCON_H1,
    **JAMBA,
}


def architecture_of(header: GgufHeader) -> Architecture:
    """Raises UnsupportedModelError for one that is not known."""
    found = ARCHITECTURES.get(header.architecture)
    if found is None:
        raise UnsupportedModelError(
            f"{header.path!r} is a GGUF file of the architecture {header.architecture!r}; known "
            f"are {', '.join(ARCHITECTURES)}"
        )
    return found
