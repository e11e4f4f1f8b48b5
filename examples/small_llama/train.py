"""Train a Llama of 21 million parameters on this machine's own text, and write it as a Hugging Face
folder. What it is for: real weights to measure quantisation with, where no hub can be reached.

It may be stopped and continued (SIGSTOP, SIGCONT): its clock is the processor's. SIGTERM and
SIGINT end it with a checkpoint, from which the next run with the same folder goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from text import held_out_texts, training_texts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / "examples" / "tiny_chat"))
from optimizers import build_optimizers, rate_factor  # noqa: E402

FOLDER = REPOSITORY / "build" / "small_llama"
END = "<|end|>"
"""Between files, and before each."""
LENGTH = 512
"""Tokens of a row of a batch."""


def build_tokenizer(texts: list[str], vocab_size: int = 4096) -> Tokenizer:
    """Byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def build_config(vocab_size: int) -> LlamaConfig:
    """All sizes are multiples of 128, the largest group of quantised weights."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=384,
        intermediate_size=1152,
        num_hidden_layers=11,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )


def encode(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """[tokens] int64: the files one behind the other."""
    ids = [0]
    for one in tokenizer.encode_batch(texts):
        ids += [*one.ids, 0]
    return torch.tensor(ids)


class Training:
    """A model, its optimizers and how far they are; all that a checkpoint holds."""

    def __init__(self, folder: Path, muon_rate: float, adam_rate: float, seed: int) -> None:
        self.folder = folder
        path = folder / "tokenizer.json"
        texts = training_texts()
        self.tokenizer = Tokenizer.from_file(str(path)) if path.exists() else build_tokenizer(texts)
        self.ids = encode(self.tokenizer, texts)
        self.held_out = encode(self.tokenizer, held_out_texts())
        torch.manual_seed(seed)
        self.model = LlamaForCausalLM(build_config(self.tokenizer.get_vocab_size()))
        self.optimizers = build_optimizers(self.model, muon_rate, adam_rate)
        self.rates = [[group["lr"] for group in opt.param_groups] for opt in self.optimizers]
        self.done = {"steps": 0, "tokens": 0, "seconds": 0.0}
        self.generator = torch.Generator().manual_seed(seed)
        if self.checkpoint.exists():
            self._resume()

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def step(self, num_rows: int, progress: float) -> float:
        """One step on random places of the text; returns the loss."""
        for opt, rates in zip(self.optimizers, self.rates, strict=True):
            for group, rate in zip(opt.param_groups, rates, strict=True):
                group["lr"] = rate * rate_factor(progress) * min((self.done["steps"] + 1) / 20, 1)
        starts = torch.randint(len(self.ids) - LENGTH, (num_rows,), generator=self.generator)
        rows = torch.stack([self.ids[at : at + LENGTH + 1] for at in starts.tolist()])
        loss = self.loss(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for opt in self.optimizers:
            opt.step()
            opt.zero_grad(set_to_none=True)
        self.done["steps"] += 1
        self.done["tokens"] += num_rows * LENGTH
        return loss.item()

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """Mean over all tokens but the first of rows [n, tokens]."""
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(input_ids=rows[:, :-1], use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())

    @torch.no_grad()
    def held_out_loss(self, num_rows: int = 32) -> float:
        step = (len(self.held_out) - LENGTH - 1) // num_rows
        rows = torch.stack([self.held_out[i * step :][: LENGTH + 1] for i in range(num_rows)])
        return sum(self.loss(part).item() for part in rows.split(8)) * 8 / num_rows

    def save(self) -> None:
        """The folder that transformers reads, and the checkpoint beside it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(self.folder)
        PreTrainedTokenizerFast(
            tokenizer_object=self.tokenizer, bos_token=END, eos_token=END
        ).save_pretrained(self.folder)
        state = {
            "model": self.model.state_dict(),
            "optimizers": [opt.state_dict() for opt in self.optimizers],
            "done": self.done,
            "generator": self.generator.get_state(),
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def _resume(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        for opt, saved in zip(self.optimizers, state["optimizers"], strict=True):
            opt.load_state_dict(saved)
        self.done = state["done"]
        self.generator.set_state(state["generator"])


def train(training: Training, arguments: argparse.Namespace) -> None:
    """Until the schedule has ended, by steps or by the processor's time, or a signal comes."""
    asked_to_end: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: asked_to_end.append(number))
    done, losses = training.done, []
    limit_s = 60 * arguments.minutes
    before_s, begun_s = done["seconds"], time.process_time()
    shown_s = saved_s = before_s

    def progress() -> float:
        return max(done["steps"] / arguments.steps, done["seconds"] / limit_s)

    while progress() < 1 and not asked_to_end:
        losses.append(training.step(arguments.rows, progress()))
        done["seconds"] = before_s + (time.process_time() - begun_s) / arguments.threads
        if done["seconds"] - shown_s > 20:
            shown_s = done["seconds"]
            print(
                f"step {done['steps']}  {done['tokens'] / 1e6:.2f} million tokens  "
                f"loss {sum(losses) / len(losses):.3f}  {done['tokens'] / shown_s:,.0f} tokens/s  "
                f"{progress():.0%}",
                flush=True,
            )
            losses = []
        if done["seconds"] - saved_s > 60 * arguments.save_every:
            saved_s = done["seconds"]
            training.save()
    training.save()


def write_record(training: Training) -> dict[str, Any]:
    """How the run went, beside the weights."""
    loss = training.held_out_loss()
    record = {
        "command": " ".join(["train.py", *sys.argv[1:]]),
        "parameters": training.model.num_parameters(),
        **training.done,
        "training_tokens": len(training.ids),
        "held_out_loss": round(loss, 4),
        "held_out_perplexity": round(math.exp(loss), 2),
    }
    (training.folder / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    return record


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--minutes", type=float, default=12, help="of the processor, per thread")
    parser.add_argument("--steps", type=int, default=4000, help="or until so many")
    parser.add_argument("--rows", type=int, default=4, help=f"of {LENGTH} tokens in each batch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--muon-rate", type=float, default=3e-3)
    parser.add_argument("--adam-rate", type=float, default=3e-3)
    parser.add_argument("--save-every", type=float, default=4, help="minutes between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    training = Training(arguments.folder, arguments.muon_rate, arguments.adam_rate, arguments.seed)
    print(
        f"{training.model.num_parameters():,} parameters, {len(training.ids):,} tokens", flush=True
    )
    train(training, arguments)
    print(json.dumps(write_record(training)))


if __name__ == "__main__":
    main()
