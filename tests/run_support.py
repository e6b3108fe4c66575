"""Real runs for tests: small recipes, the command line as a process, and who is left of it."""

from __future__ import annotations

import copy
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from contextlib import closing
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
LIMIT_S = 240.0
"""Nothing here takes nearly as long; a machine under load may."""
GONE_S = 10.0
"""How long processes may take to end after the run has."""
MARK = "RELAX_TEST_MARK"

RECIPE = {
    "name": "run",
    "steps": 2,
    "model": {
        "tiny": {"kind": "qwen3_moe", "hidden": 32, "layers": 2, "experts": 4, "expert_hidden": 64}
    },
    "env": {
        "id": "test/DenseReward-v0",
        "modules": ["dense_reward"],
        "args": {"train_tasks": 256, "eval_tasks": 32},
    },
    "tools": {"serve": "relax_agent.tools.calculator"},
    "engine": {"count": 1},
    "rollout": {
        "groups_per_step": 2,
        "group_size": 4,
        "max_concurrent_episodes": 16,
        "max_turns": 3,
        "max_tokens_per_turn": 24,
        "max_context": 256,
    },
    "algorithm": {"kind": "grpo"},
    "trainer": {
        "kind": "torch",
        "lr": 1e-3,
        "warm_start": {"episodes": 64, "batch_episodes": 16, "steps": 40, "noise": 0.5},
    },
    "eval": {"tasks": 16},
}
"""A few seconds of work, most of them imports."""


def recipe(**changes):
    """Return the recipe with changes laid over it: ``trainer={"kind": "megatron"}``."""
    return _merged(copy.deepcopy(RECIPE), changes)


def _merged(base, changes):
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merged(base[key], value)
        else:
            base[key] = value
    return base


def write_recipe(folder, runs, **changes):
    """Write the recipe into ``folder``; its run folders are made in ``runs``."""
    path = folder / f"recipe-{uuid.uuid4().hex[:6]}.yaml"
    path.write_text(yaml.safe_dump(recipe(runs=str(runs), **changes)))
    return path


class _Reader(threading.Thread):
    """Reads a pipe to its end, so that nobody who writes into it ever waits."""

    def __init__(self, pipe):
        super().__init__(daemon=True)
        self.text = ""
        self._pipe = pipe
        self.start()

    def run(self):
        with self._pipe:
            for line in self._pipe:
                self.text += line


class Process:
    """The command line, started; everything that it starts is known by a mark."""

    def __init__(self, *arguments, cwd=None, env=None):
        self.mark = uuid.uuid4().hex
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT / "tests"),
            MARK: self.mark,
            **(env or {}),
        }
        program = "import sys; from relax_agent.cli import main; sys.argv[0] = 'relax'; main()"
        self.popen = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=variables,
            bufsize=1,
            start_new_session=True,
        )
        self.status = None
        self._outputs = [_Reader(self.popen.stdout), _Reader(self.popen.stderr)]

    @property
    def out(self):
        """What it has written to standard output so far."""
        return self._outputs[0].text

    @property
    def err(self):
        """What it has written to standard error so far."""
        return self._outputs[1].text

    def finish(self):
        """Wait for the end and return self."""
        self.status = self.popen.wait(timeout=LIMIT_S)
        for output in self._outputs:
            output.join(timeout=LIMIT_S)
        return self

    @property
    def error(self):
        """The last line of standard error."""
        return self.err.rstrip("\n").split("\n")[-1]

    def send(self, signum):
        self.popen.send_signal(signum)

    def left(self):
        """Return ``{process id: command}`` of what still runs, after a short patience."""
        deadline = time.monotonic() + GONE_S
        while (found := marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def child(self, word):
        """Return the id of the one process whose command holds ``word``."""
        (pid,) = [pid for pid, command in marked(self.mark).items() if word in command]
        return pid

    def has_child(self, word):
        """Tell whether a process whose command holds ``word`` runs."""
        return any(word in command for command in marked(self.mark).values())

    def kill(self):
        """End it for sure: for a test that has failed."""
        for pid in [self.popen.pid, *marked(self.mark)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.finish()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.popen.returncode is None or marked(self.mark):
            self.kill()


def marked(mark):
    """Return ``{process id: command}`` of the living processes that inherited a mark."""
    found = {}
    needle = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0]
            if state not in b"ZX" and needle in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def train(*arguments, **options):
    """Start ``relax-agent train``."""
    return Process("train", *arguments, **options)


def wait_until(condition, process):
    """Wait until ``condition()`` is true while the process runs."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if process.popen.poll() is not None:
            process.finish()
            raise AssertionError(f"it ended first: {process.out}\n{process.err}")
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


def read_until(process, words):
    """Wait until the process has written these words."""
    wait_until(lambda: words in process.out, process)


def lines(path):
    """Return the objects of a file of JSON lines; every line must be whole and strict JSON."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n"), "a torn last line"
    return [json.loads(line, parse_constant=_refuse) for line in text.splitlines()]


def _refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


def trained_groups(folder):
    """Return ``{step: group ids in the order in which they were trained}`` from the index."""
    with closing(sqlite3.connect(f"file:{folder}/queue/index.sqlite?mode=ro", uri=True)) as db:
        rows = db.execute(
            "SELECT step, id FROM groups WHERE state IN ('acked', 'committed') ORDER BY step, place"
        ).fetchall()
    found = {}
    for step, group_id in rows:
        found.setdefault(step, []).append(group_id)
    return found
