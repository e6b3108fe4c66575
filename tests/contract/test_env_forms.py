"""An environment is the same wherever it runs: one suite for every form.

``async``: here. ``plain``: written with plain functions, in its thread. ``process``: in a process
of its own. ``ws`` and ``http``: behind a server.
"""

import asyncio
import contextlib
from dataclasses import replace

import env_support
import pytest
from env_support import FILM, MANY_PARTS, PICTURE, SECRET, SOUND, TASKS

from relax_agent.envs import PlayLimits, ScriptedPolicy, Transcript, make, make_async, play
from relax_agent.envs import spec as find_spec
from relax_agent.envs.guard import Guard
from relax_agent.envs.serving.leases import ServingLimits
from relax_agent.envs.serving.remote import connect_env
from relax_agent.envs.serving.server import open_env_server
from relax_agent.episode import EpisodeStatus
from relax_agent.errors import EnvError, InvalidAction, RelaxError, ResetNeeded, ToolErrorKind
from relax_agent.links import LinkedProcess
from relax_agent.messages import (
    AssistantMessage,
    Audio,
    Image,
    Rewrite,
    Text,
    ToolCall,
    Usage,
    Video,
    assistant,
    user,
)

FORMS = ("async", "plain", "process", "ws", "http")
SERVED = ("process", "ws", "http")
LIMIT_S = 60.0
LIMITS = ServingLimits(slots=4)


@contextlib.asynccontextmanager
async def opened(form, count=1, *, isolation=None, limits=LIMITS, **kwargs):
    """Yield ``count`` environments of a form, or the one."""
    name = "test/PlainProbe-v0" if form == "plain" else "test/Probe-v0"
    envs = []
    async with contextlib.AsyncExitStack() as stack:
        if form in ("ws", "http"):
            spec = replace(find_spec(name), kwargs=kwargs, isolation=isolation)
            url = await stack.enter_async_context(open_env_server(spec, limits=limits))
            for _ in range(count):
                if form == "ws":
                    envs.append(await make_async(url))
                else:
                    address = url.replace("ws", "http", 1)
                    envs.append(Guard(await asyncio.to_thread(connect_env, address)))
        elif form == "process":
            reused = [] if kwargs else [PROCESSES.pop() for _ in PROCESSES[:count]]
            more = range(count - len(reused))
            envs = reused + [await make_async(name, isolation="process", **kwargs) for _ in more]
        else:
            envs = [await make_async(name, **kwargs) for _ in range(count)]
        try:
            yield envs[0] if count == 1 else envs
        finally:
            for env in envs:
                if form == "process" and not kwargs and not env.closed:
                    PROCESSES.append(env)
                    continue
                with contextlib.suppress(RelaxError):
                    await env.close()


PROCESSES = []
"""Environments in processes, which outlive the loop of a test: a start takes a while."""


@pytest.fixture(scope="module", autouse=True)
def ended_processes():
    yield
    for env in PROCESSES:
        asyncio.run(env.close())
    PROCESSES.clear()


def run(main):
    async def bounded():
        async with asyncio.timeout(LIMIT_S):
            return await main

    return asyncio.run(bounded())


@pytest.fixture(params=FORMS)
def form(request):
    return request.param


@pytest.fixture(params=SERVED)
def served(request):
    return request.param


def say(text):
    return assistant(text)


def test_reset_gives_the_same_for_the_same_seed_everywhere(form):
    """T161 in every form: seeds travel, and two environments do not disturb each other."""

    async def numbers(env, seed):
        seen = [(await env.reset(seed=seed))[0][0].text]
        for _ in range(3):
            (message,), reward, *_ = await env.step(say("random"))
            seen.append(message.text)
            assert reward == 0.0
        return seen

    async def main():
        async with opened("async") as here, opened(form, 2) as (one, two):
            expected = await numbers(here, 7)
            both = await asyncio.gather(numbers(one, 7), numbers(two, 7))
            assert both == [expected, expected]
            assert await numbers(one, 8) != expected

    run(main())


def test_messages_arrive_with_every_byte_and_every_field(form):
    said = AssistantMessage(
        content=(Text("echo ü"), Image(PICTURE, "image/webp"), Audio(SOUND), Video(FILM)),
        reasoning="because",
        tool_calls=(
            ToolCall("shout", {"text": "ü", "deep": [{"a": None}, 1.5]}, "c1"),
            ToolCall("", {}, "c2", "not JSON"),
        ),
        usage=Usage(100, 20, 3),
        finish_reason="length",
    )

    async def main():
        async with opened(form) as env:
            (_, media), info = await env.reset(options={"task": "train-1"})
            assert media == MANY_PARTS
            assert info["task"] == "train-1"
            observation, reward, terminated, truncated, info = await env.step(said)
            assert observation == [user(said.content)]
            assert (reward, terminated, truncated) == (0.25, False, False)
            assert info["metrics"] == {"length": 3.5}
            assert info["same"] == [
                "because",
                [
                    ["shout", {"text": "ü", "deep": [{"a": None}, 1.5]}, "c1", None],
                    ["", {}, "c2", "not JSON"],
                ],
                [100, 20, 3],
                "length",
                None,
            ]
            observation, *_ = await env.step(say("echo"))
            assert observation == [user("echo")]
            observation, *_ = await env.step(say("rewrite"))
            assert observation == Rewrite((user("anew"), MANY_PARTS), "compaction")
            observation, *_ = await env.step(say("big"))
            assert observation[0].media[0].data == PICTURE * 1000

    run(main())


def test_the_order_of_calls_is_held_and_an_episode_ends_once(form):
    async def main():
        async with opened(form, word="new") as env:
            with pytest.raises(ResetNeeded):
                await env.step(say("echo"))
            await env.reset()
            with pytest.raises(InvalidAction):
                await env.step("echo")
            _, reward, terminated, truncated, info = await env.step(say("end"))
            assert (reward, terminated, truncated) == (1.0, True, False)
            assert info["metrics"] == {"success": 1.0}
            with pytest.raises(ResetNeeded):
                await env.step(say("echo"))
            await env.reset()
            assert (await env.step(say("cut")))[1:4] == (-0.5, False, True)
            with pytest.raises(EnvError, match="no task 'nowhere'"):
                await env.reset(options={"task": "nowhere"})
            await env.reset()
            await env.close()
            await env.close()
            with pytest.raises(ResetNeeded):
                await env.step(say("echo"))
            with pytest.raises(ResetNeeded):
                await env.reset()

    run(main())


def test_what_goes_wrong_inside_is_told_and_the_next_episode_works(form):
    words = {
        "raise": r"step\(\) raised ValueError: of",
        "envraise": "the board is gone → buy another one",
        "exit": "3",
        "four": "must return",
        "nan": "nan",
        "string": "list of Message",
    }

    async def main():
        async with opened(form) as env:
            for word, told in words.items():
                await env.reset(seed=1)
                with pytest.raises(EnvError, match=told):
                    await env.step(say(word))
                with pytest.raises(ResetNeeded):
                    await env.step(say("echo"))
            await env.reset()
            _, _, _, _, info = await env.step(say("echo"))
            assert info["turn"] == 1
        async with opened(form, fail_in="reset") as env:
            with pytest.raises(EnvError, match=r"reset\(\) raised RuntimeError: no reset today"):
                await env.reset()
        async with opened(form, fail_in="close") as env:
            await env.reset()
            with pytest.raises((EnvError, RuntimeError), match="no close today"):
                await env.close()
            await env.close()
        with pytest.raises(EnvError, match=r"constructor raised RuntimeError: no constructor"):
            async with opened(form, fail_in="constructor"):
                pass

    run(main())


def test_tools_have_the_same_schemas_and_give_the_same_results(form):
    async def main():
        async with opened("async") as here, opened(form) as env:
            assert env.tools.names == ("shout", "draw")
            assert env.tools.schemas() == here.tools.schemas()
            await env.reset()
            results = [
                await env.tools.call(call)
                for call in (
                    ToolCall("shout", {"text": "a", "times": 3}, "1"),
                    ToolCall("draw", {}, "2"),
                    ToolCall("shout", {"text": "fail"}),
                    ToolCall("shout", {"text": 5}),
                    ToolCall("shuot", {}),
                )
            ]
            assert results[0].text == "AAA"
            assert results[1].content == (Text("here"), Image(PICTURE, "image/png"))
            assert [result.error for result in results] == [
                None,
                None,
                ToolErrorKind.DENIED,
                ToolErrorKind.INVALID_ARGUMENTS,
                ToolErrorKind.NOT_FOUND,
            ]
            assert "whisper" in results[2].text
            await env.step(say("tools"))
            assert [item["function"]["name"] for item in env.tools.schemas()] == ["draw"]
            await env.close()  # it has changed for good

    run(main())


def test_tasks_are_known_by_their_ids(form):
    async def main():
        async with opened(form) as env:
            assert list(env.tasks.ids("train")) == [f"train-{n}" for n in range(5)]
            assert list(env.tasks.ids("eval")) == ["eval-0", "eval-1"]
            assert env.tasks.fingerprint() == TASKS.fingerprint()
            order = env.tasks.sample_order(3)
            assert [next(order) for _ in range(7)] == [
                next(each) for each in [TASKS.sample_order(3)] for _ in range(7)
            ]
            if form in SERVED:
                with pytest.raises(EnvError):
                    env.tasks["train-1"]

    run(main())


def test_group_rewards_see_the_whole_conversation(form):
    call = ToolCall("shout", {"text": "fail"}, "1")
    failed = env_support.Toolset([env_support.shout])

    async def main():
        result = await failed.call(call)
        member = Transcript(
            [user([Image(PICTURE)]), assistant(tool_calls=[call]), result.to_message(call)]
        )
        member.calls = [(call, result)]
        member.reward, member.metrics = 0.5, {"success": 0.0}
        async with opened(form) as env:
            assert await env.score_group("train-1", [member, Transcript([])]) == [11.5, 0.0]
            assert await env.score_group("train-1", []) == []

    run(main())


def test_a_cancelled_step_leaves_an_environment_that_can_be_reset(form):
    async def main():
        async with opened(form) as env:
            await env.reset()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await env.step(say("hang"))
            with pytest.raises(ResetNeeded):
                await env.step(say("echo"))
            if form == "plain":  # a thread cannot be killed
                with pytest.raises(EnvError, match="is dead"):
                    await env.reset()
                return
            await env.reset(seed=5)
            assert (await env.step(say("echo")))[4]["turn"] == 1

    run(main())


def test_cancelling_in_the_middle_of_a_large_reply_does_no_harm(served):
    """T160: at whatever moment; whoever asks next gets an answer, and the right one."""

    async def main():
        async with opened(served) as env:
            for delay_s in (0.0, 0.002, 0.005, 0.01, 0.02):
                await env.reset(seed=5)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay_s):
                        await env.step(say("big"))
                observation, _ = await env.reset(seed=5)
                assert observation[0].text == "hello 668835601"
                assert (await env.step(say("echo")))[0] == [user("echo")]

    run(main())


def test_one_that_hangs_holds_up_no_other(form):
    async def main():
        async with opened(form, 2) as (one, two):
            await asyncio.gather(one.reset(), two.reset())
            hanging = asyncio.create_task(one.step(say("hang")))
            for _ in range(5):
                await two.step(say("echo"))
            assert not hanging.done()
            hanging.cancel()
            with pytest.raises(asyncio.CancelledError):
                await hanging

    run(main())


def test_the_driver_keeps_the_trace_of_a_failed_episode(form):
    """``play`` over every form: nothing raises, nothing is lost."""

    async def main():
        async with opened(form) as env:
            script = ScriptedPolicy(["echo one", "echo two", "raise"])
            played = await play(env, script, task="train-2", seed=3)
            assert played.status is EpisodeStatus.ENV_FAILURE
            assert "of" in played.detail
            texts = [message.text for message in played.messages[2:]]
            assert texts == ["echo one", "echo one", "echo two", "echo two", "raise"]
            assert played.reward == 0.5
            limits = PlayLimits(step_timeout_s=0.2)
            if form != "plain":
                played = await play(env, ScriptedPolicy(["echo", "hang"]), limits=limits)
                assert not played.status.trainable or played.truncated
                assert played.turns >= 1

    run(main())


def test_an_info_that_cannot_travel_names_its_key(served):
    async def main():
        async with opened(served) as env:
            await env.reset()
            with pytest.raises(EnvError, match=r"info\['board'\] of step\(\) cannot travel"):
                await env.step(say("badinfo"))
            await env.reset()
            info = (await env.step(say("info")))[4]
            assert info == {"tuple": [1, 2], "deep": {"nan": None, "text": "ü?"}, "3": "three"}

    run(main())


@contextlib.asynccontextmanager
async def tapped(url):
    """Yield an address that leads to ``url``, and a list of all that passes."""
    seen = []
    host, _, port = url.removeprefix("ws://").partition(":")

    async def pump(reader, writer):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                seen.append(data)
                writer.write(data)
        writer.close()

    async def connect(reader, writer):
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer))

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen
    server.close()


async def everything(env):
    """Use all that an environment has."""
    await env.reset(seed=1, options={"task": "train-1"})
    await env.step(say("echo"))
    await env.tools.call(ToolCall("shout", {"text": "a"}))
    with contextlib.suppress(EnvError):
        await env.reset(options={"task": "nowhere"})
    with contextlib.suppress(EnvError):
        await env.reset()
        await env.step(say("raise"))
    await env.score_group("train-1", [Transcript([say("a")])])
    await env.close()


def test_no_gold_answer_is_on_the_wire():
    """Neither in the manifest nor in any frame, sniffed from the socket."""

    async def main():
        async with open_env_server("test/Probe-v0") as url, tapped(url) as (address, seen):
            await everything(await make_async(address))
            http = address.replace("ws", "http", 1)
            await everything(await asyncio.to_thread(connect_env, http))
            traffic = b"".join(seen)
            assert b'"train-1"' in traffic
            assert PICTURE[:100] in traffic  # as it is, not as base64
            assert SECRET.encode() not in traffic

    run(main())


def test_no_gold_answer_leaves_the_process(monkeypatch):
    received = []
    original = LinkedProcess._received

    def sniffing(self):
        for header, blobs in original(self):
            received.append((header, blobs))
            yield header, blobs

    monkeypatch.setattr(LinkedProcess, "_received", sniffing)

    async def main():
        env = await make_async("test/Probe-v0", isolation="process")
        await everything(env)

    run(main())
    assert "train-1" in repr(received)
    assert SECRET not in repr(received)


def test_an_environment_in_a_process_needs_no_loop_that_lasts():
    """``asyncio.run`` for each call: what a first script looks like."""
    env = make("test/Probe-v0", isolation="process")
    asyncio.run(env.reset(seed=2))
    assert asyncio.run(env.step(say("echo")))[4]["turn"] == 1
    asyncio.run(env.close())
