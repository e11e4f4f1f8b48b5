"""Keeps docs/module_map.md complete: adds new source files, drops gone ones (make map).

A new row takes its sentence from the head of the file; sentences that stand in the map are kept, so
that they can be improved by hand. tests/py/repo/test_module_map.py fails while a file is missing.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAP = ROOT / "docs" / "module_map.md"
ROW = re.compile(r"^\| `([^`]+)` \| (.+) \|$", re.MULTILINE)

INTRO = """\
# Module map

One sentence per file, lowest layer first; a file includes or imports only its own layer or lower
ones. A C++ header and its source share a row, named without an ending. `make map` adds new files.
"""

# Folders of the Python package, lowest first.
PACKAGES = (
    *("runtime", "vtensor", "attention", "layers", "checkpoints", "models", "sampling", "metrics"),
    *("scheduler", "speculation", "memory", "runner", "engine", "replay"),
    *("server", "server/http", "server/api", "server/protocol", "server/observability", "loadgen"),
    *("cli", "cli/chat", "cli/demo", "cli/bench", "cli/doctor", "cli/inspect", "cli/top"),
)

# Folder, title, files to list first (the rest follow by name).
SECTIONS: list[tuple[str, str, tuple[str, ...]]] = [
    ("cpp/common", "C++: what the core and the kernels both name", ()),
    ("cpp/vtensor/util", "C++ core: utilities", ("error", "units")),
    ("cpp/vtensor/driver", "C++ core: drivers (`driver/`)", ("driver",)),
    ("cpp/vtensor/driver/host", "C++ core: the host driver", ("host_driver",)),
    ("cpp/vtensor/driver/cuda", "C++ core: the CUDA driver", ("cuda_driver",)),
    ("cpp/vtensor/driver/sim", "C++ core: the simulated driver", ()),
    ("cpp/vtensor/driver/wrappers", "C++ core: wrappers around drivers", ("forwarding_driver",)),
    ("cpp/vtensor/pool", "C++ core: the pool (`pool/`)", ("kv_spec", "geometry")),
    ("cpp/vtensor/ops", "C++ core: the paper's operations (`ops/`)", ()),
    ("cpp/vtensor/store", "C++ core: the swap store (`store/`)", ()),
    ("cpp/vtensor/core", "C++ core: what the manager does (`core/`)", ("vtensor",)),
    ("cpp/vtensor", "C++ core: the manager", ("manager",)),
    ("cpp/kernels", "CPU kernels", ("dtype",)),
    ("cpp/kernels/calls", "CPU kernels: what they are asked to compute", ()),
    ("cpp/kernels/simd", "CPU kernels: what each instruction set compiles", ()),
    ("cpp/kernels/isa", "CPU kernels: instruction sets", ("isa",)),
    ("cpp/kernels/attention", "CPU kernels: attention", ("attention",)),
    ("cpp/kernels/linear", "CPU kernels: linear layers", ()),
    ("cpp/kernels/rows", "CPU kernels: row operations", ()),
    ("cpp/kernels/sampling", "CPU kernels: sampling", ("sampling",)),
    ("cpp/bindings", "Python bindings", ()),
    ("python/flexinfer", "Python package: what users import", ("__init__", "llm", "async_llm")),
    *(
        (f"python/flexinfer/{folder}", f"Python package: {folder}", ("__init__",))
        for folder in PACKAGES
    ),
]
OTHERS = ("examples", "benchmarks", "scripts")


def source_files() -> dict[str, Path]:
    """Name in the map -> file that says what it is, for every source file of the project."""
    found: dict[str, Path] = {}
    for path in (ROOT / "cpp").rglob("*"):
        if path.suffix in {".h", ".cpp"}:
            header = path.with_suffix(".h")
            paired = header.is_file() and path.with_suffix(".cpp").is_file()
            name = (path.with_suffix("") if paired else path).relative_to(ROOT).as_posix()
            found[name] = header if paired else path
    for folder in ("python/flexinfer", *OTHERS):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".sh"} and path.stat().st_size > 0:
                found[path.relative_to(ROOT).as_posix()] = path
    return found


def head_text(path: Path) -> str:
    """The docstring, or the comment lines that the file opens with."""
    text = path.read_text()
    if path.suffix == ".py":
        return ast.get_docstring(ast.parse(text)) or ""
    mark = "#" if path.suffix == ".sh" else "//"
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(("#!", "#pragma", "#include")) or (not line and not lines):
            continue
        if not line.startswith(mark):
            break
        lines.append(line[len(mark) :].strip())
    return "\n".join(lines)


def first_sentence(path: Path) -> str:
    paragraph = " ".join(head_text(path).split("\n\n")[0].split("\n"))
    sentence = re.split(r"(?<!e\.g)(?<!i\.e)\.(?=\s|$)", paragraph)[0]
    sentence = sentence.split("  ")[0].strip().rstrip(".:")
    return sentence.replace("|", "/") + "." if sentence else "(to be described)"


def ordered(names: list[str], first: tuple[str, ...]) -> list[str]:
    def key(name: str) -> tuple[int, str]:
        stem = Path(name).stem
        return (first.index(stem) if stem in first else len(first), name)

    return sorted(names, key=key)


def render(sentences: dict[str, str]) -> str:
    rest = set(sentences)
    parts = [INTRO]

    def section(title: str, names: list[str]) -> None:
        if names:
            rows = [f"| `{name}` | {sentences[name]} |" for name in names]
            parts.append("\n".join([f"## {title}\n", "| file | what it is |", "|---|---|", *rows]))
            rest.difference_update(names)

    for folder, title, first in SECTIONS:
        inside = [name for name in sentences if Path(name).parent.as_posix() == folder]
        section(title, ordered(inside, first))
    for folder in sorted({Path(name).parent.as_posix() for name in rest}):
        inside = [name for name in rest if Path(name).parent.as_posix() == folder]
        section(f"`{folder}/`", ordered(inside, ()))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> None:
    known = dict(ROW.findall(MAP.read_text())) if MAP.is_file() else {}
    files = source_files()
    sentences = {name: known.get(name) or first_sentence(path) for name, path in files.items()}
    MAP.write_text(render(sentences))
    print(f"{MAP.relative_to(ROOT)}: {len(files)} files, {len(files.keys() - known.keys())} new")


if __name__ == "__main__":
    main()
