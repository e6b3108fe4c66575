"""What is registered, for people: the whole registry, or what one module brings."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence

from relax_agent.envs.registration import load_plugins, registry
from relax_agent.envs.specs import EntryPoint, EnvSpec, label_of
from relax_agent.importing import import_named


def about(kind: object) -> str:
    """Return the first paragraph of a docstring as plain text in one line."""
    words = " ".join((inspect.getdoc(kind) or "").strip().split("\n\n")[0].split())
    return plain_words(re.sub(r"[.;,]? [Ss]ee [^.]*docstring(?=\.|$)", "", words))


def plain_words(text: str) -> str:
    """Return a docstring's text without its markup: ````x```` and ``:class:`a.x``` become x."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", text)
    return re.sub(r"``?([^`]*)``?", r"\1", text)


def pprint_registry(
    *, columns: int = 3, exclude: Sequence[str] = (), disable_print: bool = False
) -> str:
    """Print every registered id, by namespace and in columns; return what was printed.

    Args:
        columns: How many ids stand in a line.
        exclude: Namespaces that are left out.
        disable_print: Only return the text.
    """
    load_plugins()
    spaces: dict[str, list[str]] = {}
    for item in sorted(registry.values(), key=_order):
        if (item.namespace or "") not in exclude:
            spaces.setdefault(item.namespace or "", []).append(item.id)
    text = "\n".join(_section(space, ids, columns) for space, ids in spaces.items())
    if not disable_print:
        sys.stdout.write(text)
    return text


def _order(item: EnvSpec) -> tuple[str, str, int]:
    return item.namespace or "", item.name, item.version or 0


def _section(space: str, ids: Sequence[str], columns: int) -> str:
    width = max(map(len, ids))
    lines = [
        "  ".join(env_id.ljust(width) for env_id in ids[start : start + columns]).rstrip()
        for start in range(0, len(ids), columns)
    ]
    return "\n".join((f"===== {space} =====", *lines, ""))


def load_module_envs(module: str) -> list[EnvSpec]:
    """Import a module and return the environments that it registers, in their order."""
    before = dict(registry)
    name = import_named(module).__name__
    return [
        item
        for env_id, item in registry.items()
        if before.get(env_id) is not item or _is_in(item.entry_point, name)
    ]


def _is_in(entry_point: EntryPoint, module: str) -> bool:
    home = label_of(entry_point).partition(":")[0]
    return home == module or home.startswith(f"{module}.")
