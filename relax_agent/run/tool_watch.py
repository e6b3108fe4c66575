"""Looks after the tool server of a run.

A tool server that fails ends no episode: the model gets an error message and goes on. So a run
whose server is broken would go on too, and learn from episodes in which no tool ever worked. This
tells of such calls, and ends the run when not one of many has been answered.
"""

from __future__ import annotations

from collections.abc import Callable

from relax_agent.errors import ToolError, ToolErrorKind
from relax_agent.tools import RemoteToolset

MOST_UNANSWERED = 16
"""Calls in a row that may fail because of the server."""


class ToolWatch:
    """Counts the calls that a tool server did not answer."""

    def __init__(self, toolset: RemoteToolset | None, tell: Callable[[str], None]) -> None:
        """Watch a toolset; None, tools in this process, has no server that could fail.

        Args:
            toolset: The server's tools.
            tell: Shows one remark to the person who runs this.
        """
        self._toolset = toolset
        self._tell = tell
        self._answered = self._unanswered = 0
        self._in_a_row = 0

    def look(self, when: str) -> int:
        """Return how many calls went unanswered since the last look.

        Args:
            when: What they were part of, for the remark.

        Raises:
            ToolError: The server has answered none of the last calls, and those were many.
        """
        if self._toolset is None:
            return 0
        counts = self._toolset.counts
        answered = counts.answered - self._answered
        failed = counts.unanswered - self._unanswered
        self._answered, self._unanswered = counts.answered, counts.unanswered
        self._in_a_row = 0 if answered else self._in_a_row + failed
        if failed:
            words = f"{failed} of {answered + failed} tool calls failed during {when}"
            self._tell(f"{words}, the last one with: {counts.last_failure}")
        if self._in_a_row >= MOST_UNANSWERED:
            raise ToolError(
                f"the tool server has answered none of {self._in_a_row} calls, the last ones"
                f" during {when}: {counts.last_failure.removeprefix('Error: ')}",
                kind=ToolErrorKind.UNAVAILABLE,
                hint=f"look after the server at {self._toolset.url}",
            )
        return failed
