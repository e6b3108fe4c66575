"""The parts of a sandbox that face what an enemy wrote, without a process."""

import asyncio
import json
import os
import random
import re
import struct
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_agent.errors import ConfigError, ToolErrorKind, UnknownKeyError
from relax_agent.tools.sandbox import ExecutionError, ExecutionResult, Limits, Sandbox
from relax_agent.tools.sandbox.interpreter import Garbage, _header, _header_size
from relax_agent.tools.sandbox.output import Capture, shortened
from relax_agent.tools.sandbox.result import read_reply

PNG = b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


def capture(*chunks: bytes, limit: int = 100, flood: int = 1 << 30) -> tuple[str, list[str]]:
    """Write into a captured pipe during a call; return its text and whether it was a flood."""
    flooded: list[str] = []

    async def main() -> str:
        pipe = Capture(limit, flood)
        try:
            pipe.attach(lambda: flooded.append("flood"))
            for chunk in chunks:
                os.write(pipe.writer, chunk)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            return pipe.finish()
        finally:
            pipe.close()

    return asyncio.run(main()), flooded


def test_short_output_is_kept_as_it_is() -> None:
    assert capture(b"one\n", b"two \xc3", b"\xa9\n") == ("one\ntwo é\n", [])


def test_invalid_bytes_become_replacement_characters() -> None:
    assert capture(b"a\xff\xfeb")[0] == "a��b"


def test_of_long_output_the_ends_are_kept_and_the_rest_counted() -> None:
    text, _ = capture(*[b"x" * 1000] * 50, b"end", limit=100)
    assert text == "x" * 50 + "\n[… 49,903 bytes left out …]\n" + "x" * 47 + "end"


def test_memory_for_output_does_not_grow_with_it() -> None:
    pipe = Capture(100, 1 << 40)
    for _ in range(1000):
        pipe._keep(b"y" * 10_000)
    assert len(pipe._head) + len(pipe._tail) < 20_000
    pipe.close()


def test_a_flood_is_told_once() -> None:
    assert capture(*[b"x" * 4096] * 10, flood=10_000)[1] == ["flood"]


@given(st.text(max_size=300), st.integers(2, 100))
@settings(max_examples=50, deadline=None)
def test_a_shortened_text_begins_and_ends_like_the_text(text: str, limit: int) -> None:
    short = shortened(text, limit)
    if len(text) <= limit:
        assert short == text
    else:
        assert short.startswith(text[: limit // 2])
        assert short.endswith(text[-(limit // 2) :])


@pytest.mark.parametrize(
    "text",
    [b"", b"null", b"[]", b"{", b"\xff", b'{"id": 1}', b'{"id": "1", "body": {}, "blobs": []}',
     b'{"id": true, "body": {}, "blobs": []}', b'{"id": 1, "body": [], "blobs": []}',
     b'{"id": 1, "body": {}, "blobs": [-1]}', b'{"id": 1, "body": {}, "blobs": [1e3]}',
     b'{"id": 1, "body": {}, "blobs": [true]}', b'{"id": 1, "body": {}, "blobs": {"0": 1}}',
     b'{"id": 1, "body": {}, "blobs": [101]}', b'{"id": 1, "body": {}, "blobs": [60, 60]}',
     b"[" * 100_000, b"9" * 100_000, json.dumps({"id": 1, "body": {}, "blobs": [0] * 65}).encode()],
)  # fmt: skip
def test_whatever_is_no_header_is_garbage(text: bytes) -> None:
    with pytest.raises(Garbage):
        _header(text, 100)


def test_a_header_longer_than_the_limit_is_refused_before_it_is_read() -> None:
    assert _header_size(struct.pack(">I", 100), 100) == 100
    for size in (0, 101, 0xFFFFFFFF):
        with pytest.raises(Garbage):
            _header_size(struct.pack(">I", size), 100)


@given(st.dictionaries(st.sampled_from(["value", "error", "notes", "threads", "x"]), JSON))
@settings(max_examples=200, deadline=None)
def test_a_reply_of_any_shape_becomes_a_result(body: dict) -> None:
    value, error, notes, images = read_reply(body, [], 50)
    result = ExecutionResult(value=value, error=error, notes=notes, images=images)
    json.dumps(result.to_tool_result().to_json()).encode()
    assert len(result.text) < 10_000


def test_fields_of_a_reply_are_bounded_and_valid_unicode() -> None:
    body = {"value": "\ud800" * 1000, "notes": ["n" * 9999] * 99, "error": {"text": "e" * 9999}}
    value, error, notes, _ = read_reply(body, [], 100)
    assert value is not None
    value.encode()
    assert error is not None
    assert max(len(value), len(error.message)) < 200
    assert len(notes) == 8
    assert max(map(len, notes)) == 300


def test_only_png_pictures_of_a_sane_size_are_images() -> None:
    good = PNG + struct.pack(">II", 640, 480)
    bomb = PNG + struct.pack(">II", 100_000, 100_000)
    empty = PNG + struct.pack(">II", 0, 5)
    *_, images = read_reply({}, [good, bomb, empty, b"GIF89a" + bytes(99), b"", PNG], 100)
    assert [image.data for image in images] == [good]


def test_the_text_of_a_result_reads_like_a_terminal() -> None:
    error = ExecutionError(ToolErrorKind.CRASHED, "ValueError: no")
    result = ExecutionResult("out\n", "warning\n", "42", error=error, notes=("a note",))
    assert result.text == "out\nwarning\n42\nValueError: no\na note"
    assert result.to_tool_result().error is ToolErrorKind.CRASHED
    assert ExecutionResult().to_tool_result().text == "done (nothing was printed)"


@pytest.mark.parametrize(
    ("change", "said"),
    [({"timeout_s": 0}, "timeout_s must be positive"), ({"memory_mb": 1}, "memory_mb is 1"),
     ({"processes": -1}, "processes must be positive"), ({"disk_mb": "8"}, "disk_mb must be"),
     ({"open_files": 3}, "open_files is 3"), ({"timeout_s": True}, "timeout_s must be"),
     ({"cpu_s": float("nan")}, "cpu_s must be"), ({"cpu_s": float("inf")}, "cpu_s must be")],
)  # fmt: skip
def test_a_limit_that_makes_no_sense_is_refused(change: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Sandbox(untrusted=False, **change)


def test_an_unknown_limit_names_the_nearest_one() -> None:
    with pytest.raises(UnknownKeyError, match="did you mean 'memory_mb'"):
        Sandbox(untrusted=False, memory_gb=1)


def test_images_may_be_switched_off() -> None:
    Limits(images=0, image_mb=0).check()


def test_no_garbage_is_ever_read_as_a_header() -> None:
    rng = random.Random(0)
    for _ in range(500):
        data = rng.randbytes(rng.randrange(60))
        with pytest.raises(Garbage):
            _header(data, 100)


@pytest.mark.skipif(sys.platform != "linux", reason="the strong sandbox is Linux's")
def test_the_example_of_the_page_prints_what_it_says(capsys) -> None:
    page = (Path(__file__).parents[2] / "docs" / "sandbox.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(compile(code, "sandbox.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out == "hello\n 14\nZeroDivisionError\n"


def test_the_page_names_every_limit_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sandbox.md").read_text()
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \| ([\d, ]+) \|", page, re.M)
    told = {}
    for names, values in rows:
        numbers = [int(value.replace(" ", "")) for value in values.split(",")]
        told |= dict(zip(re.findall(r"`(\w+)`", names), numbers, strict=True))
    assert told == {each.name: getattr(Limits(), each.name) for each in fields(Limits)}
