"""Tools over HTTP: the server as a process, the client, and everything that goes wrong between."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from relax_agent import RemoteToolset, Toolset, make, tool
from relax_agent.envs import play
from relax_agent.errors import ConfigError, ToolErrorKind
from relax_agent.messages import Image, Text, ToolCall, assistant
from relax_agent.tools import open_server
from relax_agent.tools.app import manifest
from relax_agent.tools.calculator import calculator
from relax_agent.tools.server import main as server_main

LIMIT_S = 60
"""Upper bound of every wait; nothing here comes near it unless it hangs."""

MODULE = '''
"""Tools of a test."""
import os
from relax_agent import tool

@tool
def pid() -> int:
    """Return the process id."""
    return os.getpid()
'''


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(LIMIT_S):
            return await coroutine

    return asyncio.run(bounded())


def start(folder: Path, *args: str, module="tools_of_test", **kwargs) -> subprocess.Popen:
    (folder / "tools_of_test.py").write_text(MODULE)
    argv = [sys.executable, "-m", "relax_agent.tools.server", module, "--port", "0"]
    argv += ["--port-file", str(folder / "port"), *args]
    kwargs = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | kwargs
    return subprocess.Popen(argv, cwd=folder, **kwargs)


def wait_for_port(folder: Path, process: subprocess.Popen | None = None) -> int:
    deadline = time.monotonic() + LIMIT_S
    while not (folder / "port").exists():
        assert process is None or process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int((folder / "port").read_text())


@contextlib.contextmanager
def server(folder: Path, *args: str, **kwargs):
    process = start(folder, *args, **kwargs)
    try:
        yield process, f"http://127.0.0.1:{wait_for_port(folder, process)}"
    finally:
        process.kill()
        process.communicate()


def test_a_module_of_the_current_folder_is_served_and_sigterm_ends_it(tmp_path):
    with server(tmp_path) as (process, url):

        async def main():
            async with await RemoteToolset.connect(url) as toolset:
                return toolset.names, await toolset.call(ToolCall("pid", {}))

        names, result = run(main())
        assert names == ("pid",)
        assert result.text == str(process.pid)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0
        assert errors == ""


def test_the_server_ends_when_its_standard_input_closes(tmp_path):
    with server(tmp_path) as (process, _):
        process.stdin.close()
        assert process.wait(LIMIT_S) == 0
        process.stdin = None


def test_the_server_ends_with_its_parent(tmp_path):
    """T158, the other way round: no orphan stays when whoever started a server is killed."""
    program = (
        "import os, subprocess, sys, time\n"
        "argv = sys.argv[1:] + ['--parent-pid', str(os.getpid())]\n"
        "subprocess.Popen(argv, stdin=subprocess.DEVNULL)\n"
        "time.sleep(600)\n"
    )
    (tmp_path / "tools_of_test.py").write_text(MODULE)
    argv = [sys.executable, "-c", program, sys.executable, "-m", "relax_agent.tools.server"]
    argv += ["tools_of_test", "--port", "0", "--port-file", str(tmp_path / "port")]
    parent = subprocess.Popen(argv, cwd=tmp_path)
    try:
        url = f"http://127.0.0.1:{wait_for_port(tmp_path)}"
        body = httpx.post(f"{url}/tools/pid").json()
    finally:
        parent.kill()
        parent.wait()
    child = int(body["content"][0]["text"])
    deadline = time.monotonic() + LIMIT_S
    while Path(f"/proc/{child}").exists() and not is_zombie(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_server_ends_with_another_process_too(tmp_path):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with server(tmp_path, "--parent-pid", str(other.pid)) as (process, _):
            other.kill()
            other.wait()
            assert process.wait(LIMIT_S) == 0
    finally:
        other.kill()


def is_zombie(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["no_such_module"], "cannot import no_such_module: No module named"),
        (["relax_agent.messages"], "has no tools"),
        (["relax_agent.tools.calculator:nothing"], "has no attribute 'nothing'"),
        (["relax_agent.tools.calculator:evaluate"], "neither a toolset, a tool nor a list"),
        (["tools.py"], "is a file, not a module"),
        (["relax_agent.tools.calculator", "--host", "0.0.0.0"], "there is no token"),
        (["relax_agent.tools.calculator", "--token-env", "NO_SUCH"], "NO_SUCH holds no token"),
        (["relax_agent.tools.calculator", "--port", "PORT"], "address already in use"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_status_2(args, words, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        args = [str(taken.getsockname()[1]) if a == "PORT" else a for a in args]
        status = server_main(args)
    out, errors = capsys.readouterr()
    assert (status, out) == (2, "")
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert words in errors


def test_a_token_is_asked_of_everything_but_the_probes(tmp_path):
    environment = {**os.environ, "TOOL_TOKEN": "s3cret"}
    with server(tmp_path, "--token-env", "TOOL_TOKEN", env=environment) as (_, url):
        assert httpx.get(f"{url}/healthz").json() == {"ok": True}
        assert httpx.get(f"{url}/readyz").json() == {"ready": True, "tools": ["pid"]}
        for path in ("/tools", "/metrics", "/docs", "/openapi.json"):
            assert httpx.get(url + path).status_code == 401
        wrong = {"Authorization": "Bearer s3cre"}
        assert httpx.post(f"{url}/tools/pid", headers=wrong).status_code == 401

        async def main():
            with pytest.raises(ConfigError, match="needs a token"):
                await RemoteToolset.connect(url)
            with pytest.raises(ConfigError, match="refuses this token"):
                await RemoteToolset.connect(url, "wrong")
            async with await RemoteToolset.connect(url, "s3cret") as toolset:
                return await toolset.call(ToolCall("pid", {}))

        assert run(main()).ok


@tool
def picture(size: int) -> list[Text | Image]:
    """Return a picture."""
    return [Text("here:"), Image(b"\x89PNG" + bytes(size))]


@tool(timeout=0.05)
async def hang() -> str:
    """Hang."""
    await asyncio.Event().wait()
    return ""


@tool
def crash() -> str:
    """Crash."""
    raise ValueError("oh no")


ALL = Toolset([calculator, picture, hang, crash])


def over_http(toolset, body):
    """Run ``body(remote, url)`` against a server of ``toolset`` in this event loop."""

    async def main():
        async with open_server(toolset) as url, await RemoteToolset.connect(url) as remote:
            return await body(remote, url)

    return run(main())


@pytest.mark.parametrize(
    "call",
    [
        ToolCall("calculator", {"expression": "(17+5)*3"}),
        ToolCall("calculator", {"expression": "1/0"}),
        ToolCall("calculator", {}),
        ToolCall("calculator", {"expression": "1", "more": [1, {"a": None}]}),
        ToolCall("calculator", []),
        ToolCall("calculator", {"expression": "\ud800 lone surrogate"}),
        ToolCall("picture", {"size": 1000}),
        ToolCall("hang", {}),
        ToolCall("crash", {}),
        ToolCall("abacus", {}),
        ToolCall("calculator", {}, error="not JSON"),
    ],
)
def test_a_call_gives_the_same_over_http_as_in_process(call):
    """T58: one call, two paths, the same kind and the same words."""

    async def body(remote, url):
        return await remote.call(call)

    here = asyncio.run(ALL.call(call)).timed(0.0, 0.0)
    there = over_http(ALL, body).timed(0.0, 0.0)
    assert there == here


def test_schemas_and_names_are_the_same_over_http():
    async def body(remote, url):
        return remote.schemas(), remote.names

    assert over_http(ALL, body) == (ALL.schemas(), ALL.names)


def test_statuses_say_what_kind_of_failure_it_was():
    async def body(remote, url):
        async with httpx.AsyncClient(base_url=url) as client:
            answers = {
                "ok": await client.post("/tools/calculator", json={"expression": "1"}),
                "invalid": await client.post("/tools/calculator", json={}),
                "not json": await client.post("/tools/calculator", content=b"{"),
                "deep": await client.post("/tools/calculator", content=b"[" * 100_000),
                "unknown": await client.post("/tools/abacus", json={}),
                "crash": await client.post("/tools/crash", json={}),
                "hang": await client.post("/tools/hang", json={}),
                "large": await client.post("/tools/crash", content=b" " * (2 << 20)),
                "method": await client.get("/tools/crash"),
            }
            metrics = (await client.get("/metrics")).text
            schema = (await client.get("/openapi.json")).json()
            return {k: v.status_code for k, v in answers.items()}, metrics, schema

    statuses, metrics, schema = over_http(ALL, body)
    assert statuses == {
        "ok": 200,
        "invalid": 422,
        "not json": 422,
        "deep": 422,
        "unknown": 404,
        "crash": 500,
        "hang": 504,
        "large": 413,
        "method": 405,
    }
    assert 'relax_tool_calls_total{tool="calculator",outcome="ok"} 1' in metrics
    operation = schema["paths"]["/tools/calculator"]["post"]
    body_schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert body_schema == calculator.parameters


def test_an_error_inside_open_server_comes_out_as_it_is():
    async def body(remote, url):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        over_http(ALL, body)


def test_without_a_token_web_pages_from_elsewhere_are_refused():
    async def body(remote, url):
        async with httpx.AsyncClient() as client:
            return [
                (
                    await client.post(
                        f"{url}/tools/calculator", json={"expression": "1"}, headers={"Origin": o}
                    )
                ).status_code
                for o in ("https://evil.example", "null", url, "http://localhost:3000")
            ]

    assert over_http(ALL, body) == [403, 403, 200, 200]


def test_a_caller_that_goes_away_cancels_its_call():
    begun, ended = asyncio.Event(), asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait for ever."""
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    async def body(remote, url):
        call = asyncio.ensure_future(remote.call(ToolCall("wait", {})))
        await begun.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await ended.wait()

    over_http(Toolset([wait]), body)


class Odd:
    """A server that answers a manifest properly and calls as it is told."""

    def __init__(self, *answers: bytes | None, idempotent: bool = False) -> None:
        self.answers = list(answers)
        self.calls = 0
        tools = manifest(Toolset([calculator]))
        tools["tools"][0]["idempotent"] = idempotent
        self.manifest = json.dumps(tools).encode()

    async def handle(self, reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line for line in head.lower().split(b"\r\n") if b"content-length" in line]
                await reader.readexactly(int(length[0].split(b":")[1]) if length else 0)
                if head.startswith(b"GET"):
                    writer.write(http_answer(200, self.manifest))
                    continue
                self.calls += 1
                answer = self.answers.pop(0)
                if answer is None:
                    break
                writer.write(answer)
        writer.close()

    def call(self):
        async def main():
            odd = await asyncio.start_server(self.handle, "127.0.0.1", 0)
            url = f"http://127.0.0.1:{odd.sockets[0].getsockname()[1]}"
            async with await RemoteToolset.connect(url) as remote:
                result = await remote.call(ToolCall("calculator", {"expression": "1"}))
            odd.close()
            return result

        return run(main())


def http_answer(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


GOOD = http_answer(200, b'{"content": [{"type": "text", "text": "1"}]}')


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (http_answer(500, b"<html>oops"), ToolErrorKind.CRASHED),
        (http_answer(200, b'{"content": 3}'), ToolErrorKind.CRASHED),
        (http_answer(200, b"[]"), ToolErrorKind.CRASHED),
        (http_answer(502, b"bad gateway"), ToolErrorKind.UNAVAILABLE),
        (http_answer(503, b""), ToolErrorKind.UNAVAILABLE),
        (http_answer(401, b"{}"), ToolErrorKind.DENIED),
        (b"nonsense\r\n\r\n", ToolErrorKind.UNAVAILABLE),
        (None, ToolErrorKind.UNAVAILABLE),
    ],
)
def test_every_odd_answer_is_a_result_of_the_right_kind(answer, kind):
    odd = Odd(answer)
    result = odd.call()
    assert result.error is kind
    assert result.text.startswith("Error: calculator: the tool server")
    assert odd.calls == 1


@pytest.mark.parametrize("first", [None, http_answer(500, b"oops"), http_answer(503, b"")])
def test_only_what_is_idempotent_is_sent_again_and_only_once(first):
    """T157: one transparent retry."""
    patient = Odd(first, GOOD, idempotent=True)
    assert patient.call().text == "1"
    assert patient.calls == 2
    hopeless = Odd(first, first, GOOD, idempotent=True)
    assert not hopeless.call().ok
    assert hopeless.calls == 2
    careful = Odd(first, GOOD)
    assert not careful.call().ok
    assert careful.calls == 1


def test_the_servers_own_verdict_is_not_asked_for_twice():
    verdict = http_answer(500, b'{"content": [], "error": "crashed"}')
    odd = Odd(verdict, GOOD, idempotent=True)
    assert odd.call().error is ToolErrorKind.CRASHED
    assert odd.calls == 1


def test_a_server_that_never_answers_is_a_timeout(monkeypatch):
    """T143, T154: no wait without an end."""

    async def main():
        async def silent(reader, writer):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                writer.write(http_answer(200, json.dumps(manifest(ALL)).encode()))
                await reader.read()  # until the caller gives up
            writer.close()

        odd = await asyncio.start_server(silent, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{odd.sockets[0].getsockname()[1]}"
        async with await RemoteToolset.connect(url) as remote:
            monkeypatch.setattr(
                "relax_agent.tools.client._MARGIN_S", -ALL["hang"].limits.queue_timeout_s
            )
            result = await remote.call(ToolCall("hang", {}))
        odd.close()
        return result

    result = run(main())
    assert result.error is ToolErrorKind.TIMEOUT
    assert result.text == "Error: hang: no answer after 0.05 s"


def test_a_server_that_has_gone_is_unavailable():
    async def main():
        async with open_server(ALL) as url:
            remote = await RemoteToolset.connect(url)
            assert (await remote.call(ToolCall("calculator", {"expression": "1"}))).ok
        result = await remote.call(ToolCall("calculator", {"expression": "1"}))
        await remote.close()
        await remote.close()
        return result

    assert run(main()).error is ToolErrorKind.UNAVAILABLE


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://no-such-host.invalid", "nonsense"])
def test_no_server_is_a_config_error_at_connect(url):
    with pytest.raises(ConfigError, match="no tool server answers at"):
        run(RemoteToolset.connect(url))


def test_another_kind_of_server_is_a_config_error_at_connect():
    async def main():
        async def handle(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(http_answer(200, b"<html>hello"))
            writer.close()

        other = await asyncio.start_server(handle, "127.0.0.1", 0)
        with pytest.raises(ConfigError, match="is not a tool server"):
            await RemoteToolset.connect(f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}")
        other.close()

    run(main())


def test_many_calls_at_once_come_back_each_to_its_caller():
    async def body(remote, url):
        calls = [ToolCall("calculator", {"expression": f"{n}*{n}"}) for n in range(300)]
        return await asyncio.gather(*(remote.call(call) for call in calls))

    results = over_http(ALL, body)
    assert [result.text for result in results] == [str(n * n) for n in range(300)]


class Expert:
    """Calls the calculator with the digits of the question, and repeats the result."""

    def act(self, messages, tools):
        last = messages[-1]
        if last.role == "tool":
            return assistant(last.text)
        return assistant(tool_calls=[ToolCall("calculator", {"expression": "6*7"}, "c0")])


def test_an_environment_reaches_its_tools_over_http():
    async def body(remote, url):
        env = make("relax/Calculator-v0", tools=remote)
        record = await play(env, Expert(), seed=1)
        return [message.text for message in record.messages if message.role == "tool"]

    assert over_http(Toolset([calculator]), body) == ["42"]


def test_the_command_line_serves_until_interrupted(tmp_path):
    command = [str(Path(sys.executable).with_name("relax-agent")), "tools", "serve"]
    command += [
        "relax_agent.tools.calculator",
        "--port",
        "0",
        "--port-file",
        str(tmp_path / "port"),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        port = wait_for_port(tmp_path, process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0
    assert errors == f"serving calculator at http://127.0.0.1:{port}\n"


@pytest.mark.parametrize(
    ("args", "status", "out"),
    [
        (["list"], 0, "calculator(expression)  Compute an arithmetic expression exactly.\n"),
        (["call", "relax_agent.tools.calculator", "calculator", "expression=1/8"], 0, "0.125\n"),
        (["call", "relax_agent.tools.calculator", "calculator"], 1, ""),
        (["call", "relax_agent.tools.calculator", "calculator", "1+1"], 2, ""),
    ],
)
def test_the_command_line_lists_and_calls(args, status, out):
    command = [str(Path(sys.executable).with_name("relax-agent")), "tools", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout) == (status, out), done.stderr
