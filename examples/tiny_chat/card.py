"""The model card: a template filled with the measured numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# tiny_chat

A small but real chat model, trained from scratch for FlexInfer's tests, benchmarks and
demonstrations. It remembers what the user tells it over several turns, and answers questions
about it in whole sentences. It does small sums and small talk. An answer in turn 5 or 6 is right
only if the keys and values of turns 1 to 4 are intact, which is what makes it useful here.

* Architecture: `LlamaForCausalLM`, {layers} layers, hidden size {hidden}, {heads} query heads and
  {kv_heads} KV heads of {head_dim}, MLP {mlp}, tied embeddings, RoPE theta 10000
* Parameters: {parameters:,}, stored as float32 ({weights_mb:.2f} MB)
* Tokenizer: byte-level BPE, {vocab} tokens, every digit a token of its own; any text can be
  encoded and decoded
* Longest input: {positions} positions by configuration; trained on conversations of up to about
  1000 tokens
* End of turn: `<|end|>`, the EOS token

## Chat template

    <|begin|><|system|>...<|end|><|user|>...<|end|><|assistant|>...<|end|><|user|>...

Only special tokens stand between messages, so the token ids of a conversation, with the generated
answers and their `<|end|>`, are a prefix of the token ids of the same conversation with more
messages. A server can keep the KV cache from turn to turn without encoding anything again.
`evaluate.py` checks this on every conversation that it holds. It is not guaranteed: now and then
the model writes a word in other tokens than the tokenizer would (see the number below), so a
server should compare tokens, as for any model, and compute again what differs.

## Training

    python examples/tiny_chat/train.py

trains such a model in one run (half an hour on two idle cores, at most an hour on busy ones).
{training}

The data are synthetic dialogues from `examples/tiny_chat/dialogues.py`: no, a short or a long
(150 to 415 tokens) system prompt, then mostly 2 to 8 (rarely up to 14) turns in which the user
tells, changes and asks for eleven kinds of facts (name, city, pet, colour, food, job, friend, a
number, hobby, a word, age), asks for facts that were never told, for sums, for the assistant's
name and the password in the system prompt, and makes small talk. Part of the names, cities, pets
and words are made up from syllables and the numbers are random, so that the model must copy them.
The demo's system prompt is one of the system prompts it was trained with. The loss is on the
assistant's tokens only. Muon optimises the matrices inside the layers and AdamW the rest, in
bfloat16 autocast; the first 12 % of the tokens are short dialogues without system prompts, and
long system prompts come last.

## Accuracy

Measured by `evaluate.py` on this folder, loaded in float32, by greedy generation; the history
holds the model's own answers. All values of names, cities, pets, colours, foods, jobs, hobbies,
words, numbers, and all sums of + and -, are held out from training (except the set "training
values"; the table of products, 0 to 10, and ages are not held out). An answer is right if it
contains the expected text exactly. In the sets of 6 turns, turns 1 to 4 tell (and sometimes
change) facts and turns 5 and 6 ask for two of them.

{recall_table}

Accuracy per kind of exchange, all sets together:

{kind_table}

Accuracy per turn, "{turn_set}":

{turn_table}

* Prefix stability: {stable} of {conversations} conversations.
* Any bytes survive encoding and decoding: {round_trip}.
* `demo.json`: {demo}

## Limits

* It is a copying machine for the phrases of its generator, not an assistant. It knows nothing
  about the world, and its answers to anything unlike the training dialogues are arbitrary.
* It copies a value as the user spelled it, also in lower case. Values of several unusual words,
  or values at the very start of a message, may be copied wrongly.
* Most wrong recalls are unusual held-out words, copied with a letter or two wrong. The score "tell"
  looks at the first fact of a message only.
* Each conversation holds one value per kind of fact: one pet, one number, one friend.
* Sums are sometimes wrong (see "sum" above), and summaries of everything told often ("summary").
* `<|end|>` and the other special tokens are not escaped in a user's text.
* English only.
"""


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _training(parts: list[dict[str, Any]]) -> str:
    minutes = sum(part["minutes"] for part in parts)
    tokens = sum(part["tokens"] for part in parts) / 1e6
    lines = [
        f"The shipped weights took {minutes:.0f} minutes and {tokens:.1f} million tokens on two "
        "cores of an AMD EPYC, mostly with one PyTorch thread, because other programs kept the "
        "machine busy:",
        "",
    ]
    for part in parts:
        lines += [
            f"* `{part['command']}`: {part['steps']:,} steps, {part['tokens'] / 1e6:.2f} million "
            f"tokens, {part['minutes']:.0f} minutes, final loss {part['final_loss']:.3f}"
            f"{'. ' + part['note'] if 'note' in part else ''}"
        ]
    return "\n".join(lines)


def _pooled(sets: dict[str, Any], part: str) -> list[tuple[str, ...]]:
    right: dict[str, float] = {}
    total: dict[str, int] = {}
    for result in sets.values():
        for label, cell in result[part].items():
            right[label] = right.get(label, 0) + cell["accuracy"] * cell["answers"]
            total[label] = total.get(label, 0) + cell["answers"]
    return [(k, f"{right[k] / total[k]:.1%}", str(total[k])) for k in sorted(total)]


def _demo(report: dict[str, Any]) -> str:
    selection = report.get("demo_selection")
    text = f"{report.get('demo_right', 'none')} answers are right when held one by one."
    if selection:
        text += (
            f" Of the first {selection['kept'] + selection['left_out']} held-out conversations "
            f"drawn for it, {selection['left_out']} had a wrong answer and were left out."
        )
    return text


def write_card(folder: Path, report: dict[str, Any], parts: list[dict[str, Any]]) -> None:
    """Write the folder's README.md."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sets = report["sets"]
    size = (folder / "model.safetensors").stat().st_size
    turn_set = "6 turns, demo system prompt"
    text = _CARD.format(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["hidden_size"] // config["num_attention_heads"],
        mlp=config["intermediate_size"],
        parameters=report["parameters"],
        weights_mb=size / 1e6,
        vocab=config["vocab_size"],
        positions=config["max_position_embeddings"],
        training=_training(parts),
        recall_table=_table(
            ("Conversations", "Number", "Recall", "All turns right"),
            [
                (n, str(r["conversations"]), f"{r['recall']:.1%}", f"{r['all_turns_right']:.1%}")
                for n, r in sets.items()
            ],
        ),
        kind_table=_table(("Exchange", "Right", "Answers"), _pooled(sets, "kinds")),
        turn_set=turn_set,
        turn_table=_table(
            ("Turn", "Right", "Answers"), _pooled({turn_set: sets[turn_set]}, "turns")
        ),
        stable=sum(r["prefix_stable"] for r in sets.values()),
        conversations=sum(r["conversations"] for r in sets.values()),
        round_trip="yes" if report["byte_round_trip"] else "no",
        demo=_demo(report),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
