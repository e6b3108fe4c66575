"""The registry: ids, versions, specs as JSON, plugins, and errors that name the way out."""

import asyncio
import copy
import json
import os
import subprocess
import sys
import threading
import types
import zipfile

import pytest

from relax_agent.envs import (
    Env,
    EnvSpec,
    TimeLimit,
    Wrapper,
    WrapperSpec,
    load_module_envs,
    make,
    make_async,
    pprint_registry,
    register,
    registration,
    registry,
    spec,
)
from relax_agent.envs.guard import Guard
from relax_agent.errors import ConfigError, EnvError, UnknownEnv
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


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("Echo-v0", "it has no namespace → an id looks like my/Echo-v0"),
        ("me/Echo", "it has no version → an id looks like me/Echo-v0"),
        ("Echo", "it has no namespace and no version → an id looks like my/Echo-v0"),
        ("a/b/c-v0", "not an environment id"),
        ("me/Echo v0", "not an environment id"),
        ("", "not an environment id"),
        (None, "not an environment id"),
    ],
)
def test_an_incomplete_id_is_not_registered(env_id, words):
    with pytest.raises(ConfigError, match=words):
        register(env_id, Echo)
    with pytest.raises(ConfigError, match=words):
        register(env_id)
    assert env_id not in registry


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
    assert "===== test =====\ntest/A-v0  test/B-v0\n" in text
    assert "relax/Calculator-v0" in text
    assert text.index("== relax ==") < text.index("== test ==")
    assert capsys.readouterr().out == text
    narrow = pprint_registry(columns=1, exclude=["relax"], disable_print=True)
    assert "test/A-v0\ntest/B-v0\n" in narrow
    assert "relax" not in narrow
    assert capsys.readouterr().out == ""


def test_versions_are_listed_as_numbers():
    for version in (10, 9, 2):
        register(f"test/Echo-v{version}", Echo)
    text = pprint_registry(disable_print=True)
    assert text.index("Echo-v2") < text.index("Echo-v9") < text.index("Echo-v10")


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
        "heavy = 'torch transformers ray openai gymnasium fastapi uvicorn httpx aiohttp'.split()\n"
        "heavy.append('numpy')\n"
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


class Limited(Wrapper):
    """A wrapper of a person: all kinds of arguments."""

    def __init__(self, env, limit, *, word="x", **more):
        super().__init__(env)
        self.limit, self.word, self.more = limit, word, more


class Nameless(Wrapper):
    """Takes arguments that have no names."""

    def __init__(self, env, *words):
        super().__init__(env)


class Inherits(Limited):
    """Has no constructor of its own."""


class NeverCallsSuper(Wrapper):
    """Sets its environment itself."""

    def __init__(self, env, count):
        self.env, self.count = env, count


def chain(env):
    """The classes of an environment and its wrappers, from the outside."""
    while isinstance(env, Wrapper):
        if not isinstance(env, Guard):
            yield env
        env = env.env
    yield env


def test_wrappers_put_on_by_hand_are_in_the_spec():
    register("test/Echo-v0", Echo, wrappers=[WrapperSpec(TimeLimit, {"max_turns": 9})])
    env = Limited(make("test/Echo-v0", word="hey"), 3, word="y", deep={"a": [1]})
    env = Inherits(TimeLimit(NeverCallsSuper(env, count=2), max_turns=4), limit=5)
    text = env.spec.to_json()
    again = make(EnvSpec.from_json(text))
    kinds = [Inherits, TimeLimit, NeverCallsSuper, Limited, TimeLimit, Echo]
    assert [type(each) for each in chain(again)] == kinds
    outer, inherits_inner, count, limited, inner, bare = chain(again)
    assert (outer.limit, outer.word, outer.more) == (5, "x", {})
    assert (inherits_inner.max_turns, count.count, inner.max_turns) == (4, 2, 9)
    assert (limited.limit, limited.word, limited.more) == (3, "y", {"deep": {"a": [1]}})
    assert bare.word == "hey"
    assert again.spec.to_json() == text
    assert env.spec.id == "test/Echo-v0"


def test_the_spec_of_a_wrapper_in_the_middle_ends_there():
    register("test/Echo-v0", Echo)
    inner = TimeLimit(make("test/Echo-v0"), max_turns=1)
    outer = Limited(inner, 2)
    assert len(inner.spec.wrappers) == 1
    assert len(outer.spec.wrappers) == 2
    assert spec("test/Echo-v0").wrappers == ()
    assert TimeLimit(Echo(), max_turns=1).spec is None


@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (lambda env: Limited(env, object()), "Limited: argument 'limit' is not plain data"),
        (lambda env: Limited(env, 1, f=print), "Limited: argument 'f' is not plain data"),
        (lambda env: Nameless(env, "a"), r"Nameless: \*words takes arguments without a name"),
        (lambda env: type("Local", (Limited,), {})(env, 1), "Local"),
    ],
)
def test_what_a_wrapper_cannot_take_elsewhere_is_named(wrap, words):
    register("test/Echo-v0", Echo)
    env = wrap(make("test/Echo-v0"))
    if words == "Local":
        type(env).__qualname__ = "test.<locals>.Local"
        words = "cannot be imported elsewhere"
    with pytest.raises(ConfigError, match=words):
        env.spec.to_json()


@pytest.mark.parametrize("value", [{1: "a"}, [{"a": {None: 1}}], ({2: 3},), object(), {"a"}, b"x"])
def test_what_json_would_change_without_a_word_is_named(value):
    with pytest.raises(ConfigError, match="argument 'word' is not plain data"):
        EnvSpec("test/Echo-v0", Echo, {"word": value}).to_json()


def test_plain_data_is_whatever_json_has():
    plain = {"a": [1, 2.5, None, True, "x", {"b": []}], "c": (1, 2)}
    again = EnvSpec.from_json(EnvSpec("test/Echo-v0", Echo, {"word": plain}).to_json())
    assert again.kwargs["word"] == {**plain, "c": [1, 2]}


def build_wrapped(word="hi"):
    """An entry point that is a function and wraps what it builds."""
    return TimeLimit(Echo(word), max_turns=1)


def test_an_entry_point_may_be_a_function_that_wraps():
    env = make(EnvSpec("test/Wrapped-v0", build_wrapped, {"word": "x"}))
    assert env.spec.wrappers == ()
    again = make(EnvSpec.from_json(Limited(env, 2).spec.to_json()))
    assert [type(each) for each in chain(again)] == [Limited, TimeLimit, Echo]
    assert asyncio.run(first_word(again)) == "x"


def test_a_wrapper_can_be_copied():
    wrapper = copy.copy(Limited(Echo(), 3))
    assert (wrapper.limit, type(wrapper.env)) == (3, Echo)


def test_a_wrapper_that_cannot_be_built_is_named():
    wrong = [
        (WrapperSpec(TimeLimit, {"turns": 3}), ConfigError, "TimeLimit: .* → arguments: max_turns"),
        (WrapperSpec(TimeLimit, {"max_turns": 0}), ConfigError, "max_turns must be ≥ 1"),
        (WrapperSpec(lambda env: 3), ConfigError, "gave int, not an Env"),
        (WrapperSpec(lambda env: 1 / 0), EnvError, "raised ZeroDivisionError"),
    ]
    for item, kind, words in wrong:
        with pytest.raises(kind, match=words):
            make(EnvSpec("test/Echo-v0", Echo, {}, (item,)))


def test_isolation_is_part_of_the_spec_and_of_its_json():
    register("test/Apart-v0", Echo, isolation="process")
    assert spec("test/Apart-v0").isolation == "process"
    again = EnvSpec.from_json(spec("test/Apart-v0").to_json())
    assert again.isolation == "process"
    assert EnvSpec.from_json(EnvSpec("test/Here-v0", Echo).to_json()).isolation is None
    old = '{"id": "test/Old-v0", "entry_point": "a:b", "kwargs": {}}'
    assert EnvSpec.from_json(old).isolation is None
    for wrong in (
        lambda: register("test/Wrong-v0", Echo, isolation="container"),
        lambda: make("test/Apart-v0", isolation="thread"),
        lambda: EnvSpec("test/Wrong-v0", Echo, isolation="thread"),
    ):
        with pytest.raises(ConfigError, match='does not exist → isolation="process"'):
            wrong()


def test_isolation_makes_a_process_environment_behind_a_guard(monkeypatch):
    made = []

    class Apart(Echo):
        def __init__(self, chosen, *, start_timeout_s):
            super().__init__()
            self.spec = chosen
            made.append((chosen, start_timeout_s, threading.get_ident()))

    from relax_agent.envs.serving import process

    monkeypatch.setattr(process, "ProcessEnv", Apart)
    register("test/Here-v0", Echo)
    register("test/Apart-v0", Echo, isolation="process")
    env = make("test/Here-v0", isolation="process", start_timeout_s=7, word="x")
    assert (type(env), type(env.env)) == (Guard, Apart)
    assert (made[0][0].isolation, made[0][0].kwargs, made[0][1]) == ("process", {"word": "x"}, 7)
    assert type(asyncio.run(make_async("test/Apart-v0")).env) is Apart
    assert made[1][2] != threading.get_ident()  # starting a process does not block the loop
    assert type(make("test/Here-v0").env) is Echo


def test_an_address_is_connected_to(monkeypatch):
    asked = []

    def connect_env(url, *, token=None, start_timeout_s=30.0):
        asked.append((url, token, start_timeout_s))
        return Echo("far")

    monkeypatch.setitem(
        sys.modules,
        "relax_agent.envs.serving.remote",
        types.SimpleNamespace(connect_env=connect_env),
    )
    env = make("ws://somewhere:80/x", token="t")
    assert asyncio.run(first_word(env)) == "far"
    asyncio.run(make_async("wss://somewhere", start_timeout_s=5))
    make("http://somewhere")
    assert asked == [
        ("ws://somewhere:80/x", "t", 30.0),
        ("wss://somewhere", None, 5),
        ("http://somewhere", None, 30.0),
    ]
    with pytest.raises(ConfigError, match=r"ws://somewhere: .* → arguments: token"):
        make("ws://somewhere", tokn="t")
    with pytest.raises(ConfigError, match="runs elsewhere already"):
        make("ws://somewhere", isolation="process")


def test_the_environments_of_a_module_are_found_also_if_it_was_imported_before(
    monkeypatch, tmp_path
):
    (tmp_path / "house_of_test.py").write_text(
        "from relax_agent.envs import Env, register\n"
        "class Own(Env):\n    pass\n"
        "register('test/Own-v0', Own)\n"
        "register('test/Text-v0', 'house_of_test:Own')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    register("test/Elsewhere-v0", Echo)
    for _ in range(2):
        found = load_module_envs("house_of_test")
        assert [each.id for each in found] == ["test/Own-v0", "test/Text-v0"]
    with pytest.raises(ConfigError, match="cannot import no_such_house"):
        load_module_envs("no_such_house")


PLUGIN = """
from relax_agent.envs import Env, register

class Plugged(Env):
    async def reset(self, *, seed=None, options=None):
        return [], {"word": "plugged in"}

register("plugged/Thing-v0", Plugged)
"""


def wheel(folder):
    """Write a wheel with one module and an entry point, as any build tool would."""
    info = "envs_plugged-1.0.dist-info"
    files = {
        "envs_plugged.py": PLUGIN,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: envs-plugged\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[relax_agent.envs]\nthings = envs_plugged\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    path = folder / "envs_plugged-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as out:
        for name, text in files.items():
            out.writestr(name, text)
    return path


def test_a_package_that_pip_installs_brings_its_environments(tmp_path):
    install = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet"]
    install += ["--disable-pip-version-check", "--no-compile", "--target", str(tmp_path / "site")]
    subprocess.run([*install, str(wheel(tmp_path))], check=True, timeout=120)
    program = (
        "import asyncio\n"
        "from relax_agent.envs import make, pprint_registry\n"
        "env = make('plugged/Thing-v0')\n"
        "print(asyncio.run(env.reset())[1]['word'])\n"
        "print('plugged/Thing-v0' in pprint_registry(disable_print=True))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "plugged in\nTrue\n", done.stderr


def test_a_plugin_that_names_a_class_is_not_called(monkeypatch, caplog):
    class Made(Echo):
        def __init__(self) -> None:
            raise AssertionError("nobody asked for one")

    points = [
        Point("class", lambda: Made),
        Point("late", lambda: lambda: register("test/L-v0", Echo)),
    ]
    monkeypatch.setattr(registration, "entry_points", lambda group: points)
    monkeypatch.setattr(registration, "_loaded_plugins", False)
    assert spec("test/L-v0").entry_point is Echo
    assert caplog.text == ""
