"""Tools with state: one instance a session, closed for sure; deadlines; the trace."""

import asyncio
import contextlib
import json
import time
from functools import partial

import pytest

from relax_agent import ScriptedPolicy, Toolset, tool
from relax_agent.envs import Task, TaskSet, ToolEnv, play
from relax_agent.errors import ToolDeclarationError, ToolError, ToolErrorKind
from relax_agent.messages import Image, Text, ToolCall, assistant
from relax_agent.tools import JsonlTrace, call_context, current_call, trace_calls
from relax_agent.tools.running import LEFT_BEHIND

LIMIT_S = 30


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(LIMIT_S):
            return await coroutine

    return asyncio.run(bounded())


class Log:
    """What instances of :class:`Notebook` have gone through."""

    def __init__(self):
        self.opened, self.closed, self.live = 0, 0, 0


LOG = Log()


class Notebook:
    """Keeps lines."""

    def __init__(self, prefix: str = ""):
        self.prefix, self.lines = prefix, []

    async def open(self):
        LOG.opened += 1
        LOG.live += 1

    async def close(self):
        LOG.closed += 1
        LOG.live -= 1

    @tool
    async def write(self, line: str) -> list[str]:
        """Write a line."""
        await asyncio.sleep(0)
        self.lines.append(self.prefix + line)
        return self.lines

    @tool
    def read(self) -> list[str]:
        """Read all lines."""
        return self.lines

    @tool(requires_session=False)
    async def count(self) -> int:
        """Count the lines."""
        return len(self.lines)


@pytest.fixture(autouse=True)
def fresh_log():
    LOG.__init__()


def write(line, number=0):
    return ToolCall("write", {"line": line}, f"c{number}")


def test_each_session_has_an_instance_of_its_own_opened_at_the_first_call():
    async def main():
        toolset = Toolset([Notebook])
        async with toolset.session() as one, toolset.session() as other:
            assert LOG.opened == 0
            await one.call(write("a"))
            await one.call(write("b"))
            await other.call(write("c"))
            assert LOG.opened == 2
            return (await one.call(ToolCall("read", {}))).text, (
                await other.call(ToolCall("read", {}))
            ).text

    assert run(main()) == ('["a", "b"]', '["c"]')
    assert (LOG.closed, LOG.live) == (2, 0)


def test_a_session_may_be_opened_before_its_first_call_and_is_closed_once():
    async def main():
        session = Toolset([Notebook]).session()
        await session.open()
        assert LOG.opened == 1
        assert await session.close() == []
        await session.close()
        with pytest.raises(ToolError, match="closed"):
            await session.open()
        return await session.call(write("a"))

    assert run(main()).error is ToolErrorKind.UNAVAILABLE
    assert LOG.closed == 1


def test_calls_of_one_session_run_in_the_order_in_which_they_came():
    async def main():
        async with Toolset([Notebook]).session() as session:
            calls = [session.call(write(str(number))) for number in range(20)]
            return (await asyncio.gather(*calls))[-1].text

    assert json.loads(run(main())) == [str(number) for number in range(20)]


def test_outside_a_session_state_is_refused_or_lasts_for_the_call():
    async def main():
        toolset = Toolset([Notebook])
        denied = await toolset.call(write("a"))
        return denied, await toolset.call(ToolCall("count", {}))

    denied, counted = run(main())
    assert denied.error is ToolErrorKind.DENIED
    assert "needs a session" in denied.text
    assert counted.text == "0"
    assert (LOG.opened, LOG.closed) == (1, 1)


def test_a_function_may_ask_for_a_session_too():
    @tool(requires_session=True)
    async def whose() -> str:
        """Tell the session."""
        return current_call().session or "none"

    async def main():
        toolset = Toolset([whose])
        denied = await toolset.call(ToolCall("whose", {}))
        async with toolset.session() as session:
            return denied.error, session.id, (await session.call(ToolCall("whose", {}))).text

    denied, session_id, told = run(main())
    assert (denied, told) == (ToolErrorKind.DENIED, session_id)


def test_a_class_is_made_with_the_arguments_of_its_partial():
    async def main():
        async with Toolset([partial(Notebook, prefix="> ")]).session() as session:
            return (await session.call(write("a"))).text

    assert run(main()) == '["> a"]'


def needs_arguments():
    class Needy:
        def __init__(self, folder):
            pass

        @tool
        def look(self) -> str:
            """Look."""

    return Needy


@pytest.mark.parametrize(
    ("cls", "words"),
    [(needs_arguments(), "functools.partial"), (int, "has no tools"), (Log, "has no tools")],
)
def test_a_class_that_cannot_be_a_session_says_why(cls, words):
    with pytest.raises(ToolDeclarationError, match=words):
        Toolset([cls])


class Slow:
    """Does not open in time, the first time."""

    tries = 0
    closed = 0

    async def open(self):
        Slow.tries += 1
        if Slow.tries == 1:
            await asyncio.Event().wait()

    async def close(self):
        Slow.closed += 1

    @tool(timeout=0.05)
    async def go(self) -> str:
        """Go."""
        return "gone"


def test_start_up_is_part_of_the_time_limit_and_is_undone():
    """T152: a boot that never returns fails at the limit; the next call tries again."""

    async def main():
        Slow.tries = Slow.closed = 0
        async with Toolset([Slow]).session() as session:
            first = await session.call(ToolCall("go", {}))
            assert Slow.closed == 1
            return first, await session.call(ToolCall("go", {}))

    first, second = run(main())
    assert (first.error, second.text) == (ToolErrorKind.TIMEOUT, "gone")
    assert Slow.closed == 2


def test_what_fails_to_open_is_a_failure_with_words():
    class Broken:
        async def open(self):
            raise OSError("no display")

        @tool
        async def go(self) -> str:
            """Go."""

    async def main():
        async with Toolset([Broken]).session() as session:
            return await session.call(ToolCall("go", {}))

    result = run(main())
    assert result.error is ToolErrorKind.CRASHED
    assert result.text == "Error: go: Broken could not be opened: OSError: no display"


def test_closing_ends_the_calls_that_run():
    begun = asyncio.Event()

    class Hanging:
        @tool
        async def hang(self) -> str:
            """Hang."""
            begun.set()
            await asyncio.Event().wait()

    async def main():
        session = Toolset([Hanging]).session()
        call = asyncio.ensure_future(session.call(ToolCall("hang", {})))
        await begun.wait()
        await session.close()
        return await call

    result = run(main())
    assert result.error is ToolErrorKind.UNAVAILABLE
    assert "closed meanwhile" in result.text


def test_what_does_not_close_is_told_and_holds_nobody_up(monkeypatch):
    monkeypatch.setattr("relax_agent.tools.sessions.CLOSE_S", 0.05)
    monkeypatch.setattr("relax_agent.limits.GRACE_S", 0.05)

    class Stuck:
        def __init__(self, how=None):
            self.how = how

        async def close(self):
            if self.how:
                raise self.how
            await asyncio.Event().wait()

        @tool
        async def go(self) -> str:
            """Go."""

    async def main():
        found = []
        for cls in (Stuck, partial(Stuck, OSError("busy"))):
            session = Toolset([cls]).session()
            await session.call(ToolCall("go", {}))
            found += await session.close()
        return found

    assert run(main()) == ["Stuck.close() took over 0.05 s", "Stuck.close(): OSError: busy"]


class Diary(ToolEnv):
    tools = (Notebook,)
    tasks = TaskSet([Task("a", "Write a.", "a")])

    def score(self, task, transcript):
        return 1.0


def test_an_environment_opens_its_session_for_the_episode_and_closes_it_with_it():
    policy = ScriptedPolicy([[write("a", 0), write("b", 1)], write("c"), "done"])
    record = run(play(Diary(), policy, task="a"))
    told = [message.text for message in record.messages if message.role == "tool"]
    assert told == ['["a"]', '["a", "b"]', '["a", "b", "c"]']
    assert (LOG.opened, LOG.live) == (1, 0)


@pytest.mark.parametrize("end", ["reset", "close"])
def test_an_episode_that_is_cut_short_closes_its_session_too(end):
    async def main():
        env = Diary()
        await env.reset(options={"task": "a"})
        await env.step(assistant(tool_calls=[write("a")]))
        assert LOG.live == 1
        await (env.reset(options={"task": "a"}) if end == "reset" else env.close())
        assert LOG.live == 0
        await env.close()

    run(main())


# -- limits of time -------------------------------------------------------------------------------


@tool(timeout=0.05)
async def stubborn() -> str:
    """Swallow every cancellation, for a while."""
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.5)
    return "late"


def test_a_tool_that_swallows_its_cancellation_does_not_outlive_its_limit(monkeypatch):
    monkeypatch.setattr("relax_agent.tools.running.GRACE_S", 0.05)

    async def main():
        before = LEFT_BEHIND.total
        result = await Toolset([stubborn]).call(ToolCall("stubborn", {}))
        left = LEFT_BEHIND.total - before, LEFT_BEHIND.running
        while LEFT_BEHIND.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return result, left

    result, left = run(main())
    assert result.error is ToolErrorKind.TIMEOUT
    assert result.duration_s < 0.4
    assert left == (1, 1)


@tool(timeout=20, idempotent=True, retries=3)
async def hang() -> str:
    """Hang."""
    await asyncio.Event().wait()


def test_a_deadline_around_a_call_is_its_limit_retries_and_all():
    async def main():
        with call_context(timeout_s=60), call_context(timeout_s=0.05), call_context(timeout_s=60):
            return await Toolset([hang]).call(ToolCall("hang", {}))

    result = run(main())
    assert result.error is ToolErrorKind.TIMEOUT
    assert result.duration_s < 5


# -- the trace ------------------------------------------------------------------------------------


def test_every_call_is_an_event_with_its_episode(tmp_path):
    """T59: the trace keeps every attempt with its outcome."""
    path = tmp_path / "deep" / "calls.jsonl"
    odd = ToolCall("abacus", {"secret": "x" * 5000})
    policy = ScriptedPolicy([write("a"), odd, "done"])
    with JsonlTrace(path) as sink, trace_calls(sink):
        record = run(play(Diary(), policy, task="a"))
    run(play(Diary(), ScriptedPolicy([write("a"), "done"]), task="a"))  # nobody listens any more
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["tool"], first["outcome"], first["arguments"]) == ("write", "ok", '{"line": "a"}')
    assert first["episode"] == second["episode"] == record.id
    assert first["session"] is not None
    assert first["result_bytes"] == len('["a"]')
    assert 0 <= first["queued_s"] <= first["duration_s"]
    assert second["outcome"] == "not_found"
    assert len(second["arguments"]) == 2000 < second["arguments_size"]


def test_waiting_for_a_place_is_told_apart_from_running():
    release = asyncio.Event()

    @tool(max_concurrency=1)
    async def one() -> str:
        """One at a time."""
        await release.wait()
        return "ok"

    async def main():
        events = []
        toolset = Toolset([one])
        with trace_calls(events.append):
            calls = [asyncio.ensure_future(toolset.call(ToolCall("one", {}))) for _ in range(2)]
            await asyncio.sleep(0.02)
            release.set()
            await asyncio.gather(*calls)
        return events

    first, second = run(main())
    assert first.queued_s < 0.01 < second.queued_s <= second.duration_s


def test_a_sink_that_fails_is_told_no_more_and_harms_no_call(caplog):
    def broken(event):
        raise OSError("disk full")

    async def main():
        toolset, events = Toolset([Notebook]), []
        with trace_calls(events.append), trace_calls(broken):
            for _ in range(2):
                assert (await toolset.call(ToolCall("count", {}))).ok
        return events

    assert len(run(main())) == 2
    assert caplog.text.count("told no more") == 1


def test_media_are_described_in_the_trace_not_copied():
    @tool
    async def look(image: Image) -> list:
        """Look."""
        return [image, Text("seen")]

    events = []
    with trace_calls(events.append):
        run(Toolset([look]).call(ToolCall("look", {"image": Image(b"x" * 1000)})))
    assert events[0].arguments == '{"image": "(Image, 1,000 bytes)"}'
    assert (events[0].media, events[0].result_bytes) == (1, 1004)
