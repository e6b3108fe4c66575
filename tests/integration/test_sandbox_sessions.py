"""Sessions of a sandbox: what a model gets back, whatever its code does, and that nothing stays."""

import asyncio
import gc
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from relax_agent.errors import ConfigError, ToolError, ToolErrorKind
from relax_agent.tools.sandbox import ExecutionResult, Level, Sandbox, SandboxSession, probe

LEVELS = ["strong", "basic"]


@pytest.fixture(scope="module", params=LEVELS)
def sandbox(request):
    """A sandbox of each level; the strong one must work on Linux."""
    if request.param == "strong" and sys.platform != "linux":
        pytest.skip("namespaces are Linux's")
    made = Sandbox(untrusted=request.param == "strong", level=request.param, warm=0)
    yield made
    asyncio.run(made.close())


def in_session(sandbox: Sandbox, body: Callable[[SandboxSession], Awaitable[object]]) -> object:
    async def main() -> object:
        async with sandbox.session() as session:
            return await body(session)

    return asyncio.run(main())


def run(sandbox: Sandbox, *codes: str, timeout_s: float | None = None) -> list[ExecutionResult]:
    async def body(session: SandboxSession) -> list[ExecutionResult]:
        return [await session.run(code, timeout_s=timeout_s) for code in codes]

    results = in_session(sandbox, body)
    assert isinstance(results, list)
    return results


def test_variables_functions_and_files_stay_from_call_to_call(sandbox: Sandbox) -> None:
    *_, last = run(
        sandbox,
        "import math\nx = 6",
        "def double(n):\n    return 2 * n\nopen('note', 'w').write('kept')",
        "double(x) + math.floor(0.5), open('note').read(), _",
    )
    assert last.value == "(12, 'kept', 4)"
    assert last.error is None


def test_output_value_and_errors_come_back_apart(sandbox: Sandbox) -> None:
    out, failed, syntax = run(
        sandbox,
        "import sys\nprint('one'); print('two', file=sys.stderr)\n'three'",
        "print('before')\n1 / 0",
        "x = = 1",
    )
    assert (out.stdout, out.stderr, out.value) == ("one\n", "two\n", "'three'")
    assert out.text == "one\ntwo\n'three'"
    assert failed.stdout == "before\n"
    assert failed.error is not None
    assert (failed.error.type, failed.error.restarted) == ("ZeroDivisionError", False)
    assert failed.error.message.startswith('Traceback (most recent call last):\n  File "<call 2>"')
    assert "worker" not in failed.error.message
    assert syntax.error is not None
    assert syntax.error.message.startswith('  File "<call 3>", line 1')


def test_figures_and_pictures_come_back_as_images(sandbox: Sandbox) -> None:
    from PIL import Image

    plot = "import matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.show()\nplt.figure(); None"
    picture = "from PIL import Image\nImage.new('RGB', (30, 20), 'red')"
    figure = "fig, ax = plt.subplots(); ax.bar([1], [2]); fig"
    results = run(sandbox, plot, picture, figure, "len(plt.get_fignums())")
    assert [len(result.images) for result in results] == [2, 1, 1, 0]
    assert results[0].stderr == ""
    assert results[1].value is None
    with Image.open(io.BytesIO(results[1].images[0].data)) as decoded:
        assert decoded.size == (30, 20)
    assert results[3].value == "0"


def test_too_many_images_are_left_out_and_counted(sandbox: Sandbox) -> None:
    code = "import matplotlib.pyplot as plt\nfor _ in range(10): plt.figure(figsize=(1, 1))"
    (result,) = run(sandbox, code)
    assert len(result.images) == 8
    assert result.notes == ("2 images were left out: too many or too large",)


ENDS = {
    "timed out after 0.5 s": ("while True: pass", ToolErrorKind.TIMEOUT),
    "timed out after 0.5 s;": (
        "import signal\nfor n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n"
        "  except Exception: pass\nwhile True:\n  try:\n    while True: pass\n"
        "  except BaseException: pass",
        ToolErrorKind.TIMEOUT,
    ),
    "timed out after": ("import time; time.sleep(60)", ToolErrorKind.TIMEOUT),
    "exit code 3": ("import os; os._exit(3)", ToolErrorKind.CRASHED),
    "it was killed (SIGKILL)": ("import os; os.kill(os.getpid(), 9)", ToolErrorKind.CRASHED),
    "SIGSEGV": ("import ctypes; ctypes.string_at(0)", ToolErrorKind.CRASHED),
    "connection": (
        "import os\nfor n in range(3, 99):\n  try: os.write(n, b'x' * 99)\n  except OSError: pass",
        ToolErrorKind.CRASHED,
    ),
    "the interpreter": ("import os; os.closerange(0, 999)", ToolErrorKind.CRASHED),
    "more than 32 MB of output": (
        "import os\nfor _ in range(1024): os.write(1, b'x' * (1 << 20))",
        ToolErrorKind.TOO_LARGE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("said", ENDS)
def test_an_interpreter_that_had_to_end_is_replaced_and_the_model_told(
    sandbox: Sandbox, said: str
) -> None:
    """T158, T152: whatever ended it, an error with the reason, and the next call works."""
    code, kind = ENDS[said]
    limit = 0.5 if kind is ToolErrorKind.TIMEOUT else 10.0
    before, result, after, lost = run(
        sandbox,
        "x = 1; print(x)",
        f"print('so far', flush=True)\n{code}",
        "1 + 1",
        "x",
        timeout_s=limit,
    )
    assert before.ok
    assert result.error is not None
    assert said in result.error.message
    assert "the interpreter was restarted, variables, imports and files are lost" in result.text
    assert (result.error.kind, result.error.restarted) == (kind, True)
    assert result.stdout.startswith("so far\n")
    assert len(result.text) < 50_000
    assert after.value == "2"
    assert lost.error is not None
    assert lost.error.type == "NameError"


SURVIVED = {
    "sys.exit(4)": ("import sys; sys.exit(4)", "the code called sys.exit(4)"),
    "quit": ("quit()", "the session goes on"),
    "interrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "input": ("input('name? ')", "input() cannot be used here"),
    "breakpoint": ("breakpoint()", "breakpoint() cannot be used here"),
    "recursion": ("def f(): return f()\nf()", "RecursionError"),
    "memory": ("y = bytearray(8 << 30)", "MemoryError"),
    "repr": ("class A:\n  def __repr__(self): raise ValueError('no')\nA()", "ValueError: no"),
    "str": ("class E(Exception):\n  def __str__(self): 1 / 0\nraise E", "str() failed"),
    "null byte": ("x = 1\0", "null bytes"),
    "streams": ("import sys, os; os.close(1); sys.stderr.close(); sys.stdout = 3; 1 / 0", "Zero"),
    "builtins": ("import builtins; vars(builtins).clear(); nothing", "NameError"),
    "modules": ("import sys; sys.modules.clear(); 1 / 0", "ZeroDivisionError"),
    "a copy comes back": ("import os\nif os.fork() == 0: raise OSError('copy')\n1 / 0", "Zero"),
}  # fmt: skip


@pytest.mark.parametrize("name", SURVIVED)
def test_a_session_survives_what_can_be_survived(sandbox: Sandbox, name: str) -> None:
    code, said = SURVIVED[name]
    _, result, after = run(sandbox, "x = 41", code, "print('out'); x + 1")
    assert result.error is not None
    assert said in result.error.message
    assert not result.error.restarted
    assert (after.stdout, after.value, after.error) == ("out\n", "42", None)


def test_long_output_keeps_both_ends_and_says_what_is_missing(sandbox: Sandbox) -> None:
    printed, value = run(sandbox, "print('<' + 'é' * 100_000 + '>')", "'a' * 100_000 + 'z'")
    assert printed.stdout.startswith("<é")
    assert printed.stdout.endswith("é>\n")
    assert "bytes left out" in printed.stdout
    assert value.value is not None
    assert value.value.endswith("az'")
    assert "characters left out" in value.value
    assert max(len(printed.stdout), len(value.value)) <= 20_100


def test_any_text_comes_back_as_valid_unicode(sandbox: Sandbox) -> None:
    """T80: half a surrogate pair, bytes that are no UTF-8, null bytes."""
    results = run(
        sandbox,
        "print('\\ud800'); '\\ud800\\0'",
        "import sys; n = sys.stdout.buffer.write(bytes(range(256)))",
        "raise ValueError('\\udfff')",
    )
    for result in results:
        result.text.encode()
        json.dumps(result.to_tool_result().to_json())


def test_a_coroutine_can_be_awaited_at_the_top_level(sandbox: Sandbox) -> None:
    (result,) = run(
        sandbox, "import asyncio\nawait asyncio.sleep(0)\nawait asyncio.sleep(0, 'slept')"
    )
    assert result.value == "'slept'"


def test_calls_of_one_session_run_one_after_the_other(sandbox: Sandbox) -> None:
    async def body(session: SandboxSession) -> list[str | None]:
        await session.run("seen = []")
        async with asyncio.TaskGroup() as group:
            for n in range(5):
                group.create_task(session.run(f"seen.append({n})"))
        return [(await session.run("sorted(seen)")).value]

    assert in_session(sandbox, body) == ["[0, 1, 2, 3, 4]"]


def test_cancelling_a_call_ends_the_interpreter_and_the_session_goes_on(sandbox: Sandbox) -> None:
    async def body(session: SandboxSession) -> str | None:
        await session.run("import time")
        assert session._interpreter is not None
        pid = session._interpreter.child.pid
        job = asyncio.create_task(session.run("time.sleep(60)"))
        await asyncio.sleep(0.1)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        return (await session.run("2 + 2")).value

    assert in_session(sandbox, body) == "4"


def test_closing_a_session_ends_the_call_under_way(sandbox: Sandbox) -> None:
    async def body(session: SandboxSession) -> tuple[ExecutionResult, float]:
        started = time.perf_counter()
        job = asyncio.create_task(session.run("while True: pass"))
        await asyncio.sleep(0.3)
        await session.close()
        await session.close()
        result = await job
        with pytest.raises(ToolError, match="closed"):
            await session.run("1")
        return result, time.perf_counter() - started

    result, took = in_session(sandbox, body)  # type: ignore[misc]
    assert result.error.kind is ToolErrorKind.UNAVAILABLE
    assert took < 8


def test_files_go_in_and_out_as_bytes(sandbox: Sandbox) -> None:
    async def body(session: SandboxSession) -> list[object]:
        await session.write_file("data/in.bin", bytes(range(256)) * 4096)
        await session.run(
            "data = open('data/in.bin', 'rb').read(); open('out', 'wb').write(data[::-1])"
        )
        read = await session.read_file("out")
        problems = []
        for path in ("missing", "data"):
            with pytest.raises(ToolError) as caught:
                await session.read_file(path)
            problems.append(str(caught.value.kind))
        return [read == (bytes(range(256)) * 4096)[::-1], *problems]

    assert in_session(sandbox, body) == [True, "not_found", "not_found"]


def test_one_session_can_be_used_from_several_event_loops(sandbox: Sandbox) -> None:
    session = sandbox.session()
    assert asyncio.run(session.run("x = 5")).ok
    assert asyncio.run(session.run("x + 1")).value == "6"
    asyncio.run(session.close())


def test_a_full_disk_and_too_many_files_are_soft_errors() -> None:
    sandbox = Sandbox(disk_mb=4, files=300, warm=0)
    fill = "n = 0\nwhile True:\n  n += 1\n  open(f'/tmp/{n}', 'wb').write(b'x' * 500_000)"
    many = "import os, time\nfor n in range(2000): open(f'/tmp/{n}', 'w').close()\ntime.sleep(9)"
    full, many_files, after = run(sandbox, fill, "import os\n" + many, "1 + 1")
    assert full.error is not None
    assert "No space left on device" in full.error.message
    assert many_files.error is not None
    assert many_files.error.kind is ToolErrorKind.TOO_LARGE
    assert "more than 300 files" in many_files.error.message
    assert after.value == "2"


def test_memory_of_all_processes_together_is_bounded() -> None:
    code = """
import os, time
for n in range(8):
    if os.fork() == 0:
        block = bytearray(60 << 20)
        for place in range(0, len(block), 4096): block[place] = 1
        time.sleep(30)
time.sleep(30)
"""
    result, after = run(Sandbox(memory_mb=200, timeout_s=20, warm=0), code, "1 + 1")
    assert result.error is not None
    assert result.error.kind is ToolErrorKind.TOO_LARGE
    assert "more than 200 MB of memory" in result.error.message
    assert after.value == "2"


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
@pytest.mark.parametrize("kind", ["pair", "tcp"])
def test_memory_in_sockets_is_bounded(kind: str) -> None:
    """The kernel counts it for no process; six of them would hold 480 MB."""
    code = f"""
import os, socket, time
def two():
    if {kind!r} == "pair": return socket.socketpair()
    here = socket.create_server(("127.0.0.1", 0))
    return socket.create_connection(here.getsockname()), here.accept()[0]
def fill(left=80 << 20):
    kept = []
    while left > 0:
        kept.append(two())
        for end in kept[-1]:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
            end.setblocking(False)
            try:
                while left > 0: left -= end.send(bytes(1 << 16))
            except BlockingIOError: pass
    time.sleep(30)
for n in range(6):
    if os.fork() == 0:
        try: fill()
        finally: os._exit(0)
time.sleep(30)
"""
    limits = {"memory_mb": 128, "open_files": 1000, "timeout_s": 20}
    result, after = run(Sandbox(**limits, warm=0), code, "1 + 1")
    assert result.error is not None
    assert result.error.kind is ToolErrorKind.TOO_LARGE
    assert "more than 128 MB of memory" in result.error.message
    assert after.value == "2"


def test_processor_time_is_bounded_over_all_calls() -> None:
    sandbox = Sandbox(cpu_s=1, timeout_s=20, warm=0)
    *_, result, after = run(sandbox, "import time", "while True: pass", "1 + 1")
    assert result.error is not None
    assert "used up its processor time" in result.error.message
    assert after.value == "2"


def test_packages_can_be_hidden_or_left_out() -> None:
    (hidden,) = run(Sandbox(warm=0, hidden_packages=["six", "PIL"]), "import numpy, six")
    assert hidden.error is not None
    (both,) = run(Sandbox(warm=0, hidden_packages=["PIL"]), "import six\nfrom PIL import Image")
    assert both.error is not None
    assert both.error.type == "ModuleNotFoundError"
    (bare,) = run(Sandbox(warm=0, packages=False), "import numpy")
    assert bare.error is not None
    assert bare.error.type == "ModuleNotFoundError"


def test_untrusted_code_is_refused_below_the_strong_level() -> None:
    with pytest.raises(ConfigError, match="no sandbox for untrusted code") as caught:
        Sandbox(level="basic")
    assert "untrusted=False" in str(caught.value)


def test_a_machine_without_bubblewrap_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    probe.cache_clear()
    try:
        found = probe()
        assert found.level is Level.BASIC
        assert "install" in found.hint
        with pytest.raises(ConfigError, match=r"bubblewrap is not installed.*apt-get install"):
            Sandbox()
        assert Sandbox(untrusted=False).level is Level.BASIC
    finally:
        probe.cache_clear()


def test_a_warm_interpreter_is_used_once_and_replaced() -> None:
    async def main() -> tuple[int, int, int]:
        async with Sandbox(warm=2) as sandbox:
            sandbox.pool.fill()
            async with asyncio.timeout(20):
                while sandbox.pool.ready < 2:  # noqa: ASYNC110 - threads fill it
                    await asyncio.sleep(0.02)
            first = sandbox.pool._ready[0]
            async with sandbox.session() as session:
                await session.run("x = 1")
                assert session._interpreter is first
            async with sandbox.session() as session:
                assert (await session.run("x")).error is not None
                assert session._interpreter is not first
        return sandbox.pool.ready, first.child.pid, int(first.child.ended.done())

    ready, pid, ended = asyncio.run(main())
    assert (ready, ended) == (0, 1)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_fork_takes_no_interpreter_of_its_parent_along() -> None:
    sandbox = Sandbox(warm=1)

    async def warm() -> None:
        sandbox.pool.fill()
        async with asyncio.timeout(20):
            while not sandbox.pool.ready:  # noqa: ASYNC110 - a thread fills it
                await asyncio.sleep(0.02)

    async def told(code: str) -> str:
        async with sandbox.session() as session, asyncio.timeout(20):
            return (await session.run(code)).text

    asyncio.run(warm())
    pid = os.fork()
    if pid == 0:
        gc.collect()
        os._exit(0 if asyncio.run(told("x = 1; open('left', 'w'); 'fine'")) == "'fine'" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    code = "import os; (os.listdir(), 'x' in globals())"
    assert asyncio.run(told(code)) == "([], False)"
    asyncio.run(sandbox.close())


def test_a_path_that_no_file_can_have_does_not_cost_the_session(sandbox: Sandbox) -> None:
    async def body(session: SandboxSession) -> object:
        await session.run("x = 7")
        for path in ("a\0b", "\ud800", "a" * 5000, "", "."):
            with pytest.raises(ToolError):
                await session.read_file(path)
            with pytest.raises(ToolError):
                await session.write_file(path, b"")
        return (await session.run("x")).value

    assert in_session(sandbox, body) == "7"


def test_sessions_beyond_the_limit_wait_for_a_place() -> None:
    async def main() -> None:
        sandbox = Sandbox(warm=0, max_sessions=1)
        sandbox.pool._queue_timeout_s = 0.2
        async with sandbox.session() as one:
            await one.run("1")
            with pytest.raises(ToolError, match="all 1 sandbox sessions were in use"):
                await sandbox.session().run("1")
        async with sandbox.session() as two:
            assert (await two.run("1 + 1")).value == "2"

    asyncio.run(main())


def test_sessions_leave_no_process_thread_descriptor_mount_or_folder(sandbox: Sandbox) -> None:
    def held() -> tuple[int, int, list[str]]:
        mounts = Path("/proc/self/mounts")
        lines = len(mounts.read_text().splitlines()) if mounts.exists() else 0
        fds = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
        return (
            fds,
            lines,
            [p.name for p in Path(tempfile.gettempdir()).glob(f"relax-sandbox-*-{os.getpid()}-*")],
        )

    def churn(code: str, times: int) -> None:
        for _ in range(times):
            run(sandbox, code, timeout_s=5)

    churn("1", 1)
    gc.collect()
    before = held()
    churn("open('f', 'w').write('x')", 3)
    churn("import os; os._exit(1)", 2)
    deadline = time.monotonic() + 10
    while held() > before:  # what other tests have left may go meanwhile
        assert time.monotonic() < deadline, f"{held()} instead of {before}"
        gc.collect()
        time.sleep(0.02)


def test_folders_of_dead_parents_are_removed_at_the_next_start(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sandbox = Sandbox(untrusted=False, level="basic", warm=0)

    async def body(session: SandboxSession) -> list[Path]:
        await session.run("1")
        return list(tmp_path.iterdir())

    (living,) = in_session(sandbox, body)  # type: ignore[misc]
    assert not living.exists()
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as dead:
        dead.wait()
    old = Path(str(living).replace(f"-{os.getpid()}-", f"-{dead.pid}-"))
    (old / "home").mkdir(parents=True)
    stranger = tmp_path / f"relax-sandbox-1-{dead.pid}-of-another-container"
    stranger.mkdir()
    in_session(sandbox, body)
    assert list(tmp_path.iterdir()) == [stranger]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("level", "guarded"), [("strong", True), ("strong", False), ("basic", True)]
)
def test_nothing_survives_a_parent_that_is_killed(
    level: str, guarded: bool, tmp_path: Path
) -> None:
    """A busy session, an idle (stopped) one and a warm interpreter; at the strong level even if
    the guardian is killed first: all die with their parent.
    """
    program = f"""
        import asyncio, os
        from relax_agent.tools.sandbox import Sandbox
        async def main():
            sandbox = Sandbox(untrusted={level == "strong"}, level={level!r}, warm=1)
            idle, busy = sandbox.session(), sandbox.session()
            await idle.run("x = 1")
            await busy.run("import os")
            code = "import signal; signal.signal(15, signal.SIG_IGN)\\nwhile True: pass"
            job = asyncio.create_task(busy.run(code, timeout_s=60))
            await asyncio.sleep(0.3)
            print(os.getpid(), flush=True)
            await job
        asyncio.run(main())
    """
    env = {**os.environ, "TMPDIR": str(tmp_path), "RELAX_TEST_MARK": tmp_path.name}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, env=env, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().strip().isdigit()
        below = all_below(parent.pid)
        assert len(below) >= 4
        if not guarded:
            (guardian,) = (
                p for p in below if b"guardian" in Path(f"/proc/{p}/cmdline").read_bytes()
            )
            os.kill(guardian, signal.SIGKILL)
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while alive := [pid for pid in below if is_running(pid)]:
        assert time.monotonic() < deadline, f"still there: {alive}"
        time.sleep(0.05)


def all_below(pid: int) -> list[int]:
    from relax_agent.tools.sandbox.watch import descendants

    return descendants(pid)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False
