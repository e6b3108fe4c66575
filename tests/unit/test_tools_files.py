"""A session's folder: nothing leads out of it, its size is bounded, and nothing of it is left."""

import asyncio
import os
import stat
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_agent.errors import ConfigError, ToolError, ToolErrorKind
from relax_agent.messages import ToolCall
from relax_agent.tools import Toolset
from relax_agent.tools.files import FileLimits, FileTools
from relax_agent.tools.temporary import delete_folder, new_folder

NAMES = ("read_file", "write_file", "list_files", "search_files", "delete_file")


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """A place for temporary folders of this test alone."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


@pytest.fixture
def files():
    with FileTools({"notes/owl.md": "# Owl\nAn owl hunts.\n", "hen.txt": "A hen\n"}) as found:
        yield found


def call(files, name, **arguments):
    return asyncio.run(files.toolset().call(ToolCall(name, arguments, "c")))


def test_what_is_written_can_be_read_listed_found_and_deleted(files):
    assert files.toolset().names == NAMES
    assert (
        call(files, "write_file", path="a/b.txt", text="one\n").text == "a/b.txt has 4 bytes now."
    )
    assert call(files, "write_file", path="./a//b.txt", text="two", append=True).ok
    assert call(files, "read_file", path="a/b.txt").text == "one\ntwo"
    assert call(files, "list_files").text.splitlines() == [
        "a/", "a/b.txt (7 bytes)", "hen.txt (6 bytes)", "notes/", "notes/owl.md (20 bytes)",
    ]  # fmt: skip
    assert call(files, "list_files", folder="notes/").text == "notes/owl.md (20 bytes)"
    assert call(files, "search_files", text="OWL").text.splitlines() == [
        "notes/owl.md:1: # Owl", "notes/owl.md:2: An owl hunts.",
    ]  # fmt: skip
    assert call(files, "search_files", text="OWL", ignore_case=False).text == "Nothing was found."
    assert call(files, "search_files", text="A", folder="notes").text.count("\n") == 0
    assert "with files" in call(files, "delete_file", path="a").text
    assert call(files, "delete_file", path="a/b.txt").ok and call(files, "delete_file", path="a").ok
    assert "a/" not in call(files, "list_files").text
    assert (files.folder / "hen.txt").read_text() == "A hen\n"


def test_a_file_is_replaced_or_made_longer():
    with FileTools() as files:
        assert call(files, "list_files").text == "(the folder is empty)"
        for text, append, whole in (("a", True, "a"), ("b", True, "ab"), ("c", False, "c")):
            call(files, "write_file", path="x", text=text, append=append)
            assert call(files, "read_file", path="x").text == whole
        call(files, "write_file", path="x", text="")
        assert call(files, "read_file", path="x").text == "(x is empty)"


def test_long_files_are_read_in_pieces():
    text = "".join(f"line {n}\n" for n in range(1, 101))
    with FileTools({"x": text, "wide": "w" * 99}, limits=FileLimits(max_shown_chars=50)) as files:
        first = call(files, "read_file", path="x").text
        assert first.startswith("line 1\n") and first.endswith(
            "(lines 1 to 8 of 100; the last one is cut off)"
        )
        piece = call(files, "read_file", path="x", first_line=99, lines=5).text
        assert piece == "line 99\nline 100\n\n(lines 99 to 100 of 100)"
        assert (
            "has 100 lines; there is no line 101"
            in call(files, "read_file", path="x", first_line=101).text
        )
        assert "cut off" in call(files, "read_file", path="wide").text
        for wrong in ({"first_line": 0}, {"lines": 0}, {"lines": -1}, {"first_line": 10**30}):
            assert not call(files, "read_file", path="x", **wrong).ok


OUT = ["..", "../x", "a/../../x", "/etc/passwd", "~/x", "/", "a/..", "./../x", "notes/../.."]
NO_PATHS = [
    "",
    "a\0b",
    "a\\b",
    "x" * 513,
    "x" * 201,
    "é" * 101,
    "a/" * 13 + "b",
    ".part-1",
    "\ud800",
]


@pytest.mark.parametrize("path", OUT + NO_PATHS)
def test_no_path_leads_out(files, path):
    outside = files.folder.parent / "x"
    outside.write_text("secret")
    for name, more in (("read_file", {}), ("write_file", {"text": "t"}), ("delete_file", {})):
        result = call(files, name, path=path, **more)
        assert result.error in (ToolErrorKind.DENIED, ToolErrorKind.INVALID_ARGUMENTS)
        assert "secret" not in result.text and len(result.text) < 300
    if path not in ("", "/"):
        assert not call(files, "list_files", folder=path).ok
        assert not call(files, "search_files", text="secret", folder=path).ok
    assert outside.read_text() == "secret"


def test_links_are_never_followed(files, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("treasure")
    (files.folder / "link.txt").symlink_to(secret)
    (files.folder / "out").symlink_to(tmp_path)
    (files.folder / "loop").symlink_to(files.folder)
    (files.folder / "hard.txt").hardlink_to(secret)
    for path in ("link.txt", "out/secret.txt", "loop/hen.txt", "hard.txt"):
        result = call(files, "read_file", path=path)
        assert result.error is ToolErrorKind.DENIED and "treasure" not in result.text
        if "/" in path:
            assert not call(files, "write_file", path=path, text="x").ok
            assert not call(files, "delete_file", path=path).ok
    assert call(files, "search_files", text="treasure").text == "Nothing was found."
    assert "link" not in call(files, "list_files").text
    assert call(files, "write_file", path="link.txt", text="mine").ok  # in the place of the link
    assert call(files, "delete_file", path="out").ok
    assert secret.read_text() == "treasure"


def test_special_files_are_neither_read_nor_waited_for(files):
    os.mkfifo(files.folder / "pipe")
    os.mknod(files.folder / "sock", 0o600 | stat.S_IFSOCK)
    for path in ("pipe", "sock"):
        assert call(files, "read_file", path=path).error is ToolErrorKind.DENIED
    assert "pipe" not in call(files, "list_files").text
    assert call(files, "search_files", text="hen").ok


def test_what_is_not_there_or_of_another_kind_is_told_with_advice(files):
    missing = call(files, "read_file", path="notes/owls.md")
    assert (
        missing.error is ToolErrorKind.NOT_FOUND and "did you mean 'notes/owl.md'" in missing.text
    )
    assert "list_files" in call(files, "delete_file", path="zzz").text
    assert "is a folder" in call(files, "read_file", path="notes").text
    assert "is a folder" in call(files, "write_file", path="notes", text="x").text
    assert "not a folder" in call(files, "write_file", path="hen.txt/x", text="x").text
    assert not call(files, "list_files", folder="hen.txt").ok
    (files.folder / "bin").write_bytes(b"\0\1owl")
    assert "no text file" in call(files, "read_file", path="bin").text
    for text in ("", "  ", "x" * 1001):
        assert not call(files, "search_files", text=text).ok


def test_sizes_are_limited_and_a_refused_write_changes_nothing():
    limits = FileLimits(max_file_bytes=10, max_total_bytes=25, max_entries=3)
    with FileTools({"a": "0123456789"}, limits=limits) as files:
        for arguments in (
            {"path": "b", "text": "x" * 11},
            {"path": "a", "text": "x", "append": True},
            {"path": "d/e/f", "text": "x"},
        ):
            result = call(files, "write_file", **arguments)
            assert result.error is ToolErrorKind.TOO_LARGE
        assert [path.name for path in files.folder.rglob("*")] == ["a"]
        assert call(files, "write_file", path="b", text="x" * 10).ok
        assert "delete some" in call(files, "write_file", path="c", text="x" * 6).text
        assert call(files, "write_file", path="c", text="x" * 5).ok
        assert not call(files, "write_file", path="d", text="").ok
        (files.folder / "a").write_bytes(b"x" * 11)  # by somebody else
        assert call(files, "read_file", path="a").error is ToolErrorKind.TOO_LARGE
        assert call(files, "write_file", path="a", text="small").ok
    with pytest.raises(ConfigError, match="max_depth"):
        FileLimits(max_depth=0)


def test_results_are_limited_too():
    many = {f"file-{n:03d}.txt": "owl\n" * 3 for n in range(100)}
    with FileTools(many, limits=FileLimits(max_shown_chars=400, max_matches=5)) as files:
        listed = call(files, "list_files").text
        assert len(listed) < 450 and listed.endswith("more are not shown)")
        found = call(files, "search_files", text="owl").text.splitlines()
        assert len(found) == 6 and found[-1] == "(5 lines are shown, there are more)"


def test_a_folder_is_deleted_whatever_is_in_it(temporary):
    files = FileTools({"a/b/c": "x"})
    files.open()
    folder = files.folder
    assert folder.stat().st_mode & 0o777 == 0o700
    files.open()
    assert files.folder == folder
    (folder / "a" / "b").chmod(0)
    (folder / "a").chmod(0o500)
    (folder / "loop").symlink_to(folder)
    files.close()
    files.close()
    assert list(temporary.iterdir()) == []
    with pytest.raises(ToolError, match="closed"):
        files.folder  # noqa: B018
    assert call(files, "list_files").error is ToolErrorKind.UNAVAILABLE


def test_a_first_file_that_cannot_be_is_refused_and_nothing_is_left(temporary):
    for first in ({"../x": ""}, {"x": "y" * (2 << 20)}):
        with pytest.raises(ToolError):
            FileTools(first).open()
    assert list(temporary.iterdir()) == []


def test_each_session_has_a_folder_of_its_own_and_it_goes_with_it(temporary):
    toolset = Toolset([partial(FileTools, {"a": "first"})])

    async def main():
        async with toolset.session() as one, toolset.session() as other:
            write = ToolCall("write_file", {"path": "a", "text": "mine"}, "c")
            read = ToolCall("read_file", {"path": "a"}, "c")
            assert (await one.call(write)).ok
            assert (await one.call(read)).text == "mine"
            assert (await other.call(read)).text == "first"
            assert len(list(temporary.iterdir())) == 2
        assert list(temporary.iterdir()) == []

    asyncio.run(main())


def test_what_a_killed_process_left_is_deleted_by_the_next(temporary):
    script = (
        "import tempfile, os; tempfile.tempdir = os.sys.argv[1]\n"
        "from relax_agent.tools.temporary import new_folder\n"
        "new_folder('files'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script, str(temporary)], check=False)
    (left,) = temporary.iterdir()
    living = new_folder("files")
    assert not left.exists() and living.exists()
    again = new_folder("files")
    assert living.exists()
    delete_folder(living)
    delete_folder(again)
    delete_folder(again)


paths = st.one_of(
    st.text(max_size=30),
    st.lists(st.sampled_from(["a", "..", ".", "", "~", "link", "hen.txt", "\\", "\0"]), max_size=6)
    .map("/".join),
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(paths, st.text(max_size=5))
def test_any_path_stays_inside(path, text):
    with FileTools({"hen.txt": "x"}) as files:
        (files.folder / "link").symlink_to("..")
        around = {each.name for each in files.folder.parent.iterdir()}
        for name, more in (("write_file", {"text": text}), ("read_file", {}), ("delete_file", {})):
            result = call(files, name, path=path, **more)
            assert result.error is not ToolErrorKind.CRASHED, result.text
        assert call(files, "list_files", folder=path).error is not ToolErrorKind.CRASHED
        assert {each.name for each in files.folder.parent.iterdir()} == around
        assert Path(files.folder).is_dir()
