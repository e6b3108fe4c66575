"""The HTTP client against the scripted server: time limits, faults, connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from relax_agent.engines import GenerateRequest, SamplingParams
from relax_agent.engines.client import EngineClient, _RunningClock
from relax_agent.engines.folder import ModelFacts
from relax_agent.engines.scripted import Fault, Reply, ScriptedEngine
from relax_agent.engines.scripted_server import ScriptedServer
from relax_agent.errors import EngineRejected, EngineUnavailable, MissingLogprobs


def request(tokens=3, rid="r"):
    return GenerateRequest([1, 2, 3], SamplingParams(tokens), rid)


@contextlib.asynccontextmanager
async def served(script=None, *, token=None, client_token=None, options=None, **limits):
    engine = ScriptedEngine(script, **(options or {}))
    async with ScriptedServer(engine, token=token) as server:
        client = EngineClient(server.url, token=client_token or token, **limits)
        async with client:
            yield engine, client


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - the engine tells nobody
            await asyncio.sleep(0.001)


def ask(reply, **limits):
    async def main():
        async with served([reply], **limits) as (_, client):
            return await client.generate(request())

    return asyncio.run(main())


def test_an_answer_crosses_the_wire_unchanged():
    answer = ask(Reply([5, 6, 7], [-0.25, -0.5, -0.125]))
    assert (answer.output_ids, answer.logprobs) == ([5, 6, 7], [-0.25, -0.5, -0.125])


@pytest.mark.parametrize("fault", [Fault.NO_LOGPROBS, Fault.WRONG_TOKEN])
def test_missing_logprobs_are_an_error(fault):
    """T92"""
    with pytest.raises(MissingLogprobs):
        ask(Reply([5, 6, 7], fault=fault))


def test_ranked_logprobs_are_read_by_token():
    """T91"""
    assert ask(Reply([5, 6, 7], [-2.0, -3.0, -4.0], fault=Fault.TOP_K)).logprobs == [-2, -3, -4]


def test_a_refusal_carries_the_engines_words():
    with pytest.raises(EngineRejected, match="refused request r: scripted"):
        ask(Reply([5], fault=Fault.REJECT))


def test_a_server_error_is_an_engine_that_is_unavailable():
    with pytest.raises(EngineUnavailable, match="HTTP 500"):
        ask(Reply([5], fault=Fault.ERROR))


def test_silence_ends_at_the_time_limit():
    with pytest.raises(EngineUnavailable, match=r"r within 0\.2 s"):
        ask(Reply([5], fault=Fault.SILENCE), generate_timeout_s=0.2)


def test_death_fails_the_request_and_all_others():
    async def main():
        script = lambda r: Reply([5] * 50, fault=Fault.DEATH if r.rid == "bad" else None)  # noqa: E731
        step = asyncio.Semaphore(0)
        async with served(script, options={"step": step.acquire}) as (engine, client):
            tasks = [client.generate(request(50, rid)) for rid in ("good", "bad")]
            waiting = asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: len(engine.requests) == 2)
            for _ in range(200):
                step.release()
            results = await waiting
            return results, await client.health()

    results, healthy = asyncio.run(main())
    assert [type(result) for result in results] == [EngineUnavailable] * 2
    assert healthy is False


def test_nobody_listening_is_unavailable_and_unhealthy():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"

        async def main():
            async with EngineClient(url, name="engine 3") as client:
                with pytest.raises(EngineUnavailable, match="engine 3 gave no answer"):
                    await client.generate(request())
                return await client.health(), await client.serves()

        assert asyncio.run(main()) == (False, False)


@pytest.mark.parametrize("sent", ["wrong", None])
def test_a_wrong_token_is_refused(sent):
    async def main():
        async with ScriptedServer(ScriptedEngine(), token="secret") as server:
            async with EngineClient(server.url, token=sent) as client:
                with pytest.raises(EngineRejected, match="Unauthorized"):
                    await client.model_info()
            async with EngineClient(server.url, token="secret") as client:
                assert await client.serves()

    asyncio.run(main())


def test_paused_time_does_not_count():
    """T143: the answer takes longer than its limit only because of the pause."""

    async def main():
        async with served(generate_timeout_s=0.4) as (_, client):
            await client.pause("retract")
            waiting = asyncio.ensure_future(client.generate(request()))
            done, _ = await asyncio.wait({waiting}, timeout=0.8)
            assert not done
            await client.resume()
            return await waiting

    assert asyncio.run(main()).finish_reason == "length"


def test_the_running_clock_stands_still_while_paused(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("relax_agent.engines.client.time.monotonic", lambda: now[0])
    clock = _RunningClock()
    start = clock.now()
    for change, after in [("stop", 5), ("stop", 2), ("start", 3), ("start", 4)]:
        getattr(clock, change)()
        now[0] += after
    assert clock.now() - start == 7


def test_cancelling_a_request_frees_it_in_the_engine():
    async def main():
        step = asyncio.Semaphore(2)
        async with served(options={"step": step.acquire}) as (engine, client):
            task = asyncio.ensure_future(client.generate(request(50)))
            await until(lambda: engine.requests)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: not engine.running)

    asyncio.run(main())


def test_a_pooled_socket_that_the_server_closed_is_replaced():
    """T157"""
    connections = []

    async def serve(reader, writer):
        connections.append(writer)
        first = len(connections) == 1
        for count in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(2)  # the body {}
            assert head.startswith(b"POST /flush_cache")
            if first and count == 1:
                break
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
        writer.close()

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, EngineClient(url) as client:
            await client.flush_cache()
            await client.flush_cache()

    asyncio.run(main())
    assert len(connections) == 2


def test_token_ids_outside_a_known_vocabulary_are_not_sent():
    async def main():
        engine = ScriptedEngine()
        async with ScriptedServer(engine) as server:
            facts = ModelFacts(vocab_size=10, context_length=100, routes=None)
            async with EngineClient(server.url, facts=facts) as client:
                for ids in ([], [10], [-1, 3]):
                    with pytest.raises(EngineRejected, match="vocabulary has 10"):
                        await client.generate(GenerateRequest(ids, SamplingParams(1), "r"))
        return engine.requests

    assert asyncio.run(main()) == []


def test_a_client_takes_no_other_program_for_its_engine():
    async def main():
        async with (
            ScriptedServer(ScriptedEngine()) as server,
            EngineClient(server.url, model_path="/models/mine") as client,
        ):
            return await client.serves()

    assert asyncio.run(main()) is False


def test_closing_twice_is_harmless():
    async def main():
        async with served() as (_, client):
            await client.generate(request())
            await client.close()
            await client.close()
            return await client.generate(request())

    assert asyncio.run(main()).finish_reason == "length"
