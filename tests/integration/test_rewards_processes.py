"""Rewards in real worker processes: killed when they hang, gone when the program is."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from relax_agent import Reward, Rubric, Score, Task, ToolEnv, Transcript
from relax_agent.envs.rewards import MathEqual, WorkerFailed, WorkerPool, close_workers, math_equal
from relax_agent.errors import ChildDied, ConfigError, EnvError
from relax_agent.messages import Text, Video, assistant, user

pytest.importorskip("math_verify")

HANGS = "$9^{9^{9^{9}}}$"
GRADING = """
import os
import re
import time

from relax_agent import Score


def graded(task, transcript):
    calls = [(call.name, result.ok) for call, result in transcript.calls]
    assert (task.prompt, dict(task.data), calls) == ("2+2?", {"level": 1}, []), (task, calls)
    return Score(float(transcript.answer == task.answer), {"pid": os.getpid()})


def spins(task, transcript):
    while True:
        pass


def backtracks(task, transcript):
    return float(bool(re.match(r"(a+)+$", "a" * 60 + "!")))  # keeps the GIL for years


def crashes(task, transcript):
    os._exit(3)


def raises(task, transcript):
    raise ValueError("cannot grade this")


async def later(task, transcript):
    return 0.5


def not_finite(task, transcript):
    return float("inf")


def shortest(task, members):
    best = min(len(member.answer) for member in members)
    return [float(len(member.answer) == best) for member in members]


def media_bytes(task, transcript):
    parts = [part for message in transcript for part in message.content]
    return float(sum(len(part.data) for part in parts if hasattr(part, "data")))


def same(value):
    return value


def pid():
    return os.getpid()


def works(seconds):
    time.sleep(seconds)
    return os.getpid()


def hoards():
    return len(bytearray(4 << 30))
"""
TASK = Task("t", "2+2?", "4", {"level": 1})


@pytest.fixture(scope="module")
def grading(tmp_path_factory):
    """A module of reward functions as an author would write it."""
    folder = tmp_path_factory.mktemp("grading")
    (folder / "grading_by_hand.py").write_text(GRADING)
    sys.path.insert(0, str(folder))
    import grading_by_hand

    yield grading_by_hand
    sys.path.remove(str(folder))
    close_workers()


def said(text="4"):
    return Transcript([user("2+2?"), assistant(text)])


def score(rubric, answer="4"):
    return asyncio.run(rubric.score(TASK, said(answer)))


def gone(pid, limit_s=10.0):
    """Whether a process has ended within the limit."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


# -- mathematics ---------------------------------------------------------------------------------


def test_equal_expressions_are_found_equal():
    right = [
        ("x^2+1", "1+x^2"),
        (r"$\frac{2}{4}$", "1/2"),
        (r"The answer is \boxed{0.5}", "1/2"),
        ("So x = 5", "5"),
        ("The answer is 12%", "0.12"),
        (r"sqrt(2)/2", r"\frac{1}{\sqrt2}"),
        (r"\{3,1,2\}", r"\{1,2,3\}"),
        ("$(x+1)^2$", "x^2+2x+1"),
        ("I think it's 7", 7),
    ]
    wrong = [("[1,2)", "(1,2)"), ("2", "3"), ("hello there", "5"), ("$x+1$", "x-1")]

    async def main():
        jobs = [math_equal.equal(answer, gold) for answer, gold in right + wrong]
        return await asyncio.gather(*jobs)

    assert asyncio.run(main()) == [1.0] * len(right) + [0.0] * len(wrong)
    assert asyncio.run(math_equal.equal("4", "5", "2+2")) == 1.0


def test_mathematics_that_hangs_is_killed_scored_and_counted():
    """T154: the next answer is judged as if nothing had been."""
    rubric = Rubric(Reward(MathEqual(timeout_s=0.3), on_failure=-1.0))
    started = time.monotonic()
    found = score(rubric, HANGS)
    assert time.monotonic() - started < 30
    assert found.reward == -1.0
    assert "did not answer within 0.3 s, and was killed" in found.failures["math_equal"]
    assert score(Rubric(math_equal), r"\boxed{8/2}").reward == 1.0


def test_a_rubrics_own_limit_kills_the_worker_too():
    found = score(Rubric(Reward(MathEqual(timeout_s=60), timeout_s=0.3)), HANGS)
    assert found.failures == {"math_equal": "no value within 0.3 s"}


def test_an_episode_with_mathematics_in_an_environment():
    class Sums(ToolEnv):
        tasks = (Task("t", "2+2?", "4"),)
        rubric = Rubric(MathEqual(timeout_s=1.5))

    async def main():
        env = Sums()
        await env.reset()
        good = await env.step(assistant("$2^2$"))
        await env.reset()
        return good, await env.step(assistant(HANGS))

    good, hung = asyncio.run(main())
    assert good[1:3] == (1.0, True)
    assert hung[1:3] == (0.0, True)
    assert hung[4]["metrics"]["reward_failures"] == 1.0
    assert hung[4]["metrics"]["math_equal_failed"] == 1.0


# -- an author's functions -----------------------------------------------------------------------


def isolated(function, **options):
    return Reward(function, isolation="process", **options)


def test_an_authors_function_runs_elsewhere_on_the_same_task_and_conversation(grading):
    found = score(Rubric(isolated(grading.graded), isolated("grading_by_hand:later")))
    assert found.reward == 1.5
    assert found.metrics["pid"] != os.getpid()
    assert not found.failures


def test_a_film_larger_than_a_frames_header_reaches_the_worker(grading):
    film = Video(bytes(30 << 20), "video/mp4")
    seen = Transcript([user("look"), user([Text("here"), film]), assistant("nothing")])
    rubric = Rubric(isolated("grading_by_hand:media_bytes"))
    scored = asyncio.run(rubric.score(Task("t", "look", None), seen))
    assert scored.reward == 30 << 20


def test_large_texts_come_through_as_they_are(grading):
    pool = WorkerPool("grading_by_hand:same", size=1)
    value = {"a": ["é\ud800" * 50_000, {"b": "x" * 65_535}, {"c": "y" * 65_536}], "d": None}
    assert asyncio.run(pool.call({"value": value}, 20)) == value
    pool.close()


def test_a_group_function_runs_elsewhere(grading):
    rubric = Rubric(group=[isolated(grading.shortest)])
    scores = asyncio.run(rubric.score_group(TASK, [said("four"), said("4")]))
    assert [each.reward for each in scores] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("spins", "did not answer within 0.2 s, and was killed"),
        ("crashes", "exit code 3"),
        ("raises", "ValueError: cannot grade this"),
        ("not_finite", "ValueError: it returned inf"),
    ],
)
def test_whatever_it_does_counts_with_its_stated_value(grading, name, words):
    found = score(Rubric(isolated(getattr(grading, name), timeout_s=0.2, on_failure=-1.0)))
    assert found.reward == -1.0
    assert words in found.failures[name]


def test_the_event_loop_goes_on_while_a_pattern_backtracks(grading):
    """In a thread it would hold up the whole process: matching never lets go of the GIL."""

    async def main():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        ticking = asyncio.create_task(tick())
        found = await Rubric(isolated(grading.backtracks, timeout_s=0.3)).score(TASK, said())
        ticking.cancel()
        return found, ticks

    found, ticks = asyncio.run(main())
    assert "was killed" in found.failures["backtracks"]
    assert ticks >= 5


def nested():
    def inner(task, transcript):
        return 1.0

    return inner


@pytest.mark.parametrize(
    "function", [lambda t, c: 1.0, nested(), math_equal], ids=["lambda", "nested", "object"]
)
def test_what_another_process_cannot_import_is_refused_at_once(function):
    with pytest.raises(ConfigError, match="cannot import"):
        Rubric(isolated(function))


def test_a_name_that_leads_nowhere_is_the_authors_mistake(grading):
    for target in ("grading_by_hand:nothing", "no_such_module_at_all:f"):
        with pytest.raises(ConfigError, match=r"nothing|no_such_module"):
            score(Rubric(isolated(target)))


def test_a_task_that_is_no_json_is_a_failure_in_words(grading):
    task = Task("t", "2+2?", {1, 2})
    found = asyncio.run(Rubric(isolated(grading.graded)).score(task, said()))
    assert "graded" in found.failures


# -- the pool ------------------------------------------------------------------------------------


def test_workers_stay_warm_across_event_loops_and_end_when_told(grading):
    pool = WorkerPool("grading_by_hand:pid", size=1)
    pids = {asyncio.run(pool.call({}, 20)) for _ in range(3)}
    assert len(pids) == 1
    pool.close()
    assert gone(*pids)
    assert asyncio.run(pool.call({}, 20)) not in pids
    pool.close()


def test_several_event_loops_use_one_pool_at_once(grading):
    pool = WorkerPool("grading_by_hand:works", size=1)
    found = []

    def loop():
        found.append(asyncio.run(pool.call({"seconds": 0.2}, 20)))

    threads = [threading.Thread(target=loop) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 2
    pool.close()
    assert all(map(gone, found))


def test_no_more_workers_run_than_the_pool_holds_and_waiting_uses_up_no_time(grading):
    pool = WorkerPool("grading_by_hand:works", size=1)

    async def main():
        await pool.call({"seconds": 0}, 20)
        jobs = [pool.call({"seconds": 0.1}, 0.9) for _ in range(12)]
        return await asyncio.gather(*jobs)

    assert len(set(asyncio.run(main()))) == 1
    pool.close()


def test_a_worker_that_is_killed_is_told_of_and_replaced(grading):
    """T158: kill -9 while it works: an error with the exit code; the next call has another one."""
    pool = WorkerPool("grading_by_hand:works", size=1)

    async def main():
        pid = await pool.call({"seconds": 0}, 20)
        job = asyncio.create_task(pool.call({"seconds": 30}, 60))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ChildDied, match="SIGKILL"):
            await job
        idle = await pool.call({"seconds": 0}, 20)
        os.kill(idle, signal.SIGKILL)
        assert await asyncio.to_thread(gone, idle)
        return {pid, idle, await pool.call({"seconds": 0}, 20)}

    assert len(asyncio.run(main())) == 3
    pool.close()


def test_cancelling_a_call_kills_its_worker(grading):
    pool = WorkerPool("grading_by_hand:works", size=1)

    async def main():
        pid = await pool.call({"seconds": 0}, 20)
        job = asyncio.create_task(pool.call({"seconds": 30}, 60))
        await asyncio.sleep(0.1)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        return pid

    assert gone(asyncio.run(main()))


def test_a_worker_that_runs_out_of_memory_fails_and_is_replaced(grading):
    pool = WorkerPool("grading_by_hand:hoards", size=1, memory_bytes=2 << 30)
    for _ in range(2):
        with pytest.raises(WorkerFailed, match="MemoryError"):
            asyncio.run(pool.call({}, 20))
    pool.close()


def test_a_pool_that_is_forgotten_in_a_running_loop_blocks_nobody(grading):
    """T155."""

    async def main():
        pool = WorkerPool("grading_by_hand:pid", size=1)
        pid = await pool.call({}, 20)
        started = time.monotonic()
        del pool
        gc.collect()
        assert time.monotonic() - started < 10  # it waits for no process
        return pid

    assert gone(asyncio.run(main()))


def test_a_process_that_was_forked_off_leaves_the_workers_alone(grading):
    """It has none of them, starts its own, and kills nothing when it ends."""
    pool = WorkerPool("grading_by_hand:pid", size=1)
    pid = asyncio.run(pool.call({}, 20))
    child = os.fork()
    if not child:  # pragma: no cover
        own = asyncio.run(pool.call({}, 20))
        pool.close()
        gc.collect()
        os._exit(0 if own != pid else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert asyncio.run(pool.call({}, 20)) == pid
    pool.close()


@pytest.mark.parametrize("end", ["return", "kill -9"])
def test_no_worker_outlives_its_program(end, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(f"""
        import asyncio, os, signal
        from relax_agent.envs.rewards.workers import WorkerPool

        async def main():
            pool = WorkerPool("grading_by_hand:works", size=2)
            pid = await pool.call({{"seconds": 0}}, 20)
            print(pid, flush=True)
            if {end!r} == "kill -9":
                job = asyncio.create_task(pool.call({{"seconds": 60}}, 90))
                await asyncio.sleep(0.2)
                os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(main())
        """)
    )
    (tmp_path / "grading_by_hand.py").write_text(GRADING)
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""
    assert gone(int(done.stdout))


def test_errors_that_say_the_episode_cannot_be_judged_come_through(tmp_path, monkeypatch):
    (tmp_path / "grading_refused.py").write_text(
        "from relax_agent.errors import EnvError\n\n"
        "def judge(task, transcript):\n    raise EnvError('the reference is damaged')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvError, match="the reference is damaged"):
        score(Rubric(isolated("grading_refused:judge")))
    close_workers()


def test_scores_come_back_with_their_metrics(grading):
    found = score(Rubric(isolated(grading.graded)), "5")
    assert isinstance(found, Score)
    assert found.reward == 0.0
