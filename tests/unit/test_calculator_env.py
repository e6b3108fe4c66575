"""The calculator: disjoint splits, a reward that wants the tool, an expert that errs."""

import asyncio
import random

import pytest

from relax_agent.envs import make, play
from relax_agent.envs.catalog.arithmetic import Question, make_tasks
from relax_agent.envs.catalog.calculator_expert import CalculatorExpert
from relax_agent.errors import ConfigError
from relax_agent.messages import ToolCall, assistant
from relax_agent.models import environment_texts
from relax_agent.tools.calculator import evaluate


@pytest.fixture
def env():
    return make("relax/Calculator-v0")


def questions(env, split):
    return [Question.parse(env.tasks[task].prompt) for task in env.tasks.ids(split)]


async def say(env, task, *messages):
    """Play fixed messages and return the last step."""
    await env.reset(options={"task": task})
    step = None
    for message in messages:
        step = await env.step(message)
    return step


def call(expression):
    return assistant(tool_calls=[ToolCall("calculator", {"expression": expression}, "call_0")])


def test_no_held_out_expression_is_trained_on_in_any_form(env):
    train, held_out = questions(env, "train"), questions(env, "eval")
    assert len(train) == len(set(train)) == 4096
    assert len({q.expression for q in held_out}) == 512
    assert not {q.expression for q in train} & {q.expression for q in held_out}


def test_equal_arguments_give_equal_tasks_and_other_seeds_others():
    first = make_tasks(20, 0.7, 100, 50, 0)
    make_tasks.cache_clear()
    assert first.fingerprint() == make_tasks(20, 0.7, 100, 50, 0).fingerprint()
    assert first.fingerprint() != make_tasks(20, 0.7, 100, 50, 1).fingerprint()


@pytest.mark.parametrize("in_words", [True, False])
def test_a_question_is_read_back_and_means_what_the_calculator_computes(in_words):
    rng = random.Random(0)
    for _ in range(300):
        question = Question.draw(rng, 30, float(in_words))
        assert question.in_words == in_words
        assert Question.parse(question.text) == question
        assert evaluate(question.expression) == question.answer


def test_the_gold_answer_is_in_no_message(env):
    async def first(task):
        observation, info = await env.reset(options={"task": task})
        return [message.text for message in observation], info

    task = next(t for t in env.tasks.ids() if abs(env.tasks[t].answer) > 99)
    texts, info = asyncio.run(first(task))
    assert str(env.tasks[task].answer) not in "".join(texts) + str(info)


@pytest.mark.parametrize(
    ("messages", "reward", "success"),
    [
        (["call", "right"], 1.0, 1.0),
        (["right"], 0.3, 1.0),
        (["broken call", "right"], 0.3, 1.0),
        (["call", "wrong"], 0.0, 0.0),
        (["call", "wordy"], 0.0, 0.0),
        (["call", ""], 0.0, 0.0),
        (["call"] * 4, 0.0, 0.0),
    ],
)
def test_the_reward_wants_the_right_number_and_a_call_that_worked(env, messages, reward, success):
    task = env.tasks.ids("eval")[0]
    right = env.tasks[task].answer
    words = {
        "call": call("1+1"),
        "broken call": call("1+"),
        "right": assistant(f" {right}\n"),
        "wrong": assistant(str(right + 1)),
        "wordy": assistant(f"It is {right}"),
        "": assistant(""),
    }
    step = asyncio.run(say(env, task, *(words[name] for name in messages)))
    assert step is not None
    _, got, terminated, truncated, info = step
    assert got == reward
    assert terminated != truncated
    assert info["metrics"]["success"] == success
    assert info["metrics"]["tool_calls"] == sum("call" in name for name in messages)
    assert info["metrics"]["tool_errors"] == messages.count("broken call")


@pytest.mark.parametrize("two_call_share", [0.0, 1.0])
def test_an_expert_without_noise_is_always_right(env, two_call_share):
    async def rewards():
        expert = CalculatorExpert(two_call_share=two_call_share)
        tasks = env.tasks.ids("eval")[:60]
        return [await play(env, expert, task=task) for task in tasks]

    plays = asyncio.run(rewards())
    assert {record.reward for record in plays} == {1.0}
    assert {record.metrics["tool_calls"] for record in plays} == {1.0 + two_call_share}


def test_noise_makes_forgotten_parentheses_the_rule_and_leaves_every_message_readable(env):
    async def episodes():
        expert = env.unwrapped.expert(noise=0.2, seed=3)
        return [
            (Question.parse(env.tasks[task].prompt), await play(env, expert, task=task))
            for task in env.tasks.ids("train")[:400]
        ]

    outcomes = {True: [], False: []}
    for question, record in asyncio.run(episodes()):
        outcomes[question.in_words and question.needs_parentheses].append(record.reward)
        assert record.metrics["tool_errors"] == 0
    hard, easy = (sum(values) / len(values) for values in (outcomes[True], outcomes[False]))
    assert 0.05 < hard < 0.35
    assert 0.5 < easy < 0.8


def test_an_expert_repeats_itself_for_equal_seeds_and_varies_between_repetitions(env):
    messages, _ = asyncio.run(env.reset(options={"task": "train-00000"}))
    schemas = env.tools.schemas()
    one, two = CalculatorExpert(0.5, 1), CalculatorExpert(0.5, 1)
    said = [one.act(messages, schemas) for _ in range(30)]
    assert said == [two.act(messages, schemas) for _ in range(30)]
    assert len({message.tool_calls[0].arguments["expression"] for message in said}) > 3


def test_an_expert_gives_up_where_the_tool_fails(env):
    messages, _ = asyncio.run(env.reset(options={"task": "train-00000"}))
    expert = CalculatorExpert()
    said = expert.act(messages, env.tools.schemas())
    (item,) = said.tool_calls
    from relax_agent.messages import tool_message

    answer = expert.act([*messages, said, tool_message("Error: down", item)], env.tools.schemas())
    assert answer.tool_calls == ()


def test_the_tools_may_run_elsewhere():
    class Elsewhere:
        names = ("calculator",)

        def schemas(self):
            return make("relax/Calculator-v0").tools.schemas()

        async def call(self, call):
            from relax_agent.messages import parts
            from relax_agent.tools import ToolResult

            return ToolResult(parts("41"))

        async def close(self):
            pass

    env = make("relax/Calculator-v0", tools=Elsewhere())
    step = asyncio.run(say(env, "eval-00000", call("1+1")))
    assert step[0][0].text == "41"


@pytest.mark.parametrize(
    "arguments",
    [{"max_operand": -1}, {"max_operand": 3}, {"eval_tasks": 0}, {"word_share": 1.5}],
)
def test_arguments_that_give_no_tasks_are_refused(arguments):
    with pytest.raises(ConfigError):
        make("relax/Calculator-v0", **arguments)


def test_the_texts_for_a_tokenizer_are_the_same_every_time(env):
    first = asyncio.run(environment_texts(env, CalculatorExpert(0.3), episodes=20))
    assert first == asyncio.run(environment_texts(env, CalculatorExpert(0.3), episodes=20))
    assert len(first) == 20
    assert all("<tool_call>" in text and "# Tools" in text for text in first)
    random_play = asyncio.run(environment_texts(env, episodes=5))
    assert len(random_play) == 5
