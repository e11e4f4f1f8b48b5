"""What quantisation costs in quality: perplexity and recall before and after; see README.md beside
this file.

python benchmarks/quality/quality.py --model build/small_llama [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from provenance import write_report

from flexinfer import LLM, SamplingParams
from flexinfer.cli.settings import SHIPPED_MODEL

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(1, str(ROOT / "examples" / "tiny_chat"))  # before a package called evaluate
sys.path.append(str(ROOT / "examples" / "small_llama"))

BASE = "bfloat16"
WAYS: dict[str, dict[str, str]] = {
    BASE: {},
    "float32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int4-a8": {"quantization": "int4-a8"},
    "int4-zp": {"quantization": "int4-zp"},
    "int4-g64": {"quantization": "int4-g64"},
    "int4-g64-zp": {"quantization": "int4-g64-zp"},
    "int4-g128": {"quantization": "int4-g128"},
    "int4-g128-zp": {"quantization": "int4-g128-zp"},
    "KV int8": {"kv_cache_dtype": "int8"},
    "KV fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3"},
}
"""Settings of the engine by the name of the row; bfloat16 unless said."""
LENGTH = 512
"""Tokens of a piece of text; the first is not asked for."""
MAX_ANSWER = 80


class EngineChat:
    """An engine, as examples/tiny_chat/evaluate.py holds conversations with."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.tokenizer = llm.get_tokenizer()
        self.end = self.tokenizer.eos_token_id

    def render(self, messages: Sequence[dict[str, str]], prompt: bool) -> list[int]:
        """Token ids of a conversation."""
        text = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=prompt
        )
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """Greedy continuations, each up to and including the end-of-turn token."""
        params = SamplingParams(temperature=0, max_tokens=MAX_ANSWER)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(given, params, use_tqdm=False)  # type: ignore[arg-type]
        return [list(output.outputs[0].token_ids) for output in outputs]


def open_engine(model: str, settings: dict[str, str]) -> LLM:
    return LLM(model, **{"dtype": "bfloat16", "enable_prefix_caching": False, **settings})


def recall(settings: dict[str, str], num_conversations: int) -> dict[str, Any]:
    """Of the shipped chat model: which share of what it was told it knows later."""
    from dialogues import recall_dialogue
    from evaluate import measure
    from systems import NO_SYSTEM

    rng = random.Random("quality")
    spoken = [recall_dialogue(rng, system=NO_SYSTEM) for _ in range(num_conversations)]
    with open_engine(str(SHIPPED_MODEL), settings) as llm:
        found = measure(EngineChat(llm), spoken, [])
    return {"recall": found["recall"], "all_turns_right": found["all_turns_right"]}


def pieces(tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of held-out text, from all over it, each behind what the tokenizer begins with."""
    from text import held_out_texts

    start = list(tokenizer.encode(""))
    ids: list[int] = []
    for text in held_out_texts():
        ids += [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    step = (len(ids) - LENGTH) // count
    return [[*start, *ids[i * step : i * step + LENGTH - len(start)]] for i in range(count)]


def perplexity(model: Path, settings: dict[str, str], num_pieces: int) -> dict[str, Any]:
    """Of the trained model on held-out text, and the share of tokens that it finds likeliest."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    losses, right = [], 0
    with open_engine(str(model), settings) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in pieces(llm.get_tokenizer(), num_pieces)]
        for output in llm.generate(prompts, params, use_tqdm=False):  # type: ignore[arg-type]
            tokens = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
            for token, of_place in tokens:
                if of_place is not None:
                    losses.append(-of_place[token].logprob)
                    right += of_place[token].rank == 1
    return {
        "perplexity": math.exp(sum(losses) / len(losses)),
        "right": right / len(losses),
        "tokens": len(losses),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "small_llama")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--pieces", type=int, default=24, help=f"of {LENGTH} tokens")
    parser.add_argument("--conversations", type=int, default=30, help="0: no recall")
    parser.add_argument("--ways", default=",".join(WAYS), help="rows, by name")
    parser.add_argument("--quick", action="store_true", help="little of each: does it work at all?")
    arguments = parser.parse_args(argv)
    if not (arguments.model / "config.json").exists():
        parser.error(f"no model in {arguments.model}: run examples/small_llama/train.py first")
    load_before = os.getloadavg()
    num_pieces, num_conversations = arguments.pieces, arguments.conversations
    if arguments.quick:
        num_pieces, num_conversations = 2, 2
    print("| | perplexity | to bfloat16 | right | recall | all turns right |")
    print("|---|---|---|---|---|---|")
    rows: dict[str, dict[str, Any]] = {}
    for name in arguments.ways.split(","):
        row = perplexity(arguments.model, WAYS[name], num_pieces)
        if num_conversations:
            row |= recall(WAYS[name], num_conversations)
        rows[name] = row
        loss = row["perplexity"] / rows.get(BASE, row)["perplexity"] - 1
        print(
            f"| {name} | {row['perplexity']:.3f} | {loss:+.2%} | {row['right']:.2%} | "
            f"{row.get('recall', math.nan):.1%} | {row.get('all_turns_right', math.nan):.1%} |",
            flush=True,
        )
    record = arguments.model / "record.json"
    training = json.loads(record.read_text()) if record.exists() else None
    body = {"settings": WAYS, "results": rows, "training": training}
    write_report(arguments.json, "quality", body, load_before=load_before)


if __name__ == "__main__":
    main()
