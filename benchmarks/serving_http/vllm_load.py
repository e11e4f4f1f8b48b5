"""`vllm bench serve` behind a pipe: a JSON list of its arguments in, its result as JSON out.

Runs in vLLM's environment, whose modules take ten seconds to load: once, not once a round.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser


def serve() -> None:
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    print("ready", flush=True)
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
            saved = ["--save-result", "--result-dir", folder, "--result-filename", "result.json"]
            main(parser.parse_args([*json.loads(line), *saved]))
            result = json.loads(Path(folder, "result.json").read_text())
        numbers = {name: value for name, value in result.items() if not isinstance(value, list)}
        print(json.dumps(numbers), flush=True)


if __name__ == "__main__":
    serve()
