"""The registry: ids, versions, specs as JSON, plugins, and errors that name the way out."""

import asyncio
import json
import subprocess
import sys
import types

import pytest

from relax_agent.envs import (
    Env,
    EnvSpec,
    TimeLimit,
    WrapperSpec,
    make,
    pprint_registry,
    register,
    registration,
    registry,
    spec,
)
from relax_agent.errors import ConfigError, UnknownEnv
from relax_agent.messages import assistant, user


class Echo(Env):
    """Says its word again and again."""

    def __init__(self, word: str = "hi") -> None:
        self.word = word

    async def reset(self, *, seed=None, options=None):
        return [user(self.word)], {}

    async def step(self, action):
        return [user(self.word)], 0.0, False, False, {}


class Other(Echo):
    """Another class."""


@pytest.fixture(autouse=True)
def clean_registry(monkeypatch):
    for env_id in list(registry):
        if env_id.startswith("test/"):
            monkeypatch.delitem(registry, env_id)
    before = dict(registry)
    yield
    registry.clear()
    registry.update(before)


async def first_word(env):
    observation, _ = await env.reset()
    return observation[0].text


def test_register_and_make_with_arguments_over_the_defaults():
    register("test/Echo-v0", Echo, kwargs={"word": "hello"})
    assert asyncio.run(first_word(make("test/Echo-v0"))) == "hello"
    assert asyncio.run(first_word(make("test/Echo-v0", word="bye"))) == "bye"
    assert spec("test/Echo-v0").kwargs == {"word": "hello"}


def test_register_decorates():
    @register("test/Decorated-v1")
    class Decorated(Echo):
        pass

    env = make("test/Decorated-v1")
    assert isinstance(env.unwrapped, Decorated)
    assert (env.spec.namespace, env.spec.name, env.spec.version) == ("test", "Decorated", 1)


def test_without_a_version_the_newest_is_meant():
    for version in (2, 10, 9):
        register(f"test/Echo-v{version}", Echo, kwargs={"word": str(version)})
    assert make("test/Echo").spec.id == "test/Echo-v10"
    with pytest.raises(UnknownEnv, match="has no such version → there is test/Echo-v2"):
        make("test/Echo-v3")


def test_an_unknown_id_names_the_nearest():
    register("test/Echo-v0", Echo)
    with pytest.raises(UnknownEnv, match="did you mean test/Echo-v0"):
        make("test/Ecko-v0")
    with pytest.raises(ConfigError, match="not an environment id"):
        make("a/b/c")


def test_a_spec_goes_to_json_and_rebuilds_the_environment():
    wrapper = WrapperSpec("relax_agent.envs.wrappers.limits:TimeLimit", {"max_turns": 1})
    register("test/Echo-v0", Echo, wrappers=[wrapper])
    text = make("test/Echo-v0", word="again").spec.to_json()
    json.loads(text)
    rebuilt = EnvSpec.from_json(text)
    assert rebuilt.kwargs == {"word": "again"}
    env = make(rebuilt)

    async def main():
        word = await first_word(env)
        return word, (await env.step(assistant("x")))[3]

    assert asyncio.run(main()) == ("again", True)
    assert EnvSpec.from_json(rebuilt.to_json()) == rebuilt


def test_what_cannot_go_to_json_is_named():
    with pytest.raises(ConfigError, match="argument 'word' is not plain data"):
        EnvSpec("test/Echo-v0", Echo, {"word": object()}).to_json()
    with pytest.raises(ConfigError, match="cannot be imported elsewhere"):
        EnvSpec("test/Echo-v0", lambda: Echo()).to_json()
    for text in ("[]", "{", '{"id": "x"}', '{"id": "x", "entry_point": "a:b", "more": 1}'):
        with pytest.raises(ConfigError, match="not an environment spec"):
            EnvSpec.from_json(text)


def test_the_same_class_may_register_again_another_may_not():
    register("test/Echo-v0", Echo)
    register("test/Echo-v0", Echo, kwargs={"word": "new"})
    assert spec("test/Echo-v0").kwargs == {"word": "new"}
    with pytest.raises(ConfigError, match="registered already"):
        register("test/Echo-v0", Other)


def test_a_wrong_argument_is_named_before_anything_is_built():
    register("test/Echo-v0", Echo)
    with pytest.raises(ConfigError, match="unexpected keyword argument 'wort' → arguments: word"):
        make("test/Echo-v0", wort="x")


@pytest.mark.parametrize(
    ("entry_point", "words"),
    [
        ("no_such_module_here:Env", "No module named 'no_such_module_here'"),
        ("relax_agent.envs:NoSuchEnv", "has no 'NoSuchEnv'"),
        ("relax_agent.envs:registry", "cannot be called"),
        (dict, "gave dict, not an Env"),
    ],
)
def test_a_wrong_entry_point_is_named(entry_point, words):
    register("test/Wrong-v0", entry_point)
    with pytest.raises(ConfigError, match=words):
        make("test/Wrong-v0")


def test_a_module_prefix_imports_first(monkeypatch, tmp_path):
    (tmp_path / "my_envs_of_test.py").write_text(
        "from relax_agent.envs import Env, register\n"
        "@register('test/Mine-v0')\nclass Mine(Env):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert type(make("my_envs_of_test:test/Mine-v0").unwrapped).__name__ == "Mine"


class Point:
    """An entry point as importlib.metadata gives it."""

    def __init__(self, name, load):
        self.name, self.value, self.load = name, f"{name}:register", load


def test_plugins_are_loaded_when_needed_and_a_broken_one_is_only_reported(monkeypatch, caplog):
    def broken():
        raise ImportError("no such library")

    points = [
        Point("broken", broken),
        Point("function", lambda: lambda: register("test/Plugged-v0", Echo)),
        Point("module", lambda: types.ModuleType("envs_of_test")),
    ]
    monkeypatch.setattr(registration, "entry_points", lambda group: points)
    monkeypatch.setattr(registration, "_loaded_plugins", False)
    assert asyncio.run(first_word(make("test/Plugged-v0"))) == "hi"
    assert "plugin broken" in caplog.text and "no such library" in caplog.text


def test_pprint_groups_by_namespace(capsys):
    register("test/B-v0", Echo)
    register("test/A-v0", Echo)
    text = pprint_registry()
    assert "test\n  test/A-v0\n  test/B-v0" in text
    assert "relax/Calculator-v0" in text
    assert capsys.readouterr().out == text + "\n"


def test_the_wrapper_class_itself_may_stand_in_a_spec():
    chosen = EnvSpec("test/Echo-v0", Echo, {}, (WrapperSpec(TimeLimit, {"max_turns": 3}),))
    again = EnvSpec.from_json(chosen.to_json())
    assert again.wrappers[0].entry_point == "relax_agent.envs.wrappers.limits:TimeLimit"
    assert make(again).env.max_turns == 3


def test_importing_tools_and_environments_loads_nothing_heavy():
    program = (
        "import sys, relax_agent; early = set(sys.modules)\n"
        "import relax_agent.envs, relax_agent.tools\n"
        "from relax_agent import make, register, tool, ToolEnv\n"
        "heavy = 'torch transformers ray openai gymnasium fastapi uvicorn httpx aiohttp numpy'.split()\n"
        "print([name for name in heavy if name in sys.modules])\n"
        "print('pydantic' in early)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\nFalse\n", done.stderr


def test_every_public_name_resolves():
    import relax_agent

    assert all(getattr(relax_agent, name) is not None for name in relax_agent.__all__)
    assert set(relax_agent.__all__) <= set(dir(relax_agent))
    with pytest.raises(AttributeError):
        _ = relax_agent.no_such_name
