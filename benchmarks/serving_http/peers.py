"""Peers: other servers with OpenAI's interface, with the settings that ours has.

Streamed, they send an event for each token.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Peer:
    """How a server is started, and what its requests say besides."""

    name: str
    command: list[str]
    """Ends with --port."""
    variables: dict[str, str]
    options: dict[str, Any] = field(default_factory=dict)


def peers_of(
    args: argparse.Namespace, model: Path, max_model_len: int, num_seqs: int, kv_gib: int
) -> list[Peer]:
    """Those that `args` has a path of."""
    found = []
    if args.vllm_python is not None:
        found.append(_vllm(args, model, max_model_len, num_seqs, kv_gib))
    if args.llama_server is not None:
        found.append(_llama(args, max_model_len, num_seqs))
    return found


def _vllm(
    args: argparse.Namespace, model: Path, max_model_len: int, num_seqs: int, kv_gib: int
) -> Peer:
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{args.threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if args.vllm_preload:
        variables["LD_PRELOAD"] = args.vllm_preload
    # Not `vllm serve`: that asks for the version of a package that CPU builds call otherwise.
    command = [str(args.vllm_python), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--dtype", args.dtype, "--host", "127.0.0.1"]
    command += ["--max-model-len", str(max_model_len), "--max-num-seqs", str(num_seqs)]
    return Peer("vLLM", [*command, *args.vllm_args.split(), "--port"], variables)


def _llama(args: argparse.Namespace, max_model_len: int, num_seqs: int) -> Peer:
    """One token in an event always; as many slots as requests, and no prefixes of other rounds."""
    kv = "bf16" if args.dtype == "bfloat16" else "f32"
    num_slots = min(num_seqs, 32)
    command = [str(args.llama_server), "-m", str(args.llama_model), "--host", "127.0.0.1"]
    command += ["-t", str(args.threads), "-tb", str(args.threads), "-np", str(num_slots)]
    command += ["-c", str(num_slots * max_model_len // 2), "-b", "2048", "-ub", "512", "-cb"]
    command += ["-ctk", kv, "-ctv", kv, "-fa", "on", "--kv-unified", "--no-webui", "--offline"]
    return Peer("llama.cpp", [*command, "--port"], {}, {"cache_prompt": False})
