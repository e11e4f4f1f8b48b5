"""What the demo shows while it runs: answers as they grow, or plain lines off a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexinfer.cli.terminal_text import one_row

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

MAX_SHOWN = 8
"""Conversations whose text is shown; the others run along."""


class TextWatch:
    """Shows the text of each turn: live on a terminal, at the end of the turn elsewhere."""

    def __init__(self, console: Console, num_turns: int) -> None:
        self._console = console
        self._num_turns = num_turns
        self._users: list[str] = []
        self._texts: list[str] = []
        self._live: Live | None = None

    def turn_begins(self, turn: int, users: list[str]) -> None:
        from rich.live import Live

        self._console.print(f"\n[bold]turn {turn} of {self._num_turns}[/bold]")
        self._users, self._texts = users[:MAX_SHOWN], [""] * len(users)
        if self._console.is_terminal:
            self._live = Live(self._view(), console=self._console, refresh_per_second=15)
            self._live.start()

    def text(self, conversation: int, text: str) -> None:
        self._texts[conversation - 1] = text
        if self._live is not None:
            self._live.update(self._view())

    def turn_ends(self) -> None:
        if self._live is not None:
            self._live.update(self._view())
            self.close()
        else:
            self._console.print(self._view())

    def close(self) -> None:
        """Leave the terminal in order, also after an error."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _view(self) -> RenderableType:
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 1))
        grid.add_column(justify="right", style="dim")
        grid.add_column(overflow="fold")
        for idx, user in enumerate(self._users):
            grid.add_row(str(idx + 1), Text(f"> {one_row(user)}", "cyan"))
            grid.add_row("", Text(one_row(self._texts[idx])))
        if len(self._texts) > len(self._users):
            grid.add_row("", Text(f"and {len(self._texts) - len(self._users)} more", "dim"))
        return grid


class QuietWatch:
    """Shows only how far a run is."""

    def __init__(self, console: Console, what: str) -> None:
        self._status = console.status(what)
        self._what = what
        self._status.start()

    def turn_begins(self, turn: int, users: list[str]) -> None:
        self._status.update(f"{self._what}: turn {turn}")

    def text(self, conversation: int, text: str) -> None:
        pass

    def turn_ends(self) -> None:
        pass

    def close(self) -> None:
        """Leave the terminal in order."""
        self._status.stop()
