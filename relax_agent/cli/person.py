"""A person as the policy: what they type becomes an assistant message.

    /price fruit=fig           calls a tool; values are read as YAML
    /calculator (17+5)*3       a tool with one argument takes the rest of the line
    /a x=1 && /b y=2           several calls in one message
    42                         anything else is an answer
    /help  /tools  /quit       what can be typed; the tools; leave

A line that begins with two slashes is an answer that begins with one.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from relax_agent.messages import AssistantMessage, Message, ToolCall, assistant
from relax_agent.pages import conversation_text
from relax_agent.threads import THREADS

_PAIR = re.compile(r"[A-Za-z_]\w*=")
_SUFFIX = {"image/jpeg": ".jpg", "audio/mpeg": ".mp3", "audio/wav": ".wav", "audio/x-wav": ".wav"}
HELP = """\
  text                  an answer
  /tool name=value …    call a tool; a tool with one argument also takes the rest of the line
  /a x=1 && /b y=2      several calls in one message
  /tools                what the tools take
  /quit                 leave (Ctrl-D too)"""


class Left(Exception):
    """The person left in mid-episode."""


class NotUnderstood(Exception):
    """What was typed is neither an answer nor a call; the message says why."""


class PersonPolicy:
    """Asks a person for every message."""

    def __init__(
        self,
        *,
        ask: Callable[[str], str] = input,
        show: Callable[[str], None] = print,
        media: Path | None = None,
    ) -> None:
        """Prepare to ask.

        Args:
            ask: Shows a prompt and returns a line; raises EOFError at the end.
            show: Prints text.
            media: Where pictures, sounds and videos are put for looking at; a fresh temporary
                folder by default.
        """
        self._ask = ask
        self._show = show
        self._media = media
        self._shown: list[Message] = []
        self._said: list[Message] = []
        self._calls = 0
        self.left = False
        """Whether the person has left."""

    async def act(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> AssistantMessage:
        """Show what is new and return what the person typed.

        Raises:
            Left: The person has had enough.
        """
        self.show_new(messages)
        while True:
            try:
                # A thread, so that an environment behind a connection stays alive meanwhile; a
                # daemon one, so that Ctrl-C need not wait for the line.
                line = await THREADS.run(partial(self._ask, "> "))
                said = self._read(line, tools)
            except NotUnderstood as error:
                self._show(f"  {error}")
                continue
            except (EOFError, Left):
                self.left = True
                raise Left("left the episode") from None
            if said is not None:
                self._said.append(said)
                return said

    def show_new(self, messages: Sequence[Message]) -> None:
        """Print the messages that were not shown before, except what the person said."""
        start = len(self._shown)
        if list(messages[:start]) != self._shown:
            self._show("\n(the conversation so far was rewritten)")
            start = 0
        self._shown = list(messages)
        for message in messages[start:]:
            if any(message is said for said in self._said):
                continue
            self._show("\n" + conversation_text([message]).rstrip())
            for part in message.media:
                self._show(f"  {self._save(part.data, part.mime)}")

    def _save(self, data: bytes, mime: str) -> Path:
        if self._media is None:
            self._media = Path(tempfile.mkdtemp(prefix="relax-play-"))
        number = sum(1 for _ in self._media.iterdir())
        suffix = _SUFFIX.get(mime) or "." + re.sub(r"\W", "", mime.rpartition("/")[2])[:8]
        path = self._media / f"{number:03}{suffix}"
        path.write_bytes(data)
        return path

    def _read(self, line: str, tools: Sequence[dict[str, Any]]) -> AssistantMessage | None:
        """Turn a line into a message; None if it was a command that is done."""
        text = line.strip()
        if not text:
            return None
        if not text.startswith("/") or text.startswith("//"):
            return assistant(text.removeprefix("/") if text.startswith("//") else text)
        if text in ("/quit", "/exit", "/q"):
            raise Left
        if text in ("/help", "/h", "/?"):
            self._show(HELP)
            return None
        if text == "/tools":
            self._show(describe_tools(tools))
            return None
        calls = []
        for number, part in enumerate(re.split(r"\s&&\s+(?=/)", text)):
            name, arguments = read_call(part, tools)
            calls.append(ToolCall(name, arguments, f"call_{self._calls + number}"))
        self._calls += len(calls)
        return assistant(tool_calls=calls)


def read_call(text: str, tools: Sequence[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Read ``/name key=value …`` into a tool's name and arguments.

    Raises:
        NotUnderstood: There is no such tool, or the arguments cannot be read.
    """
    name, _, rest = text.removeprefix("/").partition(" ")
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    if name not in schemas:
        near = difflib.get_close_matches(name, schemas, n=1)
        known = f"did you mean /{near[0]}?" if near else f"tools: {', '.join(schemas) or 'none'}"
        raise NotUnderstood(f"there is no tool {name!r}; {known} (/help)")
    properties = schemas[name].get("properties", {})
    rest = rest.strip()
    if rest and len(properties) == 1 and not _PAIR.match(rest):
        (only,) = properties
        return name, {only: _value(rest, properties[only])}
    return name, _pairs(name, rest, properties)


def _pairs(name: str, rest: str, properties: dict[str, Any]) -> dict[str, Any]:
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise NotUnderstood(f"{rest!r} cannot be read: {error}") from None
    arguments: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            wants = " ".join(f"{each}=…" for each in properties)
            raise NotUnderstood(f"{word!r} is no argument; write /{name} {wants}")
        arguments[key] = _value(value, properties.get(key, {}))
    return arguments


def _value(text: str, schema: dict[str, Any]) -> Any:
    """Read a value as YAML, except where the tool wants text anyway."""
    if schema.get("type") == "string":
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def describe_tools(tools: Sequence[dict[str, Any]]) -> str:
    """Return the tools with their arguments, one block each."""
    blocks = []
    for tool in tools:
        function = tool["function"]
        parameters = function["parameters"]
        required = set(parameters.get("required", ()))
        lines = [f"  /{function['name']}  {function['description'].splitlines()[0]}"]
        for name, schema in parameters.get("properties", {}).items():
            kind = schema.get("type") or "/".join(map(str, schema.get("enum", ()))) or "value"
            need = "" if name in required else ", may be left out"
            told = schema.get("description", "")
            lines.append(f"      {name} ({kind}{need})  {told}".rstrip())
        blocks.append("\n".join(lines))
    return "\n".join(blocks) or "  there are no tools: type an answer"


def completing_input(tools: Sequence[dict[str, Any]]) -> Callable[[str], str]:
    """Return ``input`` with line editing, a history and completion of the tools' names."""
    if not sys.stdin.isatty():
        return input
    with contextlib.suppress(ImportError):  # not on every system
        import readline

        words = [f"/{tool['function']['name']} " for tool in tools] + ["/tools", "/help", "/quit"]

        def complete(text: str, state: int) -> str | None:
            found = [word for word in words if word.startswith(text)]
            return found[state] if state < len(found) else None

        readline.set_completer_delims(" ")
        readline.set_completer(complete)
        readline.parse_and_bind("tab: complete")
    return input
