"""Tokens a second with n-gram speculation and without; see README.md beside this file.

python benchmarks/speculation/bench.py [--json FILE] [--rounds N] [--quick]
    [--shape small|1b] [--dtype float32] [--quantization int8]
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "quantised"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "serving"))

import torch
from model import SHAPES, make_folder
from provenance import write_report

from flexinfer import LLM, LLMEngine, SamplingParams
from flexinfer.cli.settings import SHIPPED_MODEL
from flexinfer.runner.inputs import StepInputs
from models import SIZES

NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4}
NGRAM |= {"prompt_lookup_min": 2}
SOURCES = ("textwrap.py", "bisect.py", "heapq.py", "shlex.py", "colorsys.py", "fnmatch.py")
PROSE = "pydoc_data/topics.py"
NUM_PROMPT, NUM_NEW = 320, 128
VOCAB_SIZE = 32_000
NUM_LAYERS = 8
WAYS = {"plain": None, "speculated": NGRAM}
Script = tuple[list[int], list[int]]
"""A prompt, and the answer that the model is made to give."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=("small", *SHAPES), default="small")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization", help="int8, int4, ...; none: as the dtype says")
    parser.add_argument("--quick", action="store_true", help="one short round of each")
    arguments = parser.parse_args(argv)
    load_before = os.getloadavg()
    rounds = 1 if arguments.quick else arguments.rounds
    rows: list[dict[str, Any]] = []
    print(
        "| task | batch | tokens/s without | with | ratio | accepted |\n|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(folder, arguments.shape)
        for batch in (1, 32):
            count = 2 if arguments.quick else 32 if batch > 1 else 3
            rows += measure(model, arguments, batch, count, rounds)
    settings = {name: getattr(arguments, name) for name in ("shape", "dtype", "quantization")}
    write_report(
        arguments.json, "speculation", {**settings, "results": rows}, load_before=load_before
    )


def measure(
    model: str, arguments: argparse.Namespace, batch: int, count: int, rounds: int
) -> list[dict[str, Any]]:
    """A row for each task: medians of tokens a second of `count` prompts. The two ways, an engine
    each, take turns in each round."""
    rows = []
    with ExitStack() as stack:
        engines = {
            way: stack.enter_context(
                LLM(
                    model,
                    dtype=arguments.dtype,
                    quantization=arguments.quantization,
                    skip_tokenizer_init=True,
                    kv_cache_memory_bytes="512MiB",
                    max_num_seqs=batch,
                    enable_prefix_caching=False,
                    speculative_config=config,
                )
            ).llm_engine
            for way, config in WAYS.items()
        }
        dictated = {way: dictate(engine) for way, engine in engines.items()}
        for task, write in TASKS.items():
            scripts = [write(random.Random(i)) for i in range(count)]
            rates: dict[str, list[float]] = {way: [] for way in WAYS}
            num_drafted, num_accepted = drafted(engines["speculated"])
            for round_idx in range(rounds):
                for way in WAYS if round_idx % 2 else reversed(WAYS):
                    engine, told = engines[way], dictated[way]
                    rates[way].append(tokens_per_s(engine, told, scripts, batch))
            more_drafted, more_accepted = drafted(engines["speculated"])
            ratios = [new / old for old, new in zip(*rates.values(), strict=True)]
            rows.append(
                {
                    "task": task,
                    "batch": batch,
                    **{way: statistics.median(values) for way, values in rates.items()},
                    "ratio": statistics.median(ratios),
                    "ratios": ratios,
                    "accepted": (more_accepted - num_accepted) / max(1, more_drafted - num_drafted),
                    "drafted_per_token": (more_drafted - num_drafted) / (rounds * count * NUM_NEW),
                }
            )
            show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    print(
        f"| {row['task']} | {row['batch']} | {row['plain']:.1f} | {row['speculated']:.1f} | "
        f"{row['ratio']:.2f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f}) | "
        f"{row['accepted']:.0%} of {row['drafted_per_token']:.2f} a token |",
        flush=True,
    )


def drafted(engine: LLMEngine) -> tuple[int, int]:
    """Tokens proposed so far, and accepted."""
    stats = engine.stats().speculation
    assert stats is not None
    return stats.num_draft_tokens, stats.num_accepted_tokens


def tokens_per_s(
    engine: LLMEngine, told: dict[str, list[int]], scripts: list[Script], batch: int
) -> float:
    """Of decoding: from the last prompt's end. `told` is of `dictate`. Raises AssertionError for
    other answers."""
    num_tokens, seconds = 0, 0.0
    for first in range(0, len(scripts), batch):
        part = scripts[first : first + batch]
        told.update({str(i): prompt + answer for i, (prompt, answer) in enumerate(part)})
        for i, (prompt, _) in enumerate(part):
            params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
            engine.add_request(str(i), prompt, params)
        final: dict[str, list[int]] = {}
        start_s, num_before = 0.0, 0
        while engine.has_unfinished_requests():
            running = engine.scheduler.running.values()
            if not start_s and len(running) == len(part) and not any(map(is_new, running)):
                start_s = time.perf_counter()
                num_before = sum(request.num_output_tokens for request in running)
            for output in engine.step():
                final[output.request_id] = output.outputs[0].token_ids
        seconds += time.perf_counter() - start_s
        assert all(final[str(i)] == answer for i, (_, answer) in enumerate(part))
        num_tokens += NUM_NEW * len(part) - num_before
    return num_tokens / seconds


def is_new(request: Any) -> bool:
    return request.num_output_tokens == 0


def dictate(engine: LLMEngine) -> dict[str, list[int]]:
    """The model computes all that it does, and its most probable token is then that of what is
    returned, by request id."""
    told: dict[str, list[int]] = {}
    forward: Callable[[StepInputs], Any] = engine.runner.forward

    @torch.inference_mode()
    def dictated(inputs: StepInputs) -> Any:
        logits = forward(inputs)
        rows = inputs.logits_rows.tolist()
        wanted = {row: i for i, row in reversed(list(enumerate(rows)))}  # padding comes last
        running = engine.scheduler.running.values()
        of_slot = {r.vtensor.slot: told[r.request_id] for r in running if r.vtensor}
        for segment in inputs.metadata.segments:
            script = of_slot[segment.slot]
            for place in range(segment.start, segment.end):
                i = wanted.get(segment.row + place - segment.start)
                if i is not None and place + 1 < len(script):
                    logits[i, script[place + 1]] = 1e4
        return logits

    engine.runner.forward = dictated  # type: ignore[method-assign]
    return told


def code_edit(rng: random.Random) -> Script:
    """Code, and the same code with a name changed wherever it stands."""
    tokens, text = source_tokens(rng)
    names = re.findall(r"\b[a-z]{4,12}\b", text) or text.split()
    name = max(dict.fromkeys(names), key=names.count)
    edited = re.sub(rf"\b{re.escape(name)}\b", "other_name", text)
    return tokens, tokenizer().encode(edited)[:NUM_NEW]


def summary(rng: random.Random) -> Script:
    """Text, and some of its lines, a few new words before each."""
    tokens, text = source_tokens(rng)
    lines = [line for line in text.splitlines() if len(line.split()) > 3]
    words = [word for word in text.split() if word.isalpha()]
    told: list[int] = []
    for line in sorted(rng.sample(range(len(lines)), min(8, len(lines)))):
        told += tokenizer().encode(" ".join(rng.sample(words, 2)) + "\n" + lines[line] + "\n")
    return tokens, (told * NUM_NEW)[:NUM_NEW]


def unlike(rng: random.Random) -> Script:
    """Code, and prose of Python's manual: what an answer in words of its own gives to guess."""
    tokens, _ = source_tokens(rng)
    prose = prose_tokens()
    start = rng.randrange(len(prose) - NUM_NEW)
    return tokens, prose[start : start + NUM_NEW]


TASKS: dict[str, Callable[[random.Random], Script]] = {
    "code edit": code_edit,
    "summary": summary,
    "unlike": unlike,
}


def source_tokens(rng: random.Random) -> tuple[list[int], str]:
    """A piece of the standard library."""
    tokens = file_tokens(rng.choice(SOURCES))
    start = rng.randrange(len(tokens) - NUM_PROMPT)
    tokens = tokens[start : start + NUM_PROMPT]
    return tokens, tokenizer().decode(tokens)


@cache
def file_tokens(name: str) -> list[int]:
    found: list[int] = tokenizer().encode(stdlib_text(name))
    return found


@cache
def prose_tokens() -> list[int]:
    """Without its indents, which are easy to guess."""
    found: list[int] = tokenizer().encode(" ".join(stdlib_text(PROSE).split()))
    return found


def stdlib_text(name: str) -> str:
    return (Path(sysconfig.get_paths()["stdlib"]) / name).read_text()


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SHIPPED_MODEL)


def save_model(folder: str, shape: str) -> str:
    """Llama's architecture, random weights; returns where."""
    if shape != "small":
        return str(make_folder(Path(folder), shape, NUM_LAYERS))
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = SIZES[shape]
    config = LlamaConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=2048, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
