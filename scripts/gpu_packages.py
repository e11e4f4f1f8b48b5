"""Says which packages flexinfer and its tests miss here, and installs those that were carried.

    python scripts/gpu_packages.py FOLDER_OF_WHEELS NOTES_FILE

Nothing that is installed is changed, and nothing is fetched. What is missing is written to
NOTES_FILE; it is an error if the engine or its tests can not run without it, for the server a note.
Needs Python 3.11.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("pytest>=8.3", "pytest-timeout>=2.3", "hypothesis>=6.120")
OPTIONAL = ("matplotlib", "psutil", "einops", "triton", "flash-attn", "flashinfer-python")


def missing(requirement: Requirement) -> str | None:
    """Why the requirement is not met; None if it is."""
    if requirement.marker is not None and not requirement.marker.evaluate():
        return None
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return "not installed"
    if requirement.specifier.contains(version, prereleases=True):
        return None
    return f"version {version} is here"


def install(name: str, wheels: Path) -> bool:
    """Install one carried wheel, without its dependencies (each is looked at by itself)."""
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "-q"]
    command += ["--disable-pip-version-check", "--find-links", str(wheels), name]
    return subprocess.run(command, capture_output=True).returncode == 0


def with_needs(requirement: Requirement) -> list[Requirement]:
    """The requirement's own requirements, if it is installed."""
    try:
        texts = metadata.requires(requirement.name) or []
    except metadata.PackageNotFoundError:
        return []
    needs = [Requirement(text) for text in texts]
    return [need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]


def supply(needed: list[Requirement], wheels: Path, lines: list[str]) -> list[str]:
    """Installs what is missing and was carried, and says so in `lines`; returns what was not."""
    absent: list[str] = []
    for requirement in needed:  # grows while it is walked
        reason = missing(requirement)
        if reason is None:
            continue
        if wheels.is_dir() and install(str(requirement), wheels):
            needed += [need for need in with_needs(requirement) if missing(need)]
            lines.append(f"package {requirement}: {reason}; the carried one was installed")
        else:
            lines.append(f"package {requirement}: {reason}, and it was not carried")
            absent.append(str(requirement))
    return absent


def main() -> None:
    wheels, notes = Path(sys.argv[1]), Path(sys.argv[2])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    required = [*project["project"]["dependencies"], *project["build-system"]["requires"], *TESTS]
    lines: list[str] = []
    fatal = supply([Requirement(text) for text in required], wheels, lines)
    server = project["project"]["optional-dependencies"]["serve"]
    supply([Requirement(text) for text in server], wheels, lines)
    lines += [
        f"optional package {name}: not installed"
        for name in OPTIONAL
        if missing(Requirement(name)) is not None
    ]
    print("\n".join(lines) or "every package is here")
    with notes.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)
    if fatal:
        raise SystemExit(f"missing, and not in {wheels}: {', '.join(fatal)}")


if __name__ == "__main__":
    main()
