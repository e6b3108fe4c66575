"""The gateway in the dialect of OpenAI responses: the official SDK, and whatever else may come."""

import asyncio
import contextlib
import json

import openai
import pytest
from gateway_support import open_episode, said
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_agent.gateway.dialect import BadRequest, Call
from relax_agent.gateway.responses import read

ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}


@contextlib.asynccontextmanager
async def program(*texts):
    """A client of the official SDK with a key of its own; yields it and its episode."""
    async with (
        open_episode(said(*texts)) as (url, key, episode),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client,
    ):
        yield client, episode


def check(episode, texts):
    episode.validate()
    assert len(episode.segments) == 1
    (row,) = episode.rows()
    sampled = "".join(chr(t) for t, m in zip(row.token_ids, row.loss_mask, strict=True) if m)
    assert sampled == "".join(f"{text}\0" for text in texts)


def test_a_streamed_tool_call_and_its_answer_are_one_unbroken_log():
    async def main():
        async with program('call {"a": 1}', "it is 2") as (client, episode):
            stream = await client.responses.create(
                model="policy", instructions="s", input="1+1?", tools=[ADD], stream=True
            )
            events = [event async for event in stream]
            assert [each.sequence_number for each in events] == list(range(len(events)))
            assert events[0].type == "response.created"
            assert events[-1].type == "response.completed"
            (call,) = events[-1].response.output
            assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
            history = [
                {"role": "user", "content": "1+1?"},
                {"type": "reasoning", "id": "rs_1", "summary": []},
                call.model_dump(),
                {"type": "function_call_output", "call_id": call.call_id, "output": "2"},
            ]
            last = await client.responses.create(
                model="policy", instructions="s", input=history, tools=[ADD]
            )
            assert (last.output_text, last.status) == ("it is 2", "completed")
            return episode

    episode = asyncio.run(main())
    check(episode, ['call {"a": 1}', "it is 2"])
    roles = [message.role for message in episode.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize("instructions", [None, "s"])
def test_a_conversation_goes_on_from_the_name_of_its_last_answer(instructions):
    async def main():
        more = {} if instructions is None else {"instructions": instructions}
        async with program("one", "two", "three") as (client, episode):
            reply = await client.responses.create(model="policy", input="q", **more)
            for word in ("r", "t"):
                reply = await client.responses.create(
                    model="policy", input=word, previous_response_id=reply.id, **more
                )
            assert reply.output_text == "three"
            with pytest.raises(openai.BadRequestError, match="there is no answer 'resp_x'"):
                await client.responses.create(
                    model="policy", input="q", previous_response_id="resp_x"
                )
            return episode

    check(asyncio.run(main()), ["one", "two", "three"])


def test_an_answer_that_is_cut_is_incomplete():
    async def main():
        async with program("a long answer") as (client, _):
            reply = await client.responses.create(model="policy", input="q", max_output_tokens=3)
            assert reply.status == "incomplete"
            assert reply.incomplete_details.reason == "max_output_tokens"
            assert (reply.output_text, reply.usage.output_tokens) == ("a l", 3)

    asyncio.run(main())


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["role", "content", "type", "text", "name", "arguments", "call_id", "output",
             "image_url", "id"]
        ),
        inner
        | st.sampled_from(["message", "function_call", "function_call_output", "input_text"]),
        max_size=5,
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            ["instructions", "input", "tools", "tool_choice", "max_output_tokens", "stream",
             "model", "text", "previous_response_id", "background"]
        ),
        values,
    )
)  # fmt: skip
def test_whatever_comes_is_read_or_refused_in_words(body):
    try:
        call = read(body)
    except BadRequest as error:
        assert str(error)
    else:
        assert isinstance(call, Call) and call.request.messages
