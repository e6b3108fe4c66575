"""What is registered, as a table: read from classes, without building any environment."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from relax_agent.envs.listing import about
from relax_agent.envs.registration import load_plugins, registry
from relax_agent.envs.specs import EnvSpec, label_of
from relax_agent.envs.tasks import TaskSet
from relax_agent.errors import RelaxError
from relax_agent.importing import import_named
from relax_agent.pages import plain
from relax_agent.tools import AnyToolset, Tool

_WIDE = 240


@dataclass(frozen=True, slots=True)
class EnvRow:
    """What a list tells of one environment."""

    id: str
    about: str
    """The first line of its class's docstring."""
    tools: list[str]
    """Names that its class states; an instance may have others."""
    tasks: str
    """``train + held out`` where its class states them."""
    needs: list[str]
    """Arguments that must be given."""
    entry_point: str


def rows() -> list[EnvRow]:
    """Describe every registered environment, plugins included, by namespace and name."""
    load_plugins()
    specs = sorted(registry.values(), key=lambda s: (s.namespace or "", s.name, s.version or 0))
    return [describe(spec) for spec in specs]


def describe(spec: EnvSpec) -> EnvRow:
    """Describe one environment by its class; it is imported, not built."""
    try:
        kind = _target(spec)
    except (RelaxError, AttributeError) as error:
        return EnvRow(spec.id, f"(cannot be imported: {error})", [], "", [], _where(spec))
    return EnvRow(
        spec.id, _about(kind), _tools(kind), _tasks(kind), _needs(kind, spec), _where(spec)
    )


def _where(spec: EnvSpec) -> str:
    return label_of(spec.entry_point)


def _target(spec: EnvSpec) -> Any:
    if not isinstance(spec.entry_point, str):
        return spec.entry_point
    module, _, path = spec.entry_point.partition(":")
    target: Any = import_named(module)
    for name in path.split("."):
        target = getattr(target, name)
    return target


def _about(kind: Any) -> str:
    return about(kind).removesuffix(".") or "(no docstring)"


def _tools(kind: Any) -> list[str]:
    stated = getattr(kind, "tools", None)
    if isinstance(stated, AnyToolset):
        names = list(stated.names)
    elif isinstance(stated, Iterable) and not isinstance(stated, (str, property)):
        names = [getattr(each, "name", getattr(each, "__name__", "?")) for each in stated]
    else:
        names = []
    if isinstance(kind, type):
        members: dict[str, Any] = {}
        for base in reversed(kind.__mro__):
            members |= vars(base)
        names += [member.name for member in members.values() if isinstance(member, Tool)]
    return names


def _tasks(kind: Any) -> str:
    stated = getattr(kind, "tasks", None)
    if isinstance(stated, TaskSet):
        return f"{len(stated.ids('train'))} + {len(stated.ids('eval'))}"
    return ""


def _needs(kind: Any, spec: EnvSpec) -> list[str]:
    try:
        parameters = inspect.signature(kind).parameters
    except (TypeError, ValueError):
        return []
    positional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in positional
        and name not in spec.kwargs
    ]


def print_table(found: list[EnvRow]) -> None:
    """Print the rows; whole lines where the output goes to a file or a pipe."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("environment", no_wrap=True)
    table.add_column("what it is")
    with_tools, with_tasks = _mostly(row.tools for row in found), _mostly(r.tasks for r in found)
    if with_tools:
        table.add_column("tools")
    if with_tasks:
        table.add_column("tasks", no_wrap=True)
    for row in found:
        needs = "".join(f"  (--arg {name}=…)" for name in row.needs)
        cells: list[Any] = [row.id, _plain(row.about + needs)]
        if with_tools:
            cells.append(_plain(", ".join(row.tools[:4]) + (", …" if len(row.tools) > 4 else "")))
        if with_tasks:
            cells.append(row.tasks)
        table.add_row(*cells)
    print_plainly(table)


def _mostly(cells: Iterable[object]) -> bool:
    """Whether a column has something to say: many classes make tools and tasks when built."""
    filled = [bool(cell) for cell in cells]
    return 2 * sum(filled) > len(filled)


def print_plainly(*items: Any) -> None:
    """Print to a terminal with its width and colours; to a file or a pipe in whole lines."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(*items, sep="\n")
        return
    wide = Console(highlight=False, width=_WIDE)
    with wide.capture() as captured:
        wide.print(*items, sep="\n")
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def _plain(text: str) -> Text:
    return Text(plain(text))


def to_json(found: list[EnvRow]) -> list[dict[str, Any]]:
    """Return the rows as plain data."""
    return [asdict(row) for row in found]
