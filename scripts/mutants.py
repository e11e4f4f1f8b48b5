"""Mutants: small faults put into a copy of the tree, one at a time; tests must notice each.

    python scripts/mutants.py                       all of tests/mutants/*.toml
    python scripts/mutants.py NAME...               these
    python scripts/mutants.py --sample 6 --seed x   some that need no C++ build, by lot

A mutant names a file, a text that stands in it once, another text in its place, and the tests that
should fail then: pytest's node ids, or patterns of GoogleTest's for a C++ file. The copy lies in
build/mutants and stays, so that C++ is built incrementally. Exit status 1: a mutant is alive.
"""

from __future__ import annotations

import argparse
import filecmp
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = Path(os.environ.get("FLEXINFER_MUTANTS_WORK", ROOT / "build" / "mutants"))
"""Runs at the same time need a folder each."""
TREE = WORK / "tree"
CPP = TREE / "build" / "core"
"""Where a clone builds the C++ tests, so that ccache knows most of them."""
LOG = WORK / "last.log"
TIMEOUT_S = 180
NO_EDITABLE = """import sys
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__name__.startswith("ScikitBuild")]
"""
"""An editable install would import the package from where it was installed, not from the copy."""


@dataclass(frozen=True)
class Mutant:
    """One fault."""

    name: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def is_cpp(self) -> bool:
        return self.file.startswith("cpp/")


def read_mutants(folder: Path = ROOT / "tests" / "mutants") -> list[Mutant]:
    """All of the tables, in the order of their names."""
    tables = [tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*"))]
    rows = [row for table in tables for row in table["mutant"]]
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def sync_tree() -> None:
    """Make TREE what git sees of ROOT, with the compiled modules beside the Python files."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    wanted = {name: ROOT / name for name in names.split("\0") if (ROOT / name).is_file()}
    for module in compiled_modules():
        wanted[f"python/flexinfer/{module.name}"] = module
    for path in [path for path in TREE.rglob("*") if path.is_file() and path.suffix != ".pyc"]:
        name = str(path.relative_to(TREE))
        if name not in wanted and not name.startswith("build/"):
            path.unlink()
    for name, source in wanted.items():
        copy = TREE / name
        if not copy.exists() or not filecmp.cmp(source, copy, shallow=False):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy)
    (WORK / "site").mkdir(exist_ok=True)
    (WORK / "site" / "sitecustomize.py").write_text(NO_EDITABLE)


def compiled_modules() -> list[Path]:
    """The C++ modules of the installed package, up to date."""
    from flexinfer import _kernels, _vtensor

    folder = Path(_vtensor.__file__).parent
    assert Path(_kernels.__file__).parent == folder
    return sorted(folder.glob("*.so"))


@contextmanager
def mutated(mutant: Mutant, num_changes: int) -> Iterator[None]:
    """The copy with the fault in it."""
    path = TREE / mutant.file
    text, stat = path.read_text(encoding="utf-8"), path.stat()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: {mutant.old!r} is not once in {mutant.file}")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    # Python tells a stale .pyc by the seconds of the time and the size: both might be the same.
    if not mutant.is_cpp:
        os.utime(path, (stat.st_atime, stat.st_mtime + 10 * (1 + num_changes)))
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")
        if not mutant.is_cpp:
            os.utime(path, (stat.st_atime, stat.st_mtime))


def run_pytest(tests: Sequence[str]) -> int:
    """pytest's exit status in a fork of this process, which has the heavy imports done; a negative
    one is a signal, or the end of patience."""
    child = multiprocessing.get_context("fork").Process(target=_pytest_in_child, args=(tests,))
    child.start()
    child.join(TIMEOUT_S)
    if child.is_alive() and child.pid is not None:
        os.killpg(child.pid, signal.SIGKILL)
        child.join()
    assert child.exitcode is not None
    return child.exitcode


def _pytest_in_child(tests: Sequence[str]) -> None:
    import pytest

    os.setsid()
    os.chdir(TREE)
    with LOG.open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    status = pytest.main(["-x", "-q", *tests])
    sys.stdout.flush()
    os._exit(int(status))


def run_cpp(tests: Sequence[str]) -> int:
    """0: they pass; 1: some fail, or run for ever; above: it is not built, or there are none."""
    was_any_run = False
    with LOG.open("w") as log:
        built = subprocess.run(["cmake", "--build", CPP], stdout=log, stderr=log)
        if built.returncode != 0:
            return 2
        for name in ("vtensor_tests", "kernels_tests"):
            command = [str(CPP / "tests" / "cpp" / name), "--gtest_brief=1"]
            command.append(f"--gtest_filter={':'.join(tests)}")
            try:
                done = subprocess.run(command, stdout=log, stderr=log, timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                return 1
            if done.returncode != 0:
                return 1
            was_any_run |= "] 0 tests from" not in _last_run(LOG)
    return 0 if was_any_run else 3


def _last_run(log: Path) -> str:
    """What GoogleTest says from its last start on."""
    return log.read_text().rpartition("Running main()")[2]


def configure_cpp() -> None:
    command = ["cmake", "-S", TREE, "-B", CPP, "-G", "Ninja", "-DVTENSOR_WERROR=ON"]
    if (done := subprocess.run(command, capture_output=True, text=True)).returncode != 0:
        raise SystemExit(f"cmake failed:\n{done.stdout}{done.stderr}")


def check_clean(mutants: Sequence[Mutant]) -> None:
    """The tests pass without a fault, and there are tests of these names."""
    python = sorted({test for mutant in mutants if not mutant.is_cpp for test in mutant.tests})
    cpp = sorted({test for mutant in mutants if mutant.is_cpp for test in mutant.tests})
    if (python and run_pytest(python) != 0) or (cpp and run_cpp(cpp) != 0):
        raise SystemExit(f"the tests fail without a mutant:\n{LOG.read_text()[-4000:]}")


def judge(status: int) -> str:
    if status == 0:
        return "ALIVE"
    if status == -signal.SIGKILL:
        return "killed (endless)"
    return "killed" if status == 1 or status < 0 else "BROKEN"


def run_all(mutants: Sequence[Mutant]) -> int:
    """Prints a line for each; returns how many live."""
    if any(mutant.is_cpp for mutant in mutants):
        configure_cpp()
    started_s = time.monotonic()
    check_clean(mutants)
    print(f"all tests pass without a mutant ({time.monotonic() - started_s:.0f} s)", flush=True)
    alive = []
    for number, mutant in enumerate(mutants):
        started_s = time.monotonic()
        with mutated(mutant, number):
            status = run_cpp(mutant.tests) if mutant.is_cpp else run_pytest(mutant.tests)
        verdict = judge(status)
        seconds = time.monotonic() - started_s
        print(f"{verdict:8} {seconds:5.1f} s  {mutant.name}: {mutant.what}", flush=True)
        if not verdict.startswith("killed"):
            alive.append(mutant.name)
            print("\n".join(LOG.read_text().splitlines()[-12:]), flush=True)
    num_dead = len(mutants) - len(alive)
    print(f"{num_dead} of {len(mutants)} mutants are dead; alive: {', '.join(alive) or 'none'}")
    return len(alive)


def choose(options: argparse.Namespace) -> list[Mutant]:
    mutants = read_mutants()
    if unknown := set(options.names) - {mutant.name for mutant in mutants}:
        raise SystemExit(f"no mutant is called {', '.join(sorted(unknown))}")
    if options.names:
        mutants = [mutant for mutant in mutants if mutant.name in options.names]
    if options.python or options.sample:
        mutants = [mutant for mutant in mutants if not mutant.is_cpp]
    if options.sample:
        mutants = random.Random(options.seed).sample(mutants, options.sample)
    return mutants


def import_what_is_heavy() -> None:
    """For the forks: all that tests import but the package itself."""
    for plugin in entry_points(group="pytest11"):
        plugin.load()
    for name in ("torch", "transformers", "fastapi", "openai", "uvicorn"):
        if find_spec(name):
            import_module(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--sample", type=int, help="so many of them, none in C++")
    parser.add_argument("--seed", default="0", help="of the sample, any text")
    parser.add_argument("--python", action="store_true", help="none in C++")
    options = parser.parse_args()
    mutants = choose(options)
    if "FLEXINFER_MUTANTS" not in os.environ:
        TREE.mkdir(parents=True, exist_ok=True)
        sync_tree()
        path = os.pathsep.join([str(WORK / "site"), str(TREE / "python")])
        again = {**os.environ, "FLEXINFER_MUTANTS": "1", "PYTHONPATH": path}
        sys.exit(subprocess.run([sys.executable, __file__, *sys.argv[1:]], env=again).returncode)
    if any(not mutant.is_cpp for mutant in mutants):
        import_what_is_heavy()
    sys.exit(run_all(mutants) > 0)


if __name__ == "__main__":
    main()
