"""Environments behind a server, and everything that goes wrong between."""

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import aiohttp
import env_support
import httpx
import pytest

from relax_agent.envs import PlayLimits, ScriptedPolicy, make, make_async, play
from relax_agent.envs import spec as find_spec
from relax_agent.envs.registration import EnvSpec
from relax_agent.envs.serving.leases import ServingLimits
from relax_agent.envs.serving.remote import connect_env
from relax_agent.envs.serving.server import create_env_app, open_env_server
from relax_agent.episode import EpisodeStatus
from relax_agent.errors import ConfigError, EnvError, ResetNeeded
from relax_agent.messages import assistant

LIMIT_S = 60.0
PROBE = "test/Probe-v0"


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(LIMIT_S):
            return await coroutine

    return asyncio.run(bounded())


@contextlib.asynccontextmanager
async def serving(name=PROBE, *, token=None, isolation=None, kwargs=None, **limits):
    """Yield the URL and the leases of a server in this loop."""
    spec = replace(find_spec(name), isolation=isolation, kwargs=kwargs or {})
    app = create_env_app(spec, token=token, limits=ServingLimits(**limits))
    from relax_agent.envs.serving import server as module

    made = module.create_env_app
    module.create_env_app = lambda *_, **__: app
    try:
        async with open_env_server(spec, token=token) as url:
            yield url, app.state.leases
    finally:
        module.create_env_app = made


async def settled(condition):
    """Wait until something is so that nobody tells of."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def raw(url):
    """A WebSocket of our own: session and socket."""
    session = aiohttp.ClientSession()
    try:
        return session, await session.ws_connect(url + "/ws")
    except BaseException:
        await session.close()
        raise


async def said(ws, **request):
    await ws.send_str(json.dumps(request))
    reply = json.loads((await ws.receive()).data)
    for _ in reply.get("blobs", ()):
        await ws.receive()
    return reply


# -- slots ------------------------------------------------------------------------------------


def test_two_hundred_connections_to_sixteen_slots_all_get_their_turn():
    async def main():
        async with serving(slots=16) as (url, leases):
            manifest = await make_async(url)
            most = 0

            async def episode(number):
                nonlocal most
                env = await asyncio.to_thread(connect_env, url)
                await env.reset(seed=number)
                most = max(most, leases.taken)
                assert (await env.step(assistant("echo")))[4]["turn"] == 1
                await env.close()

            await asyncio.gather(*(episode(number) for number in range(200)))
            assert most == 16
            assert leases.episodes == 200
            await settled(lambda: leases.taken == 0)
            await manifest.close()

    run(main())


def test_a_full_server_says_so_and_a_client_gives_up_after_its_limit():
    async def main():
        async with serving(slots=1) as (url, leases):
            first = await make_async(url)
            await first.reset()
            second = await make_async(url, slot_timeout_s=0.3)
            with pytest.raises(EnvError, match=r"no free environment for 0\.3 s.*--slots"):
                await second.reset()
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await raw(url)
            assert refused.value.status == 503
            assert refused.value.headers["Retry-After"] == "1"
            http = url.replace("ws", "http", 1)
            async with httpx.AsyncClient() as client:
                answer = await client.post(f"{http}/reset")
                assert answer.status_code == 503
                assert "all 1 environments are taken" in answer.json()["error"]["message"]
                assert (await client.get(f"{http}/readyz")).status_code == 503
                waiting = asyncio.create_task(second.reset())
                await asyncio.sleep(0.05)
                await first.close()
                await waiting
                assert "relax_env_slots_taken 1" in (await client.get(f"{http}/metrics")).text
            await second.close()
            await settled(lambda: leases.taken == 0)

    run(main())


# -- clients that vanish ----------------------------------------------------------------------


def test_a_client_that_vanishes_in_a_step_cancels_it_and_frees_the_slot():
    async def main():
        async with serving(slots=1) as (url, leases):
            for number, how in enumerate(("close", "reset"), 1):
                session, ws = await raw(url)
                await said(ws, id=1, op="reset")
                await ws.send_str(
                    '{"id":2,"op":"step","action":{"role":"assistant","content":"hang"}}'
                )
                await settled(lambda: leases.requests["step"] == number)  # noqa: B023
                if how == "reset":  # the connection is cut, not closed
                    connection = ws.get_extra_info("socket")
                    connection.setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                    )
                await session.close()
                await settled(lambda: leases.taken == 0)
            assert leases.left_behind == 0

    run(main())


def test_a_killed_client_process_frees_its_slot():
    code = (
        "import asyncio, sys, relax_agent\n"
        "from relax_agent.envs import make_async\n"
        "async def main():\n"
        "    env = await make_async(sys.argv[1])\n"
        "    await env.reset()\n"
        "    print('ready', flush=True)\n"
        "    await env.step(relax_agent.messages.assistant('hang'))\n"
        "asyncio.run(main())\n"
    )

    async def main():
        async with serving(slots=1) as (url, leases):
            client = await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, url, stdout=asyncio.subprocess.PIPE
            )
            assert await client.stdout.readline() == b"ready\n"
            await settled(lambda: leases.requests["step"] == 1)
            client.kill()
            await client.wait()
            await settled(lambda: leases.taken == 0)

    run(main())


def test_a_half_open_connection_loses_its_environment_after_a_while():
    """It says nothing and never goes away; over HTTP it is a lease that runs out."""

    async def main():
        async with serving(slots=2, idle_timeout_s=0.2) as (url, leases):
            session, ws = await raw(url)
            await said(ws, id=1, op="reset")
            http = url.replace("ws", "http", 1)
            async with httpx.AsyncClient() as client:
                answer = await client.post(f"{http}/reset")
                headers = {"X-Env-Session": answer.headers["X-Env-Session"]}
                assert leases.taken == 2
                await settled(lambda: leases.taken == 0)
                step = {"action": {"role": "assistant", "content": "echo"}}
                gone = await client.post(f"{http}/step", json=step, headers=headers)
                assert gone.status_code == 404
                assert "POST /reset begins one" in gone.json()["error"]["hint"]
            told = json.loads((await ws.receive()).data)
            assert "no request within 0.2 s" in told["error"]["message"]
            assert (await ws.receive()).type is aiohttp.WSMsgType.CLOSE
            await session.close()

    run(main())


def test_a_client_that_never_reads_is_cut_off(monkeypatch):
    monkeypatch.setattr("relax_agent.envs.serving.websocket.GRACE_S", 0.2)

    async def main():
        async with serving(slots=1, step_timeout_s=0.5) as (url, leases):
            session, ws = await raw(url)
            ws._response.connection.transport.pause_reading()
            for number in range(3):  # 10 MB each
                with contextlib.suppress(ConnectionError):
                    await ws.send_str(json.dumps({"id": number, "op": "reset"}))
                    action = {"role": "assistant", "content": "big"}
                    await ws.send_str(json.dumps({"id": 9, "op": "step", "action": action}))
            await settled(lambda: leases.episodes > 0)
            await settled(lambda: leases.taken == 0)
            await session.close()

    run(main())


# -- environments that fail -------------------------------------------------------------------


def test_a_step_past_the_servers_limit_ends_with_an_error_and_the_next_reset_works():
    async def main():
        async with serving(slots=1, step_timeout_s=0.3) as (url, leases):
            env = await make_async(url)
            await env.reset()
            with pytest.raises(EnvError, match=r"no answer within 0\.3 s"):
                await env.step(assistant("hang"))
            await env.reset(seed=1)
            assert (await env.step(assistant("echo")))[4]["turn"] == 1
            await env.close()
            http = url.replace("ws", "http", 1)
            env = await asyncio.to_thread(connect_env, http)
            await env.reset()
            with pytest.raises(EnvError, match=r"no answer within 0\.3 s"):
                await env.step(assistant("hang"))
            await env.reset()
            await env.close()
            await settled(lambda: leases.taken == 0)
            assert leases.left_behind == 0

    run(main())


def test_an_environment_that_swallows_its_cancellation_is_left_behind(monkeypatch):
    """T160: whoever asked gets an answer all the same, and the slot is free again."""
    for module in ("limits", "envs.serving.leases", "envs.serving.websocket"):
        monkeypatch.setattr(f"relax_agent.{module}.GRACE_S", 0.2)

    async def main():
        async with serving(slots=1, step_timeout_s=0.2) as (url, leases):
            env = await make_async(url)
            await env.reset()
            with pytest.raises(EnvError, match=r"no answer within 0\.2 s"):
                await env.step(assistant("stubborn"))
            await settled(lambda: leases.taken == 0)
            await env.reset()
            await env.close()

    loop = asyncio.new_event_loop()  # asyncio.run would wait for what never ends
    loop.run_until_complete(asyncio.wait_for(main(), LIMIT_S))
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False
    loop.close()


def test_processes_behind_the_server_die_and_are_replaced():
    async def main():
        async with serving(slots=2, isolation="process", step_timeout_s=5) as (url, _):
            env = await make_async(url)
            await env.reset()
            with pytest.raises(EnvError, match="ended by itself with exit code 7"):
                await env.step(assistant("die"))
            with pytest.raises(ResetNeeded):
                await env.step(assistant("echo"))
            await env.reset()
            assert (await env.step(assistant("echo")))[4]["turn"] == 1
            await env.close()

    run(main())


def test_an_environment_that_cannot_be_built_is_told_at_once():
    async def main():
        async with serving(kwargs={"fail_in": "constructor"}):
            pass

    with pytest.raises(EnvError, match="no constructor today"):
        run(main())


# -- connections that are lost ----------------------------------------------------------------


def test_a_connection_lost_between_episodes_is_made_anew_without_a_word():
    """T157: a server that closed an idle connection, or was restarted, is no failure."""

    async def main():
        async with serving(idle_timeout_s=0.1) as (url, leases):
            env = await make_async(url)
            for seed in range(3):
                await env.reset(seed=seed)
                await env.step(assistant("end"))
                await settled(lambda: leases.taken == 0)
            assert leases.episodes == 3
            await env.reset()
            await settled(lambda: leases.taken == 0)
            with pytest.raises(EnvError, match=r"lost.*|no request within"):  # in an episode it is
                await env.step(assistant("echo"))
            with pytest.raises(ResetNeeded):
                await env.step(assistant("echo"))
            await env.reset()
            await env.close()

    run(main())


def test_a_restarted_server_is_found_again_and_a_dead_one_is_an_error_within_seconds(tmp_path):
    async def main():
        process, url = start(tmp_path)
        env = await make_async(url)
        await env.reset()
        await env.step(assistant("end"))
        process.kill()
        process.communicate()
        with pytest.raises(EnvError, match="cannot be reached"):
            await env.reset()
        process, again = start(tmp_path, "--port", url.rpartition(":")[2])
        try:
            assert again == url
            await env.reset(seed=3)
            process.kill()
            played = await play(env, ScriptedPolicy(["echo", "end"]))
            assert played.status is EpisodeStatus.ENV_FAILURE
        finally:
            process.kill()
            process.communicate()
        await env.close()

    run(main())


def test_a_server_killed_in_the_middle_of_an_episode_keeps_the_trace(tmp_path):
    async def main():
        process, url = start(tmp_path)
        env = await make_async(url)

        class Killer:
            def act(self, messages, tools):
                if len(messages) > 3:
                    process.kill()
                    process.wait()
                return assistant("echo")

        started = time.monotonic()
        played = await play(env, Killer(), limits=PlayLimits(max_turns=5))
        assert played.status is EpisodeStatus.ENV_FAILURE
        assert "in the middle of an episode" in played.detail
        assert [message.text for message in played.messages[2:]] == ["echo", "echo", "echo"]
        assert time.monotonic() - started < 10
        process.communicate()
        await env.close()

    run(main())


def test_an_episode_belongs_to_one_event_loop(tmp_path):
    process, url = start(tmp_path)
    try:
        env = make(url)
        asyncio.run(env.reset())
        with pytest.raises(EnvError, match=r"one asyncio\.run"):
            asyncio.run(env.step(assistant("echo")))

        async def episode():
            await env.reset()
            await env.step(assistant("end"))

        asyncio.run(episode())
        asyncio.run(env.close())
    finally:
        process.kill()
        process.communicate()


# -- who may, and what may --------------------------------------------------------------------


def test_a_token_is_needed_for_all_but_the_probes(monkeypatch):
    async def main():
        async with serving(token="right") as (url, _):
            http = url.replace("ws", "http", 1)
            with pytest.raises(EnvError, match=r"bearer token.*RELAX_AGENT_ENV_TOKEN"):
                await make_async(url)
            with pytest.raises(EnvError, match="bearer token"):
                await make_async(url, token="wrong")
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await raw(url)
            assert refused.value.status == 401
            async with httpx.AsyncClient() as client:
                assert (await client.post(f"{http}/reset")).status_code == 401
                assert (await client.get(f"{http}/env")).status_code == 401
                assert (await client.get(f"{http}/healthz")).status_code == 200
                assert (await client.get(f"{http}/readyz")).status_code == 200
            env = await make_async(url, token="right")
            await env.reset()
            assert "right" not in env.spec.to_json()
            monkeypatch.setenv("RELAX_AGENT_ENV_TOKEN", "right")
            again = await make_async(EnvSpec.from_json(env.spec.to_json()).kwargs["url"])
            await again.reset()
            await env.close()
            await again.close()

    run(main())


def test_web_pages_from_elsewhere_are_refused():
    async def main():
        async with serving() as (url, _):
            http = url.replace("ws", "http", 1)
            origin = {"Origin": "https://evil.example"}
            async with httpx.AsyncClient() as client:
                assert (await client.post(f"{http}/reset", headers=origin)).status_code == 403
            async with aiohttp.ClientSession() as session:
                with pytest.raises(aiohttp.WSServerHandshakeError):
                    await session.ws_connect(f"{url}/ws", headers=origin)
                async with session.ws_connect(
                    f"{url}/ws", headers={"Origin": "http://localhost:3000"}
                ):
                    pass

    run(main())


@pytest.mark.parametrize(
    ("frames", "told", "code"),
    [
        (["{"], "not JSON", 1002),
        (["[1]"], "not a JSON object", 1002),
        ([b"\0\1"], "a binary frame came before", 1002),
        (['{"id":1,"op":"step","blobs":[3]}', b"12"], "of 3 bytes did not follow", 1002),
        (['{"id":1,"op":"step","blobs":[3]}', "{}"], "of 3 bytes did not follow", 1002),
        (['{"id":1,"op":"step","blobs":[-1]}'], "are the sizes", 1002),
        (['{"id":1,"op":"step","blobs":{}}', "{"], "", 1002),
        (['{"id":1,"op":"step","blobs":[99999999]}'], "of at most", 1009),
        (["x" * 1_000_001], "too large", 1009),
    ],
)
def test_garbage_ends_the_connection_and_nothing_else(frames, told, code):
    async def main():
        async with serving(max_request_bytes=1_000_000) as (url, leases):
            session, ws = await raw(url)
            for frame in frames:
                await (ws.send_bytes if isinstance(frame, bytes) else ws.send_str)(frame)
            text = ""
            while (message := await ws.receive()).type is aiohttp.WSMsgType.TEXT:
                text += message.data
            assert told in text or code == 1009
            assert ws.close_code == code
            await session.close()
            await settled(lambda: leases.taken == 0)
            env = await make_async(url)
            await env.reset()
            await env.close()

    run(main())


def test_a_wrong_request_is_answered_and_the_connection_stays():
    async def main():
        async with serving() as (url, _):
            session, ws = await raw(url)
            assert "no request 'fly'" in (await said(ws, id=1, op="fly"))["error"]["message"]
            assert "no request" in (await said(ws, id=2))["error"]["message"]
            assert (await said(ws, id=3, op="step", action=3))["error"]["type"] == "ResetNeeded"
            assert "seed" in (await said(ws, id=4, op="reset", seed="x"))["error"]["message"]
            assert (await said(ws, id=[5], op="reset"))["id"] == [5]
            assert "action" in (await said(ws, id=6, op="step", action=3))["error"]["message"]
            await session.close()
            http = url.replace("ws", "http", 1)
            async with httpx.AsyncClient() as client:
                for path, body, status in [
                    ("reset", b"{", 422),
                    ("reset", b'{"seed":"x"}', 422),
                    ("step", b"{}", 404),
                    ("fly", b"", 404),
                ]:
                    assert (await client.post(f"{http}/{path}", content=body)).status_code == status
                started = await client.post(f"{http}/reset")
                headers = {"X-Env-Session": started.headers["X-Env-Session"]}
                for body, status in [
                    ({"action": {"role": "user", "content": "x"}}, 422),
                    ({"action": {"role": "assistant", "content": "raise"}}, 500),
                    ({"action": {"role": "assistant", "content": "echo"}}, 409),
                ]:
                    answer = await client.post(f"{http}/step", json=body, headers=headers)
                    assert answer.status_code == status
                frame = headers | {"Content-Type": "application/x-relax-frame"}
                answer = await client.post(f"{http}/step", content=b"\xff" * 20, headers=frame)
                assert answer.status_code == 422
                assert (await client.post(f"{http}/close", headers=headers)).status_code == 200
                assert (await client.post(f"{http}/close", headers=headers)).status_code == 404

    run(main())


def test_an_http_request_that_is_too_large_is_refused():
    async def main():
        async with serving(max_request_bytes=1000) as (url, _), httpx.AsyncClient() as client:
            http = url.replace("ws", "http", 1)
            assert (await client.post(f"{http}/reset", content=b"x" * 2000)).status_code == 413

    run(main())


@pytest.mark.parametrize("address", ["ws://", "ftp://x", "ws:/x"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match="no address"):
        connect_env(address)


def test_what_serves_no_environment_is_told_from_one_that_does():
    async def main():
        answers = [
            b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
            b"SSH-2.0\r\n",
            b"",
        ]

        async def answer(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answers.pop(0))
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        while answers:
            with pytest.raises(EnvError, match=r"serves no environment|cannot be reached"):
                await make_async(url)
        server.close()
        with pytest.raises(EnvError, match="is it served"):
            await make_async(url)

    run(main())


def test_a_server_that_never_answers_is_given_up():
    silent = socket.create_server(("127.0.0.1", 0))
    with silent, pytest.raises(EnvError, match=r"did not answer within 0\.3 s"):
        make(f"ws://127.0.0.1:{silent.getsockname()[1]}", start_timeout_s=0.3)


# -- the process ------------------------------------------------------------------------------


def start(folder, *options):
    """Start ``relax-agent envs serve`` and return it with its URL."""
    port = folder / "port"
    port.unlink(missing_ok=True)
    argv = [sys.executable, "-c", "from relax_agent.cli import main; main()", "envs", "serve"]
    argv += [f"env_support:{PROBE}", "--port", "0", "--port-file", str(port), *options]
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(env_support.__file__).parent)},
    )
    deadline = time.monotonic() + LIMIT_S
    while not port.exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process, f"ws://127.0.0.1:{port.read_text().strip()}"


def test_sigterm_lets_running_episodes_end_and_begins_no_new_ones(tmp_path):
    async def main():
        process, url = start(tmp_path, "--arg", "word=served")
        one, two = await make_async(url), await make_async(url, slot_timeout_s=0.1)
        observation, _ = await one.reset()
        assert observation[0].text.startswith("served ")
        process.send_signal(signal.SIGTERM)
        async with httpx.AsyncClient() as client:
            http = url.replace("ws", "http", 1)

            async def ready():
                return (await client.get(f"{http}/readyz")).status_code

            async with asyncio.timeout(LIMIT_S):
                while await ready() == 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        with pytest.raises(EnvError):
            await two.reset()
        assert (await one.step(assistant("echo")))[4]["turn"] == 1
        assert (await one.step(assistant("end")))[2] is True
        assert await asyncio.to_thread(process.wait, LIMIT_S) == 0
        told = process.stderr.read()
        assert f"serving {PROBE} at {url}" in told
        assert f'relax_agent.make("{url}")' in told
        assert "1 running episodes" in told
        process.communicate()
        await one.close()
        await two.close()

    run(main())


def test_the_server_ends_with_whoever_started_it(tmp_path):
    process, _ = start(tmp_path, "--drain", "0")
    process.stdin.close()
    assert process.wait(LIMIT_S) == 0
    process.stderr.close()


def test_kill_minus_nine_of_the_server_leaves_no_process_of_an_environment(tmp_path):
    async def pid_of_one(url):
        return (await (await make_async(url)).reset())[1]["pid"]

    process, url = start(tmp_path, "--isolation", "process")
    pid = run(pid_of_one(url))
    assert pid != process.pid
    process.kill()
    process.communicate()
    deadline = time.monotonic() + LIMIT_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_beyond_the_loopback_there_is_always_a_token(tmp_path):
    path = tmp_path / "token"
    process, url = start(tmp_path, "--host", "0.0.0.0", "--token-file", str(path))
    try:
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(EnvError, match="bearer token"):
            make(url)
        assert make(url, token=path.read_text().strip()).tasks is not None
    finally:
        process.kill()
        assert path.read_text().strip() not in process.communicate()[1]
    process, url = start(tmp_path, "--host", "0.0.0.0")
    try:
        with pytest.raises(EnvError, match="bearer token"):
            make(url)
    finally:
        process.kill()
        token = process.communicate()[1].partition("RELAX_AGENT_ENV_TOKEN=")[2].split()[0]
        assert len(token) > 20


# -- nothing is left --------------------------------------------------------------------------


def env_threads():
    return [thread for thread in threading.enumerate() if thread.name == "relax-env"]


def test_three_hundred_episodes_leave_nothing():
    others = set(env_threads())  # left behind on purpose by other tests of this process

    async def main():
        async with serving("test/PlainProbe-v0", slots=20) as (url, leases):

            async def episode(number):
                env = await asyncio.to_thread(connect_env, url)
                last = ["end", "raise", "cut"][number % 3]
                await play(env, ScriptedPolicy(["echo", last]), seed=number)
                if number % 4 == 0:
                    with contextlib.suppress(TimeoutError, EnvError):
                        async with asyncio.timeout(0.01):
                            await env.reset()
                            await env.step(assistant("sleep 0.1"))
                await env.close()

            async def batch(count):
                for begin in range(0, count, 20):
                    await asyncio.gather(*(episode(begin + n) for n in range(20)))
                await settled(lambda: leases.taken == 0 and others.issuperset(env_threads()))
                gc.collect()
                return len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())

            before = await batch(40)
            after = await batch(300)
            assert after[0] <= before[0] + 2  # a connection may just be closing
            assert after[1] <= before[1] + 2
            assert threading.active_count() < 60  # those of pools stay

    run(main())
