"""What a run tells reaches the disk whole and the person in words."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from relax_agent.episode import Episode, EpisodeStatus
from relax_agent.errors import StorageError
from relax_agent.messages import ToolCall, assistant, system, tool_message, user
from relax_agent.monitor import RunMonitor, before_after, read_metrics
from relax_agent.monitor.chart import column, draw_chart, moving_mean
from relax_agent.monitor.display import TRAINING, RunView, live_view
from relax_agent.monitor.metrics import MetricsWriter, scalars, to_line
from relax_agent.monitor.words import duration, rough_duration, shares, sparkline


class FakeClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def metrics(step: int, **more) -> dict:
    return {
        "step": step,
        "success": 0.5 + step / 100,
        "reward": 0.4,
        "loss": -0.01,
        "grad_norm": 0.7,
        "tokens": 500,
        "wall_s": 2.0,
        "staleness_mean": 0.5,
        "staleness_max": 1,
        "logprob_mismatch": 1e-4,
        "routes_differ": 0.01,
        "routes_replayed": 1.0,
        "time_s": {"forward": 1.5, "other": 0.5},
        **more,
    }


def monitor(folder: Path, *, terminal=False, quiet=False, clock=None, **more):
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=terminal, color_system=None)
    clock = clock or FakeClock()
    made = RunMonitor(
        folder, name="demo", total_steps=10, console=console, quiet=quiet, clock=clock, **more
    )
    return made, out


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return {
        tag: [(item.step, pytest.approx(item.value)) for item in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_every_step_is_one_line_that_is_on_disk_when_the_call_returns(tmp_path):
    run, _ = monitor(tmp_path)
    for step in (1, 2):
        run.on_step(metrics(step))
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [metrics(n) for n in range(1, step + 1)]
    run.close()


def test_steps_and_evaluations_become_tensorboard_scalars(tmp_path):
    with monitor(tmp_path)[0] as run:
        run.on_eval(0, 0.25, episodes=512)
        run.on_step(metrics(1))
        run.on_step(metrics(2))
    found = events(tmp_path)
    assert found["success"] == [(1, 0.51), (2, 0.52)]
    assert found["time_s/forward"] == [(1, 1.5), (2, 1.5)]
    assert found["eval/success"] == [(0, 0.25)]


def test_a_resumed_run_has_every_step_once(tmp_path):
    with monitor(tmp_path)[0] as run:
        run.on_eval(0, 0.25)
        for step in range(1, 6):
            run.on_step(metrics(step, loss=1.0))
        run.on_eval(5, 0.5)
    with monitor(tmp_path, last_step=3)[0] as run:
        for step in range(4, 7):
            run.on_step(metrics(step, loss=2.0))
        run.on_eval(6, 0.75)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["loss"]) for row in rows] == [
        (1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2),
    ]  # fmt: skip
    assert [row["step"] for row in read_metrics(tmp_path / "evals.jsonl")] == [0, 6]
    assert events(tmp_path)["loss"] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]


def test_a_torn_last_line_is_dropped_before_the_next_is_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "suc')
    assert read_metrics(path) == [{"step": 1}]
    writer = MetricsWriter(path)
    writer.write({"step": 2})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("line", ["{", "[1]", "nonsense"])
def test_a_broken_line_in_the_midst_is_an_error_that_names_it(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(StorageError, match=r"metrics.jsonl, line 2"):
        read_metrics(path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_storage_error_that_says_what_to_do():
    writer = MetricsWriter(Path("/dev/full"))
    with pytest.raises(StorageError, match="No space left on device → free space"):
        writer.write({"step": 1})


def test_lines_are_strict_json_whatever_the_numbers():
    row = {
        "a": float("nan"),
        "b": [np.float32(0.5), np.int64(3), float("inf")],
        "c": {"d": True, "e": None, "f": Path("x")},
    }
    assert json.loads(to_line(row), parse_constant=pytest.fail) == {
        "a": None,
        "b": [0.5, 3.0, None],
        "c": {"d": True, "e": None, "f": "x"},
    }


def test_scalars_are_found_at_every_depth():
    row = {"step": 3, "skipped": None, "excluded": {"groups": 2}, "name": "x", "b": np.float64(2)}
    assert scalars(row) == {"step": 3.0, "excluded/groups": 2.0, "b": 2.0}


def test_the_curves_are_a_png_that_changes_with_the_data(tmp_path):
    rows = [metrics(step) for step in range(1, 30)]
    draw_chart(tmp_path / "a.png", rows, [{"step": 0, "success": 0.1}], title="t")
    draw_chart(tmp_path / "b.png", rows[:5], title="t")
    pictures = [(tmp_path / name).read_bytes() for name in ("a.png", "b.png")]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert pictures[0] != pictures[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png"]


def test_curves_that_cannot_be_written_are_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match="cannot write"):
        draw_chart(tmp_path / "none" / "a.png", [metrics(1)], title="t")


def test_closing_draws_the_curves(tmp_path):
    with monitor(tmp_path)[0] as run:
        run.on_step(metrics(1))
        assert not (tmp_path / "reward.png").exists()
    assert (tmp_path / "reward.png").exists()
    run.close()


def test_a_long_run_draws_the_curves_on_the_way_without_blocking(tmp_path):
    clock = FakeClock()
    run, _ = monitor(tmp_path, clock=clock)
    run.on_step(metrics(1))
    assert run._drawing is None
    clock.now = 61.0
    run.on_step(metrics(2))
    run._drawing.join(60)
    assert (tmp_path / "reward.png").exists()
    run.close()


def test_a_run_without_a_step_closes_without_curves(tmp_path):
    with monitor(tmp_path)[0]:
        pass
    assert not (tmp_path / "reward.png").exists()


def test_the_error_that_ends_a_run_is_not_hidden_by_a_failing_close(tmp_path):
    with pytest.raises(KeyError), monitor(tmp_path)[0] as run:
        run.on_step(metrics(1))
        (tmp_path / "metrics.jsonl").write_text("broken\nbroken\n")
        raise KeyError


def test_a_failing_close_is_an_error_of_a_run_that_had_none(tmp_path):
    with pytest.raises(StorageError, match="line 1"), monitor(tmp_path)[0]:
        (tmp_path / "metrics.jsonl").write_text("broken\nbroken\n")


def test_without_a_terminal_a_step_is_one_plain_line(tmp_path):
    clock = FakeClock()
    run, out = monitor(tmp_path, clock=clock)
    run.phase("warm start", 0, 40)
    run.phase("warm start", 1, 40)
    clock.now = 30.0
    run.phase("warm start", 20, 40)
    run.phase(TRAINING)
    run.on_step(metrics(1))
    run.on_progress(in_flight=4)
    run.on_step(metrics(2, skipped="all rewards were equal"))
    run.close()
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert [line.split("  ")[-1] for line in lines[:3]] == [
        "warm start 0/40",
        "warm start 20/40",
        "training",
    ]
    assert lines[3] == (
        "step  1/10  success 0.510  reward 0.400  loss -0.0100  grad norm 0.700  mismatch 1.0e-04"
        "  staleness 0.50, most 1  2.0 s  under 1 min left"
    )
    assert "no update: all rewards were equal" in lines[4]
    assert len(lines) == 5


def test_quiet_shows_nothing_and_writes_everything(tmp_path):
    run, out = monitor(tmp_path, quiet=True)
    run.phase("warm start", 0, 40)
    run.on_step(metrics(1))
    run.message("hello")
    run.close()
    assert out.getvalue() == ""
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_a_terminal_shows_the_last_state_when_the_run_ends(tmp_path):
    run, out = monitor(tmp_path, terminal=True)
    run.on_eval(0, 0.31)
    run.on_step(metrics(1))
    run.on_progress(in_flight=7)
    run.message("a remark [bold]as it is[/bold] \x1b[2J")
    run.close()
    text = out.getvalue()
    for words in ("demo", "1/10", "0.51", "0.31", "7 episodes in flight", "250 tokens/s"):
        assert words in text
    assert "a remark [bold]as it is[/bold] \\u001b[2J" in text
    assert text.rstrip("\n").endswith("\x1b[?25h")  # the cursor is shown again


@pytest.mark.parametrize("width", [24, 40, 80, 200])
def test_the_live_view_fits_the_terminal(width):
    view = RunView("demo", 60, FakeClock(), phase=TRAINING, in_flight=3)
    view.steps.extend(metrics(step) for step in range(1, 40))
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(live_view(view, width))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "39/60" in console.file.getvalue()


def test_time_left_follows_the_pace_of_the_last_steps():
    view = RunView("demo", 100, FakeClock())
    assert view.left_s() is None
    view.steps.extend(metrics(step, wall_s=60.0) for step in range(1, 11))
    view.steps.extend(metrics(step, wall_s=2.0) for step in range(11, 21))
    assert view.left_s() == 2.0 * 80
    assert view.tokens_per_s() == 250.0


CALL = ToolCall("calculator", {"expression": "(17+5)*3"}, "c")
QUESTION = [system("Be good."), user("17 plus 5, then times 3")]


def episode(messages, reward: float, status=EpisodeStatus.COMPLETED) -> Episode:
    made = Episode("relax/Calculator-v0", "t", "g", 0, messages=[*QUESTION, *messages])
    made.add_prompt([1])
    made.add_sampled([2], [-1.0], [0], "stop").reward = reward
    made.finish(status)
    return made


@pytest.mark.parametrize("width", [60, 120])
def test_before_and_after_show_the_question_once_and_both_attempts(width):
    before = episode([assistant("34 [red]x[/red] \x1b[2J")], 0.0, EpisodeStatus.TRUNCATED_TOKENS)
    after = episode([assistant(tool_calls=[CALL]), tool_message("66", CALL), assistant("66")], 1.0)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(before_after(before, after, width=width))
    text = console.file.getvalue().replace("\u00a0", " ")
    assert text.count("17 plus 5, then times 3") == 1
    assert "Be good." not in text
    for words in (
        "before training",
        "after training",
        "34 [red]x[/red] \\u001b[2J",
        '→ calculator(expression="(17+5)*3")',
        "← 66",
        "reward 0, truncated tokens",
        "reward 1, completed",
    ):
        assert words in text
    one_line = any(
        "before training" in line and "after training" in line for line in text.split("\n")
    )
    assert one_line == (width > 80)


def test_durations_are_said_in_the_units_that_matter():
    assert [duration(s) for s in (0, 41.4, 60, 252, 7500)] == [
        "0 s", "41 s", "1 min 0 s", "4 min 12 s", "2 h 5 min",
    ]  # fmt: skip
    assert [rough_duration(s) for s in (-5, 20, 100, 7500)] == [
        "under 1 min", "under 1 min", "2 min", "2 h 5 min",
    ]  # fmt: skip


def test_a_sparkline_rises_with_its_values():
    assert sparkline([0, 1], 8) == "▁█"
    assert sparkline([], 8) == ""
    assert sparkline([0, 0, 0.5, 0.5, 1, 1], 3) == "▁▅█"


@given(st.lists(st.floats(-2, 3), max_size=99), st.integers(1, 50))
def test_a_sparkline_never_exceeds_its_width(values, width):
    assert len(sparkline(values, width)) == min(width, len(values))


def test_shares_of_time_come_largest_first_and_without_crumbs():
    assert shares({"forward": 1.0, "wait_for_data": 2.99, "other": 0.01}) == (
        "wait for data 75 % · forward 25 %"
    )
    assert shares({}) == ""


def test_a_moving_mean_looks_back_only():
    assert moving_mean([1, 2, 3, 4], window=2) == [1, 1.5, 2.5, 3.5]
    assert column([{"step": 1, "x": 2}, {"step": 2}, {"step": 3, "x": None}], "x") == ([1], [2.0])


def test_the_monitor_is_light_until_it_draws():
    code = (
        "import sys, relax_agent.monitor\n"
        "heavy = {'torch', 'matplotlib', 'tensorboard', 'transformers'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
