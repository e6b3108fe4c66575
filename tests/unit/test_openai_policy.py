"""The policy behind an OpenAI-compatible endpoint, against a small server of that dialect."""

import asyncio
import contextlib
import json

import pytest
from aiohttp import web

from relax_agent.envs.openai_policy import OpenAIPolicy, from_chat, to_chat
from relax_agent.errors import ConfigError, EngineRejected, EngineUnavailable
from relax_agent.messages import (
    Audio,
    Image,
    Text,
    ToolCall,
    Video,
    assistant,
    system,
    tool_message,
    user,
)
from relax_agent.rendering import tool_parser


def completion(message, finish_reason="stop"):
    return {
        "id": "1", "object": "chat.completion", "created": 0, "model": "m",
        "choices": [{"index": 0, "finish_reason": finish_reason, "message": message}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
    }  # fmt: skip


@contextlib.asynccontextmanager
async def endpoint(*answers):
    """Serve the answers in turn, the last one for ever; yield (base_url, requests)."""
    asked, queue = [], list(answers)

    async def chat(request):
        asked.append((request.headers.get("Authorization"), await request.json()))
        answer = queue.pop(0) if len(queue) > 1 else queue[0]
        if callable(answer):
            return await answer(request)
        return web.json_response(answer)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/v1", asked
    finally:
        await runner.cleanup()


def ask(*answers, tools=(), **options):
    async def run():
        async with (
            endpoint(*answers) as (url, asked),
            OpenAIPolicy("m", base_url=url, **options) as policy,
        ):
            return await policy.act([user("hi")], list(tools)), asked

    return asyncio.run(run())


TOOL = {"type": "function", "function": {"name": "f", "description": "F.", "parameters": {}}}


def test_the_answer_comes_back_with_reasoning_calls_and_usage():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    said = {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [call]}
    message, asked = ask(completion(said, "tool_calls"), tools=[TOOL], temperature=0.5)
    assert (message.text, message.reasoning) == ("so", "hm")
    assert message.tool_calls == (ToolCall("f", {"x": 1}, "c1"),)
    assert (message.usage.prompt_tokens, message.usage.completion_tokens) == (7, 3)
    assert message.finish_reason == "stop"
    assert asked[0][1] == {
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL],
        "temperature": 0.5,
    }  # fmt: skip


def test_calls_that_come_as_text_are_read_where_a_parser_is_given():
    text = '<think>hm</think>So <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    answer = completion({"role": "assistant", "content": text}, "length")
    plain, _ = ask(answer, tools=[TOOL])
    assert (plain.text, plain.tool_calls) == (text, ())
    message, _ = ask(answer, tools=[TOOL], read_text=tool_parser("hermes").parse)
    assert (message.text, message.reasoning) == ("So", "hm")
    assert message.tool_calls == (ToolCall("f", {"x": 1}, "call_0"),)
    assert (message.usage.prompt_tokens, message.finish_reason) == (7, "length")


def test_a_cut_answer_says_so():
    message, _ = ask(completion({"role": "assistant", "content": "s"}, "length"))
    assert message.finish_reason == "length"


@pytest.mark.parametrize("arguments", ["{", "[1]", '"x"', "3", "NaN"])
def test_arguments_that_are_no_object_are_a_call_with_an_error(arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    message = from_chat(completion({"content": None, "tool_calls": [call]}))
    assert message.tool_calls[0].error and message.tool_calls[0].id == "call_0"


def test_the_key_comes_from_the_environment_and_a_local_server_needs_none(monkeypatch):
    answer = completion({"role": "assistant", "content": "ok"})
    monkeypatch.setenv("MY_KEY", "secret")
    assert ask(answer, api_key_env="MY_KEY")[1][0][0] == "Bearer secret"
    monkeypatch.delenv("MY_KEY")
    assert ask(answer, api_key_env="MY_KEY")[0].text == "ok"
    with pytest.raises(ConfigError, match="MY_KEY is not set"):
        OpenAIPolicy("m", api_key_env="MY_KEY")


def test_a_busy_endpoint_is_asked_again():
    async def busy(request):
        return web.Response(status=429, headers={"Retry-After-Ms": "1"}, text="slow down")

    message, asked = ask(busy, completion({"role": "assistant", "content": "ok"}))
    assert message.text == "ok" and len(asked) == 2


def test_a_refusal_is_not_repeated_and_has_the_endpoint_s_words():
    async def refuse(request):
        return web.json_response({"error": {"message": "context too long"}}, status=400)

    with pytest.raises(EngineRejected, match="context too long"):
        ask(refuse)


def test_a_silent_endpoint_and_one_that_is_not_there_are_unavailable():
    async def silent(request):
        await asyncio.sleep(30)
        return web.Response()

    with pytest.raises(EngineUnavailable, match=r"within 0\.05 s"):
        ask(silent, timeout_s=0.05, max_retries=0)

    async def nobody():
        async with OpenAIPolicy("m", base_url="http://127.0.0.1:9/v1", max_retries=0) as policy:
            await policy.act([user("hi")], [])

    with pytest.raises(EngineUnavailable, match="is the server running"):
        asyncio.run(nobody())


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [{"message": None}]}])
def test_an_answer_without_a_message_is_an_error(answer):
    with pytest.raises(EngineRejected, match="without a message"):
        from_chat(answer)


def test_media_of_tools_follow_in_a_user_message_behind_all_tool_messages():
    """U26: every kind of part has its form."""
    calls = [ToolCall("look", {}, "a"), ToolCall("listen", {"at": 1}, "b")]
    chat = to_chat(
        [
            system("Be brief."),
            user([Text("What is it?"), Image(b"png")]),
            assistant("I look.", tool_calls=calls),
            tool_message([Image(b"x", "image/jpeg")], calls[0]),
            tool_message([Text("sound:"), Audio(b"y"), Video(b"z")], calls[1]),
            user("And?"),
        ]
    )
    assert [m["role"] for m in chat] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "user",
        "user",
    ]
    assert chat[1]["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")
    assert json.loads(chat[2]["tool_calls"][1]["function"]["arguments"]) == {"at": 1}
    assert chat[3] == {"role": "tool", "content": "(see the next message)", "tool_call_id": "a"}
    assert chat[4]["content"] == "sound:"
    kinds = [part["type"] for part in chat[5]["content"]]
    assert kinds == ["image_url", "input_audio", "video_url"]
    assert chat[5]["content"][1]["input_audio"]["format"] == "wav"


def test_media_of_the_last_tool_message_are_not_lost():
    call = ToolCall("look", {}, "a")
    chat = to_chat([assistant(tool_calls=[call]), tool_message([Image(b"x")], call)])
    assert [m["role"] for m in chat] == ["assistant", "tool", "user"]
