"""What all dialects share: a request in no dialect, refusals, and what a program may not choose.

What would change the distribution that is sampled from (``temperature``, ``top_p``, penalties,
``logit_bias``) or the sampled text (``stop``) is the run's to say: log-probs of a policy must be
comparable. A program that asks for other values is answered under the run's own, and told so in
the header ``x-relax-ignored``. What cannot be done at all is refused with words that say what to
change.

A dialect is a module with what :class:`Dialect` names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from relax_agent.gateway.session import Answer, ChatRequest
from relax_agent.messages import AssistantMessage, ToolCall


class BadRequest(Exception):
    """The request cannot be answered; its words say what to change."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Call:
    """A request, and how its answer is to look."""

    request: ChatRequest
    model: str
    stream: bool
    ignored: list[str]
    """Parameters that are answered under the run's own values."""
    usage_in_stream: bool = True
    logprobs: bool = False


class Dialect(Protocol):
    """A way to write requests and answers."""

    PATH: str
    PREFIX: str
    """What the names of answers begin with."""
    ALIVE: bytes

    def read(self, body: Any) -> Call:
        """Read a body, or raise BadRequest."""

    def body_of(self, call: Call, answer: Answer, completion: str) -> dict[str, Any]:
        """Return an answer as one object."""

    def events(self, call: Call, answer: Answer, completion: str) -> Iterator[bytes]:
        """Yield an answer as server-sent events."""

    def error_body(self, status: int, message: str, code: str, param: str | None) -> dict[str, Any]:
        """Return an error."""

    def error_event(self, body: dict[str, Any]) -> bytes:
        """Return an error in the midst of a stream."""


_REASONS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    413: "request_too_large",
}


def reasons(status: int) -> str:
    """Return the type of an error, as both OpenAI and Anthropic name it."""
    return _REASONS.get(status, "api_error")


def readable(message: AssistantMessage) -> list[ToolCall]:
    """Return the calls that a program gets; one that cannot be read is in the log alone."""
    return [call for call in message.tool_calls if call.error is None]


def max_tokens(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the first limit that is there.

    Raises:
        BadRequest: It is no whole number ≥ 1.
    """
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadRequest(f"{name} must be a whole number ≥ 1", name)
        return value
    return None


def require_free_choice(tools: Any, choice: Any) -> None:
    """Refuse to force a call, where there are tools.

    Raises:
        BadRequest: ``choice`` is none of ``auto``, ``none`` and nothing.
    """
    if tools and choice not in (None, "auto", "none"):
        raise BadRequest(
            "tool_choice can only be auto or none: a policy cannot be forced to call a tool"
            " without changing what it samples from",
            "tool_choice",
        )


# -- what OpenAI's two dialects share --------------------------------------------------------------

ALIVE = b": sampling\n\n"
"""What a stream that waits for its answer sends now and then."""


def error_body(status: int, message: str, code: str, param: str | None) -> dict[str, Any]:
    """Return an error in OpenAI's shape."""
    return {"error": {"message": message, "type": reasons(status), "code": code, "param": param}}
