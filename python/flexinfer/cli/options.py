"""Options that several commands share: where a server is, the keys for it, and texts of options."""

from __future__ import annotations

from typing import Annotated

import typer

Url = Annotated[
    str | None,
    typer.Option(help="Where the server is; without it, http://127.0.0.1:8000."),
]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar=["FLEXINFER_API_KEY", "OPENAI_API_KEY"], help="Key of the server's users."),
]
AdminKey = Annotated[
    str | None,
    typer.Option(envvar="FLEXINFER_ADMIN_API_KEY", help="Key of the server's administrators."),
]

THREADS_HELP = (
    "CPU threads of torch and the kernels; without it, one for each core this process may use."
)
COMPILE_HELP = "Compile the model with torch.compile: slower to start, faster steps."
ATTENTION_BACKEND_HELP = "auto, flash, host, sdpa or two_phase: docs/cuda.md."
QUANTIZATION_HELP = (
    "int8, int4, int4-g64, int4-g128, of 4 bits with zero points (int4-zp) or inputs of 8 bits "
    "(int4-a8: faster for many tokens) if wanted; a8: weights that are quantised already (GGUF, "
    "GPTQ, AWQ, NVFP4, ...), inputs of 8 bits; auto: as the model is."
)
KV_CACHE_DTYPE_HELP = (
    "int8 or fp8 (fp8_e4m3): a byte for each number of K and V; auto: as the model's."
)
