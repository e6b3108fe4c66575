"""Recipes: what is laid over them, what is refused and how, what comes back from a file."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter
from run_support import RECIPE, recipe

from relax_agent.errors import ConfigError, UnknownKeyError
from relax_agent.run.plan import process_plan
from relax_agent.run.recipe import Recipe, dump_recipe, load_recipe, parse_recipe


def parsed(**changes):
    return parse_recipe(recipe(**changes), "recipe")


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(RECIPE))
    return file


# -- overrides -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "found", "value"),
    [
        ("steps=7", lambda r: r.steps, 7),
        ("trainer.lr=1e-5", lambda r: r.trainer.lr, 1e-5),
        ("trainer.lr=.5E+1", lambda r: r.trainer.lr, 5.0),
        ("trainer.warm_start.steps=3", lambda r: r.trainer.warm_start.steps, 3),
        ("goal={}", lambda r: r.goal.success_last, None),
        ("goal.greedy_rise=0.5", lambda r: r.goal.greedy_rise, 0.5),
        ("env.args.max_operand=9", lambda r: r.env.args.get("max_operand"), 9),
        ("env.modules=[a, b]", lambda r: r.env.modules, ["a", "b"]),
        ("trainer.betas=[0.8, 0.9]", lambda r: r.trainer.betas, (0.8, 0.9)),
        ("name=infinity", lambda r: r.name, "infinity"),
        ("name=nan", lambda r: r.name, "nan"),
        ("tools.serve=null", lambda r: r.tools.serve, None),
        ("runs=/a=b", lambda r: str(r.runs), "/a=b"),
    ],
)
def test_an_override_sets_one_value(override, found, value, path):
    before, after = load_recipe(path), load_recipe(path, [override])
    assert found(after) == value
    if override != "goal={}":
        assert found(before) != value


def test_an_isolated_environment_keeps_its_tools(path):
    isolated = load_recipe(path, ["env.isolation=process", "tools.serve=null"])
    assert isolated.env.isolation == "process"
    with pytest.raises(ConfigError, match=r"leave tools\.serve and tools\.url out"):
        load_recipe(path, ["env.isolation=process"])


def test_overrides_apply_in_order(path):
    assert load_recipe(path, ["steps=3", "steps=4"]).steps == 4


def test_an_override_replaces_a_part_and_keeps_the_rest(path):
    changed = load_recipe(path, ["trainer.lr=0.5"])
    assert changed.trainer == load_recipe(path).trainer.model_copy(update={"lr": 0.5})


# -- unknown keys --------------------------------------------------------------------------------


def sections(model, prefix=()):
    """Every group of settings of the recipe, by the path to it."""
    yield prefix
    for name, field in model.model_fields.items():
        for inner in models_in(field.annotation):
            yield from sections(inner, (*prefix, name))


def models_in(annotation):
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for item in getattr(annotation, "__args__", ()) for m in models_in(item)]


@pytest.mark.parametrize("section", list(sections(Recipe)), ids=lambda keys: ".".join(keys))
def test_an_unknown_key_is_refused_in_every_section(section, path):
    """No key is accepted and ignored, however deep it lies."""
    if section == ("model", "tiny"):
        assert load_recipe(path).model.tiny is not None
    key = ".".join((*section, "no_such_key"))
    with pytest.raises(UnknownKeyError) as caught:
        load_recipe(path, [f"{key}=1"])
    assert f"there is no setting {key}" in str(caught.value)
    assert "did you mean " + ".".join(section) in str(caught.value)


def leaves(data, prefix=""):
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


KEYS = sorted(
    key
    for key in leaves(parse_recipe(recipe(), "recipe").model_dump(mode="json"))
    if not key.startswith("env.args.")
)


@given(key=st.sampled_from(KEYS), data=st.data())
def test_a_slip_of_the_keyboard_is_answered_with_the_key_that_was_meant(key, data):
    parents, _, name = key.rpartition(".")
    if len(name) < 5:
        return
    at = data.draw(st.integers(1, len(name) - 2))
    typo = name[:at] + name[at + 1] + name[at] + name[at + 2 :]
    if typo == name:
        return
    wrong = recipe()
    node = wrong
    for parent in filter(None, parents.split(".")):
        node = node.setdefault(parent, {})
    node[typo] = node.pop(name, 1)
    with pytest.raises(UnknownKeyError) as caught:
        parse_recipe(wrong, "recipe")
    assert str(caught.value).endswith(f"did you mean {key}?")


def test_a_wrong_key_is_told_before_the_gap_that_it_leaves():
    wrong = recipe()
    wrong["modle"] = wrong.pop("model")
    with pytest.raises(UnknownKeyError, match="did you mean model"):
        parse_recipe(wrong, "recipe")


def test_a_key_that_is_given_twice_is_refused(path):
    """YAML itself would take the last one without a word."""
    path.write_text(path.read_text() + "trainer: {lr: 1}\n")
    with pytest.raises(ConfigError, match=r"trainer is given twice .* line \d+"):
        load_recipe(path)


def test_several_mistakes_are_counted():
    with pytest.raises(ConfigError, match=r": (seed|steps): .* \(and 1 more\)"):
        parsed(steps=0, seed="x")


# -- what the recipe says once -------------------------------------------------------------------


def test_the_seed_reaches_every_part_that_names_none():
    spread = parsed(seed=5)
    assert (spread.engine.seed, spread.trainer.seed, spread.model.tiny.seed) == (5, 5, 5)


def test_a_part_keeps_the_seed_that_it_names():
    spread = parsed(seed=5, trainer={"seed": 7}, model={"tiny": {"seed": 0}})
    assert (spread.engine.seed, spread.trainer.seed, spread.model.tiny.seed) == (5, 7, 0)


def test_the_trainer_compares_at_the_temperature_of_sampling():
    assert parsed(rollout={"temperature": 0.7}).trainer.temperature == 0.7
    with pytest.raises(ConfigError, match=r"trainer.temperature=1 differs from rollout"):
        parsed(rollout={"temperature": 0.7}, trainer={"temperature": 1.0})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tools": {"serve": "a", "url": "http://b"}}, "either tools.serve or tools.url"),
        ({"model": {"tiny": None}}, "exactly one of path and tiny"),
        ({"engine": {"kind": "sglang"}, "weights": {"kind": "tensor"}}, "weights.kind=disk"),
        ({"name": "../elsewhere"}, "name"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        parsed(**changes)


# -- round trip ----------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"seed": 3, "trainer": {"seed": 4, "lr": 1e-7}}])
def test_a_dumped_recipe_reads_back_as_itself(changes):
    one = parsed(**changes)
    again = parse_recipe(yaml.safe_load(dump_recipe(one)), "dump")
    assert again == one
    assert again.fingerprint() == one.fingerprint()
    assert dump_recipe(again) == dump_recipe(one)


def test_the_dump_is_json_too():
    data = parsed().model_dump(mode="json")
    assert TypeAdapter(dict).validate_json(TypeAdapter(dict).dump_json(data)) == data


# -- what a checkpoint depends on ----------------------------------------------------------------


@pytest.mark.parametrize(
    "free",
    [
        {"name": "b"}, {"runs": "elsewhere"}, {"steps": 99}, {"goal": {"greedy_rise": 1.0}},
        {"engine": {"count": 3}}, {"trainer": {"timeout_s": 1}}, {"trainer": {"threads": 2}},
        {"queue": {"no_progress_s": 1}}, {"rollout": {"max_concurrent_episodes": 5}},
        {"eval": {"every": 3}}, {"checkpoint": {"every": 3}}, {"weights": {"pause": "in_place"}},
    ],
    ids=str,
)  # fmt: skip
def test_a_run_may_go_on_with_other_places_lengths_and_limits(free):
    assert parsed(**free).fingerprint() == parsed().fingerprint()


@pytest.mark.parametrize(
    "bound",
    [
        {"seed": 1}, {"env": {"args": {"max_operand": 3}}}, {"algorithm": {"clip_low": 0.1}},
        {"trainer": {"lr": 0.5}}, {"trainer": {"kind": "megatron"}}, {"rollout": {"group_size": 5}},
        {"model": {"tiny": {"layers": 3}}}, {"queue": {"max_staleness": 3}},
        {"trainer": {"warm_start": {"steps": 3}}}, {"rollout": {"temperature": 0.5}},
    ],
    ids=str,
)  # fmt: skip
def test_what_training_depends_on_makes_another_run(bound):
    assert parsed(**bound).fingerprint() != parsed().fingerprint()


# -- the plan ------------------------------------------------------------------------------------


def test_the_plan_names_every_process():
    plan = process_plan(parsed(engine={"count": 3}, trainer={"kind": "megatron", "ranks": 2}))
    assert "engine x3: embedded" in plan and "trainer x2: megatron" in plan
    assert "tools: relax_agent.tools.calculator over HTTP" in plan
    assert all(line.startswith("# ") for line in plan.splitlines())
    url = parsed(tools={"serve": None, "url": "http://there"})
    assert "already served at http://there" in process_plan(url)
