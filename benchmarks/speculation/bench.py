"""Tokens a second with n-gram speculation and without; see README.md beside this file.

python benchmarks/speculation/bench.py [--json FILE] [--rounds N] [--quick]
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
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import torch
from provenance import write_report

from flexinfer import LLM, LLMEngine, SamplingParams
from flexinfer.cli.settings import SHIPPED_MODEL
from flexinfer.runner.inputs import StepInputs

NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4}
NGRAM |= {"prompt_lookup_min": 2}
SOURCES = ("textwrap.py", "bisect.py", "heapq.py", "shlex.py", "colorsys.py", "fnmatch.py")
NUM_PROMPT, NUM_NEW = 320, 128
SHAPE = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1408,
}
Script = tuple[list[int], list[int]]
"""A prompt, and the answer that the model is made to give."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short round of each")
    arguments = parser.parse_args(argv)
    load_before = os.getloadavg()
    rounds = 1 if arguments.quick else arguments.rounds
    rows = []
    print(
        "| task | batch | tokens/s without | with | ratio | accepted |\n|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        for task, write in TASKS.items():
            for batch in (1, 32):
                count = 2 if arguments.quick else 32 if batch > 1 else 3
                scripts = [write(random.Random(i)) for i in range(count)]
                found = measure(folder, scripts, batch, rounds)
                print(
                    f"| {task} | {batch} | {found['plain']:.1f} | {found['speculated']:.1f} | "
                    f"{found['ratio']:.2f} | {found['accepted']:.0%} |",
                    flush=True,
                )
                rows.append({"task": task, "batch": batch, **found})
    write_report(arguments.json, "speculation", {"results": rows}, load_before=load_before)


def measure(folder: str, scripts: list[Script], batch: int, rounds: int) -> dict[str, Any]:
    """Medians of tokens a second; the two ways take turns in each round."""
    rates: dict[str, list[float]] = {"plain": [], "speculated": []}
    ratios, accepted = [], 0.0
    for _ in range(rounds):
        for way, config in (("plain", None), ("speculated", NGRAM)):
            with LLM(
                folder,
                skip_tokenizer_init=True,
                kv_cache_memory_bytes="512MiB",
                max_num_seqs=batch,
                enable_prefix_caching=False,
                speculative_config=config,
            ) as llm:
                rates[way].append(tokens_per_s(llm, scripts, batch))
                stats = llm.llm_engine.stats().speculation
            if stats is not None:
                accepted = stats.num_accepted_tokens / max(1, stats.num_draft_tokens)
        ratios.append(rates["speculated"][-1] / rates["plain"][-1])
    found: dict[str, Any] = {way: statistics.median(values) for way, values in rates.items()}
    return found | {"ratio": statistics.median(ratios), "ratios": ratios, "accepted": accepted}


def tokens_per_s(llm: LLM, scripts: list[Script], batch: int) -> float:
    """Of decoding: from the last prompt's end. Raises AssertionError for other answers."""
    engine = llm.llm_engine
    told: dict[str, list[int]] = {}
    dictate(engine, told)
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


def dictate(engine: LLMEngine, told: dict[str, list[int]]) -> None:
    """The model computes all that it does, and its most probable token is then that of `told`, by
    request id."""
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


TASKS: dict[str, Callable[[random.Random], Script]] = {"code edit": code_edit, "summary": summary}


def source_tokens(rng: random.Random) -> tuple[list[int], str]:
    """A piece of the standard library."""
    tokens = file_tokens(rng.choice(SOURCES))
    start = rng.randrange(len(tokens) - NUM_PROMPT)
    tokens = tokens[start : start + NUM_PROMPT]
    return tokens, tokenizer().decode(tokens)


@cache
def file_tokens(name: str) -> list[int]:
    text = (Path(sysconfig.get_paths()["stdlib"]) / name).read_text()
    found: list[int] = tokenizer().encode(text)
    return found


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SHIPPED_MODEL)


def save_model(folder: str) -> None:
    """Llama's architecture, random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32_000, max_position_embeddings=2048, **SHAPE)
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    main()
