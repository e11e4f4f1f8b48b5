"""The home of these names in vLLM: `from flexinfer.sampling_params import SamplingParams` works."""

from flexinfer.sampling.grammars import StructuredOutputsParams
from flexinfer.sampling.params import BeamSearchParams, RequestOutputKind, SamplingParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
