"""`flexinfer demo`: chats that share a system prompt, run with and without the prefix cache."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from flexinfer.cli.demo.checks import Check, all_checks
from flexinfer.cli.demo.live_output import QuietWatch, TextWatch
from flexinfer.cli.demo.options import DemoSettings
from flexinfer.cli.demo.plot import plot_memory
from flexinfer.cli.demo.records import Run
from flexinfer.cli.demo.report import print_checks, print_report
from flexinfer.cli.demo.run import DemoRunner, RunError
from flexinfer.cli.demo.script import load_script
from flexinfer.cli.errors import USAGE_ERROR, check_folder, one_line, usage_errors
from flexinfer.cli.plot import check_can_plot
from flexinfer.cli.result_file import result_file
from flexinfer.cli.terminal_text import size_text
from flexinfer.engine.history import PlainFormat, choose_format
from flexinfer.errors import RequestError, VTensorError

if TYPE_CHECKING:
    from flexinfer.llm import LLM

FAILED = 1
DEFAULT_WIDTH = 110


def run_demo(settings: DemoSettings) -> None:
    """The command; ends by typer.Exit."""
    with usage_errors():
        opened = Demo(settings)
    raise typer.Exit(opened.run())


class Demo:
    """Checks the settings and loads the model; `run` does the rest."""

    def __init__(self, settings: DemoSettings) -> None:
        """Raises ValueError or OSError for what cannot work."""
        self._settings = settings
        self._console = Console()
        if not self._console.is_terminal:
            self._console = Console(width=max(DEFAULT_WIDTH, self._console.width))
        if settings.plot is not None:
            check_can_plot(settings.plot)
        if settings.json is not None:
            check_folder(settings.json, "--json")
        folder = settings.check_model()
        self._script = load_script(folder, settings.conversations, settings.turns, settings.seed)
        self._llm = settings.open()

    def run(self) -> int:
        """Both runs, the tables, the checks. Returns the exit code."""
        self._introduce()
        try:
            cached = self._run(self._llm, TextWatch(self._console, self._script.num_turns))
            uncached = self._run_uncached()
        except RequestError as error:
            return self._fail(USAGE_ERROR, f"{one_line(error)}; try fewer --turns")
        except (RunError, VTensorError) as error:
            return self._fail(FAILED, one_line(error))
        checks = all_checks(cached, uncached)
        print_report(self._console, cached, uncached)
        self._remark(cached)
        self._write(cached, uncached, checks)
        return 0 if print_checks(self._console, cached, checks) else FAILED

    def _introduce(self) -> None:
        manager = self._llm.engine.manager
        spec = manager.spec
        say = self._console.print
        say(f"[bold]{self._settings.folder}[/bold]", highlight=False)
        say(
            f"{self._settings.conversations} conversations share a system prompt of "
            f"{len(self._script.system_prompt.split())} words. KV: {spec.dtype}, "
            f"{size_text(spec.bytes_per_token)} per token, chunks of "
            f"{size_text(manager.chunk_bytes)}, {spec.layers_per_plane} of {spec.num_layers} "
            "layers in one range.",
            highlight=False,
        )
        say(f"{self._llm.engine.kv_memory}.", highlight=False)
        if isinstance(choose_format(self._llm.get_tokenizer()), PlainFormat):
            say("The model has no chat template: prompts are plain 'User: ...' text.")

    def _run(self, llm: LLM, watch: TextWatch | QuietWatch) -> Run:
        try:
            return DemoRunner(llm, self._script, self._settings.max_tokens, watch).run()
        finally:
            watch.close()
            llm.close()

    def _run_uncached(self) -> Run:
        """The same again, without prefix cache, on the same weights."""
        self._console.print()
        watch = QuietWatch(self._console, "the same again without prefix cache")
        llm = self._settings.open(enable_prefix_caching=False, like=self._llm)
        return self._run(llm, watch)

    def _remark(self, cached: Run) -> None:
        if cached.num_rewritten:
            self._console.print(
                f"The chat template rewrote earlier turns {cached.num_rewritten} times: "
                "what it changed had to be computed again."
            )
        if cached.chunks_evicted:
            self._console.print(
                f"KV memory was short: {cached.chunks_evicted} chunks of recorded conversations "
                "were evicted and computed again. More --memory keeps them."
            )
        if self._settings.dtype != "float32":
            self._console.print(
                f"With dtype {self._settings.dtype}, rounding depends on how prompts are "
                "batched: tokens may differ though the memory is right. Compare in float32."
            )

    def _write(self, cached: Run, uncached: Run, checks: list[Check]) -> None:
        settings = self._settings
        if settings.json is not None:
            numbers = self._numbers(cached, uncached, checks)
            with result_file(settings.json) as file:
                file.write_text(json.dumps(numbers, indent=1))
            self._console.print(f"numbers: {settings.json}", highlight=False, soft_wrap=True)
        if settings.plot is not None:
            with result_file(settings.plot) as file:
                plot_memory(file, cached, uncached)
            self._console.print(f"picture: {settings.plot}", highlight=False, soft_wrap=True)

    def _numbers(self, cached: Run, uncached: Run, checks: list[Check]) -> dict[str, Any]:
        return {
            "passed": all(check.passed for check in checks),
            "checks": [asdict(check) for check in checks],
            "model": self._settings.folder,
            "peak_bytes_shared": cached.peak("used_bytes"),
            "peak_bytes_unshared": cached.peak("unshared_bytes"),
            "with_prefix_cache": asdict(cached),
            "without_prefix_cache": asdict(uncached),
        }

    def _fail(self, code: int, message: str) -> int:
        line = f"flexinfer demo: FAILED - {message}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        return code
