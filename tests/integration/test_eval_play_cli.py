"""``relax-agent eval`` and ``play`` as people use them: whole programs, a real endpoint."""

import asyncio
import json
import os
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from relax_agent.envs.catalog.calculator_expert import CalculatorExpert
from relax_agent.envs.openai_policy import to_chat
from relax_agent.messages import from_openai

CLI = [sys.executable, "-c", "from relax_agent.cli import main; main()"]
SHOP = """
from relax_agent import Task, TaskSet, ToolEnv, register, tool

@tool
def price(fruit: str) -> int:
    '''Look up a price.

    Args:
        fruit: Its name.
    '''
    return {"fig": 12, "pear": 5}[fruit]

@register("shop/Fruit-v0")
class Fruit(ToolEnv):
    '''Say what it costs.'''

    tools = [price]

    def __init__(self, greeting: str = "Hello.") -> None:
        tasks = TaskSet([Task("fig", "A fig?", 12)], [Task("pear", "A pear?", 5)])
        super().__init__(tasks=tasks, system_prompt=greeting)

    def score(self, task, transcript):
        return float(transcript.answer == str(task.answer))
"""


@asynccontextmanager
async def model_server():
    """An OpenAI-compatible endpoint whose model is the calculator's expert."""
    expert, asked = CalculatorExpert(), []

    async def chat(request):
        body = await request.json()
        asked.append(body)
        answer = expert.act([from_openai(item) for item in body["messages"]], body["tools"])
        message = to_chat([answer])[0]
        usage = {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        head = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"]}
        return web.json_response(head | {"choices": [choice], "usage": usage})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1", asked
    finally:
        await runner.cleanup()


async def relax(*arguments, cwd, stdin=""):
    environment = {k: v for k, v in os.environ.items() if k != "OPENAI_API_KEY"}
    process = await asyncio.create_subprocess_exec(
        *CLI, *map(str, arguments), cwd=cwd, env={**environment, "COLUMNS": "100"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(60):
        out, err = await process.communicate(stdin.encode())
    return process.returncode, out.decode(), err.decode()


def test_a_model_behind_an_endpoint_is_evaluated_and_its_episodes_are_kept(tmp_path):
    async def run():
        async with model_server() as (url, asked):
            model = ("--model", "tiny", "--base-url", url, "--temperature", 0.5)
            wish = ("eval", "relax/Calculator-v0", *model, "--tasks", 6, "--out", "out")
            first = await relax(*wish, "-k", 2, cwd=tmp_path)
            count = len(asked)
            again = await relax(*wish, "-k", 2, "--json", cwd=tmp_path)
            other = await relax(*wish[:-1], "out", "--max-tokens", 9, cwd=tmp_path)
            return first, again, other, count, asked

    first, again, other, count, asked = asyncio.run(run())
    assert first[0] == 0, first[2]
    assert "success" in first[1] and "1.000" in first[1] and "pass@k" in first[1]
    assert "12 of 6 tasks" in first[1]
    assert asked[0]["temperature"] == 0.5 and asked[0]["tools"][0]["function"]["name"]
    assert len(asked) == count  # nothing was played twice
    report = json.loads(again[1])
    assert report["episodes"] == 12 and report["means"]["success"]["value"] == 1.0
    assert report["prompt_tokens"] >= 40
    out = tmp_path / "out"
    assert json.loads((out / "summary.json").read_text())["model"] == "tiny"
    assert len((out / "episodes.jsonl").read_text().splitlines()) == 12
    assert len(list((out / "pages").iterdir())) == 12 and (out / "index.html").exists()
    assert other[0] == 2 and "another evaluation: sampling" in other[2]


def test_an_endpoint_that_is_not_there_ends_with_words(tmp_path):
    away = ("--model", "m", "--base-url", "http://127.0.0.1:9/v1", "--retries", 0)
    wish = ("eval", "relax/Calculator-v0", *away, "--tasks")
    code, out, _ = asyncio.run(relax(*wish, 1, cwd=tmp_path))
    assert code == 1 and "is the server running?" in " ".join(out.split())
    code, _, err = asyncio.run(relax(*wish, 200, cwd=tmp_path))
    assert code == 1 and "could not be asked in any of 24 episodes" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["relax/Calculator-v0"], "--model NAME --base-url URL"),
        (["relax/Calculator-v0", "--model", "m"], "OPENAI_API_KEY is not set"),
        (["relax/Calculator-v0", "--policy", "nobody"], "module:factory"),
        (["relax/Calculater-v0", "--policy", "random"], "did you mean"),
        (["relax/Calculator-v0", "--policy", "expert", "--task", "nope"], "no task 'nope'"),
        (["relax/Calculator-v0", "--policy", "expert", "--arg", "max_operand"], "--arg name=value"),
    ],
)
def test_a_wish_that_makes_no_sense_is_one_line_and_starts_nothing(tmp_path, arguments, words):
    code, out, err = asyncio.run(relax("eval", *arguments, cwd=tmp_path))
    assert code == 2 and words in err and "Traceback" not in err
    assert not (tmp_path / "runs").exists() and out == ""


def test_a_module_of_one_s_own_with_arguments_and_a_policy_of_one_s_own(tmp_path):
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "mine.py").write_text(
        "from relax_agent import ScriptedPolicy\ndef five():\n    return ScriptedPolicy(['5'])\n"
    )
    mine = ("--module", "shop", "--policy", "mine:five", "--arg", "greeting=Moin.")
    code, out, err = asyncio.run(
        relax("eval", "shop/Fruit-v0", *mine, "-k", 3, "--no-html", cwd=tmp_path)
    )
    assert code == 0, err
    assert "Unclosed" not in err
    (folder,) = (tmp_path / "runs" / "eval").iterdir()
    (first, *_) = map(json.loads, (folder / "episodes.jsonl").read_text().splitlines())
    assert first["messages"][0]["content"] == "Moin." and first["reward"] == 1.0
    assert not (folder / "pages").exists() and str(folder.name) in out


def test_a_person_plays_tool_calls_included(tmp_path):
    (tmp_path / "shop.py").write_text(SHOP)
    typed = "/help\n/prise fig\n/price fig\n12\n"
    code, out, err = asyncio.run(
        relax("play", "shop:shop/Fruit-v0", "--task", "fig", cwd=tmp_path, stdin=typed)
    )
    assert code == 0, err
    assert "A fig?" in out and "did you mean /price?" in out
    assert "completed" in out and "reward 1 in 2 turns" in out and "success: 1" in out


def test_a_person_may_leave_and_what_was_played_is_recorded(tmp_path):
    (tmp_path / "shop.py").write_text(SHOP)
    code, out, err = asyncio.run(
        relax("play", "shop:shop/Fruit-v0", "--record", "kept", cwd=tmp_path, stdin="/price pear\n")
    )
    assert code == 0 and "you left" in out, err
    (line,) = (tmp_path / "kept" / "episodes.jsonl").read_text().splitlines()
    assert json.loads(line)["turns"] == 1


def test_one_may_watch_the_expert(tmp_path):
    code, out, err = asyncio.run(
        relax("play", "relax/Calculator-v0", "--policy", "expert", "--seed", 3, cwd=tmp_path)
    )
    assert code == 0 and "What is" in out and "reward 1" in out, err


def test_changed_code_is_another_evaluation_and_what_is_known_is_said(tmp_path):
    """Whoever mends a score and evaluates again must not be shown the old result."""
    wish = ("eval", "shop:shop/Fruit-v0", "--policy", "mine:five", "--no-html")
    (tmp_path / "mine.py").write_text(
        "from relax_agent import ScriptedPolicy\ndef five():\n    return ScriptedPolicy(['5'])\n"
    )

    def reward(*more):
        code, out, err = asyncio.run(relax(*wish, *more, cwd=tmp_path))
        assert code == 0, err
        (line,) = [line for line in out.splitlines() if line.startswith("reward")]
        return float(line.split()[1]), err

    (tmp_path / "shop.py").write_text(SHOP)
    first = reward()
    again = reward()
    fresh = reward("--fresh")
    (tmp_path / "shop.py").write_text(SHOP.replace("float(", "0.5 * float("))
    changed = reward()
    assert [first[0], again[0], fresh[0], changed[0]] == [1.0, 1.0, 1.0, 0.5]
    assert "1 of 1 episodes were played before" in again[1] and "--fresh" in again[1]
    assert "before" not in first[1] + fresh[1] + changed[1]
    names = sorted(path.name for path in (tmp_path / "runs" / "eval").iterdir())
    assert names == [f"shop-shop-fruit-v0-policy-mine-five{end}" for end in ("", "-2", "-3")]


def test_other_arguments_are_another_folder_and_a_model_leaves_no_open_connection(tmp_path):
    async def run():
        async with model_server() as (url, _):
            model = ("--model", "tiny", "--base-url", url, "--tasks", 2, "--no-html")
            wish = ("eval", "relax/Calculator-v0", *model)
            one = await relax(*wish, cwd=tmp_path)
            other = await relax(*wish, "--arg", "max_operand=9", cwd=tmp_path)
            return one, other

    for code, _, err in asyncio.run(run()):
        assert code == 0 and "Unclosed" not in err, err
    assert len(list((tmp_path / "runs" / "eval").iterdir())) == 2
