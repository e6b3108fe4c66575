"""The log of a server process: one line of JSON for each record, on standard error.

What a call was about never stands in it: neither arguments nor results, tokens or session ids. That
is the business of the trace (:mod:`relax_agent.tools.trace`), which is off unless asked for.
"""

from __future__ import annotations

import json
import logging
import time


class JsonLines(logging.Formatter):
    """Formats a record as JSON; ``extra={"facts": {…}}`` become keys of their own."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        facts = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        return json.dumps(facts, ensure_ascii=False, default=str)


def log_as_json(level: str) -> None:
    """Let this process log from ``level`` on, as lines of JSON on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    logging.getLogger("relax_agent").setLevel(level.upper())
