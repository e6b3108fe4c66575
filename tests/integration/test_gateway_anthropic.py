"""The gateway in Anthropic's dialect: the official SDK, and whatever else may come."""

import asyncio
import base64
import contextlib

import anthropic
import pytest
from gateway_support import open_episode, said
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_support import ids_of

from relax_agent.gateway.anthropic import read
from relax_agent.gateway.dialect import BadRequest, Call
from relax_agent.messages import Image

ADD = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {}}}


@contextlib.asynccontextmanager
async def program(*texts, **limits):
    """A client of the official SDK with a key of its own; yields it and its episode."""
    async with (
        open_episode(said(*texts), **limits) as (url, key, episode),
        anthropic.AsyncAnthropic(base_url=url, api_key=key) as client,
    ):
        yield client, episode


def ask(client, messages, **more):
    return client.messages.create(model="policy", max_tokens=64, messages=messages, **more)


def test_a_streamed_tool_call_and_its_answer_are_one_unbroken_log():
    async def main():
        async with program('call {"a": 1}', "it is 2") as (client, episode):
            messages = [{"role": "user", "content": "1+1?"}]
            async with client.messages.stream(
                model="policy", max_tokens=64, system="s", messages=messages, tools=[ADD]
            ) as stream:
                kinds = [event.type async for event in stream]
                reply = await stream.get_final_message()
            assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
            (block,) = reply.content
            assert (reply.stop_reason, block.name, block.input) == ("tool_use", "add", {"a": 1})
            assert reply.usage.output_tokens == len(ids_of('call {"a": 1}'))
            messages += [
                {"role": "assistant", "content": reply.content},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": block.id, "content": "2"}]},
            ]  # fmt: skip
            last = await ask(client, messages, system="s", tools=[ADD])
            assert (last.stop_reason, last.content[0].text) == ("end_turn", "it is 2")
            return episode

    episode = asyncio.run(main())
    episode.validate()
    assert len(episode.segments) == 1 and len(episode.turns) == 2
    (row,) = episode.rows()
    said = "".join(chr(t) for t, m in zip(row.token_ids, row.loss_mask, strict=True) if m)
    assert said == 'call {"a": 1}\0it is 2\0'
    roles = [message.role for message in episode.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]


def test_a_used_up_budget_is_told_in_the_dialects_own_way():
    async def main():
        async with program("one", "two", max_turns=1) as (client, _):
            await ask(client, [{"role": "user", "content": "q"}])
            with pytest.raises(anthropic.PermissionDeniedError, match="all 1 turns"):
                await ask(client, [{"role": "user", "content": "r"}])
            with pytest.raises(anthropic.APIStatusError, match="all 1 turns"):
                async with client.messages.stream(
                    model="policy", max_tokens=8, messages=[{"role": "user", "content": "r"}]
                ) as stream:
                    await stream.get_final_message()

    asyncio.run(main())


def test_tokens_are_counted_without_a_trace_in_the_log():
    async def main():
        async with program() as (client, episode):
            messages = [{"role": "user", "content": "q"}]
            found = await client.messages.count_tokens(model="policy", messages=messages)
            assert (found.input_tokens, len(episode)) == (len("u:q") + 3, 0)

    asyncio.run(main())


def test_results_pictures_and_words_of_one_message_keep_their_order():
    data = base64.b64encode(b"png").decode()
    picture = {"type": "base64", "media_type": "image/png", "data": data}
    call = read(
        {
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "so"},
                    {"type": "tool_use", "id": "a", "name": "look", "input": {}},
                    {"type": "tool_use", "id": "b", "name": "look", "input": {}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": [
                        {"type": "image", "source": picture}]},
                    {"type": "tool_result", "tool_use_id": "b", "is_error": True},
                    {"type": "text", "text": "and now?"}]},
            ],
        }
    )  # fmt: skip
    found = call.request.messages
    assert [each.role for each in found] == ["system", "assistant", "tool", "tool", "user"]
    assert [each.tool_call_id for each in found[2:4]] == ["a", "b"]
    assert found[2].media == (Image(b"png", "image/png"),)
    assert (found[1].text, found[1].reasoning, len(found[1].tool_calls)) == ("so", None, 2)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["role", "content", "type", "text", "name", "input", "source", "data", "media_type",
             "tool_use_id", "id", "input_schema"]
        ),
        inner | st.sampled_from(["text", "image", "tool_use", "tool_result", "base64"]),
        max_size=5,
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            ["system", "messages", "tools", "tool_choice", "max_tokens", "stream", "model"]
        ),
        values,
    )
    | st.builds(
        lambda role, content: {"messages": [{"role": role, "content": content}]},
        st.sampled_from(["user", "assistant"]),
        values,
    )
)
def test_whatever_comes_is_read_or_refused_in_words(body):
    try:
        call = read(body)
    except BadRequest as error:
        assert str(error)
    else:
        assert isinstance(call, Call) and call.request.messages
