"""``relax-agent envs``: what a newcomer types, in a fresh folder, in real processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).with_name("relax-agent")
LIMIT_S = 120


def relax_agent(folder, *args, status=0):
    done = subprocess.run(
        [COMMAND, *map(str, args)], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["tool", "text", "image"])
def test_a_new_environment_works_and_its_test_passes(tmp_path, kind):
    told = relax_agent(tmp_path, "envs", "new", "my_env", "--kind", kind)
    code = (tmp_path / "my_env.py").read_text()
    assert len(code.splitlines()) <= 30
    assert "wrote my_env.py" in told and "pytest -q" in told
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


def test_what_it_says_to_type_next_works(tmp_path):
    told = relax_agent(tmp_path, "envs", "new", "my_env", "--folder", "sub/folder")
    folder = tmp_path / "sub" / "folder"
    assert "cd sub/folder" in told
    commands = [line.strip().partition("#")[0].split() for line in told.splitlines()]
    check = next(words for words in commands if words[:3] == ["relax-agent", "envs", "check"])
    assert "33 checks ok" in relax_agent(folder, *check[1:])
    play = next(words for words in commands if words[:2] == ["relax-agent", "play"])
    assert relax_agent(folder, *play[1:], "--policy", "random")
    for linter in (["check", "--select", "E,F,I,W"], ["format", "--check"]):
        done = subprocess.run(
            [Path(sys.executable).with_name("ruff"), *linter, "--line-length", "100", "."],
            cwd=folder,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "test_my_env.py").write_text("mine")
    told = relax_agent(tmp_path, "envs", "new", "my_env", status=2)
    assert "test_my_env.py exists already" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test_my_env.py"]
    assert (tmp_path / "test_my_env.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("MyEnv",), "my_env"),
        (("my-env",), "my_env"),
        (("my_env.py",), "my_env"),
        (("class",), "my_env"),
        (("test_env",), "module's name"),
        (("../up",), "cannot be a module's name"),
        (("",), "my_env"),
        (("json",), "json_env"),
        (("numpy",), "numpy_env"),
        (("my_env", "--kind", "smell"), "tool | text | image"),
        (("my_env", "--folder", "/proc/here"), "cannot write"),
    ],
)
def test_a_name_or_place_that_cannot_be_is_refused(tmp_path, monkeypatch, capfd, arguments, words):
    from relax_agent import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["relax-agent", "envs", "new", *arguments])
    assert cli._run() in (1, 2)
    assert words in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


BROKEN = '''
from relax_agent import Env, register
from relax_agent.messages import user


@register("mine/Broken-v0")
class Broken(Env):
    """It is broken."""

    def __init__(self, size=3, seed=0):
        self.size = size

    async def reset(self, *, seed=None, options=None):
        return [user("hi")], {}

    async def step(self, action):
        return [user("go on")], float("nan"), False, False, {}
'''


@pytest.fixture
def broken(tmp_path):
    (tmp_path / "mine.py").write_text(BROKEN)
    return tmp_path


def test_a_check_that_fails_says_what_and_where_and_exits_with_1(broken):
    told = relax_agent(broken, "envs", "check", "mine:mine/Broken-v0", status=1)
    (line,) = [line for line in told.splitlines() if line.startswith("reward")]
    assert "FAILED" in line and "must be finite" in line and line.endswith("mine.py:16")


def test_a_check_as_json_is_for_programs(broken):
    told = relax_agent(broken, "envs", "check", "--module", "mine", "mine/Broken-v0", "--json",
                       "--arg", "size=4", "--arg", "seed=9", status=1)  # fmt: skip
    report = json.loads(told)
    assert (report["env"], report["ok"]) == ("mine/Broken-v0", False)
    assert {"check", "status", "message", "where"} == set(report["rows"][0])


def test_wrong_arguments_of_a_check_are_told_before_it_begins(broken):
    told = relax_agent(
        broken, "envs", "check", "mine:mine/Broken-v0", "--arg", "colour=red", status=2
    )
    assert "colour" in told and "size" in told
    assert "did you mean" in relax_agent(broken, "envs", "check", "relax/Calculater-v0", status=2)


def test_warnings_fail_where_they_are_asked_to(tmp_path):
    code = BROKEN.replace('float("nan"), False', "0.0, True")
    (tmp_path / "mine.py").write_text(code.replace('"""It is broken."""', "pass"))
    told = relax_agent(tmp_path, "envs", "check", "mine:mine/Broken-v0")
    assert "warning" in told and "no docstring" in told
    relax_agent(tmp_path, "envs", "check", "mine:mine/Broken-v0", "--strict", status=1)


def test_the_list_has_a_modules_own_environments_too(broken):
    told = relax_agent(broken, "envs", "list", "--module", "mine")
    lines = {line.split()[0]: line for line in told.splitlines() if "/" in line.split()[0]}
    assert "It is broken" in lines["mine/Broken-v0"]
    assert "calculator" in lines["relax/Calculator-v0"]
    assert "--arg env_id=" in lines["relax/Gymnasium-v0"]
    rows = json.loads(relax_agent(broken, "envs", "list", "--json"))
    assert "relax/Calculator-v0" in [row["id"] for row in rows]


def test_listing_builds_no_environment(tmp_path):
    code = BROKEN.replace("self.size = size", "raise SystemExit('built')")
    (tmp_path / "mine.py").write_text(code)
    assert "mine/Broken-v0" in relax_agent(tmp_path, "envs", "list", "--module", "mine")


def test_one_is_shown_with_its_arguments(broken):
    told = relax_agent(broken, "envs", "show", "mine:mine/Broken-v0")
    assert "argument: size=3" in told and "user: hi" in told
    told = relax_agent(broken, "envs", "show", "relax/Calculator-v0", "--arg", "max_operand=30")
    assert "argument: max_operand=20  Largest operand" in told
