"""What the adapters share, and what they say where their library is missing."""

import importlib
import random
import sys
import threading

import numpy as np
import pytest

from relax_agent.envs.adapters import common, from_gem, from_reasoning_gym, from_verifiers
from relax_agent.envs.adapters.common import PrivateRandomness, placed, require, unknown
from relax_agent.errors import EnvError, MissingExtraError


@pytest.mark.parametrize(
    ("module", "use", "install"),
    [
        ("gem", lambda: from_gem("game:GuessTheNumber-v0-easy"), "gem-llm==0.1.0"),
        ("reasoning_gym", lambda: from_reasoning_gym("chain_sum"), "reasoning-gym==0.1.25"),
        ("verifiers.v1", lambda: from_verifiers("a_module:Tasks"), "verifiers==0.4.0"),
    ],
)
def test_a_library_that_is_missing_is_named_with_its_install(monkeypatch, module, use, install):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=f"is not installed → pip install '{install}'"):
        use()


def test_a_library_that_lacks_one_of_its_own_is_told_apart(monkeypatch, tmp_path):
    (tmp_path / "half_a_library.py").write_text("import a_part_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtraError, match="pip install 'a_part_that_is_missing'"):
        require("half_a_library", "half-a-library")


def test_importing_a_library_touches_no_global_generator(monkeypatch, tmp_path):
    (tmp_path / "seeds_at_import.py").write_text("import random\nrandom.seed(0)")
    monkeypatch.syspath_prepend(tmp_path)
    before = random.getstate()
    require("seeds_at_import", "seeds-at-import")
    assert random.getstate() == before
    assert require("seeds_at_import", "x") is importlib.import_module("seeds_at_import")


def test_private_randomness_goes_on_where_it_was_and_leaves_the_global_one_alone():
    """T161: interleaved draws are what they are alone."""

    def draw(randomness):
        with randomness.swapped_in():
            return random.random(), float(np.random.rand())

    alone = PrivateRandomness(3)
    expected = [draw(alone) for _ in range(4)]
    random.seed(1)
    np.random.seed(1)
    one, two, mixed = PrivateRandomness(3), PrivateRandomness(3), []
    for _ in range(4):
        mixed.append((draw(one), draw(two)))
    assert [pair[0] for pair in mixed] == [pair[1] for pair in mixed] == expected
    drawn = random.random(), float(np.random.rand())
    random.seed(1)
    np.random.seed(1)
    assert drawn == (random.random(), float(np.random.rand()))
    one.seed(3)
    assert draw(one) == expected[0] != draw(PrivateRandomness(4))


def test_what_raises_gives_the_global_generators_back():
    before = random.getstate()
    with pytest.raises(ZeroDivisionError), PrivateRandomness(1).swapped_in():
        random.seed(9)
        raise ZeroDivisionError
    assert random.getstate() == before


def test_environments_in_many_threads_take_turns():
    results = {}

    def play(name):
        randomness = PrivateRandomness(5)
        drawn = []
        for _ in range(200):
            with randomness.swapped_in():
                drawn.append(random.random())
        results[name] = drawn

    threads = [threading.Thread(target=play, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({tuple(drawn) for drawn in results.values()}) == 1


def test_waiting_for_one_that_hangs_has_an_end(monkeypatch):
    monkeypatch.setattr(common, "_PATIENCE_S", 0.01)
    entered, leave = threading.Event(), threading.Event()

    def hang():
        with PrivateRandomness(1).swapped_in():
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=hang)
    thread.start()
    entered.wait(30)
    with (
        pytest.raises(EnvError, match="has held the global generators"),
        PrivateRandomness(2).swapped_in(),
    ):
        pass
    leave.set()
    thread.join()


def test_unknown_names_come_with_the_nearest_and_templates_with_their_braces():
    assert "did you mean chain_sum?" in str(unknown("set", "chian_sum", ["chain_sum", "maze"]))
    assert "did you mean Wordle-v0-easy?" in str(unknown("game", "wordle", ["Wordle-v0-easy"]))
    assert "there are 2 of them" in str(unknown("set", "zzz", ["a", "b"], where=" of them"))
    assert placed('{"a": {b}} {c}', b="1") == '{"a": 1} {c}'
