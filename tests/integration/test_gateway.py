"""The gateway: programs with the official SDK play episodes, and the token log is what was said."""

import asyncio
import contextlib
import json

import httpx
import openai
import pytest
from gateway_support import open_episode, said
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_support import FakeRenderer, ids_of

from relax_agent.engines.protocol import SamplingParams
from relax_agent.engines.script import Reply
from relax_agent.engines.scripted import ScriptedEngine
from relax_agent.episode import Episode, EpisodeStatus
from relax_agent.gateway import Gateway
from relax_agent.gateway.chat import read
from relax_agent.gateway.dialect import BadRequest, Call
from relax_agent.gateway.history import same
from relax_agent.messages import ToolCall, assistant, user
from relax_agent.rollout.episode_loop import EpisodeOptions

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


class Thinks(FakeRenderer):
    """What stands before a bar was thought."""

    def parse(self, output_ids, tools):
        text = "".join(chr(i) for i in output_ids if i != 0)
        thought, _, said = text.rpartition("|")
        message = super().parse(ids_of(said), tools)
        return assistant(message.text, tool_calls=message.tool_calls, reasoning=thought or None)


@contextlib.asynccontextmanager
async def program(engine, **limits):
    """A client of the official SDK with a key of its own; yields it and its episode."""
    async with (
        open_episode(engine, Thinks(), **limits) as (url, key, episode),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=2) as client,
    ):
        yield client, episode


def ask(client, messages, **more):
    return client.chat.completions.create(model="policy", messages=messages, **more)


def texts_of(episode):
    """Every row as text, the sampled part in brackets."""
    rows = []
    for row in episode.rows():
        out = ""
        for token, mask in zip(row.token_ids, row.loss_mask, strict=True):
            out += f"[{chr(token)}]" if mask else chr(token)
        rows.append(out.replace("][", ""))
    return rows


def test_a_streamed_tool_call_and_its_answer_are_one_unbroken_log():
    """T7, T64: reasoning is dropped from the history, calls are structured, ids stay as sampled."""

    async def main():
        engine = said('hm|call {"a": 1}', "so|it is 2")
        async with program(engine) as (client, episode):
            messages = [{"role": "user", "content": "1+1?"}]
            stream = await ask(
                client, messages, tools=[ADD], stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
            (call,) = [each for delta in deltas for each in delta.tool_calls or ()]
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
            assert chunks[-2].choices[0].finish_reason == "tool_calls"
            assert chunks[-1].usage.completion_tokens == len(ids_of('hm|call {"a": 1}'))
            again = {"role": "assistant", "content": None, "tool_calls": [
                {"id": call.id, "type": "function",
                 "function": {"name": "add", "arguments": '{ "a":1 }'}}]}  # fmt: skip
            answer = {"role": "tool", "tool_call_id": call.id, "content": "2"}
            reply = await ask(client, [*messages, again, answer], tools=[ADD])
            assert reply.choices[0].message.content == "it is 2"
            assert reply.choices[0].finish_reason == "stop"
            return episode

    episode = asyncio.run(main())
    episode.validate()
    assert len(episode.segments) == 1 and len(episode.turns) == 2
    assert texts_of(episode) == ['u:1+1?\0\n\1[hm|call {"a": 1}\0]\nt:2\0\n\1[so|it is 2\0]']
    assert [message.role for message in episode.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert episode.messages[1].reasoning == "hm"


def test_what_was_sampled_is_continued_where_the_program_changes_only_how_it_is_written():
    async def main():
        async with program(said("a |yes ", "b|no")) as (client, episode):
            messages = [{"role": "user", "content": "q"}]
            first = (await ask(client, messages)).choices[0].message
            messages += [{"role": "assistant", "content": first.content.strip()}]
            await ask(client, [*messages, {"role": "user", "content": "r"}])
            return episode

    assert len(asyncio.run(main()).segments) == 1


def test_an_edit_a_repetition_and_another_conversation_are_named_forks():
    async def main():
        async with program(said("one", "two", "three", "four", "five")) as (client, episode):
            start = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
            await ask(client, start)
            await ask(client, start)
            edited = [*start, {"role": "assistant", "content": "ONE!"}]
            await ask(client, [*edited, {"role": "user", "content": "r"}])
            await ask(client, [{"role": "user", "content": "other"}])
            back = [*start, {"role": "assistant", "content": "one"}]
            await ask(client, [*back, {"role": "user", "content": "r"}])
            return episode

    episode = asyncio.run(main())
    episode.validate()
    assert [each.reason for each in episode.segments] == [
        "start",
        "the same was asked again",
        "the history was edited",
        "another conversation",
        "back to an earlier conversation",
    ]
    rows = texts_of(episode)
    sampled = "".join(rows)
    assert [sampled.count(f"[{word}\0]") for word in ("one", "two", "three", "four", "five")] == [
        1
    ] * 5
    assert rows[-1].endswith("[one\0]\nu:r\0\n\1[five\0]") or "one\0\nu:r\0\n\1[five\0]" in rows[-1]


def test_conversations_side_by_side_go_on_each_in_its_own_line():
    """Two sub-agents that ask at the same time: each sampled token is trained once."""

    async def agent(client, name):
        messages = [{"role": "user", "content": name}]
        for _ in range(3):
            reply = await ask(client, messages)
            messages += [
                {"role": "assistant", "content": reply.choices[0].message.content},
                {"role": "user", "content": "on"},
            ]

    async def main():
        def script(request):
            return Reply(ids_of(chr(request.input_ids[2]) * 2))

        async with program(ScriptedEngine(script)) as (client, episode):
            await asyncio.gather(agent(client, "A"), agent(client, "B"))
            return episode

    episode = asyncio.run(main())
    episode.validate()
    rows = texts_of(episode)
    assert len(episode.turns) == 6
    assert sum(row.count("[") for row in rows) == 6
    for row in rows:  # no line ever holds what was said in the other one
        assert not ("A" in row and "B" in row)


def test_a_client_that_hangs_up_ends_its_request_and_leaves_no_trace():
    async def main():
        release = asyncio.Event()
        engine = ScriptedEngine(lambda request: Reply(ids_of("late")), step=release.wait)
        async with program(engine) as (client, episode):
            messages = [{"role": "user", "content": "q"}]
            for stream in (False, True):
                with pytest.raises((openai.APITimeoutError, httpx.ReadTimeout)):
                    quick = client.with_options(timeout=0.2, max_retries=0)
                    reply = await ask(quick, messages, stream=stream)
                    async for _ in reply:
                        pass
            assert len(episode) == 0
            while engine._running:  # noqa: ASYNC110 (it learns of it through a socket)
                await asyncio.sleep(0.01)
            release.set()
            reply = await ask(client, messages)
            assert reply.choices[0].message.content == "late"
            assert len(episode.segments) == len(episode.turns) == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("limits", "messages", "error", "code"),
    [
        ({"max_turns": 1}, ["q", "r"], openai.PermissionDeniedError, "episode_over"),
        (
            {"max_context": 8},
            ["a long question"],
            openai.BadRequestError,
            "context_length_exceeded",
        ),
        ({"timeout_s": 1e-9}, ["q"], openai.PermissionDeniedError, "episode_over"),
    ],
)
def test_a_used_up_budget_is_told_once_and_never_tried_again(limits, messages, error, code):
    async def main():
        engine = said("one", "two", "three", "four")
        async with program(engine, **limits) as (client, _):
            with pytest.raises(error) as caught:
                for text in messages:
                    await ask(client, [{"role": "user", "content": text}])
            assert caught.value.code == code
            return len(engine.requests)

    assert asyncio.run(main()) == len(messages) - 1


def test_an_answer_that_is_cut_says_so():
    async def main():
        async with program(said("a long answer")) as (client, episode):
            reply = await ask(client, [{"role": "user", "content": "q"}], max_completion_tokens=3)
            assert reply.choices[0].finish_reason == "length"
            assert reply.usage.completion_tokens == 3
            assert episode.turns[0].finish_reason == "length"

    asyncio.run(main())


def test_log_probs_are_those_of_the_log_and_foreign_sampling_is_told_to_be_ignored():
    async def main():
        async with program(said("ab")) as (client, episode):
            raw = await client.chat.completions.with_raw_response.create(
                model="policy", messages=[{"role": "user", "content": "q"}],
                logprobs=True, temperature=0.1, top_p=0.5,
            )  # fmt: skip
            assert raw.headers["x-relax-ignored"] == "temperature, top_p"
            told = [each.logprob for each in raw.parse().choices[0].logprobs.content]
            assert told == list(episode.segments[0].logprobs[-3:])

    asyncio.run(main())


def test_without_its_key_nobody_gets_anything():
    async def main():
        gateway = Gateway()
        async with gateway.serve() as url, httpx.AsyncClient() as client:
            for headers in ({}, {"Authorization": "Bearer sk-wrong"}, {"x-api-key": "x"}):
                answers = [
                    await client.get(f"{url}/v1/models", headers=headers),
                    await client.post(f"{url}/v1/chat/completions", headers=headers, json={}),
                    await client.post(f"{url}/v1/messages", headers=headers, json={}),
                ]
                assert [each.status_code for each in answers] == [401] * 3
        episode = Episode("env", "t", "g", 0)
        key = gateway.start(episode, said(), Thinks(), EpisodeOptions(SamplingParams(8)))
        assert gateway.close(key) is episode and episode.status is EpisodeStatus.RUNNING
        with pytest.raises(KeyError):
            gateway.close(key)

    asyncio.run(main())


def test_what_programs_leave_out_or_send_empty_is_accepted():
    """T62: tool_choice without tools, an assistant without content, an empty list of calls."""
    call = read(
        {
            "messages": [
                {"role": "developer", "content": "d"},
                {"role": "user", "content": [{"type": "text", "text": "q"}]},
                {"role": "assistant"},
                {"role": "assistant", "content": None, "tool_calls": []},
            ],
            "tool_choice": "auto",
        }
    )
    assert [each.role for each in call.request.messages] == [
        "system", "user", "assistant", "assistant",
    ]  # fmt: skip
    assert read({"messages": [{"role": "user", "content": "q"}], "tool_choice": "required"})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["role", "content", "tool_calls", "type", "text", "function", "name", "arguments",
             "image_url", "url", "input_audio", "data", "format", "id"]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            ["messages", "tools", "tool_choice", "n", "max_tokens", "stream", "stream_options",
             "response_format", "logprobs", "model", "stop", "temperature"]
        ),
        json_values,
    )
    | st.builds(
        lambda role, more: {"messages": [{"role": role, **more}]},
        st.sampled_from(["user", "assistant", "tool", "system"]),
        st.dictionaries(st.sampled_from(["content", "tool_calls", "tool_call_id"]), json_values),
    )
)  # fmt: skip
def test_whatever_comes_is_read_or_refused_in_words(body):
    try:
        call = read(body)
    except BadRequest as error:
        assert str(error)
    else:
        assert isinstance(call, Call) and call.request.messages


def test_an_answer_is_the_same_without_what_programs_lose_and_another_with_other_words():
    call, broken = ToolCall("add", {"a": 1, "b": 2}, "c1"), ToolCall("", {}, "c2", "not JSON")
    own = assistant("so ", tool_calls=[call, broken], reasoning="hm")
    assert same(assistant("so", tool_calls=[ToolCall("add", {"b": 2, "a": 1}, "else")]), own)
    assert same(assistant("", tool_calls=[ToolCall("add", {}, "c1")]), own)
    assert not same(assistant("so", tool_calls=[ToolCall("add", {"a": 2}, "else")]), own)
    assert not same(assistant("so"), own)
    assert not same(user("so "), own)


def test_after_its_key_is_taken_back_an_episode_grows_no_more():
    async def main():
        release, asked = asyncio.Event(), asyncio.Event()

        async def step():
            asked.set()
            await release.wait()

        engine = ScriptedEngine(lambda request: Reply(ids_of("late")), step=step)
        gateway, episode = Gateway(), Episode("env", "t", "g", 0)
        async with gateway.serve() as url, asyncio.timeout(30):
            key = gateway.start(episode, engine, Thinks(), EpisodeOptions(SamplingParams(64)))
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
                late = asyncio.ensure_future(ask(client, [{"role": "user", "content": "q"}]))
                await asked.wait()
                gateway.close(key)
                release.set()
                with pytest.raises(openai.PermissionDeniedError, match="episode is over"):
                    await late
        assert (len(episode), episode.turns) == (0, [])

    asyncio.run(main())


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
@pytest.mark.parametrize("body", [rb'{"model": "\ud800"}', b"[", b"\xff", b"[" * 5000, b"7", b""])
def test_a_body_that_is_no_text_is_refused_in_words(path, body):
    async def main():
        gateway, episode = Gateway(), Episode("env", "t", "g", 0)
        async with gateway.serve() as url, httpx.AsyncClient() as client:
            options = EpisodeOptions(SamplingParams(8))
            key = gateway.start(episode, said("a"), Thinks(), options)
            headers = {"Authorization": f"Bearer {key}"}
            answer = await client.post(f"{url}/v1/{path}", headers=headers, content=body)
            assert answer.status_code == 400 and answer.json()["error"]["message"]

    asyncio.run(main())


def test_an_answer_that_got_lost_is_given_again_and_not_sampled_twice():
    async def main():
        async with program(said("one", "two")) as (client, episode):
            messages = [{"role": "user", "content": "q"}]
            for _ in range(2):
                again = {"x-stainless-retry-count": "1"}
                reply = await ask(client, messages, extra_headers=again)
                assert reply.choices[0].message.content == "one"
            assert len(episode.turns) == 1
            assert (await ask(client, messages)).choices[0].message.content == "two"

    asyncio.run(main())
