"""Train the tiny chat model from scratch on a CPU and write it as a Hugging Face folder."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from batches import IGNORE, batches, draw, encode, pad
from dialogues import HELD_OUT
from optimizers import build_optimizers, rate_factor
from safetensors.torch import save_file
from tokenizer import BEGIN, END, PAD, build_tokenizer, save_tokenizer
from tokenizers import Tokenizer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "python" / "flexinfer" / "data" / "tiny_chat"
RECORD = Path(__file__).with_name("record.json")
MAX_LENGTH = 2048


def build_config(tokenizer: Tokenizer) -> LlamaConfig:
    """A Llama of about 1.1 million parameters with grouped-query attention."""
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-5,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BEGIN),
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(PAD),
    )


def step_loss(
    model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean loss over the learnt tokens, and which of them are predicted right."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        targets = labels[:, 1:]
        learnt = targets != IGNORE
        logits = hidden[learnt] @ model.lm_head.weight.T
    right = torch.zeros_like(learnt)
    right[learnt] = logits.argmax(-1) == targets[learnt]
    return nn.functional.cross_entropy(logits.float(), targets[learnt]), right


@torch.no_grad()
def probe(model: LlamaForCausalLM, tokenizer: Tokenizer, count: int = 96) -> dict[str, float]:
    """Per kind of exchange: the share of held-out answers with every token predicted right."""
    rng = random.Random("probe")
    rows = [encode(tokenizer, draw(rng, 1.0, HELD_OUT)) for _ in range(count)]
    rows.sort(key=lambda row: len(row.ids))
    scores: dict[str, list[bool]] = defaultdict(list)
    for first in range(0, count, 16):
        group = rows[first : first + 16]
        _, right = step_loss(model, *pad(group, tokenizer.token_to_id(PAD)))
        for row, marks in zip(group, right, strict=True):
            for start, stop, kind in row.answers:
                scores[kind].append(bool(marks[start - 1 : stop - 1].all()))
    return {kind: sum(values) / len(values) for kind, values in sorted(scores.items())}


def polite_threads(limit: int) -> int:
    """Use fewer threads while other processes load the machine."""
    others = os.getloadavg()[0] - torch.get_num_threads()
    return limit if others < 0.6 else 1


def save_model(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights, configurations and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.detach().float().contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.update({"torch_dtype": "float32", "dtype": "float32", "rope_theta": 10000.0})
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    generation = {
        "bos_token_id": model.config.bos_token_id,
        "eos_token_id": model.config.eos_token_id,
        "pad_token_id": model.config.pad_token_id,
        "do_sample": False,
    }
    text = json.dumps(generation, indent=2) + "\n"
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
    save_tokenizer(tokenizer, folder, MAX_LENGTH)


def write_record(path: Path, record: dict[str, object], append: bool) -> None:
    """Write how a run went; a resumed run adds itself to the runs before it."""
    parts = json.loads(path.read_text(encoding="utf-8")) if append and path.exists() else []
    command = " ".join(["train.py", *sys.argv[1:]])
    text = json.dumps([*parts, {"command": command, **record}], indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def begin(arguments: argparse.Namespace) -> tuple[Tokenizer, LlamaForCausalLM]:
    """What is trained: new, or as a folder has it."""
    if arguments.resume:
        tokenizer = Tokenizer.from_file(str(arguments.resume / "tokenizer.json"))
        model = LlamaForCausalLM.from_pretrained(arguments.resume, dtype=torch.float32).train()
    else:
        tokenizer = build_tokenizer(seed=arguments.seed)
        model = LlamaForCausalLM(build_config(tokenizer))
    model.config._attn_implementation = "sdpa"
    print(f"{model.num_parameters():,} parameters", flush=True)
    return tokenizer, model


def train(arguments: argparse.Namespace) -> None:
    """Run the whole recipe."""
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    rng = random.Random(f"train {arguments.seed} {arguments.start or ''}".strip())
    tokenizer, model = begin(arguments)
    pad_id = tokenizer.token_to_id(PAD)
    optimizers = build_optimizers(model, arguments.muon_rate, arguments.adam_rate)
    base_rates = [[group["lr"] for group in opt.param_groups] for opt in optimizers]
    started, seen, step, shown, losses = time.time(), 0, 0, 0.0, []
    progress = arguments.start
    while progress < 1:
        for rows in batches(tokenizer, rng, progress, arguments.batch_tokens):
            for opt, rates in zip(optimizers, base_rates, strict=True):
                for group, rate in zip(opt.param_groups, rates, strict=True):
                    group["lr"] = rate * rate_factor(progress) * min((step + 1) / 20, 1.0)
            ids, labels = pad(rows, pad_id)
            loss, _ = step_loss(model, ids, labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for opt in optimizers:
                opt.step()
                opt.zero_grad(set_to_none=True)
            seen += ids.numel()
            step += 1
            losses.append(loss.item())
            elapsed = time.time() - started
            done = max(seen / arguments.tokens, elapsed / 60 / arguments.minutes)
            progress = arguments.start + (1 - arguments.start) * done
            if elapsed - shown > 20:
                shown = elapsed
                torch.set_num_threads(polite_threads(arguments.threads))
                eta = elapsed / done - elapsed
                print(
                    f"step {step}  tokens {seen / 1e6:.2f}M  loss {sum(losses) / len(losses):.4f}"
                    f"  {seen / elapsed:,.0f} tokens/s  threads {torch.get_num_threads()}"
                    f"  elapsed {elapsed / 60:.1f} min  eta {eta / 60:.1f} min",
                    flush=True,
                )
                losses = []
            if progress >= 1:
                break
            if step % arguments.probe_every == 0:
                scores = probe(model, tokenizer)
                text = "  ".join(f"{kind} {score:.2f}" for kind, score in scores.items())
                print(f"probe {step}: {text}", flush=True)
                save_model(model, tokenizer, arguments.folder)
    save_model(model, tokenizer, arguments.folder)
    minutes = (time.time() - started) / 60
    record = {
        "minutes": round(minutes, 1),
        "steps": step,
        "tokens": seen,
        "final_loss": round(sum(losses) / max(len(losses), 1), 4),
        "parameters": model.num_parameters(),
    }
    print(f"done: {json.dumps(record)}", flush=True)
    write_record(arguments.record, record, append=arguments.resume is not None)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--record", type=Path, default=RECORD, help="where to write how it went")
    parser.add_argument("--tokens", type=float, default=9.5e6)
    parser.add_argument(
        "--minutes", type=float, default=60, help="finish the schedule by then, with fewer tokens"
    )
    parser.add_argument("--resume", type=Path, help="start from the weights in this folder")
    parser.add_argument("--start", type=float, default=0.0, help="where in the schedule to start")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--muon-rate", type=float, default=4e-3, help="0 uses AdamW throughout")
    parser.add_argument("--adam-rate", type=float, default=4e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--probe-every", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
