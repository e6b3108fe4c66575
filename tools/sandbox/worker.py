"""The interpreter inside a sandbox: run as a script, it executes what comes over its socket.

It is trusted only until the first line of foreign code has run; nothing outside relies on it. It
makes a session pleasant: variables stay, the value of a last expression is shown, figures and
pictures come back as images, a traceback begins in the code that was given and ends there.

A frame is 4 bytes with the length of a JSON header, the header ``{"id", "body", "blobs": [sizes]}``
and the blobs. Requests are ``{"do": "run", "code": …}``, ``{"do": "read", "path": …}`` and
``{"do": "write", "path": …}`` with one blob. What code does to the streams and to the built-in
names is mended before the next call; if more than that is broken, this process ends, and the
session goes on with another one. Standard library only.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import fcntl
import inspect
import io
import json
import linecache
import os
import resource
import stat
import struct
import sys
import threading
import traceback
import types
import warnings
from typing import Any

Body = dict[str, Any]

_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_MAX_FD = 1 << 16
_WHATEVER = BaseException
"""By another name: code may have deleted this one."""
_HIDDEN_FD = 100
_CUT_CHARS = 60
"""Room for the words that say what was cut."""
_SHOWN_FRAMES = 12
_OWN_FILES = (__file__, ast.__file__)


class _Link:
    """The socket to the outside."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._fd = fd

    def receive(self) -> tuple[int, Body, bytes]:
        """Wait for a request; end if there will be none."""
        (size,) = struct.unpack(">I", self._take(4))
        header = json.loads(self._take(size))
        return header["id"], header["body"], self._take(sum(header["blobs"]))

    def send(self, number: int, body: Body, blobs: list[bytes]) -> None:
        header = {"id": number, "body": body, "blobs": [len(blob) for blob in blobs]}
        text = json.dumps(header).encode()
        self._give(b"".join([struct.pack(">I", len(text)), text, *blobs]))

    def _take(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = os.read(self._fd, min(size - len(data), 1 << 20))
            if not chunk:
                os._exit(0)  # the session is over
            data += chunk
        return bytes(data)

    def _give(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]


class _Session:
    """One namespace, and how code runs in it."""

    def __init__(self, config: Body) -> None:
        self._config = config
        self._calls = 0
        self._threads = 0
        self._process = os.getpid()
        self._mend = _Mend()
        self.main = types.ModuleType("__main__")
        self.main.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = self.main

    def run(self, code: str) -> tuple[Body, list[bytes]]:
        """Execute code; say what it gave."""
        self._calls += 1
        body: Body = {}
        images: list[bytes] = []
        try:
            self._show(self._execute(code, f"<call {self._calls}>"), body, images)
        except _WHATEVER as error:  # sys.exit and Ctrl-C of the code as well
            self._mend()
            body["error"] = self._told(error)
        else:
            self._mend()
        if os.getpid() != self._process:
            _end_copy(body)
        with contextlib.suppress(BaseException):
            images += _figures()
        body["notes"] = self._fit(images) + self._threads_left()
        return body, images

    def _show(self, value: Any, body: Body, images: list[bytes]) -> None:
        if value is None:
            return
        self.main.__dict__["_"] = value
        picture = _picture(value)
        if picture is None:
            body["value"] = self._shortened(repr(value))
        else:
            images.append(picture)

    def _threads_left(self) -> list[str]:
        """Say so if code has left more threads running than before."""
        count = threading.active_count() - 1
        before, self._threads = self._threads, count
        if count <= before:
            return []
        note = f"threads that are still running: {count}; they go on only while calls run"
        return [f"{note} (os._exit(0) ends them, and the interpreter)"]

    def _execute(self, code: str, name: str) -> Any:
        lines = code.splitlines(keepends=True)
        linecache.cache[name] = (len(code), None, lines, name)
        tree = ast.parse(code, name)
        last = tree.body[-1] if tree.body else None
        value = None
        if isinstance(last, ast.Expr):
            tree.body.pop()
            value = compile(ast.Expression(last.value), name, "eval", _FLAGS)
        self._evaluate(compile(tree, name, "exec", _FLAGS))
        return None if value is None else self._evaluate(value)

    def _evaluate(self, code: types.CodeType) -> Any:
        if code.co_flags & inspect.CO_COROUTINE:
            return asyncio.run(types.FunctionType(code, self.main.__dict__)())
        return eval(code, self.main.__dict__)  # noqa: S307 - this is the place for it

    def _told(self, error: BaseException) -> Body:
        if isinstance(error, SystemExit):
            text = f"the code called sys.exit({error.code!r}); the session goes on, variables stay"
            return {"type": "SystemExit", "text": self._shortened(text)}
        try:
            shown = traceback.TracebackException.from_exception(error, compact=True)
            _without_own_frames(shown)
            text = "".join(shown.format())
        except BaseException as second:
            text = f"{type(error).__name__} (which cannot be shown: {type(second).__name__})"
        return {"type": type(error).__name__, "text": self._shortened(text.rstrip())}

    def _shortened(self, text: str) -> str:
        limit = self._config["output_chars"]
        if len(text) <= limit:
            return text
        half = max(0, limit - _CUT_CHARS) // 2
        left = len(text) - 2 * half
        return f"{text[:half]}\n[… {left:,} characters left out …]\n{text[len(text) - half :]}"

    def _fit(self, images: list[bytes]) -> list[str]:
        """Drop images beyond the limits; say so."""
        room, kept = self._config["image_bytes"], []
        for image in images[: self._config["images"]]:
            if len(image) <= room:
                room -= len(image)
                kept.append(image)
        dropped = len(images) - len(kept)
        images[:] = kept
        return [f"{dropped} images were left out: too many or too large"] if dropped else []


class _Mend:
    """Puts the streams and the built-in names back to what they were."""

    def __init__(self) -> None:
        self._names = dict(vars(builtins))
        self._put_back = vars(builtins).update  # code may delete every name that is looked up
        self._pipes = [_hidden(1), _hidden(2)]

    def __call__(self) -> None:
        self._put_back(self._names)
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            with contextlib.suppress(BaseException):
                stream.flush()  # type: ignore[union-attr]
        for number, pipe in enumerate(self._pipes, 1):
            os.dup2(pipe, number)
        sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, _stream(1), _stream(2)
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]


def _hidden(fd: int) -> int:
    """Return a copy of a descriptor with a number that nothing counts up to."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIDDEN_FD)


def _stream(fd: int) -> io.TextIOWrapper:
    file = open(fd, "wb", closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(
        file, encoding="utf-8", errors="backslashreplace", line_buffering=True, newline="\n"
    )


def _end_copy(body: Body) -> None:
    """End a process that code has forked and that came back here; there is one session only."""
    with contextlib.suppress(BaseException):
        print(body["error"]["text"], file=sys.stderr, flush=True)
    os._exit(1 if "error" in body else 0)


def _without_own_frames(shown: traceback.TracebackException | None) -> None:
    """Leave out this file's frames and the compiler's, and all but the last of the others."""
    while shown is not None:
        frames = [frame for frame in shown.stack if frame.filename not in _OWN_FILES]
        shown.stack = traceback.StackSummary.from_list(frames[-_SHOWN_FRAMES:])
        shown = shown.__cause__ or shown.__context__


def _picture(value: Any) -> bytes | None:
    """Return a picture as PNG; None for anything else."""
    module = sys.modules.get("PIL.Image")
    if module is not None and isinstance(value, module.Image):
        buffer = io.BytesIO()
        if value.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16"):
            value = value.convert("RGB")
        value.save(buffer, "PNG")
        return buffer.getvalue()
    figure = sys.modules.get("matplotlib.figure")
    if figure is not None and isinstance(value, figure.Figure):
        return _drawn(value)
    return None


def _drawn(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    plots = sys.modules.get("matplotlib.pyplot")
    if plots is not None:
        plots.close(figure)
    return buffer.getvalue()


def _figures() -> list[bytes]:
    """Return the open figures of matplotlib as PNG and close them."""
    plots = sys.modules.get("matplotlib.pyplot")
    if plots is None:
        return []
    return [_drawn(plots.figure(number)) for number in plots.get_fignums()]


def _read(path: str, most: int) -> tuple[Body, list[bytes]]:
    """Return a regular file's bytes. A pipe does not hang it, a link leads nowhere else."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:  # noqa: PTH123
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return {"problem": "not a regular file"}, []
            data = file.read(most + 1)
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        return {"problem": getattr(error, "strerror", None) or str(error)}, []
    if len(data) > most:
        return {"problem": f"larger than {most:,} bytes", "too_large": True}, []
    return {}, [data]


def _write(path: str, data: bytes) -> tuple[Body, list[bytes]]:
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)  # noqa: PTH103, PTH120
        with open(path, "wb") as file:  # noqa: PTH123
            file.write(data)
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        return {"problem": getattr(error, "strerror", None) or str(error)}, []
    return {}, []


def _no_input(prompt: object = "") -> str:
    raise EOFError(
        "input() cannot be used here: nobody is there to type; put the value in the code"
    )


def _no_breakpoint(*_: object, **__: object) -> None:
    raise RuntimeError("breakpoint() cannot be used here: nobody is there to debug; use print()")


def _prepare(config: Body) -> None:
    """Make the process what the session shall find."""
    os.dup2(int(config["out"]), 1)
    os.dup2(int(config["err"]), 2)
    link = int(config["link"])
    os.closerange(3, link)
    os.closerange(link + 1, _MAX_FD)
    for name, value in config["limits"].items():
        kind = getattr(resource, name, None)
        if kind is not None:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(kind, tuple(value))
    for folder in config["folders"]:
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103
    os.chdir(config["home"])
    sys.argv = [""]
    sys.path[:] = ["", *(p for p in sys.path if not p.endswith("site-packages")), *config["path"]]
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    builtins.input = _no_input
    sys.breakpointhook = _no_breakpoint
    warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive")


def _serve(config: Body) -> None:
    link = _Link(int(config["link"]))
    session = _Session(config)
    for name in config["preload"]:
        with contextlib.suppress(ImportError):
            __import__(name)
    link.send(0, {"pid": os.getpid(), "python": sys.version.split()[0]}, [])
    while True:
        number, body, data = link.receive()
        if body["do"] == "run":
            reply, blobs = session.run(body["code"])
        elif body["do"] == "read":
            reply, blobs = _read(body["path"], config["file_bytes"])
        else:
            reply, blobs = _write(body["path"], data)
        link.send(number, reply, blobs)


if __name__ == "__main__":
    _given: Body = json.loads(sys.argv[1])
    _prepare(_given)
    _serve(_given)
