"""Builds flash-attn from its source distribution, as little of it as is measured here.

    python scripts/flash_attn_build.py SDIST WORK_FOLDER [--full] [--prepare-only]

The whole of flash-attn 2.8 is 72 CUDA files: an hour of compiling on 16 cores for one architecture.
What FlexInfer calls is the forward pass; what the benchmarks measure has heads of 128 in bfloat16.
That is 4 files. The kernels are compiled from flash-attn's own source, unchanged; what is left out
raises an error that says so. --full builds everything. A wheel is left in WORK_FOLDER/dist.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

UNUSED = (
    "csrc/composable_kernel",
    "csrc/cutlass/test",
    "csrc/cutlass/examples",
    "csrc/flash_attn_ck",
)
LEFT_OUT = ("BACKWARD", "DROPOUT", "ALIBI")
KEPT_SOURCE = re.compile(r"flash_fwd_(split_)?hdim128_bf16_(causal_)?sm80\.cu")
ANY_KERNEL = re.compile(r'^\s*"csrc/flash_attn/src/flash_[a-z0-9_]+\.cu",$')
STUB = "csrc/flash_attn/without_backward.cpp"

SWITCHES = """
// FlexInfer's lean build (scripts/flash_attn_build.py): heads of 97 to 128, bfloat16, forward only.
#include <stdexcept>
#undef FP16_SWITCH
#define FP16_SWITCH(COND, ...)                                                     \\
  [&] {                                                                            \\
    if (COND) throw std::runtime_error("this flash-attn was built for bfloat16");  \\
    using elem_type = cutlass::bfloat16_t;                                         \\
    return __VA_ARGS__();                                                          \\
  }()
#undef HEADDIM_SWITCH
#define HEADDIM_SWITCH(HEADDIM, ...)                                               \\
  [&] {                                                                            \\
    if ((HEADDIM) <= 96 || (HEADDIM) > 128)                                        \\
      throw std::runtime_error("this flash-attn was built for heads of 97 to 128"); \\
    constexpr static int kHeadDim = 128;                                           \\
    return __VA_ARGS__();                                                          \\
  }()
"""

WITHOUT_BACKWARD = """\
#include <cutlass/numeric_types.h>

#include <stdexcept>

#include "namespace_config.h"

#include "flash.h"

namespace FLASH_NAMESPACE {

template <typename T, int Headdim, bool Is_causal>
void run_mha_bwd_(Flash_bwd_params &, cudaStream_t) {
  throw std::runtime_error("this flash-attn was built without the backward pass");
}
template void run_mha_bwd_<cutlass::bfloat16_t, 128, false>(Flash_bwd_params &, cudaStream_t);
template void run_mha_bwd_<cutlass::bfloat16_t, 128, true>(Flash_bwd_params &, cudaStream_t);

}  // namespace FLASH_NAMESPACE
"""


def extract(sdist: Path, folder: Path) -> Path:
    """The source tree, without the parts that only other builds need."""
    tree = folder / sdist.name.removesuffix(".tar.gz")
    if (tree / "setup.py").exists():
        return tree
    with tarfile.open(sdist) as archive:
        wanted = [
            member
            for member in archive.getmembers()
            if not member.name.partition("/")[2].startswith(UNUSED)
        ]
        archive.extractall(folder, members=wanted, filter="data")
    return tree


def make_lean(tree: Path) -> list[str]:
    """Edits the tree to build the forward pass alone; returns the kernels that are left."""
    setup = tree / "setup.py"
    lines = setup.read_text().splitlines()
    if any(STUB in line for line in lines):
        return kernels(lines)
    kept = [line for line in lines if not ANY_KERNEL.match(line) or KEPT_SOURCE.search(line)]
    text = "\n".join(kept) + "\n"
    text = replace_once(
        text,
        '"csrc/flash_attn/flash_api.cpp",\n',
        f'"csrc/flash_attn/flash_api.cpp",\n                "{STUB}",\n',
    )
    macros = [f'"-DFLASHATTENTION_DISABLE_{name}"' for name in LEFT_OUT]
    text = replace_once(text, "    nvcc_flags = [\n", f"    nvcc_flags = [{', '.join(macros)},\n")
    text = replace_once(
        text, 'compiler_c17_flag=["-O3", ', f'compiler_c17_flag=[{", ".join(macros)}, "-O3", '
    )
    setup.write_text(text)
    switches = tree / "csrc/flash_attn/src/static_switch.h"
    switches.write_text(switches.read_text() + SWITCHES)
    (tree / STUB).write_text(WITHOUT_BACKWARD)
    return kernels(text.splitlines())


def kernels(lines: list[str]) -> list[str]:
    return [line.strip().strip('",') for line in lines if ANY_KERNEL.match(line)]


def replace_once(text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise SystemExit(f"flash-attn's setup.py has changed: {old.strip()!r} not found once")
    return text.replace(old, new)


def build(tree: Path, dist: Path, standard: str) -> int:
    """pip wheel; returns its exit code."""
    setup = tree / "setup.py"
    setup.write_text(re.sub(r"-std=c\+\+\d\d", f"-std={standard}", setup.read_text()))
    environment = {
        "FLASH_ATTN_CUDA_ARCHS": "90",
        "FLASH_ATTENTION_FORCE_BUILD": "TRUE",
        # As many as there are files in the lean build: other cores stay with the benchmarks.
        "MAX_JOBS": "6",
        "NVCC_THREADS": "1",
        **os.environ,
    }
    command = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "-v", "-w", str(dist), str(tree)]
    print(f"building {tree.name} as {standard}", flush=True)
    return subprocess.run(command, env=environment).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sdist", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--full", action="store_true", help="all head sizes, types and backward")
    parser.add_argument(
        "--prepare-only", action="store_true", help="edit the tree, compile nothing"
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    tree = extract(options.sdist, options.folder)
    if not options.full:
        print("kernels:", *make_lean(tree), sep="\n  ")
    if options.prepare_only:
        return
    # torch's headers decide which standard is needed; the wrong one fails in the first minute.
    for standard in ("c++17", "c++20"):
        if build(tree, options.folder / "dist", standard) == 0:
            return
    raise SystemExit("flash-attn could not be built; see the compiler's messages above")


if __name__ == "__main__":
    main()
