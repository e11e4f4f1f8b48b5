"""A folder with the numbers of a GGUF file, as transformers reads them, for `quality.py`.

python benchmarks/quality/plain_folder.py MODEL.gguf FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    source = {
        "pretrained_model_name_or_path": str(args.file.parent),
        "gguf_file": args.file.name,
    }
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    read.config.__dict__.pop("quantization_config", None)
    # transformers writes no model that came of quantised weights, whatever it is by now.
    plain = AutoModelForCausalLM.from_config(read.config)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(args.folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(args.folder)


if __name__ == "__main__":
    main()
