"""Tasksets of verifiers through the adapter, against the real package."""

import asyncio
import gc
import json
import random
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import verifiers_tasksets
from peer_support import assert_pinned, run_snippets

from relax_agent.envs import EnvSpec, ScriptedPolicy, check_env, make, make_vec, play
from relax_agent.envs.adapters import from_verifiers, verifiers_loop
from relax_agent.errors import ConfigError, EnvError, MissingExtraError, UnknownEnv
from relax_agent.messages import ToolCall, assistant
from relax_agent.status import EpisodeStatus

HERE = "verifiers_tasksets"


def taskset(name, **options):
    return from_verifiers(f"{HERE}:{name}", **options)


def guessing(**options):
    return from_verifiers("verifiers_game", **options)


def run(env, *replies, task=None, seed=0):
    async def go():
        async with env:
            policy = ScriptedPolicy(replies[0] if callable(replies[0]) else list(replies))
            return await play(env, policy, task=task, seed=seed)

    return asyncio.run(go())


def call(name, /, **arguments):
    return assistant(tool_calls=[ToolCall(name, arguments, "c")])


def test_the_library_is_the_pinned_one():
    assert_pinned("verifiers")


def test_the_page_on_neighbours_is_true():
    run_snippets("verifiers")


# -- tasks ------------------------------------------------------------------------------------


def test_every_task_is_a_task_and_its_answer_stays_behind():
    env = taskset("Sums", limit=4)
    assert env.tasks.ids() == ("sum-0", "sum-1", "sum-2", "sum-3")
    played = run(env, "please: 6", task="sum-3")
    assert [(m.role, m.text) for m in played.messages] == [
        ("system", "Be brief."), ("user", "What is 3 + 3?"), ("assistant", "please: 6"),
    ]  # fmt: skip
    task = env.tasks["sum-3"]
    assert (task.answer, task.data["answer"]) == ("6", "6")
    assert "6" not in repr(task)


def test_rewards_are_weighted_and_each_is_a_metric_beside_the_sum():
    env = taskset("Sums")
    good = run(env, "please: 6", task="sum-3")
    assert good.reward == 2.0 + 0.25 + 0.25
    shown = {name: good.metrics[name] for name in ("correct", "please", "short", "length")}
    assert shown == {"correct": 1.0, "please": 1.0, "short": 1.0, "length": 9.0}
    bad = run(taskset("Sums"), "7", task="sum-3")
    assert (bad.reward, bad.metrics["success"], bad.metrics["correct"]) == (0.25, 0.0, 0.0)


def test_the_end_says_what_counted_and_the_trace_is_at_hand():
    async def go():
        env = taskset("Sums")
        await env.reset(seed=1, options={"task": "sum-1"})
        *_, terminated, truncated, info = await env.step(assistant("2"))
        await env.close()
        return env.unwrapped.trace, terminated, truncated, info

    trace, terminated, truncated, info = asyncio.run(go())
    assert (terminated, truncated) == (True, False)
    assert info["rewards"]["correct"] == {"score": 1.0, "weight": 2.0}
    assert info["stop_condition"] == "agent_completed" and info["task"] == "sum-1"
    assert trace.ok and trace.num_turns == 1 and trace.reward == 2.25
    assert json.dumps(trace.to_record())


def test_ids_stay_with_their_tasks():
    ids = taskset("Sums", config={"ids": False}).tasks.ids()
    later = taskset("Sums", config={"ids": False, "first": 4}).tasks.ids()
    assert len(set(ids)) == 10 and set(ids[4:]) == set(later[:6])
    assert taskset("Hunts").tasks.ids() == ("red", "blue")
    assert taskset("Endless", limit=3).tasks.ids() == ("draw 0", "draw 1", "draw 2")


def test_a_part_is_held_out():
    by_config = taskset("Sums", eval_config={"first": 50}, limit=5).tasks
    assert by_config.ids("eval") == tuple(f"sum-{n}" for n in range(50, 55))
    by_share = taskset("Sums", config={"count": 200}, eval_share=0.2).tasks
    assert 20 < len(by_share.ids("eval")) < 60 and len(by_share) == 200
    with pytest.raises(ConfigError, match="3 of 10 held-out tasks are also trained on"):
        taskset("Sums", eval_config={"first": 7})
    with pytest.raises(ConfigError, match="both say"):
        taskset("Sums", eval_config={"first": 70}, eval_share=0.1)
    chosen = taskset("Sums", select={"include": {"ids": ["sum-2", "sum-5"]}})
    assert chosen.tasks.ids() == ("sum-2", "sum-5")


def test_order_fingerprint_and_spec_are_repeatable():
    env = taskset("Sums", config={"count": 5, "task": {"style_weight": 1.0}}, max_turns=3)
    again = make(EnvSpec.from_json(env.spec.to_json()))
    assert again.tasks.fingerprint() == env.tasks.fingerprint()
    assert taskset("Sums", config={"count": 6}).tasks.fingerprint() != env.tasks.fingerprint()
    orders = [[next(e.tasks.sample_order(3)) for _ in range(1)] for e in (env, again)]
    assert orders[0] == orders[1]
    assert from_verifiers(verifiers_tasksets.Sums).tasks.ids()[0] == "sum-0"
    assert run(again, "2", task="sum-1").reward == 2.25


def test_the_seed_chooses_the_task():
    async def asked(seed):
        async with taskset("Sums") as env:
            return (await env.reset(seed=seed))[1]["task"]

    chosen = [asyncio.run(asked(seed)) for seed in (1, 1, 2, 3, 4)]
    assert chosen[0] == chosen[1] and len(set(chosen)) > 1


def test_loading_draws_from_no_global_generator():
    random.seed(5)
    before = random.getstate()
    one = taskset("Endless", limit=3)
    assert random.getstate() == before
    assert one.tasks.fingerprint() == taskset("Endless", limit=3, max_turns=9).tasks.fingerprint()


def test_prompts_of_several_messages_with_pictures():
    played = run(taskset("Shown"), "a dot")
    assert [m.role for m in played.messages] == ["user", "assistant", "user", "assistant"]
    assert played.messages[2].media[0].data == verifiers_tasksets.PNG
    assert taskset("Shown").tasks["s"].prompt == played.messages[2].content
    far = run(taskset("Shown", config={"url": "https://a.example/b.png"}), "a dot")
    assert far.status is EpisodeStatus.ENV_FAILURE and "data URLs" in far.detail


# -- tools ------------------------------------------------------------------------------------


def test_tools_have_the_names_and_schemas_of_verifiers():
    env = taskset("Hunts")
    assert set(env.tools.names) == {"boxes_open", "boxes_look", "boxes_smash", "boxes_wait", "roll"}
    (shown,) = [s for s in env.tools.schemas() if s["function"]["name"] == "boxes_open"]
    assert shown["function"]["description"] == "Open a box."
    assert shown["function"]["parameters"]["required"] == ["name"]


def test_an_episode_with_tools_and_state():
    played = run(
        taskset("Hunts"), call("boxes_open", name="blue"), call("boxes_look"),
        call("boxes_open", name="red"), "here it is", task="red",
    )  # fmt: skip
    assert (played.status, played.reward, played.terminated) == ("completed", 1.0, True)
    told = [m for m in played.messages if m.role == "tool"]
    assert [m.text for m in told] == ["creak: nothing", "1 are open", "creak: gold"]
    assert told[1].media[0].data == verifiers_tasksets.PNG
    assert {m.tool_call_id for m in told} == {"c"}
    assert played.metrics["opened"] == 2 and played.metrics["calls_seen"] == 3


def test_several_calls_of_one_message_are_done_in_order():
    twice = assistant(tool_calls=[ToolCall("boxes_open", {"name": n}, "") for n in ("blue", "red")])
    played = run(taskset("Hunts"), twice, "done", task="blue")
    assert [m.text for m in played.messages if m.role == "tool"] == [
        "creak: gold", "creak: nothing",
    ]  # fmt: skip
    assert (played.reward, played.metrics["opened"]) == (1.0, 2)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (call("boxes_smash"), "it is too hard"),
        (call("boxes_open"), "Field required"),
        (call("boxes_opne", name="x"), "did you mean 'boxes_open'"),
        (call("boxes_wait", seconds=9), "took over 0.2 s"),
        (assistant(tool_calls=[ToolCall("boxes_open", {}, "c", error="no JSON")]), "no JSON"),
    ],
)
def test_what_fails_in_a_tool_is_told_to_the_model(wish, words):
    played = run(taskset("Hunts", tool_timeout_s=0.2), wish, "done", task="red")
    assert played.status == "completed" and words in played.messages[2].text
    assert played.metrics["tool_errors"] == 1


def test_a_long_result_is_cut_as_verifiers_cuts_it():
    played = run(taskset("Hunts"), call("boxes_wait", seconds=0), "done", task="red")
    assert "bytes truncated" in played.messages[2].text and len(played.messages[2].text) < 21_000


def test_shared_tools_draw_from_the_environments_own_generators():
    def rolls(seed):
        twice = call("roll"), call("roll")
        played = run(taskset("Hunts"), *twice, "done", task="red", seed=seed)
        return [m.text for m in played.messages if m.role == "tool"]

    before = random.getstate()
    assert rolls(1) == rolls(1) != rolls(2)
    assert random.getstate() == before


# -- ends -------------------------------------------------------------------------------------


def test_a_stop_condition_ends_the_episode_and_it_is_scored():
    """Of the trace, after a turn; and of the response, before its calls are run."""
    thrice = [call("boxes_open", name=n) for n in ("red", "x", "y")]
    played = run(taskset("Hunts"), *thrice, task="red")
    assert (played.terminated, played.truncated, played.turns) == (True, False, 3)
    assert played.reward == 1.0 and played.messages[-1].text == "creak: nothing"
    gave_up = assistant("I give up", tool_calls=[ToolCall("boxes_open", {"name": "red"}, "c")])
    played = run(taskset("Hunts"), gave_up, task="red")
    assert (played.terminated, played.reward, len(played.messages)) == (True, 0.0, 2)


def test_too_many_turns_truncate_and_the_episode_is_scored():
    env = taskset("Hunts", max_turns=2)
    played = run(env, call("boxes_open", name="red"), call("boxes_look"), task="red")
    assert (played.terminated, played.truncated, played.reward) == (False, True, 1.0)


def test_a_taskset_with_an_env_of_its_own_plays_turn_by_turn():
    def halve(messages, tools):
        said = [m.text for m in messages if m.role == "user"][1:]
        low, high, guess = 1, 8, 4
        for word in said:
            low, high = (guess + 1, high) if word == "higher" else (low, guess - 1)
            guess = (low + high) // 2
        return str(guess)

    records = [run(guessing(), halve, task=f"g{n}") for n in range(5)]
    assert all(r.status == "completed" and r.reward == 1.0 for r in records)
    assert any(r.turns > 1 for r in records)
    assert all(r.metrics["guesses"] == r.turns and r.metrics["finalized"] == 1 for r in records)
    assert [m.role for m in records[0].messages[:2]] == ["system", "user"]
    lost = run(guessing(env_config={"guesses": 1}), lambda m, t: "0", task="g1")
    assert (lost.reward, lost.terminated) == (0.0, True)
    cut = run(guessing(max_turns=2), lambda m, t: "0", task="g1")
    assert (cut.reward, cut.truncated, cut.turns) == (0.0, True, 2)
    broken = run(guessing(), "a few", task="g1")
    assert broken.status is EpisodeStatus.ENV_FAILURE and "invalid literal" in broken.detail


def test_games_that_seed_the_global_generator_are_repeatable_side_by_side():
    """T161."""
    before = random.getstate()

    def first(n):
        return run(guessing(), lambda m, t: "4", task=f"g{n}").messages[-1].text

    alone = [first(n) for n in range(5)]

    async def together():
        async def one(n):
            async with guessing() as env:
                policy = ScriptedPolicy(lambda m, t: "4")
                return (await play(env, policy, task=f"g{n}", seed=n)).messages[-1].text

        return await asyncio.gather(*(one(n) for n in range(5)))

    assert asyncio.run(together()) == alone
    assert random.getstate() == before


@pytest.mark.parametrize(
    ("reply", "words"),
    [("raise", "KeyError"), ("nan", "nan"), ("hang", "took over 0.3 s")],
)
def test_a_score_that_fails_is_the_environments_failure_and_no_zero(reply, words):
    played = run(taskset("Odds", score_timeout_s=0.3), reply)
    assert played.status is EpisodeStatus.ENV_FAILURE and words in played.detail, played.detail


def test_a_score_that_blocks_does_not_block_the_caller():
    async def go():
        beats, env = 0, taskset("Odds")
        await env.reset(seed=0)
        step = asyncio.ensure_future(env.step(assistant("block")))
        while not step.done():
            await asyncio.sleep(0.02)
            beats += 1
        await env.close()
        return beats, step.result()[1]

    beats, reward = asyncio.run(go())
    assert beats > 10 and reward >= 1.0


def test_a_thread_that_is_blocked_is_left_behind(monkeypatch):
    monkeypatch.setattr(verifiers_loop, "_ALIVE_S", 0.1)
    env = taskset("Odds")
    inner = env.unwrapped

    async def go():
        await env.reset(seed=0)
        held = inner._loop
        with pytest.raises(EnvError, match="blocks its thread"):
            await held.run(_block(), "a call", 0.1)
        await env.reset(seed=0)
        assert inner._loop is not held
        result = await env.step(assistant("well"))
        await env.close()
        return result[1]

    assert asyncio.run(go()) >= 1.0


async def _block():
    threading.Event().wait(1.0)


def test_what_has_no_reward_is_not_worth_zero():
    played = run(taskset("Unscoreds"), "hi")
    assert played.status is EpisodeStatus.ENV_FAILURE and "was not scored" in played.detail


def test_judges_score_without_a_runtime(monkeypatch):
    """A judge that comes with verifiers, asked over HTTP."""
    asked = []

    class Model(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(self.rfile.read(int(self.headers["Content-Length"])))
            choice = {"index": 0, "finish_reason": "stop",
                      "message": {"role": "assistant", "content": "yes"}}  # fmt: skip
            body = json.dumps({"id": "1", "object": "chat.completion", "created": 1, "model": "m",
                               "choices": [choice]}).encode()  # fmt: skip
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    monkeypatch.setenv("JUDGE_KEY", "k")
    server = HTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        judge = {"id": "reference", "model": "m", "base_url": url, "api_key_var": "JUDGE_KEY",
                 "weight": 0.5}  # fmt: skip
        played = run(taskset("Judgeds", config={"task": {"judges": [judge]}}), "It is Paris.")
    finally:
        server.shutdown()
        server.server_close()
    assert (played.status, played.reward) == ("completed", 0.5), played.detail
    assert b"Paris" in asked[0] and played.metrics["reference"] == 1.0


# -- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Boxeds", "Boxed need a container"),
        ("Imaged", "task i asks for the image python:3.11"),
        ("Whollys", "tests_pass of its 1 rewards need a runtime"),
        ("Partlys", "skip_signals=True"),
        ("Rewritings", "hide rewrites messages"),
        ("Mute", "task m has no prompt"),
        ("Empty", "has no tasks"),
        ("Endless", "limit=1000"),
        ("Fars", "served at a url"),
        ("SumData", "not a Taskset"),
        ("Nothing", "not a Taskset"),
    ],
)
def test_what_cannot_run_here_is_refused_with_words(name, words):
    with pytest.raises(ConfigError, match=words):
        taskset(name)


def test_signals_that_need_a_runtime_are_named_when_they_are_left_out():
    async def go():
        env = taskset("Partlys", skip_signals=True)
        await env.reset(seed=0)
        *_, info = await env.step(assistant("please 4"))
        await env.close()
        return info

    info = asyncio.run(go())
    assert info["skipped"] == ["tests_pass", "files"]
    assert info["rewards"].keys() == {"correct", "please", "short"}


def test_a_task_that_uses_a_runtime_on_the_way_says_so():
    played = run(taskset("Runnings"), "hi")
    assert played.status is EpisodeStatus.ENV_FAILURE and "uses a runtime (run)" in played.detail


def test_wrong_names_and_configs_are_told():
    with pytest.raises(UnknownEnv, match=r"no taskset 'gsm9k'.*textarena"):
        from_verifiers("gsm9k")
    with pytest.raises(ConfigError, match="cannot import no_such_module"):
        from_verifiers("no_such_module:Tasks")
    with pytest.raises(ConfigError, match=r"config: count: .*→ it has task, "):
        taskset("Sums", config={"count": "many"})
    with pytest.raises(ConfigError, match="config: cuont"):
        taskset("Sums", config={"cuont": 3})
    with pytest.raises(ConfigError, match="select"):
        taskset("Sums", select={"nothing": 1})
    with pytest.raises(ConfigError, match="env_config: tries"):
        guessing(env_config={"tries": 1})
    with pytest.raises(ConfigError, match="plain data"):
        taskset("Sums", config={"count": {1}})
    with pytest.raises(ConfigError, match="must be positive"):
        taskset("Sums", max_turns=0)
    with pytest.raises(EnvError, match="eval split"):
        asyncio.run(taskset("Sums").reset(options={"split": "eval"}))
    with pytest.raises(EnvError, match="no task 'x'"):
        asyncio.run(taskset("Sums").reset(options={"task": "x"}))


def test_a_taskset_that_lacks_a_package_of_its_own_names_it(tmp_path, monkeypatch):
    (tmp_path / "lacking_tasks.py").write_text("import a_part_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtraError, match="pip install 'a_part_that_is_missing'"):
        from_verifiers("lacking_tasks")


def test_a_harness_of_its_own_and_several_agents_are_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "with_harness.py").write_text(
        "from verifiers_tasksets import Sums\n"
        "from verifiers.v1.harnesses.null import NullHarness\n"
        "__all__ = ['Sums', 'NullHarness']\n"
    )
    (tmp_path / "with_two.py").write_text(
        "from verifiers_tasksets import Sums\n"
        "from verifiers.v1.envs.user_sim import UserSimEnv\n"
        "__all__ = ['Sums', 'UserSimEnv']\n"
    )
    (tmp_path / "without_all.py").write_text(
        "import verifiers_game, verifiers.v1 as vf\n"
        "class Mine(verifiers_game.GuessEnv): pass\n"
        "Guessing = verifiers_game.Guessing\n"
    )
    with pytest.raises(ConfigError, match=r"is Mine meant for it\? → say so in without_all"):
        from_verifiers("without_all:Guessing")
    with pytest.raises(ConfigError, match="brings a harness of its own"):
        from_verifiers("with_harness")
    with pytest.raises(ConfigError, match=r"2 agents \(assistant, user\)"):
        from_verifiers("with_two")


# -- as an environment like any other ---------------------------------------------------------


def test_it_passes_check_env():
    check_env("relax/Verifiers-v0", taskset=f"{HERE}:Hunts")


def test_it_steps_in_a_vector_environment():
    async def go():
        vec = make_vec("relax/Verifiers-v0", 4, taskset=f"{HERE}:Sums")
        jobs = [f"sum-{n}" for n in range(8)]
        records = [r async for r in vec.run(lambda: ScriptedPolicy(lambda m, t: "please"), jobs)]
        await vec.close()
        return records

    assert {r.reward for r in asyncio.run(go())} == {0.5}


def test_an_episode_that_is_left_ends():
    """Cancelled, begun anew, closed or forgotten: nothing of it goes on."""

    async def go():
        env = taskset("Hunts")
        await env.reset(seed=0)
        runner = env.unwrapped._episode.runner
        step = asyncio.ensure_future(env.step(call("boxes_wait", seconds=30)))
        await asyncio.sleep(0.2)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        await env.reset(seed=1)
        others = [env.unwrapped._episode.runner]
        await env.reset(seed=2)
        others.append(env.unwrapped._episode.runner)
        await env.close()
        forgotten = taskset("Hunts")
        await forgotten.reset(seed=0)
        others.append(forgotten.unwrapped._episode.runner)
        del forgotten
        gc.collect()
        await asyncio.sleep(0.3)
        return [runner, *others]

    assert all(runner.done() for runner in asyncio.run(go()))


# -- a taskset that comes with verifiers -------------------------------------------------------


def test_the_textarena_taskset_of_verifiers_plays(tmp_path, monkeypatch):
    """Hangman needs nltk's words, which it would download; here is a list of a few."""
    words = tmp_path / "corpora" / "words"
    words.mkdir(parents=True)
    (words / "en").write_text("\n".join(["apple", "grape", "lemon", "mango", "peach", "berry"]))
    (words / "en-basic").write_text("apple\ngrape\nlemon\nmango\npeach\nberry")
    import nltk

    monkeypatch.setattr(nltk, "download", lambda *_, **__: True)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    env = from_verifiers("textarena", config={"game": "Hangman-v0"}, limit=3)
    assert env.tasks.ids() == ("Hangman-v0#0", "Hangman-v0#1", "Hangman-v0#2")
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    played = run(env, lambda m, t: f"[{next(letters)}]", task="Hangman-v0#1")
    assert (played.status, played.terminated) == ("completed", True), played.detail
    assert played.turns > 2 and "game_reward" in played.metrics
