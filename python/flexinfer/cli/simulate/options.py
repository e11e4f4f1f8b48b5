"""The options of `flexinfer simulate`: one field each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from flexinfer.cli.option_model import option


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    panel: ClassVar[str] = "The fleet"
    replicas: Annotated[int, option("How many replicas.", min=1)] = 8
    router: Annotated[
        list[str] | None,
        option(
            "round-robin, random, power-of-two, prefix-affinity or cached-prefix; may be repeated; "
            "by default all of them."
        ),
    ] = None
    seed: Annotated[int, option("Of what routers draw.")] = 0


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    panel: ClassVar[str] = "The load"
    trace: Annotated[Path, option("Azure's or Mooncake's trace: CSV or JSON lines, also .gz.")]
    num_prompts: Annotated[int | None, option("Only the first requests.", min=1)] = None
    trace_time_scale: Annotated[float, option("Factor of the trace's times.")] = 1.0
    trace_length_scale: Annotated[float, option("Factor of the trace's lengths.")] = 1.0


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    panel: ClassVar[str] = "Each replica"
    num_layers: Annotated[int, option("Of the model; by default Llama 3 8B's.", min=1)] = 32
    num_kv_heads: Annotated[int, option(min=1)] = 8
    head_dim: Annotated[int, option(min=1)] = 128
    dtype: Annotated[str, option("Of the KV cache.")] = "bfloat16"
    kv_cache_memory_bytes: Annotated[str, option("Budget of the KV cache.")] = "16GiB"
    chunk_bytes: Annotated[str, option("Size of a chunk.")] = "2MiB"
    max_model_len: Annotated[int, option("Longer prompts lose their end.", min=2)] = 131072
    max_num_seqs: Annotated[int, option("Maximum number of requests that run.", min=1)] = 64
    max_num_batched_tokens: Annotated[int, option("Maximum of a step.", min=1)] = 2048


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    panel: ClassVar[str] = "Time of a step"
    step_cost: Annotated[
        Path | None, option("JSON of --calibrate; by default the shipped model's on two cores.")
    ] = None
    calibrate: Annotated[
        str | None, option("Measure a model (folder or hub id) on this machine first.")
    ] = None
    save_step_cost: Annotated[Path | None, option("Write what --calibrate found here.")] = None
    json: Annotated[Path | None, option("Write every number into this file.")] = None


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(CostOptions, ReplicaOptions, LoadOptions, FleetOptions):
    """Everything that the command was given; the last base's fields come first in the help."""
