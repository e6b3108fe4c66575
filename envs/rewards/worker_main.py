"""The program of a reward worker: ``python -m relax_agent.envs.rewards.worker_main TARGET BYTES``.

It imports the function once, then answers calls until its parent closes the link. Calls run in the
event loop itself, one at a time: a worker is asked nothing else meanwhile, and who waits too long
kills it. Exceptions are answers; only what says that the set-up is wrong is raised in the parent.
"""

from __future__ import annotations

import inspect
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from relax_agent.envs.rewards.calling import FATAL, MAX_WORDS, number
from relax_agent.envs.rewards.large import put_back
from relax_agent.envs.tasks import Task
from relax_agent.envs.transcript import Score, Transcript
from relax_agent.errors import ConfigError, one_line
from relax_agent.importing import import_named
from relax_agent.links import serve_link
from relax_agent.messages import from_record


def main(target: str, memory_bytes: int) -> None:
    """Serve calls of one function."""
    function: Callable[..., Any] | None = None

    def setup() -> None:
        nonlocal function
        function = find(target)
        if memory_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))

    async def handle(
        header: dict[str, Any], blobs: list[bytes]
    ) -> tuple[dict[str, Any], list[bytes]]:
        assert function is not None
        try:
            arguments = put_back(header["arguments"], blobs)
            value = _run(function, arguments)
            value = await value if inspect.isawaitable(value) else value
            value = _plain(value) if "task" in arguments else value
        except FATAL:
            raise
        except (Exception, SystemExit) as error:
            retire = isinstance(error, MemoryError)
            return {"failed": one_line(error, MAX_WORDS), "retire": retire}, []
        return {"value": value}, []

    serve_link(handle, setup=setup)


def find(target: str) -> Callable[..., Any]:
    """Import ``"module:name"``, or raise ConfigError."""
    module, _, path = target.partition(":")
    found: Any = import_named(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    if not callable(found):
        raise ConfigError(f"there is no function {path} in {module}")
    return found


def _run(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    if arguments.keys() == {"task", "transcript"}:
        return function(_task(arguments["task"]), Transcript.from_record(arguments["transcript"]))
    if arguments.keys() == {"task", "group"}:
        group = [Transcript.from_record(each) for each in arguments["group"]]
        return function(_task(arguments["task"]), group)
    return function(**arguments)


def _task(data: Mapping[str, Any]) -> Task:
    prompt = data["prompt"]
    content = prompt if isinstance(prompt, str) else from_record(prompt).content
    messages = tuple(from_record(item) for item in data["messages"])
    return Task(data["id"], content, data["answer"], data["data"], messages)


def _plain(value: Any) -> Any:
    """Return what a function gave as JSON data; a number that is not finite is an error."""
    if isinstance(value, Score):
        metrics = {name: number(each) for name, each in value.metrics.items()}
        return {"reward": number(value.reward), "metrics": metrics}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [number(each) for each in value]
    return number(value)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
