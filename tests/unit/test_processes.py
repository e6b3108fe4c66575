"""No child outlives its parent, and no death goes unnoticed. Real processes throughout."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from relax_agent import processes
from relax_agent.errors import ChildDied, ConfigError, RelaxError, RunFailed, StorageError
from relax_agent.processes import ChildProcess, supervise

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
LIMIT_S = 30.0


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def ends_in_time(pids) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


async def numbers(child: ChildProcess, count: int) -> list[int]:
    """The process ids that a child wrote to its log, once they are all there."""
    async with asyncio.timeout(LIMIT_S):
        while len(child.tail(count)) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return [int(line) for line in child.tail(count)]


def shell(script: str) -> list[str]:
    return ["bash", "-c", script]


SLEEPER = shell("echo $$; exec sleep 600")
STUBBORN_FAMILY = shell(
    "trap '' TERM; sh -c 'trap \"\" TERM; echo $$; sleep 600' & setsid sh -c 'echo $$; sleep 600' "
    "& echo $$; while :; do sleep 600; done"
)
"""Ignores SIGTERM, with a child in its group that does so too and one in another session."""


@pytest.fixture(autouse=True)
def own_guardian(monkeypatch):
    """Other tests of this process may have children, and so a guardian, that outlive a test."""
    monkeypatch.setattr(processes, "_GUARDIAN", processes._GuardianLink())


def guardian_is_off() -> bool:
    return processes._GUARDIAN._process is None


def test_a_child_gets_arguments_variables_folder_and_inherited_descriptors(tmp_path):
    async def go():
        ours, theirs = socket.socketpair()
        child = await ChildProcess.start(
            "worker",
            shell(f'echo "$0 $WORD $(pwd)"; echo hello >&{theirs.fileno()}'),
            log=tmp_path / "logs" / "worker.log",
            env={"WORD": "two words"},
            cwd=tmp_path,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        assert await child.wait() == 0
        assert ours.recv(100) == b"hello\n"
        assert child.tail() == [f"bash two words {tmp_path}"]
        assert await child.terminate() == 0
        ours.close()

    asyncio.run(go())


def test_a_child_leads_its_own_session_so_that_ctrl_c_reaches_only_the_parent(tmp_path):
    async def go():
        child = await ChildProcess.start("sleeper", SLEEPER, log=tmp_path / "log")
        try:
            assert os.getsid(child.pid) == os.getpgid(child.pid) == child.pid
        finally:
            await child.terminate()

    asyncio.run(go())


def test_terminate_ends_a_well_behaved_child_with_sigterm(tmp_path):
    async def go():
        child = await ChildProcess.start("sleeper", SLEEPER, log=tmp_path / "log")
        await numbers(child, 1)
        assert await child.terminate(grace_s=LIMIT_S) == -signal.SIGTERM
        assert child.exit_code == -signal.SIGTERM

    asyncio.run(go())


def test_terminate_lets_a_child_finish_within_the_grace(tmp_path):
    async def go():
        script = "trap 'echo saved; exit 3' TERM; echo 1; while :; do sleep 0.05; done"
        child = await ChildProcess.start("saver", shell(script), log=tmp_path / "log")
        await numbers(child, 1)
        assert await child.terminate(grace_s=LIMIT_S) == 3
        assert child.tail(1) == ["saved"]

    asyncio.run(go())


def test_terminate_ends_the_whole_family_although_it_ignores_sigterm(tmp_path):
    async def go():
        child = await ChildProcess.start("family", STUBBORN_FAMILY, log=tmp_path / "log")
        pids = await numbers(child, 3)
        assert child.pid in pids
        assert await child.terminate(grace_s=0.1) == -signal.SIGKILL
        assert not any(alive(pid) for pid in pids)
        assert guardian_is_off()

    asyncio.run(go())


def test_terminate_after_death_ends_what_the_child_left_behind(tmp_path):
    async def go():
        script = "setsid sh -c 'echo $$; exec sleep 600' & sleep 600 & echo $!; exit 4"
        child = await ChildProcess.start("parent", shell(script), log=tmp_path / "log")
        assert await child.wait() == 4
        pids = await numbers(child, 2)
        assert all(alive(pid) for pid in pids)
        assert await child.terminate() == 4
        assert not any(alive(pid) for pid in pids)

    asyncio.run(go())


def test_terminate_may_be_called_often_and_at_the_same_time(tmp_path):
    async def go():
        child = await ChildProcess.start("sleeper", SLEEPER, log=tmp_path / "log")
        codes = await asyncio.gather(*(child.terminate() for _ in range(3)))
        assert set(codes) == {-signal.SIGTERM} == {await child.terminate()}

    asyncio.run(go())


def test_cancelling_terminate_kills_at_once(tmp_path):
    async def go():
        child = await ChildProcess.start("family", STUBBORN_FAMILY, log=tmp_path / "log")
        pids = await numbers(child, 3)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await child.terminate(grace_s=600)
        assert await child.wait() == -signal.SIGKILL
        assert ends_in_time(pids)
        await child.terminate()

    asyncio.run(go())


def test_a_program_that_does_not_exist_is_a_config_error_that_names_it(tmp_path):
    async def go():
        with pytest.raises(ConfigError, match=r"engine: cannot start /no/such/python"):
            await ChildProcess.start("engine", ["/no/such/python"], log=tmp_path / "log")
        assert guardian_is_off()

    asyncio.run(go())


def test_a_log_that_cannot_be_written_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write the log"):
        asyncio.run(ChildProcess.start("x", SLEEPER, log=tmp_path / "file" / "x.log"))


def test_the_tail_of_a_long_log_is_read_without_the_rest(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"x" * 200_000 + b"\nlast \xff but one\n\nlast\n")
    child = ChildProcess("x", log, "token", None)
    assert child.tail(2) == ["last � but one", "last"]
    assert ChildProcess("x", tmp_path / "none", "token", None).tail() == []


def test_a_child_that_dies_cancels_the_body_and_names_itself_its_code_and_its_last_line(tmp_path):
    async def go():
        reached = False
        with pytest.raises(ChildDied) as caught:
            async with supervise(tmp_path) as children:
                sleeper = await children.start("sleeper", SLEEPER)
                await children.start("engine-0", shell("echo loading; echo no memory >&2; exit 7"))
                await asyncio.sleep(600)
                reached = True
        assert not reached
        assert not alive(sleeper.pid)
        return caught.value

    error = asyncio.run(go())
    assert (error.name, error.child_exit_code) == ("engine-0", 7)
    assert "no memory" in str(error) and str(tmp_path / "engine-0.log") in str(error)


def test_a_child_that_is_killed_is_noticed_with_its_signal(tmp_path):
    """T158: `kill -9` of a worker gives an error with the exit code, not a wait for ever."""

    async def go():
        async with supervise(tmp_path) as children:
            child = await children.start("worker", SLEEPER)
            os.kill(child.pid, signal.SIGKILL)
            await asyncio.sleep(600)

    with pytest.raises(ChildDied, match="worker ended by itself with exit code -9"):
        asyncio.run(go())


def test_a_death_that_made_the_body_fail_is_reported_with_the_bodys_error_as_its_cause(tmp_path):
    async def go():
        async with supervise(tmp_path) as children:
            ours, theirs = socket.socketpair()
            script = f"exec {theirs.fileno()}>&-; sleep 0.1; exit 9"
            await children.start("trainer", shell(script), pass_fds=[theirs.fileno()])
            theirs.close()
            ours.setblocking(False)
            assert await asyncio.get_running_loop().sock_recv(ours, 1) == b""
            ours.close()
            raise RelaxError("connection lost")

    with pytest.raises(ChildDied, match="trainer ended") as caught:
        asyncio.run(go())
    assert isinstance(caught.value.__cause__, RelaxError)


def test_an_error_of_the_body_ends_the_children_and_comes_out_as_it_is(tmp_path):
    pids = []

    async def go():
        async with supervise(tmp_path, grace_s=0.1) as children:
            pids.extend(await numbers(await children.start("family", STUBBORN_FAMILY), 3))
            raise RunFailed("enough") from KeyError("why")

    with pytest.raises(RunFailed, match="enough") as caught:
        asyncio.run(go())
    assert isinstance(caught.value.__cause__, KeyError)
    assert not any(alive(pid) for pid in pids)
    assert guardian_is_off()


def test_a_cancelled_body_ends_the_children(tmp_path):
    pids = []

    async def go():
        async with supervise(tmp_path) as children:
            pids.append((await children.start("sleeper", SLEEPER)).pid)
            await asyncio.sleep(600)

    async def cancel():
        task = asyncio.create_task(go())
        while not pids:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert not alive(pids[0])


def test_stopped_and_expected_ends_are_no_faults(tmp_path):
    async def go():
        async with supervise(tmp_path) as children:
            stopped = await children.start("stopped", SLEEPER)
            assert await children.stop(stopped) == -signal.SIGTERM
            told = await children.start("told", shell("read line < $FIFO"), env={"FIFO": FIFO})
            children.expect_exit(told)
            Path(FIFO).write_text("close\n")
            assert await told.wait() == 0
            again = await children.start("stopped", SLEEPER)
            assert children.children == (told, again)
            with pytest.raises(ConfigError, match="already a child named stopped"):
                await children.start("stopped", SLEEPER)

    FIFO = str(tmp_path / "fifo")
    os.mkfifo(FIFO)
    asyncio.run(go())


PARENT = """
import asyncio, os, sys
from pathlib import Path
from relax_agent.processes import supervise

async def go():
    async with supervise(Path(sys.argv[1]), grace_s=0.2) as children:
        await children.start("family", ["sh", "-c", sys.argv[2]])
        await asyncio.sleep(600)

asyncio.run(go())
"""


def start_parent(folder: Path) -> tuple[subprocess.Popen, list[int]]:
    script = folder / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    parent = subprocess.Popen(
        [sys.executable, str(script), str(folder), STUBBORN_FAMILY[2]],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    log, deadline = folder / "family.log", time.monotonic() + LIMIT_S
    while not log.exists() or len(log.read_text().split()) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return parent, [int(line) for line in log.read_text().split()]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_whatever_ends_the_parent_nothing_is_left_behind(tmp_path, signum):
    parent, pids = start_parent(tmp_path)
    guardians = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _parent_of(entry) == parent.pid
    ]
    assert len(guardians) == 2  # the family's head and the guardian
    os.kill(parent.pid, signum)
    assert parent.wait(LIMIT_S) != 0
    assert ends_in_time(pids + guardians)


def _parent_of(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def test_a_guardian_that_was_killed_is_replaced_by_one_that_knows_all_children(tmp_path):
    async def go():
        first = await ChildProcess.start("first", SLEEPER, log=tmp_path / "1")
        old = processes._GUARDIAN._process
        old.kill()
        old.wait()
        second = await ChildProcess.start("second", SLEEPER, log=tmp_path / "2")
        new = processes._GUARDIAN._process
        assert new.pid != old.pid
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, new.stdin.fileno())  # closes the pipe, as this process's death would
        os.close(nowhere)
        assert await first.wait() == await second.wait() == -signal.SIGTERM
        assert new.wait(LIMIT_S) == 0
        await first.terminate()
        await second.terminate()

    asyncio.run(go())


def test_an_impatient_cancel_during_the_grace_still_sees_every_child_end(tmp_path):
    pids = []

    async def go():
        async with supervise(tmp_path, grace_s=600) as children:
            pids.extend(await numbers(await children.start("family", STUBBORN_FAMILY), 3))

    async def cancel_twice():
        task = asyncio.create_task(go())
        while len(pids) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_twice())
    assert not any(alive(pid) for pid in pids)
    assert guardian_is_off()
