"""``check_env`` and its parts as other people's tests call them: from anywhere, on anything."""

import asyncio
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_checking_broken import Good, Hangs, SeedsGlobally, rows_of

import relax_agent
from relax_agent.envs import (
    Env,
    EnvSpec,
    RandomPolicy,
    Task,
    TaskSet,
    ToolEnv,
    make,
    play,
    register,
    registry,
)
from relax_agent.envs.checking import (
    Report,
    Row,
    benchmark_env,
    check_cancellation,
    check_env,
    check_isolation,
    check_seeding,
    check_tools,
)
from relax_agent.envs.checking.checks import ALL_CHECKS
from relax_agent.envs.wrappers import Compaction, RecordEpisode, SystemPrompt, TimeLimit
from relax_agent.errors import ConfigError, EnvCheckFailed, UnknownEnv
from relax_agent.messages import user

CALCULATOR = "relax/Calculator-v0"
SMALL = {"train_tasks": 20, "eval_tasks": 5}


def complaints(report):
    return [(row.check, row.status, row.message) for row in report if row.status != "ok"]


def test_the_calculator_passes_without_a_word_of_complaint():
    began = time.perf_counter()
    report = check_env(CALCULATOR)
    assert complaints(report) == []
    assert report.ok and len(report.rows) == 33
    assert time.perf_counter() - began < 20


def test_a_check_that_fails_fails_the_test_that_calls_it_with_readable_words():
    with pytest.raises(EnvCheckFailed) as raised:
        check_env(SeedsGlobally)
    lines = str(raised.value).splitlines()
    assert lines[0] == "SeedsGlobally: 1 check failed"
    assert "global random: an episode changes the state of the global generator random" in lines[1]
    assert "test_checking_broken.py:" in lines[1]
    assert relax_agent.check_env is check_env


def test_checks_run_inside_a_running_loop_too():
    """T151: a plain function, called from a notebook's loop, neither deadlocks nor raises."""

    async def main():
        return check_seeding(CALCULATOR, **SMALL), check_tools(CALCULATOR, **SMALL)

    assert [complaints(report) for report in asyncio.run(main())] == [[], []]


@pytest.mark.parametrize("check", [check_seeding, check_isolation, check_cancellation, check_tools])
def test_the_parts_stand_alone_and_take_constructor_arguments(check):
    report = check(CALCULATOR, timeout_s=20, seed=3, **SMALL)
    assert complaints(report) == [] and report.rows


def test_anything_that_makes_environments_can_be_checked():
    spec = EnvSpec("mine/Good-v0", Good)
    assert check_seeding(spec).env == "mine/Good-v0"
    assert check_seeding(Good).env == "Good"
    assert complaints(check_seeding(lambda: make(CALCULATOR, **SMALL))) == []
    assert check_seeding(make(CALCULATOR, **SMALL)).env == CALCULATOR


def test_one_environment_without_a_spec_is_checked_as_far_as_one_goes():
    env = Good()
    report = check_env(env)
    assert report.ok
    skipped = {row.check: row.message for row in report if row.status == "skip"}
    assert {"isolation", "close", "release", "gold answers"} <= set(skipped)
    assert "give its class" in skipped["isolation"]


def test_wrappers_put_on_by_hand_are_checked_with_it(tmp_path):
    env = make(CALCULATOR, **SMALL)
    env = SystemPrompt(TimeLimit(env, max_turns=3), "Be brief.", "append")
    env = RecordEpisode(Compaction(env, max_messages=5, keep_last=2), tmp_path)
    report = check_env(env)
    assert complaints(report) == []
    assert (tmp_path / "episodes.jsonl").exists()


@pytest.mark.parametrize("wrong", [3, None, object(), lambda: 3])
def test_what_cannot_be_checked_is_told(wrong):
    with pytest.raises((ConfigError, EnvCheckFailed)) as raised:
        check_env(wrong)
    assert "environment" in str(raised.value)


def test_an_unknown_id_or_argument_is_the_callers_mistake():
    with pytest.raises(UnknownEnv, match="did you mean"):
        check_env("relax/Calculater-v0")
    with pytest.raises(ConfigError, match="colour"):
        check_env(CALCULATOR, colour="red")


def test_the_global_generators_are_as_they_were():
    random.seed(5)
    before = random.getstate()
    check_seeding(Good)
    check_seeding(SeedsGlobally, raises=False)
    assert random.getstate() == before


def test_a_constructor_that_raises_is_one_failure_and_not_thirty():
    class Broken(Good):
        """Broken."""

        def __init__(self):
            raise OSError("no such simulator")

    report = check_env(Broken, raises=False)
    assert [row.status for row in report] == ["fail", "skip"]
    assert "no such simulator" in report.rows[0].message
    assert "test_checking_api.py:" in report.rows[0].where


def test_a_check_leaves_no_thread_behind():
    check_isolation(Good)
    assert [t.name for t in threading.enumerate() if t.name == "relax-check"] == []


def test_ctrl_c_reaches_the_caller_while_it_waits():
    """The checks run in a daemon thread; a person does not have to wait for them."""
    code = (
        "import signal, threading, os, time\n"
        "from relax_agent.envs import check_env\n"
        "from test_checking_broken import Hangs\n"
        "threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "check_env(Hangs, timeout_s=100)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd="tests/unit"
    )
    assert "KeyboardInterrupt" in done.stderr


def test_importing_environments_loads_no_checks():
    code = "import sys, relax_agent.envs; print('relax_agent.envs.checking' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# -- reports ---------------------------------------------------------------------------------------


def test_a_report_is_read_by_people_and_programs():
    report = Report("my/Env-v0", [Row("seed", "ok", "fine"), Row("end", "warn", "late", "a.py:3")])
    assert report.ok and len(report.warnings) == 1
    assert report.require() is report
    with pytest.raises(EnvCheckFailed, match=r"end: late \(a\.py:3\)"):
        report.require(warnings=True)
    assert str(report).splitlines()[0] == "my/Env-v0: 1 checks ok, 1 warning in 0.0 s"
    data = report.to_json()
    assert data["ok"] is True
    assert data["rows"][1] == {
        "check": "end",
        "status": "warn",
        "message": "late",
        "where": "a.py:3",
    }


def test_warnings_alone_raise_nothing():
    class Quiet(Good):
        pass

    assert "build" in [row.check for row in check_env(Quiet).warnings]


# -- other environments that are in order ----------------------------------------------------------


def test_an_environment_in_a_process_of_its_own_passes():
    spec = EnvSpec(CALCULATOR, registry[CALCULATOR].entry_point, SMALL, isolation="process")
    rows = rows_of(spec, "reset", "reward", "gold answers", "chosen task", "seed")
    assert [row.message for row in rows if row.status != "ok"] == []
    assert "stand-in" in rows[2].message or "stand-in" in rows[3].message


def test_one_that_is_registered_is_guarded_and_needs_no_order_of_its_own():
    register("mine/Guarded-v0", Good)
    try:
        assert {row.check: row.status for row in check_env("mine/Guarded-v0")}["order"] == "ok"
    finally:
        registry.pop("mine/Guarded-v0")


def test_the_seed_alone_may_be_the_task():
    class Dice(Env):
        """Guess the dice."""

        async def reset(self, *, seed=None, options=None):
            self.seed_rng(seed)
            if options:
                raise ConfigError(f"no option {options}")
            self.number, self.over = self.rng.randint(1, 6), False
            return [user(f"Guess {self.rng.random()}")], {}

        async def step(self, action):
            return [], float(action.text == str(self.number)), True, False, {}

    report = check_env(Dice)
    assert [row[0] for row in complaints(report)] == ["order", "spec"]


def test_one_task_alone_is_in_order():
    class Single(ToolEnv):
        """One question."""

        tasks = TaskSet([Task("only", "Six times seven?", 42)])

        def score(self, task, transcript):
            return float(transcript.answer == str(task.answer))

    assert [row[0] for row in complaints(check_env(Single))] == ["spec"]


# -- the benchmark ---------------------------------------------------------------------------------


def test_a_benchmark_counts_steps_and_times():
    found = benchmark_env(CALCULATOR, steps=300, **SMALL)
    assert found.steps == 300 and 0 < found.episodes <= 300
    assert 0 < found.step_ms["p50"] <= found.step_ms["p99"] <= found.step_ms["max"]
    assert found.steps_per_s == pytest.approx(found.steps / found.seconds)
    assert "steps/s" in str(found) and found.to_json()["steps"] == 300


def test_a_benchmark_sees_memory_that_grows():
    class Hoards(Good):
        """Keeps everything."""

        kept = []  # noqa: RUF012

        async def reset(self, *, seed=None, options=None):
            self.kept.append(bytearray(1 << 20))
            return await super().reset(seed=seed, options=options)

    try:
        assert benchmark_env(Hoards, steps=90).memory_growth_kb > 10_000
    finally:
        Hoards.kept.clear()


def test_a_benchmark_of_what_hangs_ends():
    with pytest.raises(EnvCheckFailed, match=r"step\(\) did not return"):
        benchmark_env(Hangs, timeout_s=0.2)


def test_a_benchmark_without_a_length_is_refused():
    with pytest.raises(ConfigError):
        benchmark_env(CALCULATOR, seconds=0)


# -- the pages -------------------------------------------------------------------------------------

DOCS = Path(__file__).parents[2] / "docs"


def test_the_code_of_the_page_about_wrappers_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "wrappers.md").read_text("utf-8"), re.S)
    names: dict[str, object] = {"__name__": "pages_of_wrappers"}
    exec(compile(blocks[0], "wrappers.md", "exec"), names)
    asyncio.run(play(names["env"], RandomPolicy(1)))
    for block in blocks[1:]:
        exec(compile(block, "wrappers.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "RecordEpisode" in printed and re.search(
        r"train-\d+ (completed|truncated_turns) ", printed
    )
    polite = names["Polite"](make(CALCULATOR, **SMALL), bonus=2)
    assert polite.spec.wrappers[0].kwargs == {"bonus": 2}


def test_the_page_about_checking_names_every_check():
    text = (DOCS / "checking.md").read_text("utf-8")
    for check in ALL_CHECKS:
        assert re.search(rf"\b{check.name}\b", text), check.name
