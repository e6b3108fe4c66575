"""Places in an author's code, for messages: ``shop.py:31``."""

from __future__ import annotations

import contextlib
import inspect
import re
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

_OWN = Path(__file__).resolve().parents[2]
_LIBRARY = Path(sysconfig.get_paths()["stdlib"]).resolve()


def place(file: str, line: int) -> str:
    """Return ``file:line``, relative to the current folder where that is shorter."""
    path = Path(file)
    with contextlib.suppress(ValueError, OSError):
        path = path.resolve().relative_to(Path.cwd())
    return f"{path}:{line}"


def place_of(target: Callable[..., Any] | type | None) -> str:
    """Return where a function or class is defined; empty if that is not known."""
    if target is None:
        return ""
    try:
        target = inspect.unwrap(target)
        file = inspect.getsourcefile(target)
        return place(file, inspect.getsourcelines(target)[1]) if file else ""
    except (TypeError, OSError, ValueError):
        return ""


def place_of_method(kind: type, name: str) -> str:
    """Return where a class's method is written, unless that is in this project's base classes."""
    for base in kind.__mro__:
        if name in vars(base):
            member = vars(base)[name]
            member = getattr(member, "__func__", member)
            return (place_of(member) or place_of(base)) if _wrote(base) else place_of(kind)
    return place_of(kind)


def place_of_named(kind: type, error: BaseException) -> str:
    """Return where the author's method is written that an error names: ``score() returned …``."""
    for name in re.findall(r"(\w+)\(\)", str(error)):
        if any(name in vars(base) and _wrote(base) for base in kind.__mro__):
            return place_of_method(kind, name)
    return ""


def _wrote(kind: type) -> bool:
    """Whether an author wrote a class, not this project or the standard library."""
    try:
        return _is_authors(inspect.getsourcefile(kind) or "<unknown>")
    except (TypeError, OSError):
        return True


def place_of_error(error: BaseException) -> str:
    """Return where an exception came from: the innermost line that an author wrote."""
    frames = [
        (frame.filename, frame.lineno or 0)
        for each in _chain(error)
        for frame in reversed(traceback.extract_tb(each.__traceback__))
    ]
    return _authors(frames)


def place_of_frame(frame: FrameType | None) -> str:
    """Return the innermost line of a running stack that an author wrote."""
    frames = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return _authors(frames)


def _chain(error: BaseException) -> list[BaseException]:
    """The error that started it first."""
    chain = [error]
    while chain[0].__cause__ is not None and len(chain) < 10:
        chain.insert(0, chain[0].__cause__)
    return chain


def _authors(frames: list[tuple[str, int]]) -> str:
    """Choose among frames, the innermost first: not the library's, not the checker's."""
    written = [(file, line) for file, line in frames if _is_authors(file)]
    return place(*written[0]) if written else ""


def _is_authors(file: str) -> bool:
    if file.startswith("<"):
        return False
    path = Path(file).resolve()
    if path.is_relative_to(_LIBRARY) and "site-packages" not in path.parts:
        return False
    if not path.is_relative_to(_OWN):
        return True
    inside = path.relative_to(_OWN).parts
    return inside[0] in ("tests", "examples") or "catalog" in inside or "adapters" in inside
