"""Commands, ports and waiting for engines, without starting a real one."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from relax_agent.engines import launch
from relax_agent.engines.client import EngineClient
from relax_agent.engines.settings import EngineSettings
from relax_agent.errors import ChildDied, ConfigError, EngineUnavailable
from relax_agent.processes import ChildProcess

DENSE = {"vocab_size": 512, "max_position_embeddings": 2048, "num_hidden_layers": 2}
MOE = DENSE | {"num_experts": 8, "num_experts_per_tok": 2}


@pytest.fixture
def model(tmp_path):
    def write(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


def option(argv, name):
    return argv[argv.index(f"--{name}") + 1]


def test_the_embedded_command_hides_the_token_and_names_its_parent(model):
    settings = EngineSettings(threads=2, max_running_requests=7, seed=9)
    argv, env = launch.engine_command(settings, model(MOE), 4321, "secret", version=3)
    assert argv[:3] == [sys.executable, "-m", "relax_agent.engines.embedded"]
    assert "secret" not in argv
    assert env[option(argv, "token-env")] == "secret"
    assert option(argv, "parent-pid") == str(os.getpid())
    assert env["OMP_NUM_THREADS"] == option(argv, "threads") == "2"
    assert option(argv, "weight-version") == "3"
    assert option(argv, "max-running-requests") == "7"
    assert option(argv, "random-seed") == "9"


def test_the_embedded_command_is_one_that_the_engine_understands(model):
    from relax_agent.engines.embedded.__main__ import parse_arguments

    argv, _ = launch.engine_command(EngineSettings(), model(MOE), 4321, "secret")
    parsed = parse_arguments(argv[3:])
    assert (parsed.port, parsed.model_path) == (4321, model(MOE))


def test_sglang_on_a_cpu_gets_shims_and_known_good_options(model):
    settings = EngineSettings(kind="sglang", python=Path(sys.executable), extra_args=("--x", "1"))
    argv, env = launch.engine_command(settings, model(MOE), 4321, "secret")
    assert argv[0] == sys.executable
    assert option(argv, "device") == "cpu"
    assert option(argv, "attention-backend") == "torch_native"
    assert option(argv, "dtype") == "float32"
    assert option(argv, "api-key") == "secret"
    assert argv[-2:] == ["--x", "1"]
    assert "--enable-return-routed-experts" in argv
    assert (Path(env["PYTHONPATH"]) / "sitecustomize.py").exists()
    assert (Path(env["PYTHONPATH"]) / "sgl_kernel" / "__init__.py").exists()


def test_sglang_on_a_gpu_gets_no_cpu_options(model):
    settings = EngineSettings(kind="sglang", python=Path(sys.executable), device="cuda")
    argv, env = launch.engine_command(settings, model(DENSE), 4321, None)
    assert "PYTHONPATH" not in env
    assert not {"--device", "--attention-backend", "--api-key"} & set(argv)
    assert "--enable-return-routed-experts" not in argv


@pytest.mark.parametrize("option", [{"python": "x"}, {"device": "cuda"}, {"extra_args": ["--y"]}])
def test_options_of_sglang_are_refused_for_the_embedded_engine(option):
    with pytest.raises(ValidationError, match=f"{next(iter(option))}: only for"):
        EngineSettings(kind="embedded", **option)


def test_a_folder_without_a_model_is_a_readable_error(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        launch.engine_command(EngineSettings(), tmp_path, 1, None)


def test_the_interpreter_of_sglang_is_found_in_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = EngineSettings(kind="sglang")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"\.venv-sglang.*make venv-sglang"):
        launch.sglang_python(settings)
    python = tmp_path / ".venv-sglang" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert launch.sglang_python(settings) == python


def test_a_named_interpreter_that_is_not_there_is_an_error():
    with pytest.raises(ConfigError, match="does not exist"):
        launch.sglang_python(EngineSettings(kind="sglang", python=Path("nowhere/python")))


def test_ports_are_different_and_count_up_from_a_given_one():
    assert launch.engine_ports(EngineSettings(count=3, port=5000)) == [5000, 5001, 5002]
    free = launch.engine_ports(EngineSettings(count=4))
    assert len(set(free)) == 4


def start_and_wait(tmp_path, program, timeout_s):
    async def main():
        argv = [sys.executable, "-c", program]
        child = await ChildProcess.start("engine 7", argv, log=tmp_path / "e.log")
        url = f"http://127.0.0.1:{launch.find_free_port()}"
        try:
            async with EngineClient(url) as client:
                await launch.wait_ready(client, child, timeout_s)
        finally:
            await child.terminate()

    asyncio.run(main())


def test_an_engine_that_ends_while_starting_shows_its_last_words(tmp_path):
    program = "print('x'); import sys; sys.exit('ValueError: no such flag')"
    with pytest.raises(ChildDied, match=r"engine 7 .*code 1.*no such flag") as caught:
        start_and_wait(tmp_path, program, 30)
    assert caught.value.child_exit_code == 1


def test_an_engine_that_never_serves_ends_the_wait(tmp_path):
    with pytest.raises(EngineUnavailable, match=r"engine 7 was not ready within 0\.5 s"):
        start_and_wait(tmp_path, "import time; print('loading'); time.sleep(60)", 0.5)
