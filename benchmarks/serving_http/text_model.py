"""The models of benchmarks/serving with a tokenizer: servers answer with text, which takes time."""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serving"))

from workloads import VOCAB_SIZE

from models import make_model

SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")
"""Ids 0 to 3: no prompt of the workloads has them."""


def make_text_model(folder: Path, size: str) -> Path:
    """The folder of the model, made if it is missing."""
    path = make_model(folder, size)
    if not (path / "tokenizer_config.json").exists():
        _make_tokenizer(path)
    return path


def _make_tokenizer(path: Path) -> None:
    """Byte-level BPE of VOCAB_SIZE tokens, trained on the standard library's own sources."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sources = sorted(map(str, Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train(sources, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens")
    tokenizer.save(str(path / "tokenizer.json"))
    names = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **names}
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
