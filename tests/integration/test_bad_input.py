"""Each row of the table in docs/errors.md: one line that says what, why and what to do.

What starts nothing runs in this process; what dies in a run is in test_run_interrupted.
"""

import ast
import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from errors_table import table, told, told_by
from rollout_support import FakeEngine, dead, run, runner
from run_support import train, write_recipe

import relax_agent.cli
from relax_agent.engines.scripted import ScriptedEngine
from relax_agent.errors import (
    EngineUnavailable,
    MissingExtraError,
    NoData,
    RunFailed,
    WeightSyncError,
)
from relax_agent.models import TinySettings, create_tiny_model
from relax_agent.monitor.tensorboard import TensorBoardWriter
from relax_agent.queue import LocalQueue, QueueSettings
from relax_agent.rollout import GroupRunner, Producer, evaluate
from relax_agent.run.conductor import require_episodes
from relax_agent.run.folder import RunFolder
from relax_agent.run.recipe import load_recipe
from relax_agent.tools.app import manifest
from relax_agent.tools.loading import load_toolset
from relax_agent.weights import WeightsSettings, publish

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cli(monkeypatch, capsys):
    """The command line in this process: returns exit status and standard error."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["relax-agent", *map(str, arguments)])
        status = relax_agent.cli._run()
        return status, capsys.readouterr().err

    return call


@pytest.fixture
def made(tmp_path):
    """Return a function that writes a recipe; no folder of a run may come of it."""
    runs = tmp_path / "runs"
    yield lambda **changes: write_recipe(tmp_path, runs, **changes)
    assert not runs.exists(), "something was made although nothing could start"


# -- the recipe ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "there is no recipe at"), ("a: [", "cannot be read as YAML"), ("7", "no mapping")],
)
def test_a_recipe_that_is_none(content, words, cli, tmp_path):
    path = tmp_path / "recipe.yaml"
    if content is not None:
        path.write_text(content)
    line = told("There is no recipe, or it is no YAML", *cli("train", path))
    assert words in line and str(path) in line


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("trainer.learning_rate=1", "trainer.lr"),
        ("trainr=1", "trainer"),
        ("queue.staleness=1", "queue.max_staleness"),
        ("rollout.group_per_step=3", "rollout.groups_per_step"),
        ("model.tiny.layer=2", "model.tiny.layers"),
        ("algorithm.clip_hi=0.3", "algorithm.clip_high"),
        ("trainer.warm_start.learning_rate=2", "trainer.warm_start.lr"),
    ],
)
def test_a_wrong_key_gets_the_nearest_right_one(wrong, right, cli, made):
    status, err = cli("train", made(), "--set", wrong)
    line = told("A key in the recipe, or in `--set`, does not exist", status, err)
    assert f"there is no setting {wrong.partition('=')[0]}" in line
    assert line.endswith(f"did you mean {right}?")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("steps=0", "steps: Input should be greater than or equal to 1"),
        ("trainer.lr=fast", "trainer.lr: Input should be a valid number"),
        ("trainer.kind=jax", "trainer.kind: Input should be 'megatron' or 'torch'"),
        ("model.path=x", "model: give exactly one of path and tiny"),
        ("engine.count=0", "engine.count: Input should be greater than or equal to 1"),
        ("steps", "--set steps is not of the form key=value"),
        ("steps=[", "--set steps=["),
        ("trainer.lr.a=1", "lr is not a group of settings"),
    ],
)
def test_a_value_that_does_not_fit(change, words, cli, made):
    line = told("A value in the recipe does not fit", *cli("train", made(), "--set", change))
    assert words in line


# -- what the recipe names -----------------------------------------------------------------------


def test_a_missing_model(cli, made, tmp_path):
    path = made(model={"tiny": None, "path": str(tmp_path / "nowhere")})
    line = told("The model's folder does not exist", *cli("train", path))
    assert str(tmp_path / "nowhere") in line


def test_an_environment_that_nobody_registered(cli, made):
    status, err = cli("train", made(env={"id": "relax/Calculater-v0", "args": {}}))
    line = told("No environment is registered under the id", status, err)
    assert "relax/Calculator-v0" in line


@pytest.mark.parametrize("module", ["no_such_module", "envs/mine.py"])
def test_a_module_that_cannot_be_imported(module, cli, made):
    status, err = cli("train", made(env={"modules": [module]}))
    line = told("A module that the recipe names cannot be imported", status, err)
    assert module in line


TASKLESS = """
from relax_agent.envs import TaskSet, register
from relax_agent.envs.catalog.calculator import CalculatorEnv
from relax_agent.envs.tasks import Task

@register("test/NothingHeldOut-v0")
class NothingHeldOut(CalculatorEnv):
    def __init__(self, tools=None):
        super().__init__(tools=tools)
        self.tasks = TaskSet([Task("a", "What is (1+1)*1?", 2)])
"""


def test_an_environment_without_held_out_tasks(cli, made, tmp_path, monkeypatch):
    (tmp_path / "taskless.py").write_text(TASKLESS)
    monkeypatch.syspath_prepend(tmp_path)
    path = made(env={"id": "test/NothingHeldOut-v0", "modules": ["taskless"], "args": {}})
    status, err = cli("train", path, "--set", "env.args={}")
    line = told("The environment has nothing to train or evaluate on", status, err)
    assert "test/NothingHeldOut-v0 has no tasks to evaluate on" in line


def test_a_missing_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    with pytest.raises(MissingExtraError) as caught:
        TensorBoardWriter(tmp_path)
    words = told_by("A package of an extra is not installed", caught.value)
    assert words == "tensorboard is not installed → pip install 'relax-agent[train]'"


@pytest.fixture
def busy_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_an_engines_port_in_use(busy_port, cli, made):
    status, err = cli("train", made(), "--set", f"engine.port={busy_port}")
    line = told("A port is in use", status, err)
    assert f"engine.port: 127.0.0.1:{busy_port}: address already in use" in line


def test_a_tool_servers_port_in_use(busy_port, cli):
    arguments = ("tools", "serve", "relax_agent.tools.calculator", "--port", busy_port)
    line = told("A port is in use", *cli(*arguments))
    assert f"127.0.0.1:{busy_port}" in line


def test_no_tool_server(cli, made):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    path = made(tools={"serve": None, "url": f"http://127.0.0.1:{port}"})
    line = told("No tool server answers at `tools.url`", *cli("train", path))
    assert f"http://127.0.0.1:{port}" in line


# -- resume --------------------------------------------------------------------------------------


@pytest.fixture
def old_run(tmp_path):
    """The folder of a run that was made and did nothing, and its recipe's file."""
    path = write_recipe(tmp_path, tmp_path / "runs", name="old")
    return RunFolder.create(load_recipe(path)), path


def test_the_folder_of_another_run(cli, old_run, tmp_path):
    folder, path = old_run
    row = "`--resume` names no run, or another run"
    line = told(row, *cli("train", path, "--resume", tmp_path))
    assert f"{tmp_path} is not a run folder" in line
    changes = ("--set", "trainer.lr=0.5", "--set", "seed=3", "--set", "steps=7")
    line = told(row, *cli("train", path, "--resume", folder.path, *changes))
    assert "trainer.lr was 0.001, is 0.5" in line and "seed was 0, is 3" in line
    assert "steps" not in line.partition("another run")[2].partition("→")[0].replace("_steps", "")


def test_a_run_that_still_goes_on(cli, old_run):
    folder, path = old_run
    with folder.locked():
        status, err = cli("train", path, "--resume", folder.path)
    line = told("`--resume` names a run that still goes on", status, err)
    assert str(folder.path) in line


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("conductor.json", b"{"),
        ("conductor.json", b'{"step": 4}'),
        ("model.safetensors", b"\x10"),
        ("model.safetensors", b"\xff" * 100),
        ("model.safetensors", (2).to_bytes(8, "little") + b"{}" + b"more"),
        ("model.safetensors", (2).to_bytes(8, "little") + b"[]"),
    ],
)
def test_a_damaged_checkpoint(name, content, cli, old_run):
    folder, path = old_run
    for step in (2, 4):
        checkpoint = folder.checkpoints.path(step)
        checkpoint.mkdir()
        (checkpoint / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        state = {"step": step, "version": step, "extra": {}}
        (checkpoint / "conductor.json").write_text(json.dumps(state))
    (folder.checkpoints.path(4) / name).write_bytes(content)
    status, err = cli("train", path, "--resume", folder.path, "--set", "steps=9")
    line = told("A checkpoint is damaged", status, err)
    assert name in line
    assert line.endswith("delete that folder to go on from step-000002")


# -- in the midst of a run -----------------------------------------------------------------------


def test_a_model_of_unknown_kind(runs, tmp_path):
    model = tmp_path / "model"
    create_tiny_model(model, TinySettings(hidden=32, layers=2), ["What is (1+2)*3?"] * 9)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "nonsense"}))
    path = write_recipe(tmp_path, runs, name="broken", model={"tiny": None, "path": str(model)})
    with train(path) as process:
        process.finish()
        assert process.left() == {}
    assert process.status in (1, 2)  # engine and trainer fail alike, and either may be the first
    assert re.match(r"error: (trainer-0|engine-0)\b.* cannot load ", process.error), process.err
    assert "nonsense" in process.error and "Traceback" not in process.err


class BrokenTools(BaseHTTPRequestHandler):
    """A tool server that lists its tools and answers 500 to every call."""

    def do_GET(self):
        self._answer(200, json.dumps(manifest(load_toolset("relax_agent.tools.calculator"))))

    def do_POST(self):
        self._answer(500, "Internal Server Error")

    def _answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *arguments):
        return


def test_a_tool_server_that_answers_500(runs, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), BrokenTools)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    path = write_recipe(tmp_path, runs, name="broken-tools", tools={"serve": None, "url": url})
    with train(path) as process:
        process.finish()
        line = told("The tool server answers no call", process.status, process.err)
        assert process.left() == {}
    server.shutdown()
    server.server_close()
    assert "calculator: the tool server failed (500)" in line and url in line
    assert re.search(r"\d+ of \d+ tool calls failed during the expert's episodes", process.out)


def test_weights_that_do_not_arrive(tmp_path):
    class Refusing(ScriptedEngine):
        async def begin_weight_update(self):
            raise EngineUnavailable(f"{self.name} is gone")

    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    engine = Refusing([], name="engine-1")
    with pytest.raises(WeightSyncError) as caught:
        asyncio.run(publish([engine], tmp_path, 1, WeightsSettings(kind="disk")))
    assert "engine-1" in told_by("New weights do not reach an engine", caught.value)


def test_no_data(tmp_path):
    async def main():
        queue = LocalQueue(tmp_path, QueueSettings(no_progress_s=60), groups_per_step=1)
        await queue.reserve("g", "t", timeout=1)
        try:
            await queue.lease(1, step=1, timeout=1000)
        finally:
            await queue.close()

    with pytest.raises(NoData) as caught:
        run(main())
    words = told_by("No group of episodes arrives for a long time", caught.value)
    assert "after 60 s" in words and "1 reserved" in words


def test_groups_that_all_fail(tmp_path):
    async def main():
        queue = LocalQueue(tmp_path, QueueSettings(), groups_per_step=4)
        groups = GroupRunner(runner(FakeEngine(dead)), size=2)
        producer = Producer(queue, groups, ["t"] * 9, max_episodes=9, max_failures_in_a_row=3)
        try:
            await producer.run()
        finally:
            await queue.close()

    with pytest.raises(RunFailed) as caught:
        run(main())
    words = told_by("Many groups fail one after another", caught.value)
    assert "3 groups failed" in words and "the engine is gone" in words


def test_an_evaluation_of_nothing_but_failures():
    report = run(evaluate(["a", "b"], runner(FakeEngine(dead)), name="eval"))
    with pytest.raises(RunFailed) as caught:
        require_episodes(report)
    words = told_by("All episodes of an evaluation fail", caught.value)
    assert "all 2 episodes" in words and "the engine is gone" in words


def test_an_evaluation_with_one_episode_is_good_enough():
    def script(request):
        return dead(request) if ord("x") in request.input_ids else "good"

    report = run(evaluate(["x", "y"], runner(FakeEngine(script)), name="eval"))
    require_episodes(report)
    assert (report.failures, report.success) == (1, 0.5)


def test_a_goal_that_was_missed(cli, old_run):
    folder, path = old_run
    folder.write_outcome({"step": 2, "missed": ["optimizer steps: 0, wanted at least 1"]})
    status, err = cli("train", path, "--resume", folder.path)
    line = told("The run ends without reaching its goal", status, err)
    assert line == (
        "error: optimizer steps: 0, wanted at least 1 → everything is in " + str(folder.path)
    )


def test_ctrl_c_and_sigterm(monkeypatch, capsys):
    """In a run they are errors with the phase; elsewhere the command line says the same."""

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(relax_agent.cli, "_command", interrupted)
    line = told(
        "Somebody ends the run: Ctrl-C, SIGTERM", relax_agent.cli._run(), capsys.readouterr().err
    )
    assert line == "error: interrupted by Ctrl-C"


def test_output_that_nobody_reads_is_no_fault(made):
    code = "import sys; from relax_agent.cli import main; main()"
    arguments = [sys.executable, "-c", code, "train", made(), "--dry-run"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


# -- the table -----------------------------------------------------------------------------------


def test_every_row_of_the_table_has_a_test_that_names_it():
    named = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named.add(node.value)
    assert table().keys() <= named
    assert len(table()) >= 20


def test_the_table_says_the_status_that_the_error_has():
    for words, row in table().items():
        fixed = getattr(row.error, "exit_code", None)
        assert row.statuses == (fixed,) or row.error.__name__ == "Interrupted", words
