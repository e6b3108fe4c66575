"""Environments in a process of their own: whatever they do, the driver goes on."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import env_support
import pytest

from relax_agent.envs import PlayLimits, ScriptedPolicy, TimeLimit, make, make_async, play
from relax_agent.envs.registration import EnvSpec
from relax_agent.episode import EpisodeStatus
from relax_agent.errors import ConfigError, EnvError, ResetNeeded
from relax_agent.messages import assistant

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
LIMIT_S = 60.0


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(LIMIT_S):
            return await coroutine

    return asyncio.run(bounded())


def gone(*pids):
    deadline = time.monotonic() + LIMIT_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):  # zombies count
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def isolated(name="test/Probe-v0", **kwargs):
    return make(name, isolation="process", **kwargs)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        (
            "die",
            "its process ended by itself with exit code 7 → its last line was 'the last words'",
        ),
        ("segfault", r"exit code -11 \(SIGSEGV\)"),
        ("kill -9", r"exit code -9 \(SIGKILL"),
    ],
)
def test_a_death_is_an_env_error_that_names_it_and_the_next_reset_lives(word, told, capfd):
    """T158: within a second, with the exit code; the trace up to there is kept."""

    async def main():
        env = isolated()
        assert env.unwrapped.pid != os.getpid()
        first = env.unwrapped.pid
        await env.reset()
        if word == "kill -9":
            hanging = asyncio.create_task(env.step(assistant("hang")))
            await asyncio.sleep(0.1)
            started = time.monotonic()
            os.kill(first, signal.SIGKILL)
            with pytest.raises(EnvError, match=told):
                await hanging
            assert time.monotonic() - started < 5  # a second on a machine that does nothing else
        else:
            played = await play(env, ScriptedPolicy(["echo one", word]))
            assert played.status is EpisodeStatus.ENV_FAILURE
            assert played.messages[-2:] == [*played.messages[-2:-1], assistant(word)]
            assert [m.text for m in played.messages[2:]] == ["echo one", "echo one", word]
            assert played.reward == 0.25
            await env.reset()
            with pytest.raises(EnvError, match=told):
                await env.step(assistant(word))
        with pytest.raises(ResetNeeded):
            await env.step(assistant("echo"))
        await env.reset(seed=1)
        second = env.unwrapped.pid
        assert second != first
        assert (await env.step(assistant("echo")))[4]["turn"] == 1
        await env.close()
        assert gone(first, second)

    run(main())
    if word == "die":
        assert "the last words" in capfd.readouterr().err  # what it prints is seen, as elsewhere


def test_an_idle_environment_that_dies_between_episodes_is_replaced():
    async def main():
        env = isolated()
        await env.reset()
        await env.step(assistant("end"))
        os.kill(env.unwrapped.pid, signal.SIGKILL)
        assert gone(env.unwrapped.pid)
        await env.reset()
        await env.close()

    run(main())


def test_a_plain_environment_that_never_returns_is_killed_with_its_process():
    async def main():
        env = isolated("test/PlainProbe-v0")
        first = env.unwrapped.pid
        await env.reset()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await env.step(assistant("hang"))
        played = await play(env, ScriptedPolicy(["echo", "end"]))
        assert played.status is EpisodeStatus.COMPLETED
        assert gone(first)
        limits = PlayLimits(step_timeout_s=0.3)
        played = await play(env, ScriptedPolicy(["echo", "hang"]), limits=limits)
        assert (played.status, played.turns) == (EpisodeStatus.ENV_FAILURE, 2)
        await env.close()
        assert gone(env.unwrapped.pid)

    run(main())


def test_start_up_is_bounded_and_says_what_went_wrong():
    """T152: the limit covers the boot, whatever it hangs in."""
    started = time.monotonic()
    with pytest.raises(EnvError, match=r"not ready within 1 s"):
        isolated(slow_s=1000.0, start_timeout_s=1.0)
    assert time.monotonic() - started < 20
    with pytest.raises(EnvError, match="its process ended by itself with exit code 11"):
        isolated(fail_in="boot")
    with pytest.raises(EnvError, match="constructor raised RuntimeError: no constructor today"):
        isolated(fail_in="constructor")
    with pytest.raises(ConfigError, match="unexpected keyword argument 'wrod'"):
        isolated(wrod="x")


def test_a_boot_does_not_hold_up_the_loop():
    async def main():
        boot = asyncio.create_task(make_async("test/Probe-v0", isolation="process", slow_s=0.3))
        ticks = 0
        while not boot.done():
            await asyncio.sleep(0.01)
            ticks += 1
        assert ticks > 5
        await (await boot).close()

    run(main())


def test_wrappers_go_into_the_process_and_the_spec_rebuilds_both():
    async def main():
        spec = TimeLimit(make("test/Probe-v0", word="hi"), max_turns=2).spec
        env = make(spec, isolation="process")
        again = make(EnvSpec.from_json(env.spec.to_json()))
        for each in (env, again):
            assert each.unwrapped.pid != os.getpid()
            observation, _ = await each.reset()
            assert observation[0].text.startswith("hi ")
            assert (await each.step(assistant("echo")))[3] is False
            assert (await each.step(assistant("echo")))[3] is True
            await each.close()

    run(main())


def test_classes_of_the_running_script_or_a_function_are_refused_in_words(tmp_path):
    code = """
        import relax_agent
        @relax_agent.register("my/Env-v0")
        class MyEnv(relax_agent.Env):
            pass
        try:
            relax_agent.make("my/Env-v0", isolation="process")
        except relax_agent.errors.ConfigError as error:
            print(error)
    """
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    ).stdout
    assert "__main__:MyEnv" in told
    assert "process of its own" in told
    assert "at the top of a module" in told


def test_a_module_beside_the_script_is_found_from_anywhere(tmp_path):
    """The child has the parent's path: a module that the script imports, it imports too."""
    folder = tmp_path / "game"
    folder.mkdir()
    (folder / "shop.py").write_text(
        "import relax_agent\n"
        "@relax_agent.register('my/Shop-v0')\n"
        "class Shop(relax_agent.Env):\n"
        "    async def reset(self, *, seed=None, options=None):\n"
        "        return [relax_agent.messages.user('what may it be?')], {}\n"
    )
    (folder / "run.py").write_text(
        "import asyncio, relax_agent, shop\n"
        "env = relax_agent.make('my/Shop-v0', isolation='process')\n"
        "print(asyncio.run(env.reset())[0][0].text)\n"
        "asyncio.run(env.close())\n"
    )
    done = subprocess.run(
        [sys.executable, str(folder / "run.py")], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.stdout, done.stderr) == ("what may it be?\n", "")


def test_ending_the_parent_in_any_way_ends_the_environment(tmp_path):
    code = """
        import asyncio, sys, env_support, relax_agent
        env = relax_agent.make("test/PlainProbe-v0", isolation="process")
        async def main():
            await env.reset()
            print(env.unwrapped.pid, flush=True)
            if sys.argv[1] == "hang":
                await env.step(relax_agent.messages.assistant("hang"))
        asyncio.run(main())
    """
    for how in ("hang", "leave"):
        parent = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), how],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(env_support.__file__).parent)},
        )
        pid = int(parent.stdout.readline())
        if how == "hang":
            parent.kill()
        parent.wait(LIMIT_S)
        parent.stdout.close()
        assert gone(pid)


def test_many_environments_leave_no_thread_and_no_descriptor():
    def resources():
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    async def go(last):
        env = await make_async("test/Probe-v0", isolation="process")
        await play(env, ScriptedPolicy(["echo", last]))
        await env.close()

    for _ in range(2):
        run(go("die"))
    before = resources()
    for last in ("end", "die", "raise"):
        run(go(last))
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:  # a keeper or the guardian may just be ending
        threads, descriptors = resources()
        if threads <= before[0] + 1 and descriptors <= before[1]:
            return
        time.sleep(0.02)
    raise AssertionError((before, threads, descriptors))
