"""Importing flexinfer and asking for help stay cheap: counted in modules, not in time."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
    *("torch", "transformers", "numpy", "fastapi", "starlette", "uvicorn", "prometheus_client"),
    *("matplotlib", "aiohttp", "httpx", "tokenizers", "jinja2", "asyncio", "flexinfer._vtensor"),
)
MAX_FLEXINFER = 40
"""Modules that `import flexinfer` loads: those of the standard library that it needs."""
MAX_HELP = 450
"""Modules of `flexinfer --help`: typer's and rich's, and the few that typer needs of pydantic."""


def loaded(code: str) -> set[str]:
    """Modules that are there after `code` and not before."""
    report = (
        "import sys; before = set(sys.modules)\n"
        f"{code}\n"
        "print('MODULES', *sorted(set(sys.modules) - before), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return set(result.stderr.split("MODULES")[-1].split())


def help_of(*arguments: str) -> str:
    return (
        "from flexinfer.cli.app import app\n"
        f"try: app({[*arguments, '--help']!r})\n"
        "except SystemExit as end: assert not end.code"
    )


def test_importing_the_package_loads_next_to_nothing() -> None:
    modules = loaded("import flexinfer")
    assert len(modules) <= MAX_FLEXINFER, modules


@pytest.mark.parametrize(
    "code",
    [
        "import flexinfer",
        help_of(),
        help_of("chat"),
        help_of("top"),
        help_of("inspect"),
        help_of("doctor"),
        help_of("bench", "serve"),
    ],
)
def test_nothing_heavy_is_loaded(code: str) -> None:
    assert loaded(code).isdisjoint(HEAVY)


def test_help_loads_few_modules() -> None:
    modules = loaded(help_of())
    assert len(modules) <= MAX_HELP
