"""A child that answers requests: whatever it does, its parent hears of it and nothing is left."""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from relax_agent.errors import ChildDied, ConfigError, EnvError, RelaxError, ToolError
from relax_agent.frames import FrameError, Frames, error_from_json, error_to_json, pack
from relax_agent.link_server import serve_link
from relax_agent.links import LinkedProcess

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
LIMIT_S = 30.0

WORKER = """
import asyncio, os, subprocess, sys, time
from relax_agent.errors import ToolError, ToolErrorKind
from relax_agent.links import serve_link

async def handle(header, blobs):
    match header["do"]:
        case "echo":
            return header, blobs
        case "sleep":
            await asyncio.sleep(header["s"])
            return {"slept": header["s"]}, []
        case "hang":
            time.sleep(1e6)
        case "exit":
            print("nothing left to do")
            os._exit(header["code"])
        case "flood":
            for _ in range(1000):
                print("x" * 10_000)
            return {}, []
        case "garbage":
            os.write(LINK, b"\\xff\\xff\\xff\\xffwhat")
            await asyncio.sleep(1e6)
        case "family":  # one in the group, one in a session of its own
            one = subprocess.Popen(["sleep", "1000"])
            two = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            return {"pids": [one.pid, two.pid]}, []
        case "hold and die":  # a copy of the socket lives on in another process
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(9)
        case "value":
            raise ValueError("of\\nno use")
        case "tool":
            raise ToolError("not today", kind=ToolErrorKind.DENIED, hint="come tomorrow")
        case "set":
            return {"a": {1, 2}}, []
        case "quit":
            sys.exit(5)

def setup():
    match sys.argv[1:]:
        case ["never"]:
            print("booting")
            time.sleep(1e6)
        case ["die"]:
            print("no disk")
            os._exit(4)
        case ["raise"]:
            raise ToolError("no key", hint="export KEY")
    return {"pid": os.getpid()}

def teardown():
    print("orderly end", flush=True)

LINK = int(os.environ["RELAX_AGENT_LINK"])
serve_link(handle, setup=setup, teardown=teardown)
"""


@pytest.fixture
def worker(tmp_path):
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return lambda *words: [sys.executable, str(path), *words]


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "X"  # a zombie counts


def all_gone(*pids: int) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(LIMIT_S):
            return await coroutine

    return asyncio.run(bounded())


def test_a_link_is_made_without_a_loop_and_used_by_one_loop_after_the_other(worker):
    link = LinkedProcess.start("worker", worker())
    assert link.hello == {"pid": link.pid}
    blobs = [b"a" * 3_000_000, b"", b"\0\xff"]
    for text in ("one", "ü \ud800"):
        assert run(link.request({"do": "echo", "x": text}, blobs)) == (
            {"do": "echo", "x": text},
            blobs,
        )
    run(link.close())
    assert link.exit_code == 0
    assert link.tail() == ["orderly end"]
    run(link.close())
    with pytest.raises(RelaxError, match="was closed"):
        run(link.request({}))


def test_requests_run_at_the_same_time_and_errors_arrive_as_themselves(worker):
    async def go():
        async with await LinkedProcess.start_async("worker", worker(), failure=EnvError) as link:
            slow = asyncio.create_task(link.request({"do": "sleep", "s": 1000}))
            big = link.request({"do": "echo"}, [bytes(5_000_000)])
            assert len((await asyncio.gather(big, big_again(link)))[0][1][0]) == 5_000_000
            assert not slow.done()  # it was asked first, and holds nobody up
            with pytest.raises(EnvError, match=r"^ValueError: of no use$"):
                await link.request({"do": "value"})
            with pytest.raises(ToolError) as told:
                await link.request({"do": "tool"})
            assert (told.value.kind, told.value.hint) == ("denied", "come tomorrow")
            with pytest.raises(EnvError, match="not JSON"):
                await link.request({"do": "set"})
            with pytest.raises(EnvError, match="cannot be sent"):
                await link.request({"do": {1}})
            with pytest.raises(EnvError, match="SystemExit: 5"):
                await link.request({"do": "quit"})
        with pytest.raises(EnvError, match="was closed"):
            await slow

    async def big_again(link):
        return await link.request({"do": "echo"}, [bytes(4_000_000)])

    run(go())


def test_start_up_has_a_time_limit_and_a_child_that_fails_meanwhile_says_why(worker):
    """T152: a boot that never returns fails at the limit."""
    threads = threading.active_count()
    with pytest.raises(EnvError, match=r"not ready within 0\.5 s.*booting"):
        LinkedProcess.start("w", worker("never"), start_timeout_s=0.5, failure=EnvError)
    with pytest.raises(ChildDied, match=r"exit code 4.*no disk"):
        LinkedProcess.start("w", worker("die"))
    with pytest.raises(ConfigError, match="cannot start /no/such"):
        LinkedProcess.start("w", ["/no/such"])

    async def go():
        with pytest.raises(EnvError, match=r"not ready within 0\.5 s"):
            await LinkedProcess.start_async(
                "w", worker("never"), start_timeout_s=0.5, failure=EnvError
            )
        with pytest.raises(ToolError, match="no key → export KEY"):
            await LinkedProcess.start_async("w", worker("raise"))

    run(go())
    deadline = time.monotonic() + LIMIT_S
    while threading.active_count() > threads + 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() <= threads + 2  # those of relax_agent.threads stay


@pytest.mark.parametrize("how", ["exit", "hold and die", "kill -9"])
def test_a_death_is_noticed_within_a_second_with_exit_code_and_last_line(worker, how):
    """T158: also while another process holds a copy of the child's socket."""

    async def go():
        link = LinkedProcess.start("worker", worker())
        others = [asyncio.create_task(link.request({"do": "sleep", "s": 1000})) for _ in range(3)]
        await asyncio.sleep(0)
        started = time.monotonic()
        if how == "kill -9":
            os.kill(link.pid, signal.SIGKILL)
        else:
            others.append(asyncio.create_task(link.request({"do": how, "code": 7})))
        told = await asyncio.gather(*others, return_exceptions=True)
        assert time.monotonic() - started < 5  # a second, on a machine with nothing else to do
        assert {type(error) for error in told} == {ChildDied}
        assert told[0].child_exit_code == {"exit": 7, "hold and die": 9, "kill -9": -9}[how]
        assert ("nothing left to do" in str(told[0])) == (how == "exit")
        with pytest.raises(ChildDied):  # and asking again says the same
            await link.request({"do": "echo"})
        assert not link.alive
        await link.close()
        return link.pid

    assert all_gone(run(go()))


def test_cancelling_a_request_kills_the_child_with_all_that_it_started(worker):
    async def go():
        link = LinkedProcess.start("worker", worker())
        family = (await link.request({"do": "family"}))[0]["pids"]
        hanging = asyncio.create_task(link.request({"do": "hang"}))
        other = asyncio.create_task(link.request({"do": "echo"}))
        await asyncio.sleep(0.05)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        with pytest.raises(RelaxError, match="a call was cancelled"):
            await other
        await link.close()
        assert link.exit_code == -signal.SIGKILL
        return [link.pid, *family]

    assert all_gone(*run(go()))


def test_a_request_past_its_time_limit_kills_the_child(worker):
    link = LinkedProcess.start("worker", worker(), failure=EnvError)
    with pytest.raises(EnvError, match=r"did not answer within 0\.2 s, and was killed"):
        run(link.request({"do": "hang"}, timeout_s=0.2))
    assert all_gone(link.pid)  # nobody waits for it, and yet no zombie stays
    with pytest.raises(EnvError, match=r"is gone: it did not answer within 0\.2 s"):
        run(link.request({"do": "echo"}))


def test_output_is_bounded_and_garbage_ends_the_child(worker):
    async def go():
        link = LinkedProcess.start("worker", worker())
        await link.request({"do": "flood"})
        assert all(set(line) == {"x"} for line in link.tail())
        assert len(link._child._output) <= 1 << 18
        with pytest.raises(RelaxError, match="what is no frame"):
            await link.request({"do": "garbage"})
        await link.close()

    run(go())


def test_a_forgotten_link_takes_its_child_with_it(worker):
    """T155: nothing waits in a finaliser."""
    link = LinkedProcess.start("worker", worker())
    run(link.request({"do": "echo"}))
    pid = link.pid
    del link
    gc.collect()
    assert all_gone(pid)


def test_a_child_that_keeps_running_after_it_closed_its_link_is_ended():
    code = "import os,time; os.close(int(os.environ['RELAX_AGENT_LINK'])); time.sleep(1000)"
    with pytest.raises(RelaxError, match="closed its link"):
        LinkedProcess.start("mute", [sys.executable, "-c", code])


def test_the_number_of_the_socket_can_travel_in_the_arguments(tmp_path):
    """For a sandbox program that clears the environment."""
    path = tmp_path / "worker.py"
    path.write_text(
        "import sys\nfrom relax_agent.links import serve_link\n"
        "async def handle(header, blobs): return header, blobs\n"
        "serve_link(handle, fd=int(sys.argv[1]))"
    )
    link = LinkedProcess.start(
        "worker", ["env", "-u", "RELAX_AGENT_LINK", sys.executable, str(path), "{link_fd}"]
    )
    assert run(link.request({"a": 1})) == ({"a": 1}, [])
    run(link.close())


def test_kill_minus_nine_of_the_parent_leaves_nothing(worker, tmp_path):
    code = textwrap.dedent(
        f"""
        import asyncio, os
        from relax_agent.links import LinkedProcess
        link = LinkedProcess.start("worker", {worker()!r})
        async def main():
            pids = (await link.request({{"do": "family"}}))[0]["pids"]
            print(link.pid, *pids, flush=True)
            await link.request({{"do": "hang"}})
        asyncio.run(main())
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 3
    parent.kill()
    parent.communicate()
    assert all_gone(*pids)


def test_starting_and_ending_many_children_leaves_no_descriptor_behind(worker):
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def go():
        async with await LinkedProcess.start_async("w", worker()) as link:
            await link.request({"do": "echo"})
        link = LinkedProcess.start("w", worker())
        with contextlib.suppress(ChildDied):
            await link.request({"do": "exit", "code": 1})

    run(go())
    gc.collect()
    before = descriptors()
    for _ in range(4):
        run(go())
    gc.collect()
    deadline = time.monotonic() + LIMIT_S
    while descriptors() > before and time.monotonic() < deadline:  # the guardian may just be ending
        time.sleep(0.02)
    assert descriptors() <= before


def test_a_program_that_nobody_linked_says_so():
    with pytest.raises(ConfigError, match="there is no link"):
        serve_link(None)


def frames(data: bytes, size: int) -> list:
    reader = Frames()
    pieces = (data[i : i + size] for i in range(0, len(data), size))
    return [frame for piece in pieces for frame in reader.feed(piece)]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_frames_are_found_however_the_stream_is_cut(size):
    one = pack({"id": 1, "body": {"a": [1, None]}}, [b"abc", b"", b"\xff" * 20])
    two = pack({"id": 2})
    assert frames(one + two + one, size) == [
        ({"id": 1, "body": {"a": [1, None]}}, [b"abc", b"", b"\xff" * 20]),
        ({"id": 2}, []),
        ({"id": 1, "body": {"a": [1, None]}}, [b"abc", b"", b"\xff" * 20]),
    ]


def framed(header: bytes) -> bytes:
    return struct.pack(">I", len(header)) + header


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        b"\0\0\0\0",
        framed(b"{"),
        framed(b"[]"),
        framed(b'{"id": "a", "blobs": []}'),
        framed(b'{"id": 1}'),
        framed(b'{"id": 1, "blobs": [-1]}'),
        framed(b'{"id": 1, "blobs": [1.5]}'),
        framed(b'{"id": 1, "blobs": [true]}'),
        framed(b'{"id": 1, "blobs": [9999999999999]}'),
        framed(b"\xff\xfe"),
        framed(b"[" * 100_000),
    ],
)
def test_what_is_no_frame_is_refused(data):
    with pytest.raises(FrameError):
        frames(data, 1000)


def test_errors_travel_as_data():
    for error in (EnvError("a", hint="b"), ChildDied("c", -9), ToolError("d")):
        back = error_from_json(error_to_json(error))
        assert (type(back), str(back)) == (type(error), str(error))
    assert type(error_from_json({"type": "KeyError", "message": "x"}, EnvError)) is EnvError
    junks = ({"type": "signal", "message": {}, "hint": 3}, {"type": [1]}, None, [], {})
    for junk in (*junks, {"type": "ToolError", "kind": []}, {"type": "ToolError", "kind": "x"}):
        assert isinstance(error_from_json(junk), RelaxError)


def in_a_fork(body):
    """Run a function in a fork of this process; return what it returned, as a text."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            told = str(body())
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writer, told.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader) as file:
        return file.read()


def test_a_fork_neither_uses_nor_ends_its_parents_children(worker):
    """Two processes on one socket would take each other's replies."""
    link = LinkedProcess.start("worker", worker())
    run(link.request({"do": "echo"}))

    def in_fork():
        told = [link.alive]
        for call in (link.request({"do": "echo"}), link.close()):
            try:
                run(call)
            except RelaxError as error:
                told.append(error.message)
        link.kill()
        own = LinkedProcess.start("worker", worker())
        told.append(run(own.request({"do": "echo"}))[0])
        run(own.close())
        return told

    gone = "worker is gone: it belongs to the process that this one was forked from"
    assert in_a_fork(in_fork) == str([False, gone, {"do": "echo"}])
    assert run(link.request({"do": "echo"})) == ({"do": "echo"}, [])
    run(link.close())


def test_a_fork_that_lives_on_does_not_keep_its_dead_parents_children(worker):
    code = f"""
import os, sys, time
from relax_agent.links import LinkedProcess
link = LinkedProcess.start("worker", {worker()!r})
fork = os.fork()
if fork == 0:
    time.sleep(1000)
print(link.pid, fork, flush=True)
os.kill(os.getpid(), 9)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child, fork = map(int, process.stdout.readline().split())
    try:
        assert all_gone(child)
    finally:
        os.kill(fork, signal.SIGKILL)
        process.communicate()


def test_a_socket_pair_speaks_for_itself():
    """The frames are the whole protocol: another language can be the child."""
    ours, theirs = socket.socketpair()
    ours.sendall(pack({"id": 5, "body": {"do": "x"}}, [b"12"]))
    raw = theirs.recv(1000)
    (size,) = struct.unpack(">I", raw[:4])
    assert raw[4 : 4 + size] == b'{"id":5,"body":{"do":"x"},"blobs":[2]}'
    assert raw[4 + size :] == b"12"
    ours.close()
    theirs.close()
