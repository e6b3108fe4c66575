"""The guard around every environment: order of calls, actions and results, in clear words."""

import asyncio
import math
from fractions import Fraction

import numpy as np
import pytest

from relax_agent.envs import Env, EnvSpec, SyncEnv, Transcript, Wrapper, make
from relax_agent.envs.guard import Guard
from relax_agent.errors import EnvBusy, EnvError, InvalidAction, ResetNeeded, ToolError
from relax_agent.messages import AssistantMessage, Message, Rewrite, assistant, user


class Counter(Env):
    """Ends after ``length`` steps."""

    def __init__(self, length: int = 3) -> None:
        self.left = self.length = length
        self.closed = 0

    async def reset(self, *, seed=None, options=None):
        self.left = self.length
        return [user("go")], {}

    async def step(self, action):
        self.left -= 1
        return [user("on")], 1.0, self.left == 0, False, {}

    async def close(self):
        self.closed += 1


class SyncCounter(SyncEnv):
    """The same, written with plain functions."""

    def __init__(self, length: int = 3) -> None:
        self.left = self.length = length

    def reset(self, *, seed=None, options=None):
        self.left = self.length
        return [user("go")], {}

    def step(self, action):
        self.left -= 1
        return [user("on")], 1.0, self.left == 0, False, {}


class Scalar:
    """A tensor without dimensions, as PyTorch and JAX have them."""

    shape = ()

    def __init__(self, value) -> None:
        self.value = value

    def item(self):
        return self.value


class Returns(Counter):
    """Returns what it was given."""

    def __init__(self, step=None, reset=([], {})) -> None:
        super().__init__()
        self.results = reset, step

    async def reset(self, *, seed=None, options=None):
        return self.results[0]

    async def step(self, action):
        return self.results[1]


def of(kind, **kwargs):
    return make(EnvSpec("test/Any-v0", kind, kwargs))


def stepped(result):
    async def main():
        env = of(Returns, step=result)
        await env.reset()
        return await env.step(assistant("go"))

    return asyncio.run(main())


@pytest.mark.parametrize("kind", [Counter, SyncCounter])
def test_step_needs_an_episode(kind):
    async def main():
        env = of(kind, length=1)
        with pytest.raises(ResetNeeded, match=r"test/Any-v0: step\(\) outside an episode → await"):
            await env.step(assistant("go"))
        await env.reset(seed=1)
        assert (await env.step(assistant("go")))[2] is True
        with pytest.raises(ResetNeeded, match="after the episode's end"):
            await env.step(assistant("go"))
        await env.reset()
        assert (await env.step(assistant("go")))[2] is True
        await env.close()
        for call in (env.reset, lambda: env.step(assistant("go"))):
            with pytest.raises(ResetNeeded, match="closed"):
                await call()

    asyncio.run(main())


@pytest.mark.parametrize("flags", [(True, False), (False, True), (True, True)])
def test_either_flag_ends_an_episode(flags):
    async def main():
        env = of(Returns, step=([], 0.0, *flags, {}))
        await env.reset()
        assert (await env.step(assistant("go")))[2:4] == flags
        with pytest.raises(ResetNeeded):
            await env.step(assistant("go"))

    asyncio.run(main())


def test_close_reaches_the_environment_once():
    async def main():
        env = of(Counter)
        async with env:
            await env.close()
        return env.unwrapped.closed

    assert asyncio.run(main()) == 1


@pytest.mark.parametrize("action", ["text", user("hello"), None, {"role": "assistant"}])
def test_an_action_that_is_no_assistant_message_is_named(action):
    async def main():
        env = of(Counter)
        await env.reset()
        with pytest.raises(InvalidAction, match=type(action).__name__):
            await env.step(action)
        await env.step(assistant("still running"))

    asyncio.run(main())


def test_an_action_of_a_subclass_is_welcome():
    class Mine(AssistantMessage):
        pass

    async def main():
        env = of(Counter)
        await env.reset()
        return (await env.step(Mine()))[1]

    assert asyncio.run(main()) == 1.0


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (([], 0.0, False, {}), "must return .*, not 4 values"),
        (None, "must return .*, not None"),
        ([[], 0.0, False, False, {}], "must return .*, not a list"),
        (("text", 0.0, False, False, {}), r"not a str → wrap it: \[relax_agent.messages.user"),
        (([user("x"), "y"], 0.0, False, False, {}), "there is a str in it → wrap it"),
        ((user("x"), 0.0, False, False, {}), "not a Message → wrap it in a list"),
        ((None, 0.0, False, False, {}), r"not None → return \[\]"),
        (([{"role": "user"}], 0.0, False, False, {}), "a dict in it → .*from_openai"),
        ((Rewrite((user("x"), "y"), "cut"), 0.0, False, False, {}), "a str in it"),
        (([], "1", False, False, {}), "is not a number"),
        (([], None, False, False, {}), "None, which is not a number"),
        (([], [1.0], False, False, {}), "is not a number"),
        (([], np.zeros(2), False, False, {}), "is not a number"),
        (([], True, False, False, {}), r"is not a number → return float"),
        (([], np.bool_(True), False, False, {}), "is not a number"),
        (([], float("nan"), False, False, {}), "reward is nan"),
        (([], -math.inf, True, False, {}), "reward is -inf"),
        (([], np.float32("nan"), False, False, {}), "reward is nan"),
        (([], 10**400, False, False, {}), "reward is inf"),
        (([], 0.0, 1, False, {}), r"must be bool; terminated is 1"),
        (([], 0.0, False, None, {}), r"must be bool; truncated is None"),
        (([], 0.0, np.array([True]), False, {}), "must be bool"),
        (([], 0.0, False, False, None), "must be a dict, not None"),
        (([], 0.0, False, False, [("a", 1)]), "must be a dict, not a list"),
    ],
)
def test_a_broken_step_result_is_named(result, words):
    with pytest.raises(EnvError, match=rf"(?s)test/Any-v0: .*{words}"):
        stepped(result)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ([user("x")], "must return .observation, info., not a list"),
        (([user("x")], {}, 1), "not 3 values"),
        (("text", {}), "not a str → wrap it"),
        (([user("x")], None), "must be a dict, not None"),
    ],
)
def test_a_broken_reset_result_is_named(result, words):
    async def main():
        env = of(Returns, reset=result)
        with pytest.raises(EnvError, match=rf"test/Any-v0: .*reset\(\).*{words}"):
            await env.reset()
        with pytest.raises(ResetNeeded, match="after a call that failed"):
            await env.step(assistant("go"))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("reward", "value"),
    [
        (1, 1.0),
        (np.float32(0.5), 0.5),
        (np.float64(0.25), 0.25),
        (np.int64(3), 3.0),
        (np.array(0.5), 0.5),
        (Scalar(0.5), 0.5),
        (Fraction(1, 2), 0.5),
    ],
)
def test_a_number_of_any_library_is_a_reward(reward, value):
    got = stepped(([], reward, False, False, {}))[1]
    assert (got, type(got)) == (value, float)


@pytest.mark.parametrize("flag", [np.bool_(True), np.array(True), Scalar(True)])
def test_a_flag_of_any_library_is_a_flag(flag):
    result = stepped(([], 0.0, flag, flag, {}))
    assert result[2] is True and result[3] is True


def test_messages_may_come_as_a_tuple_or_of_a_subclass():
    class Mine(Message):
        pass

    assert stepped(((user("x"),), 0.0, False, False, {}))[0] == [user("x")]
    mine = Mine("user")
    assert stepped(([mine], 0.0, False, False, {}))[0][0] is mine
    rewrite = Rewrite((user("x"),), "cut")
    assert stepped((rewrite, 0.0, False, False, {}))[0] is rewrite


@pytest.mark.parametrize("call", ["reset", "step", "close"])
@pytest.mark.parametrize("base", [Counter, SyncCounter])
@pytest.mark.parametrize("error", [ZeroDivisionError("oh"), SystemExit(3), StopIteration("oh")])
def test_what_an_environment_raises_names_environment_and_call(base, call, error):
    def fail(self, *args, **kwargs):
        raise error

    async def fail_later(self, *args, **kwargs):
        raise error

    kind = type("Crash", (base,), {call: fail if base is SyncCounter else fail_later})

    async def main():
        env = of(kind)
        if call != "reset":
            await env.reset()
        act = {"reset": env.reset, "step": lambda: env.step(assistant("go")), "close": env.close}
        with pytest.raises(EnvError, match=rf"^test/Any-v0: {call}\(\) raised ") as caught:
            await act[call]()
        assert caught.value.__cause__ is not caught.value
        with pytest.raises(ResetNeeded):
            await env.step(assistant("go"))
        await env.close()

    asyncio.run(main())


def test_a_typed_error_of_the_environment_stays_what_it_is():
    class Denied(Counter):
        async def step(self, action):
            raise ToolError("no")

    async def main():
        env = of(Denied)
        await env.reset()
        with pytest.raises(ToolError, match="no"):
            await env.step(assistant("go"))

    asyncio.run(main())


def test_after_a_failed_call_the_environment_can_be_reset():
    class Once(Counter):
        async def step(self, action):
            if self.length:
                self.length = 0
                raise ValueError
            return await super().step(action)

    async def main():
        env = of(Once)
        await env.reset()
        with pytest.raises(EnvError):
            await env.step(assistant("go"))
        await env.reset()
        return (await env.step(assistant("go")))[1]

    assert asyncio.run(main()) == 1.0


@pytest.mark.parametrize("first", ["reset", "step"])
@pytest.mark.parametrize("second", ["reset", "step"])
def test_two_calls_at_once_are_refused_and_the_first_goes_on(first, second):
    gate = asyncio.Event()

    class Slow(Counter):
        async def reset(self, *, seed=None, options=None):
            if first == "reset":
                await gate.wait()
            return await super().reset()

        async def step(self, action):
            await gate.wait()
            return await super().step(action)

    async def main():
        env = of(Slow)
        act = {"reset": env.reset, "step": lambda: env.step(assistant("go"))}
        if first == "step":
            await env.reset()
        running = asyncio.ensure_future(act[first]())
        await asyncio.sleep(0)
        with pytest.raises(EnvBusy, match=rf"{second}\(\) while its {first}\(\) still runs"):
            await act[second]()
        gate.set()
        await running
        assert (await env.step(assistant("go")))[1] == 1.0

    asyncio.run(main())


def test_a_cancelled_step_ends_the_episode_and_a_reset_begins_another():
    class Hangs(Counter):
        async def step(self, action):
            await asyncio.Event().wait()

    async def main():
        env = of(Hangs)
        await env.reset()
        task = asyncio.ensure_future(env.step(assistant("go")))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert caught.value.__cause__ is not caught.value
        with pytest.raises(ResetNeeded, match="after a call that was cancelled"):
            await env.step(assistant("go"))
        assert (await env.reset())[0] == [user("go")]

    asyncio.run(main())


def test_an_environment_that_cancels_itself_does_not_cancel_its_caller():
    class Odd(Counter):
        async def step(self, action):
            raise asyncio.CancelledError

    async def main():
        env = of(Odd)
        await env.reset()
        with pytest.raises(EnvError, match="was cancelled from inside"):
            await env.step(assistant("go"))

    asyncio.run(main())


def test_the_score_of_a_group_is_checked():
    class Odd(Counter):
        extra = None

        async def score_group(self, task_id, members):
            return self.extra

    def scored(extra):
        env = of(Odd)
        env.unwrapped.extra = extra
        return asyncio.run(env.score_group("t", [Transcript(), Transcript()]))

    assert scored((1, np.float32(0.5))) == [1.0, 0.5]
    for extra, words in (
        (None, "one number for each of the 2 members"),
        ([1.0], "one number for each of the 2 members"),
        ([1.0, math.nan], r"score_group\(\) returned is nan"),
    ):
        with pytest.raises(EnvError, match=words):
            scored(extra)


def test_a_label_without_a_spec_is_the_class():
    assert Guard(Wrapper(Counter())).label == "Counter"


@pytest.mark.parametrize("running", ["reset", "step"])
def test_closed_stays_closed_when_a_call_that_ran_meanwhile_ends(running):
    """What was given back must not be used again."""

    class Slow(Counter):
        async def reset(self, *, seed=None, options=None):
            await asyncio.sleep(0)
            return [user("go")], {}

        async def step(self, action):
            await asyncio.sleep(0)
            return [user("on")], 1.0, False, False, {}

    async def main():
        env = Guard(Slow())
        await env.reset()
        call = env.reset() if running == "reset" else env.step(assistant("a"))
        task = asyncio.create_task(call)
        await asyncio.sleep(0)
        await env.close()
        await task
        with pytest.raises(ResetNeeded, match="is closed"):
            await env.step(assistant("b"))
        with pytest.raises(ResetNeeded, match="is closed"):
            await env.reset()

    asyncio.run(main())
