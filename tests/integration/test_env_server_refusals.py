"""What an environment server refuses: an answer each time, and nothing in its log."""

import asyncio
import contextlib
import json
import logging

import aiohttp
import env_support  # noqa: F401 - registers the probes
import httpx
import pytest

from relax_agent.envs import make_async
from relax_agent.envs.serving.leases import ServingLimits
from relax_agent.envs.serving.server import open_env_server
from relax_agent.errors import EnvError
from relax_agent.messages import AssistantMessage, Image, Text, assistant

PROBE = "test/Probe-v0"


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(60):
            return await coroutine

    return asyncio.run(bounded())


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "null", "file://", "http://[::1", b"\xff", "http://localhost.evil.de"],
)
def test_a_page_from_elsewhere_is_refused_however_it_names_itself(origin):
    async def main():
        async with open_env_server(PROBE) as url, httpx.AsyncClient() as client:
            http = url.replace("ws", "http", 1)
            reply = await client.post(f"{http}/reset", headers={"Origin": origin})
            assert reply.status_code == 403

    run(main())


def test_a_refused_connection_is_no_fault_of_the_server(caplog):
    log = logging.getLogger("uvicorn.error")

    async def main():
        async with (
            open_env_server(PROBE, limits=ServingLimits(slots=1)) as url,
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{url}/ws"),
        ):
            log.addHandler(caplog.handler)  # only now: a server that starts sets up its own
            for headers, status in (({}, 503), ({"Origin": "https://evil.example"}, 403)):
                with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                    await session.ws_connect(f"{url}/ws", headers=headers)
                assert refused.value.status == status

    try:
        run(main())
    finally:
        log.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize("op", [[], {}, None, 1, True, "fly", "__init__"])
def test_whatever_is_no_request_is_called_so(op):
    async def main():
        async with (
            open_env_server(PROBE) as url,
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{url}/ws") as ws,
        ):
            await ws.send_str(json.dumps({"id": 1, "op": op}))
            reply = json.loads((await ws.receive()).data)
            assert reply["error"]["type"] == "WireError"
            assert "there is no request" in reply["error"]["message"]

    run(main())


@pytest.mark.parametrize("scheme", ["ws", "http"])
def test_media_that_are_too_large_are_refused_in_words_and_the_connection_stays(scheme):
    async def main():
        limits = ServingLimits(max_request_bytes=100_000)
        async with open_env_server(PROBE, limits=limits) as url:
            env = await make_async(url.replace("ws", scheme, 1))
            await env.reset()
            await env.step(assistant("echo"))
            large = Image(bytes(100_001), "image/png")
            with pytest.raises(EnvError, match=r"100,001 bytes of media.* takes 100,000 at most"):
                await env.step(AssistantMessage(content=(Text("echo"), large)))
            connection = env.unwrapped._connection
            await env.reset()
            assert env.unwrapped._connection is connection
            fits = Image(bytes(90_000), "image/png")
            assert (await env.step(AssistantMessage(content=(Text("echo"), fits))))[1] == 0.25
            await env.close()

    run(main())


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /reset HTTP/1.1\r\nHost: x\r\nContent-Le",
        b"POST /reset HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n|GET /heal",
    ],
)
def test_a_request_that_never_ends_does_not_keep_its_connection(sent, monkeypatch):
    monkeypatch.setattr("relax_agent.tools.one_write.LOOK_S", 0.1)

    async def main():
        async with open_env_server(PROBE) as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.split(":")[2]))
            first, _, rest = sent.partition(b"|")
            writer.write(first)
            if rest:
                await reader.readuntil(b'{"ok":true}')
                writer.write(rest)
            with contextlib.suppress(ConnectionError):
                while await reader.read(1000):
                    pass
            writer.close()

    run(main())


@pytest.mark.parametrize("scheme", ["ws", "http"])
def test_a_connection_whose_requests_do_end_is_kept(scheme, monkeypatch):
    monkeypatch.setattr("relax_agent.tools.one_write.LOOK_S", 0.05)

    async def main():
        async with open_env_server(PROBE) as url:
            env = await make_async(url.replace("ws", scheme, 1))
            await env.reset()
            await env.step(assistant("sleep 0.3"))
            await asyncio.sleep(0.3)
            assert (await env.step(assistant("echo")))[1] == 0.25
            await env.close()

    run(main())
