"""The interpreter inside a sandbox: run as a script, it executes what comes over its socket.

It is trusted only until the first line of foreign code has run; nothing outside relies on it. It
makes a session pleasant: variables stay, the value of a last expression is shown, figures and
pictures come back as images, a traceback begins in the code that was given and ends there.

A frame is 4 bytes with the length of a JSON header, the header ``{"id", "body", "blobs": [sizes]}``,
and the blobs. Requests are ``{"do": "run", "code": …}``, ``{"do": "read", "path": …}`` and
``{"do": "write", "path": …}`` with one blob. Standard library only.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
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
_SHOWN_FRAMES = 12


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
        self.main = types.ModuleType("__main__")
        self.main.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = self.main

    def run(self, code: str) -> tuple[Body, list[bytes]]:
        """Execute code; say what it gave."""
        self._calls += 1
        name = f"<call {self._calls}>"
        body: Body = {}
        images: list[bytes] = []
        try:
            value = self._execute(code, name)
            if value is not None:
                self.main.__dict__["_"] = value
                picture = _picture(value)
                if picture is None:
                    body["value"] = self._shortened(repr(value))
                else:
                    images.append(picture)
            images += _figures()
        except BaseException as error:  # sys.exit and Ctrl-C of the code as well
            body["error"] = self._told(error, name)
            with contextlib.suppress(BaseException):
                images += _figures()
        _flush()
        body["threads"] = sum(t is not threading.current_thread() for t in threading.enumerate())
        return body | {"notes": self._fit(images)}, images

    def _execute(self, code: str, name: str) -> Any:
        lines = code.splitlines(keepends=True)
        linecache.cache[name] = (len(code), None, lines, name)
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        self._evaluate(compile(tree, name, "exec", _FLAGS))
        if last is None:
            return None
        return self._evaluate(compile(ast.Expression(last.value), name, "eval", _FLAGS))

    def _evaluate(self, code: types.CodeType) -> Any:
        if code.co_flags & inspect.CO_COROUTINE:
            return asyncio.run(types.FunctionType(code, self.main.__dict__)())
        return eval(code, self.main.__dict__)  # noqa: S307 - this is the place for it

    def _told(self, error: BaseException, name: str) -> Body:
        if isinstance(error, SystemExit):
            return {"type": "SystemExit", "text": f"SystemExit: {error.code}"}
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != name:
            trace = trace.tb_next  # the worker's own frames
        try:
            shown = traceback.TracebackException(
                type(error), error, trace, limit=-_SHOWN_FRAMES, compact=True
            )
            text = "".join(shown.format())
        except BaseException as second:
            text = f"{type(error).__name__} (which cannot be shown: {type(second).__name__})"
        return {"type": type(error).__name__, "text": self._shortened(text.rstrip())}

    def _shortened(self, text: str) -> str:
        limit = self._config["output_chars"]
        if len(text) <= limit:
            return text
        left = len(text) - limit
        return f"{text[: limit // 2]}\n[… {left:,} characters left out …]\n{text[-limit // 2 :]}"

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


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(BaseException):
            stream.flush()  # type: ignore[union-attr]


def _read(path: str, most: int) -> tuple[Body, list[bytes]]:
    """Return a regular file's bytes. A pipe does not hang it, a link leads nowhere else."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:  # noqa: PTH123
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return {"problem": "not a regular file"}, []
            data = file.read(most + 1)
    except OSError as error:
        return {"problem": error.strerror or str(error)}, []
    if len(data) > most:
        return {"problem": f"larger than {most:,} bytes", "too_large": True}, []
    return {}, [data]


def _write(path: str, data: bytes) -> tuple[Body, list[bytes]]:
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)  # noqa: PTH103, PTH120
        with open(path, "wb") as file:  # noqa: PTH123
            file.write(data)
    except OSError as error:
        return {"problem": error.strerror or str(error)}, []
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
                resource.setrlimit(kind, (value, value))
    for folder in config["folders"]:
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103
    os.chdir(config["home"])
    sys.argv = [""]
    sys.path[:] = ["", *(p for p in sys.path if not p.endswith("site-packages")), *config["path"]]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(  # type: ignore[union-attr]
            encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
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
