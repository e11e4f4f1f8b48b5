"""The host attention kernel alone: sharing, SDPA, bandwidth; see README.md beside this file.

python benchmarks/attention_cpu/bench.py --json FILE [--threads N] [--tables NAME,...] [--quick]
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from provenance import write_report
from scenario import Setting, Shape, copy_bandwidth, medians_us, open_scenario

from flexinfer.attention.host import HostAttention
from flexinfer.attention.kv_format import KVFormat
from flexinfer.attention.sdpa import SdpaAttention

# benchmarks/serving/models.py; few layers of the others, so that the arena fits in memory.
SMALL = Shape(num_layers=8, num_kv_heads=4, group=2, head_dim=64)
BIG = Shape(num_layers=16, num_kv_heads=4, group=4, head_dim=64)
LARGE = Shape(num_layers=2, num_kv_heads=8, group=4, head_dim=128)
GROUP_OF_8 = Shape(num_layers=8, num_kv_heads=2, group=8, head_dim=128)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write the numbers."""
    arguments = _arguments(argv)
    torch.set_num_threads(arguments.threads)
    load_before = os.getloadavg()
    bandwidth = copy_bandwidth()
    results: dict[str, list[Row]] = {}
    for name in arguments.tables:
        results[name] = TABLES[name](bandwidth["read"], 1 if arguments.quick else 7)
        _print_table(name, results[name])
    load = ", ".join(f"{value:.1f}" for value in load_before)
    print(f"copy {bandwidth['copy']:.1f} GB/s, read {bandwidth['read']:.1f} GB/s")
    print(f"load average before: {load} on {os.cpu_count()} cores; {arguments.threads} threads")
    body = {
        "threads": arguments.threads,
        "bandwidth_gb_s": bandwidth,
        "quick": arguments.quick,
        "results": results,
    }
    write_report(arguments.json, "attention_cpu", body, load_before=load_before)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch's threads")
    parser.add_argument("--tables", type=_tables, default=list(TABLES), help="one or more, by ,")
    parser.add_argument("--quick", action="store_true", help="one round: only to see it work")
    return parser.parse_args(argv)


def _tables(text: str) -> list[str]:
    for name in text.split(","):
        if name not in TABLES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(TABLES)}")
    return text.split(",")


def measure_sharing(read_gb_s: float, rounds: int) -> list[Row]:
    """32 decodes over a common prefix: in two phases; in one over the same chunks, or copies."""
    rows = []
    for dtype_name, dtype in DTYPES.items():
        for num_shared in (1024,) if rounds == 1 else (1024, 4096, 8192):
            num_layers = max(1, min(4, 8192 // num_shared // 2))
            shape = Shape(num_layers, SMALL.num_kv_heads, SMALL.group, SMALL.head_dim)
            setting = Setting(((num_shared + 64, 1),) * 32, num_shared)
            with open_scenario(shape, dtype, setting) as scenario:
                backend = HostAttention(scenario.layers)
                runs = [
                    (scenario, backend, scenario.shared_metadata()),
                    (scenario, backend, scenario.metadata),
                ]
                two_phase, one_phase = medians_us(runs, rounds)
                del backend, runs
            with open_scenario(shape, dtype, setting, alias=False) as scenario:
                backend = HostAttention(scenario.layers)
                (copies,) = medians_us([(scenario, backend, scenario.metadata)], rounds)
                del backend
            rows.append(
                {
                    "dtype": dtype_name,
                    "shared": num_shared,
                    "two_phase_us": two_phase,
                    "aliased_us": one_phase,
                    "copies_us": copies,
                    "ratio": one_phase / two_phase,
                    "ratio_copies": copies / two_phase,
                }
            )
    return rows


def measure_decodes(read_gb_s: float, rounds: int) -> list[Row]:
    """Decodes that share nothing, against SDPA, and the bandwidth that they reach."""
    generator = random.Random(1)
    mixed = tuple((generator.randint(64, 600), 1) for _ in range(32))
    batches = {
        "32 x 64-600": (SMALL, mixed),
        "32 x 64": (SMALL, ((64, 1),) * 32),
        "1 x 4096": (SMALL, ((4096, 1),)),
        "big, 32 x 64-600": (BIG, mixed),
        "large, 8 x 4096": (LARGE, ((4096, 1),) * 8),
        "8 heads a KV head, 32 x 64-600": (GROUP_OF_8, mixed),
    }
    rows = []
    for dtype_name, dtype in DTYPES.items():
        for name, (shape, lengths) in batches.items():
            for layout, layers_per_plane in (("interleaved", None), ("dense", 1)):
                with open_scenario(
                    shape, dtype, Setting(lengths), layers_per_plane=layers_per_plane
                ) as scenario:
                    runs = [
                        (scenario, backend(scenario.layers), scenario.metadata)
                        for backend in (HostAttention, SdpaAttention)
                    ]
                    host, sdpa = medians_us(runs, rounds)
                    del runs
                num_tokens = sum(start + num_new for start, num_new in lengths)
                gb_s = shape.kv_bytes(num_tokens, dtype) / host / 1e3
                rows.append(
                    {
                        "dtype": dtype_name,
                        "batch": name,
                        "layout": layout,
                        "host_us": host,
                        "sdpa_us": sdpa,
                        "speedup": sdpa / host,
                        "gb_s": gb_s,
                        "of_read": gb_s / read_gb_s,
                    }
                )
    return rows


def measure_prefills(read_gb_s: float, rounds: int) -> list[Row]:
    """Prompts and chunks of prompts, against SDPA."""
    generator = random.Random(1)
    mixed = tuple((0, generator.randint(64, 512)) for _ in range(7))
    batches = {
        "1 x 64": (SMALL, ((0, 64),)),
        "7 x 64-512": (SMALL, mixed),
        "4 x 512": (SMALL, ((0, 512),) * 4),
        "1 x 2048": (SMALL, ((0, 2048),)),
        "256 after 1024": (SMALL, ((1024, 256),)),
        "8 x 64 after 1024": (SMALL, ((1024, 64),) * 8),
        "16 decodes + 256": (SMALL, (*((300, 1),) * 16, (0, 256))),
        "large, 1 x 1024": (LARGE, ((0, 1024),)),
        "large, 256 after 2048": (LARGE, ((2048, 256),)),
    }
    rows = []
    for dtype_name, dtype in DTYPES.items():
        for name, (shape, lengths) in batches.items():
            with open_scenario(shape, dtype, Setting(lengths)) as scenario:
                runs = [
                    (scenario, backend(scenario.layers), scenario.metadata)
                    for backend in (HostAttention, SdpaAttention)
                ]
                host, sdpa = medians_us(runs, max(1, rounds // 2))
                del runs
            rows.append(
                {
                    "dtype": dtype_name,
                    "batch": name,
                    "host_us": host,
                    "sdpa_us": sdpa,
                    "speedup": sdpa / host,
                }
            )
    return rows


def measure_little_sharing(read_gb_s: float, rounds: int) -> list[Row]:
    """Where nothing or little is shared: the engine's choice, with the time to make it, against the
    kernel that is never told of sharing. A step of a model of 8 layers."""
    rows = []
    for dtype_name, dtype in DTYPES.items():
        for num_requests in (2, 8, 32):
            for num_shared in (0, 16, 64, 256):
                setting = Setting(((num_shared + 200, 1),) * num_requests, num_shared)
                with open_scenario(SMALL, dtype, setting) as scenario:
                    backend = HostAttention(scenario.layers)
                    chosen, choice_us = scenario.chosen_metadata(backend.sharing_cost, 51)
                    runs = [(scenario, backend, chosen), (scenario, backend, scenario.metadata)]
                    with_choice, without = medians_us(runs, 30 * rounds)
                    del backend, runs
                step_us = SMALL.num_layers * with_choice + choice_us
                rows.append(
                    {
                        "dtype": dtype_name,
                        "requests": num_requests,
                        "shared": num_shared,
                        "ranges": len(chosen.shared),
                        "choice_us": choice_us,
                        "chosen_us": step_us,
                        "never_us": SMALL.num_layers * without,
                        "chosen_of_never": step_us / (SMALL.num_layers * without),
                    }
                )
    return rows


def measure_quantised(read_gb_s: float, rounds: int) -> list[Row]:
    """Decodes of long contexts, and a chunk of a prompt, over KV as it comes and quantised."""
    batches = {
        "small, 4 x 8192": (SMALL, ((8192, 1),) * 4),
        "large, 2 x 8192": (LARGE, ((8192, 1),) * 2),
        "256 after 1024": (SMALL, ((1024, 256),)),
    }
    rows = []
    for dtype_name, dtype in DTYPES.items():
        for name, (shape, lengths) in batches.items():
            formats = (None, KVFormat("int8", dtype), KVFormat("fp8_e4m3", dtype))
            with ExitStack() as stack:
                runs = []
                for kv_format in formats:
                    opened = open_scenario(shape, dtype, Setting(lengths), kv_format=kv_format)
                    scenario = stack.enter_context(opened)
                    runs.append((scenario, HostAttention(scenario.layers), scenario.metadata))
                plain, int8, fp8 = medians_us(runs, rounds)
                del runs
            rows.append(
                {
                    "dtype": dtype_name,
                    "batch": name,
                    "plain_us": plain,
                    "int8_us": int8,
                    "fp8_e4m3_us": fp8,
                    "int8_speedup": plain / int8,
                    "fp8_e4m3_speedup": plain / fp8,
                }
            )
    return rows


TABLES: dict[str, Callable[[float, int], list[Row]]] = {
    "sharing": measure_sharing,
    "little_sharing": measure_little_sharing,
    "decodes": measure_decodes,
    "prefills": measure_prefills,
    "quantised": measure_quantised,
}


def _print_table(name: str, rows: Sequence[Row]) -> None:
    """As Markdown, ready for the README."""
    print(f"\n{name}\n")
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(_cell(key, value) for key, value in row.items()) + " |")
    print()


def _cell(key: str, value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    if "of_" in key:
        return f"{value:.1%}"
    return f"{value:,.0f}" if key.endswith("_us") else f"{value:.1f}"


if __name__ == "__main__":
    main()
