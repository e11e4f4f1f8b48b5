"""Measure the tiny chat model on held-out conversations by greedy generation."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from card import write_card
from dialogues import HELD_OUT, SYSTEM_PROMPT, TRAIN, Dialogue, demo_conversations, recall_dialogue
from dialogues import dialogue as any_dialogue
from systems import DEMO_SYSTEM, NO_SYSTEM, long_system
from train import FOLDER, RECORD
from transformers import AutoModelForCausalLM, AutoTokenizer

Message = dict[str, str]
MAX_NEW_TOKENS = 80


class Chat:
    """The model and its tokenizer, loaded from a folder in float32."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.end = self.tokenizer.eos_token_id
        self.pad = self.tokenizer.pad_token_id

    def render(self, messages: Sequence[Message], prompt: bool) -> list[int]:
        """Token ids of a conversation."""
        text = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=prompt
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    @torch.no_grad()
    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """Greedy continuations, each up to and including the end-of-turn token."""
        width = max(map(len, prompts))
        ids = torch.tensor([[self.pad] * (width - len(row)) + row for row in prompts])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
        output = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
            eos_token_id=self.end,
            pad_token_id=self.pad,
        )
        return [self._cut(row) for row in output[:, width:].tolist()]

    def _cut(self, row: list[int]) -> list[int]:
        return row[: row.index(self.end) + 1] if self.end in row else row


class Conversation:
    """One conversation in progress: the messages and the token ids the model has seen."""

    def __init__(self, system: str | None, users: Sequence[str]) -> None:
        self.messages: list[Message] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self.users = list(users)
        self.seen: list[int] = []
        self.answers: list[str] = []
        self.stable = True

    def ask(self, chat: Chat) -> list[int]:
        """Add the next user message and return the prompt; check the prefix property."""
        self.messages.append({"role": "user", "content": self.users[len(self.answers)]})
        prompt = chat.render(self.messages, prompt=True)
        self.stable &= prompt[: len(self.seen)] == self.seen
        return prompt

    def answer(self, chat: Chat, prompt: list[int], generated: list[int]) -> None:
        """Add the generated answer and check that rendering it gives the same tokens."""
        text = chat.tokenizer.decode([i for i in generated if i != chat.end])
        self.seen = prompt + generated
        self.messages.append({"role": "assistant", "content": text})
        self.stable &= chat.render(self.messages, prompt=False) == self.seen
        self.answers.append(text)


def hold(chat: Chat, conversations: list[Conversation], batch: int = 64) -> None:
    """Run conversations to their end, turn by turn; histories hold the generated answers."""
    ordered = sorted(conversations, key=lambda c: len(str(c.messages)))
    for first in range(0, len(ordered), batch):
        group = ordered[first : first + batch]
        while group:
            prompts = [conversation.ask(chat) for conversation in group]
            for conversation, prompt, ids in zip(
                group, prompts, chat.generate(prompts), strict=True
            ):
                conversation.answer(chat, prompt, ids)
            group = [c for c in group if len(c.answers) < len(c.users)]


class Score:
    """Counts of right answers per label."""

    def __init__(self) -> None:
        self.right: Counter[str] = Counter()
        self.total: Counter[str] = Counter()

    def add(self, label: str, right: bool) -> None:
        """Count one answer."""
        self.right[label] += right
        self.total[label] += 1

    def share(self, label: str) -> float:
        """The share of right answers under a label."""
        return self.right[label] / max(self.total[label], 1)

    def table(self) -> dict[str, dict[str, float]]:
        """All labels with their shares and counts."""
        return {
            label: {"accuracy": round(self.share(label), 4), "answers": self.total[label]}
            for label in sorted(self.total)
        }


def measure(chat: Chat, spoken: list[Dialogue], errors: list[str]) -> dict[str, object]:
    """Hold the dialogues' user sides with the model and score its answers."""
    held = [Conversation(d.system.text, [e.user for e in d.exchanges]) for d in spoken]
    hold(chat, held)
    kinds, turns, whole = Score(), Score(), 0
    for d, conversation in zip(spoken, held, strict=True):
        perfect = True
        for turn, (exchange, answer) in enumerate(
            zip(d.exchanges, conversation.answers, strict=True), start=1
        ):
            right = exchange.expect is None or exchange.expect in answer
            perfect &= right
            kinds.add(exchange.kind, right)
            turns.add(f"turn {turn}", right)
            if not right:
                errors.append(f"[{exchange.kind}] {exchange.user} -> {answer} ({exchange.expect})")
        whole += perfect
    return {
        "conversations": len(spoken),
        "recall": round(kinds.share("recall"), 4),
        "all_turns_right": round(whole / len(spoken), 4),
        "prefix_stable": sum(c.stable for c in held),
        "kinds": kinds.table(),
        "turns": turns.table(),
    }


def _draws(name: str, count: int, make: Callable[[random.Random], Dialogue]) -> list[Dialogue]:
    rng = random.Random(f"evaluate {name}")
    return [make(rng) for _ in range(count)]


def _demo_prompt(rng: random.Random) -> Dialogue:
    return recall_dialogue(rng, HELD_OUT, DEMO_SYSTEM)


def _long_prompt(rng: random.Random) -> Dialogue:
    return recall_dialogue(rng, HELD_OUT, long_system(rng, HELD_OUT))


def _no_prompt(rng: random.Random) -> Dialogue:
    return recall_dialogue(rng, HELD_OUT, NO_SYSTEM)


def _seen_values(rng: random.Random) -> Dialogue:
    return recall_dialogue(rng, TRAIN, NO_SYSTEM)


def _mixed(rng: random.Random) -> Dialogue:
    return any_dialogue(rng, HELD_OUT, turns=8)


# The measured sets, and what share of `--count` conversations each of them has.
SETS: dict[str, tuple[Callable[[random.Random], Dialogue], float]] = {
    "6 turns, no system prompt": (_no_prompt, 1.0),
    "6 turns, demo system prompt": (_demo_prompt, 1.0),
    "6 turns, long system prompts": (_long_prompt, 0.5),
    "6 turns, training values": (_seen_values, 0.5),
    "8 mixed turns, any system prompt": (_mixed, 0.5),
}


def byte_round_trip(chat: Chat) -> bool:
    """Whether any text survives encoding and decoding."""
    texts = [
        "naïve Zoë 東京 🐶",
        "tabs\tand\nlines  ",
        "  1 + 22=23?",
        "\x00\x7f ß",
        "I'm O'Neil's",
    ]
    return all(chat.tokenizer.decode(chat.tokenizer.encode(text)) == text for text in texts)


def write_demo(chat: Chat, path: Path, count: int, seed: int) -> dict[str, int]:
    """Write `count` demo conversations; those with a wrong answer are left out and counted."""
    drawn = demo_conversations(count * 3, seed)
    held = [Conversation(SYSTEM_PROMPT, [user for user, _ in turns]) for turns in drawn]
    hold(chat, held)
    kept, tried = [], 0
    for turns, conversation in zip(drawn, held, strict=True):
        if len(kept) == count:
            break
        tried += 1
        if all(e is None or e in a for (_, e), a in zip(turns, conversation.answers, strict=True)):
            kept.append([{"user": user, "expect": expect} for user, expect in turns])
    if len(kept) < count:
        raise SystemExit(f"only {len(kept)} of {tried} demo conversations are right")
    text = json.dumps({"system_prompt": SYSTEM_PROMPT, "conversations": kept}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    return {"kept": len(kept), "left_out": tried - len(kept)}


def check_demo(chat: Chat, path: Path) -> str:
    """Hold the demo conversations of `demo.json` one by one, as a demo would."""
    demo = json.loads(path.read_text(encoding="utf-8"))
    right = total = 0
    for turns in demo["conversations"]:
        conversation = Conversation(demo["system_prompt"], [turn["user"] for turn in turns])
        hold(chat, [conversation])
        for turn, answer in zip(turns, conversation.answers, strict=True):
            right += turn["expect"] is None or turn["expect"] in answer
            total += 1
    return f"{right}/{total}"


def print_table(results: dict[str, dict]) -> None:
    """Print one line per set and one per kind of exchange."""
    for name, result in results.items():
        print(
            f"{name}: recall {result['recall']:.1%}, all turns right "
            f"{result['all_turns_right']:.1%}, prefix stable "
            f"{result['prefix_stable']}/{result['conversations']}"
        )
        for part in ("turns", "kinds"):
            cells = (f"{k} {v['accuracy']:.3f} ({v['answers']})" for k, v in result[part].items())
            print("   " + "  ".join(cells))


def main() -> None:
    """Parse the command line and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--count", type=int, default=300, help="conversations in a full set")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--errors", type=int, default=0, help="print this many wrong answers")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write-demo", action="store_true", help="write demo.json")
    parser.add_argument("--demo-count", type=int, default=12)
    parser.add_argument("--demo-seed", type=int, default=0)
    parser.add_argument("--write-card", action="store_true", help="update the model card")
    parser.add_argument("--record", type=Path, default=RECORD, help="how the training went")
    arguments = parser.parse_args()
    if not (arguments.folder / "config.json").is_file():
        parser.error(
            f"--folder: there is no model in {str(arguments.folder)!r}: train.py makes one"
        )
    torch.set_num_threads(arguments.threads)
    chat, started = Chat(arguments.folder), time.time()
    errors: list[str] = []
    results = {}
    for name, (make, share) in SETS.items():
        count = max(int(arguments.count * share), 1)
        results[name] = measure(chat, _draws(name, count, make), errors)
        print_table({name: results[name]})
    report: dict[str, object] = {
        "parameters": chat.model.num_parameters(),
        "sets": results,
        "byte_round_trip": byte_round_trip(chat),
    }
    demo = arguments.folder / "demo.json"
    if arguments.write_demo:
        report["demo_selection"] = write_demo(chat, demo, arguments.demo_count, arguments.demo_seed)
    if demo.exists():
        report["demo_right"] = check_demo(chat, demo)
    report["seconds"] = round(time.time() - started, 1)
    print(json.dumps({key: value for key, value in report.items() if key != "sets"}))
    for error in errors[: arguments.errors]:
        print(error)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if arguments.write_card:
        parts = json.loads(arguments.record.read_text(encoding="utf-8"))
        write_card(arguments.folder, report, parts)


if __name__ == "__main__":
    main()
