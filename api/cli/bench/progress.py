"""Shows on a terminal how far a measurement has come, while it runs.

Owns the live lines on standard error: one for each phase, with the time since its start. Never computes a figure. If
standard error is no terminal, shows nothing.
"""

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from graftwork.api.cli.bench.load import Load


class LiveProgress:
    """Shows the running phase, and the phases that have ended. Use it in a `with` block."""

    def __init__(self, *, is_shown: bool | None = None) -> None:
        """`is_shown` is whether lines are drawn; None draws them if standard error is a terminal."""
        self._is_shown = sys.stderr.isatty() if is_shown is None else is_shown
        self._bars: Progress | None = None
        self._phase: tuple[str, TaskID] | None = None

    def __enter__(self) -> Self:
        if self._is_shown:
            # Rich takes a tenth of a second to import, so it is imported only for a terminal.
            from rich.console import Console
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), TimeElapsedColumn())
            self._bars = Progress(*columns, TextColumn("{task.fields[state]}"), console=Console(stderr=True))
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._end_phase(self._bars)
            self._bars.stop()

    def update(self, phase: str, state: str) -> None:
        """Shows the state of a phase. A new name ends the phase before."""
        if self._bars is None:
            return
        if self._phase is None or self._phase[0] != phase:
            self._end_phase(self._bars)
            self._phase = phase, self._bars.add_task(phase, total=None, state="")
        self._bars.update(self._phase[1], state=state)

    def show_load(self, phase: str, load: "Load") -> None:
        """Shows how many chats of a phase were sent, how many have ended, and how many of these were not answered."""
        if self._bars is not None:
            ended = [one for one in load.sent if one.ended_at is not None]
            others = sum(one.status != 200 for one in ended)
            self.update(phase, f"{len(load.sent)} sent, {len(ended)} ended, {others} refused or failed")

    def _end_phase(self, bars: "Progress") -> None:
        if self._phase is not None:
            bars.update(self._phase[1], total=1, completed=1)
            self._phase = None
