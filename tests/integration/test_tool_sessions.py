"""Sessions, deadlines and media over HTTP; several servers; the end of a server."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from relax_agent import RemoteToolset, ScriptedPolicy, Toolset, tool
from relax_agent.envs import Task, TaskSet, ToolEnv, play
from relax_agent.errors import ConfigError, ToolError, ToolErrorKind
from relax_agent.messages import Image, Text, ToolCall
from relax_agent.references import conversation
from relax_agent.tools import call_context, create_tool_app, current_call, open_server, trace_calls
from relax_agent.tools.calculator import calculator
from relax_agent.tools.service import ServiceLimits

LIMIT_S = 60


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(LIMIT_S):
            return await coroutine

    return asyncio.run(bounded())


class Counter:
    """Counts."""

    live = 0

    def __init__(self):
        self.value = 0

    async def open(self):
        Counter.live += 1

    async def close(self):
        Counter.live -= 1

    @tool
    async def count(self, by: int = 1) -> int:
        """Count on."""
        self.value += by
        return self.value


@tool(max_output_bytes=8 << 20)
async def twice(image: Image) -> list:
    """Return a picture twice."""
    return [image, Text("and"), image]


@tool
async def context() -> str:
    """Tell what the call belongs to."""
    return f"{current_call().episode}"


ENDED = asyncio.Event


@tool
async def hang() -> str:
    """Hang."""
    try:
        await asyncio.Event().wait()
    finally:
        hang.ended = True


ALL = Toolset([Counter, twice, context, hang, calculator])
COUNT = ToolCall("count", {})


@contextlib.asynccontextmanager
async def served(toolset=ALL, count=1, **limits):
    async with contextlib.AsyncExitStack() as stack:
        urls = [
            await stack.enter_async_context(open_server(toolset, limits=ServiceLimits(**limits)))
            for _ in range(count)
        ]
        yield await stack.enter_async_context(await RemoteToolset.connect(urls)), urls


def test_a_session_over_http_is_what_it_is_in_process():
    async def main():
        async with served() as (remote, _):
            assert (await remote.call(COUNT)).error is ToolErrorKind.DENIED
            async with remote.session() as one, remote.session() as other:
                told = [(await one.call(COUNT)).text for _ in range(3)]
                told.append((await other.call(COUNT)).text)
                assert Counter.live == 2
            assert Counter.live == 0
            return told, (await one.call(COUNT)).error

    assert run(main()) == (["1", "2", "3", "1"], ToolErrorKind.UNAVAILABLE)


def test_an_environment_does_not_notice_that_its_session_is_elsewhere():
    class Env(ToolEnv):
        tasks = TaskSet([Task("a", "?", "3")])

        def score(self, task, transcript):
            return float(transcript.calls[-1][1].text == task.answer)

    async def main():
        async with served() as (remote, _):
            env = Env(tools=remote)
            record = await play(env, ScriptedPolicy([[COUNT, COUNT], COUNT, "ok"]), task="a")
            return record.reward, Counter.live

    assert run(main()) == (1.0, 0)


def test_a_session_that_nobody_uses_ends_and_one_that_is_renewed_does_not():
    async def main():
        async with served(lease_s=0.3) as (remote, urls), httpx.AsyncClient() as client:
            kept = remote.session()
            await kept.call(COUNT)
            left = (await client.post(f"{urls[0]}/sessions", json={})).json()["session"]
            headers = {"X-Tool-Session": left}
            answer = await client.post(f"{urls[0]}/tools/count", json={}, headers=headers)
            assert answer.json()["content"][0]["text"] == "1"
            while Counter.live > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.4)
            gone = await client.post(f"{urls[0]}/tools/count", json={}, headers=headers)
            counts = (await client.get(f"{urls[0]}/sessions")).json()
            return (await kept.call(COUNT)).text, gone, counts, await kept.close(), Counter.live

    text, gone, counts, _, live = run(main())
    assert (text, live) == ("2", 0)
    assert (gone.status_code, gone.headers["X-Tool-Refused"]) == (404, "no session")
    assert (counts["sessions"], counts["sessions_expired_total"]) == (1, 1)
    assert counts["sessions_opened_total"] == 2


def test_the_routes_of_sessions_say_what_is_wrong():
    async def main():
        async with served(max_sessions=1) as (_, urls), httpx.AsyncClient(base_url=urls[0]) as http:
            one = (await http.post("/sessions")).json()["session"]
            answers = [
                await http.post("/sessions", json={}),
                await http.post("/sessions", json={"lease_s": -1}),
                await http.post("/sessions", json={"lease_s": 1e9}),
                await http.post("/sessions", content=b'{"lease_s": NaN}'),
                await http.post("/sessions", content=b"{"),
                await http.post("/sessions/renew", json={"sessions": [one, "0.none"]}),
                await http.post(f"/sessions/{one}/renew"),
                await http.post("/sessions/0.none/renew"),
                await http.delete(f"/sessions/{one}"),
                await http.delete(f"/sessions/{one}"),
            ]
            return [answer.status_code for answer in answers], answers[5].json()

    statuses, renewed = run(main())
    assert statuses == [429, 422, 422, 422, 422, 200, 200, 404, 200, 404]
    assert renewed == {"renewed": 1, "lost": ["0.none"]}


def test_a_session_stays_with_the_server_that_opened_it():
    async def main():
        async with served(count=2) as (remote, _):
            sessions = [remote.session() for _ in range(6)]
            for _ in range(3):
                told = await asyncio.gather(*(each.call(COUNT) for each in sessions))
            spread = sorted(each.sessions for each in remote.replicas.all)
            await asyncio.gather(*(each.close() for each in sessions))
            return [each.text for each in told], spread

    assert run(main()) == (["3"] * 6, [3, 3])


def test_a_call_without_state_goes_to_a_server_that_lives():
    async def main():
        async with open_server(ALL) as second:
            async with open_server(ALL) as first:
                remote = await RemoteToolset.connect(f"{first}, {second}")
                session = remote.session()
                await session.call(COUNT)
                assert session.replica.url == first
            calls = [ToolCall("calculator", {"expression": f"{n}"}) for n in range(20)]
            results = await asyncio.gather(*(remote.call(each) for each in calls))
            lost = await session.call(COUNT)
            await session.close()
            await remote.close()
            return [each.text for each in results], lost

    texts, lost = run(main())
    assert texts == [str(n) for n in range(20)]
    assert lost.error is ToolErrorKind.UNAVAILABLE


def test_servers_with_other_tools_are_no_replicas():
    async def main():
        async with open_server(ALL) as one, open_server(Toolset([calculator])) as other:
            with pytest.raises(ConfigError, match="serves other tools"):
                await RemoteToolset.connect([one, other])

    run(main())


def test_the_server_ends_what_its_caller_no_longer_waits_for():
    async def main():
        async with served() as (remote, urls):
            hang.ended = False
            with call_context(timeout_s=0.2):
                result = await remote.call(ToolCall("hang", {}))
            ended = hang.ended
            async with httpx.AsyncClient() as client:
                answers = [
                    await client.post(f"{urls[0]}/tools/hang", headers={"X-Tool-Deadline": text})
                    for text in ("0.05", "soon", "nan", "-1")
                ]
            return result, ended, [answer.status_code for answer in answers]

    result, ended, statuses = run(main())
    assert (result.error, ended) == (ToolErrorKind.TIMEOUT, True)
    assert result.duration_s < 5
    assert statuses == [408, 422, 422, 422]


def test_the_episode_travels_with_the_call_and_both_ends_tell_of_it():
    async def main():
        events = []
        async with served() as (remote, _):
            with trace_calls(events.append), call_context(episode="e-1"):
                text = (await remote.call(ToolCall("context", {}, "c-7"))).text
        return text, [(each.place, each.episode, each.call_id) for each in events]

    assert run(main()) == ("e-1", [("server", "e-1", "c-7"), ("client", "e-1", "c-7")])


PICTURE = Image(os.urandom(2 << 20), "image/gif")


def test_media_travel_both_ways_as_bytes():
    async def main():
        async with served() as (remote, urls):
            with conversation([type("Said", (), {"media": (PICTURE,)})]):
                named = await remote.call(ToolCall("twice", {"image": "image:1"}))
                wrong = await remote.call(ToolCall("twice", {"image": "image:2"}))
            given = await remote.call(ToolCall("twice", {"image": PICTURE}))
            async with httpx.AsyncClient() as client:  # what reads no frames gets base64
                plain = await client.post(
                    f"{urls[0]}/tools/twice", json={"image": Image(b"x").data_url()}
                )
            return named.content, given.content, wrong, plain.json()

    named, given, wrong, plain = run(main())
    assert named == given == (PICTURE, Text("and"), PICTURE)
    assert wrong.text == "Error: twice: there is no image:2 in this conversation; it has 1"
    assert plain["content"][0] == {"type": "image", "mime": "image/png", "data": "eA=="}


def test_fifty_megabytes_are_refused_on_both_sides_with_words():
    huge = "x" * 50_000_000

    async def main():
        async with served() as (remote, urls):
            here = await remote.call(ToolCall("calculator", {"expression": huge}))
            async with httpx.AsyncClient(timeout=60) as client:
                there = await client.post(f"{urls[0]}/tools/calculator", json={"expression": huge})
            after = await remote.call(ToolCall("calculator", {"expression": "1"}))
            return here, there, after

    here, there, after = run(main())
    assert here.error is ToolErrorKind.TOO_LARGE
    assert there.status_code == 413
    assert there.json()["error"] == "too_large"
    assert after.text == "1"


def test_idle_connections_that_the_server_closes_cost_no_call():
    """T157: the server closes idle sockets; the next call works, whatever the tool."""

    async def main():
        calls = 0

        async def handle(reader, writer):
            nonlocal calls
            head = await reader.readuntil(b"\r\n\r\n")
            manifest = head.startswith(b"GET")
            if not manifest:
                length = next(x for x in head.lower().split(b"\r\n") if b"content-length" in x)
                await reader.readexactly(int(length.split(b":")[1]))
                calls += 1
            good = {"content": [{"type": "text", "text": "1"}]}
            body = json.dumps(create_tool_app(ALL).state.service.manifest() if manifest else good)
            writer.write(b"HTTP/1.1 200 X\r\nContent-Length: %d\r\n\r\n" % len(body))
            writer.write(
                body.encode()
            )  # keep-alive is promised, and the socket closed all the same
            await writer.drain()
            writer.close()

        odd = await asyncio.start_server(handle, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{odd.sockets[0].getsockname()[1]}"
        async with odd, await RemoteToolset.connect(url) as remote:
            texts = []
            for _ in range(5):
                texts.append((await remote.call(ToolCall("context", {}))).text)
                await asyncio.sleep(0.02)
        return texts, calls

    assert run(main()) == (["1"] * 5, 5)


def test_a_server_is_ready_when_its_tools_are_warm():
    release = asyncio.Event()

    async def warm_up():
        await release.wait()

    @tool(warm_up=warm_up)
    async def warm() -> str:
        """Be warm."""
        return "warm"

    @tool(warm_up=lambda: 1 / 0)
    async def cold() -> str:
        """Never be warm."""

    async def main():
        app = create_tool_app(Toolset([warm]))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            first = (await client.get("/readyz")).status_code, (await client.get("/healthz")).json()
            release.set()
            await app.state.service.start()
            second = (await client.get("/readyz")).status_code
        with pytest.raises(ToolError, match=r"the warm-up of cold failed with ZeroDivisionError"):
            async with open_server(Toolset([cold])):
                pass
        return first, second

    assert run(main()) == ((503, {"ok": True}), 200)


def test_an_app_of_ones_own_can_mount_the_tools():
    from fastapi import FastAPI

    async def main():
        app = FastAPI()
        tools = create_tool_app(Toolset([Counter, calculator]), token="secret")
        app.mount("/my", tools)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x/my") as client:
            probes = [(await client.get(path)).status_code for path in ("/healthz", "/tools")]
            client.headers["Authorization"] = "Bearer secret"
            answer = await client.post("/tools/calculator", json={"expression": "6*7"})
            session = (await client.post("/sessions")).json()["session"]
            counted = await client.post(
                "/tools/count", json={"by": 3}, headers={"X-Tool-Session": session}
            )
        await tools.state.service.close()
        return probes, answer.json()["content"], counted.json()["content"], Counter.live

    assert run(main()) == (
        [200, 401],
        [{"type": "text", "text": "42"}],
        [{"type": "text", "text": "3"}],
        0,
    )


MODULE = '''
import asyncio, os, pathlib
from relax_agent import tool

@tool
async def slow(seconds: float) -> str:
    """Take a while."""
    pathlib.Path("begun").touch()
    await asyncio.sleep(seconds)
    return f"took {seconds}"

class Pad:
    """State."""
    async def close(self):
        pathlib.Path("closed").touch()

    @tool
    async def pid(self) -> int:
        """Tell the process."""
        return os.getpid()
'''


@contextlib.contextmanager
def process(folder, *args):
    (folder / "own_tools.py").write_text(MODULE)
    argv = [sys.executable, "-m", "relax_agent.tools.server", "own_tools", "--port", "0"]
    argv += ["--port-file", str(folder / "port"), *args]
    kwargs = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    child = subprocess.Popen(argv, cwd=folder, **kwargs)
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (folder / "port").exists():
            assert child.poll() is None, child.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield child, f"http://127.0.0.1:{(folder / 'port').read_text().strip()}"
    finally:
        child.kill()
        child.communicate()


def test_a_server_that_is_told_to_end_lets_calls_end_and_closes_its_sessions(tmp_path):
    async def main(child, url):
        async with await RemoteToolset.connect(url) as remote:
            session = remote.session()
            await session.call(ToolCall("pid", {}))
            call = asyncio.ensure_future(remote.call(ToolCall("slow", {"seconds": 0.5})))
            endless = asyncio.ensure_future(remote.call(ToolCall("slow", {"seconds": 25})))
            while not (tmp_path / "begun").exists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            child.send_signal(signal.SIGTERM)
            results = [await call, await endless]
            with contextlib.suppress(ToolError):
                await remote.session().open()
                raise AssertionError("a session was opened")
            return results

    with process(tmp_path, "--drain", "1.5", "--log-level", "info") as (child, url):
        done, cut = run(main(child, url))
        assert child.wait(LIMIT_S) == 0
        log = [json.loads(line) for line in child.stderr.read().splitlines()]
    assert done.text == "took 0.5"
    assert cut.error is ToolErrorKind.UNAVAILABLE  # T160: a call that is cut off gets its answer
    assert "about to end" in cut.text
    assert (tmp_path / "closed").exists()
    calls = [line for line in log if line["event"] == "call"]
    assert {line["tool"] for line in calls} >= {"pid", "slow"}
    assert "seconds" not in json.dumps(log)


def test_workers_share_a_port_and_sessions_stay_in_theirs(tmp_path):
    """T158: the kill of a worker is an error at once, and another one takes its place."""

    async def main():
        async with await RemoteToolset.connect(url) as remote:
            sessions = [remote.session() for _ in range(8)]
            for _ in range(3):
                rounds = await asyncio.gather(*(each.call(PID) for each in sessions))
            pids = [int(each.text) for each in rounds]
            async with httpx.AsyncClient() as client:
                counts = (await client.get(f"{url}/sessions")).json()
                lost = (await client.post(f"{url}/sessions/renew", json={"sessions": ids()})).json()
            os.kill(pids[0], signal.SIGKILL)
            while Path(f"/proc/{pids[0]}/stat").exists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            after = await asyncio.gather(*(each.call(PID) for each in sessions))
            fresh = remote.session()
            for _ in range(100):
                if (await fresh.call(PID)).ok:
                    break
                await asyncio.sleep(0.05)
            again = await fresh.call(PID)
            await asyncio.gather(*(each.close() for each in [*sessions, fresh]))
            return pids, counts, lost, after, again

    def ids():
        return ["0.none", "1.none", "7.none"]

    PID = ToolCall("pid", {})
    with process(tmp_path, "--workers", "2") as (child, url):
        pids, counts, lost, after, again = run(main())
        child.send_signal(signal.SIGTERM)
        assert child.wait(LIMIT_S) == 0
        told = child.stderr.read()
    assert child.pid not in pids
    assert counts["sessions"] == 8
    assert sorted(lost["lost"]) == ids()
    for pid, result in zip(pids, after, strict=True):
        assert result.ok == (pid != pids[0])
        assert result.ok or result.error is ToolErrorKind.UNAVAILABLE
    assert again.ok
    assert "SIGKILL" in told
