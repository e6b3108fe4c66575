"""The command line: wrong use is told in words and status 2; a printed recipe can be read back."""

import sys
from pathlib import Path

import pytest

from relax_agent import cli
from relax_agent.run.recipe import dump_recipe, load_recipe

ROOT = Path(__file__).parents[2]


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["relax-agent", *map(str, arguments)])
    return cli._run()


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("train",),
        ("no-such-command",),
        ("train", "--no-such-option"),
        ("train", "--set"),
        ("train", "a.yaml", "b.yaml"),
        ("envs",),
        ("envs", "show"),
        ("tools", "serve", "relax_agent.tools.calculator", "--port", "abc"),
    ],
)
def test_wrong_use_shows_help_and_never_a_traceback(monkeypatch, capfd, arguments):
    assert run(monkeypatch, *arguments) == 2
    told = capfd.readouterr()
    assert "Usage: " in told.out + told.err or told.err.startswith("Error: ")
    assert "Traceback" not in told.err


@pytest.mark.parametrize("name", ["calculator-moe.yaml", "calculator-dense.yaml"])
@pytest.mark.parametrize("override", ["seed=3", "engine.kind=sglang"])
def test_a_printed_recipe_reads_back_as_the_same(tmp_path, name, override):
    settings = load_recipe(ROOT / "configs" / name, [override, "weights.kind=disk"])
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_recipe(settings))
    assert load_recipe(copy).model_dump() == settings.model_dump()
    assert load_recipe(copy).fingerprint() == settings.fingerprint()


def test_an_error_of_the_project_is_one_last_line_and_its_status(monkeypatch, capfd):
    assert run(monkeypatch, "train", ROOT / "configs" / "missing.yaml") == 2
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1].startswith("error: ") and len(lines) == 1
