"""A policy behind any OpenAI-compatible endpoint: a hosted model, SGLang, vLLM, a local server.

:class:`OpenAIPolicy` sends the conversation and the tools' schemas to ``/chat/completions`` with
the official SDK, which retries what is safe to retry (429, 5xx, lost connections) with growing
pauses. What comes back becomes an :class:`~relax_agent.messages.AssistantMessage`; arguments that
are no JSON object stay visible as a call with an ``error``, so the environment can tell the model.

A server that knows nothing of a model's tool calls returns them as text. ``read_text`` reads them
there: ``tool_parser("hermes").parse``, or any function of a text and the tools' schemas.

The chat API takes only text in tool messages. Pictures, sounds and videos that a tool returned
follow in a user message right behind the tool messages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from relax_agent.closing import Closing
from relax_agent.errors import (
    ConfigError,
    EngineRejected,
    EngineUnavailable,
)
from relax_agent.messages import (
    AssistantMessage,
    Audio,
    Image,
    Message,
    Part,
    Text,
    ToolCall,
    Usage,
    parts,
)

if TYPE_CHECKING:
    import openai
    from openai import AsyncOpenAI

ReadText: TypeAlias = Callable[[str, Sequence[dict[str, Any]]], AssistantMessage]
"""Makes a message of what a model said, given the tools' schemas."""

_TIMEOUT_S = 120.0
_MAX_RETRIES = 4
_NO_KEY = "none"
"""Sent where no key is set: the SDK insists on one, servers of one's own ignore it."""


class OpenAIPolicy(Closing):
    """Answers with a model behind an OpenAI-compatible endpoint. One serves many episodes."""

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        timeout_s: float = _TIMEOUT_S,
        max_retries: int = _MAX_RETRIES,
        read_text: ReadText | None = None,
        **sampling: Any,
    ) -> None:
        """Prepare a client; nothing is sent yet.

        Args:
            model: The model's name at the endpoint.
            base_url: E.g. ``http://127.0.0.1:30000/v1``; None means OpenAI's own.
            api_key_env: The variable that holds the key. It need not be set where ``base_url`` is.
            timeout_s: Seconds for one request.
            max_retries: Requests after the first, for what is safe to retry.
            read_text: Finds tool calls in the content of an answer that has none.
            **sampling: Passed on with every request: ``temperature``, ``max_tokens``, ``seed``, …

        Raises:
            ConfigError: There is no key for OpenAI's own endpoint.
        """
        key = os.environ.get(api_key_env)
        if key is None and base_url is None:
            raise ConfigError(
                f"{api_key_env} is not set", hint="set it, or name a server: --base-url http://…/v1"
            )
        self.model = model
        self.base_url = base_url
        self.sampling = sampling
        self._key = key or _NO_KEY
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._read_text = read_text
        self._client: AsyncOpenAI | None = None

    async def act(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> AssistantMessage:
        """Return the model's next message.

        Raises:
            EngineUnavailable: The endpoint cannot be reached, or not in time, after all retries.
            EngineRejected: It refused the request; the message has its words.
        """
        import openai

        request: dict[str, Any] = {"messages": to_chat(messages), **self.sampling}
        if tools:
            request["tools"] = list(tools)
        try:
            answer = await self._opened().chat.completions.create(model=self.model, **request)
        except openai.APIStatusError as error:
            raise EngineRejected(
                f"{self.model} answered {error.status_code}: {_short(error.message)}"
            ) from error
        except openai.APIConnectionError as error:
            raise self._unavailable(error) from error
        except openai.OpenAIError as error:
            raise EngineRejected(f"{self.model}: {_short(str(error))}") from error
        message = from_chat(answer.model_dump())
        if self._read_text is None or message.tool_calls:
            return message
        read = self._read_text(message.text, tools)
        return replace(
            message,
            content=read.content,
            reasoning=message.reasoning or read.reasoning,
            tool_calls=read.tool_calls,
        )

    def _unavailable(self, error: openai.APIConnectionError) -> EngineUnavailable:
        cause = error.__cause__
        # The aiohttp transport reports a refused connection as one that timed out.
        if type(error).__name__ == "APITimeoutError" and type(cause).__name__ != "ConnectTimeout":
            return EngineUnavailable(f"{self.model} gave no answer within {self._timeout_s:g} s")
        where = self.base_url or "OpenAI's endpoint"
        reason = _short(str(cause or error))
        return EngineUnavailable(
            f"{where} cannot be reached: {reason}", hint="is the server running?"
        )

    async def close(self) -> None:
        """Close the connections. May be called twice."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _opened(self) -> AsyncOpenAI:
        if self._client is None:
            from openai import AsyncOpenAI, DefaultAioHttpClient

            # httpx's own pool slows down badly with dozens of connections.
            self._client = AsyncOpenAI(
                api_key=self._key,
                base_url=self.base_url,
                timeout=self._timeout_s,
                max_retries=self._max_retries,
                http_client=DefaultAioHttpClient(timeout=self._timeout_s),
            )
        return self._client


def to_chat(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return a conversation as the chat API wants it."""
    chat: list[dict[str, Any]] = []
    shown: list[Part] = []  # media of the tool messages since the last message of another kind
    for message in messages:
        if message.role != "tool" and shown:
            chat.append(_media_message(shown))
            shown = []
        if message.role == "tool":
            shown.extend(message.media)
        chat.append(_to_chat(message))
    if shown:
        chat.append(_media_message(shown))
    return chat


def from_chat(answer: dict[str, Any]) -> AssistantMessage:
    """Return the assistant message of a chat completion.

    Raises:
        EngineRejected: There is no message in it.
    """
    choices = answer.get("choices") or []
    if not choices or not choices[0].get("message"):
        raise EngineRejected("the endpoint answered without a message")
    message = choices[0]["message"]
    usage = answer.get("usage") or {}
    calls = message.get("tool_calls") or ()
    return AssistantMessage(
        content=parts(message.get("content") or ""),
        reasoning=message.get("reasoning_content") or message.get("reasoning") or None,
        tool_calls=tuple(_read_call(number, call) for number, call in enumerate(calls)),
        usage=Usage(usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0),
        finish_reason="length" if choices[0].get("finish_reason") == "length" else "stop",
    )


def _to_chat(message: Message) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role, "content": _content(message)}
    if message.role == "tool":
        return out | {"tool_call_id": message.tool_call_id or ""}
    if message.name is not None:
        out["name"] = message.name
    if isinstance(message, AssistantMessage) and message.tool_calls:
        out["tool_calls"] = [_write_call(call) for call in message.tool_calls]
    return out


def _content(message: Message) -> str | list[dict[str, Any]]:
    if message.role == "tool" and message.media:
        return message.text or "(see the next message)"
    if not message.media:
        return message.text
    return [_part(part) for part in message.content]


def _media_message(media: Sequence[Part]) -> dict[str, Any]:
    return {"role": "user", "content": [_part(part) for part in media]}


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    if isinstance(part, Image):
        return {"type": "image_url", "image_url": {"url": part.data_url()}}
    if isinstance(part, Audio):
        data = part.data_url().partition(",")[2]
        kind = part.mime.partition("/")[2].removeprefix("x-")
        kind = {"mpeg": "mp3", "wave": "wav"}.get(kind, kind)
        return {"type": "input_audio", "input_audio": {"data": data, "format": kind}}
    # Not part of OpenAI's own API; SGLang and vLLM read it.
    return {"type": "video_url", "video_url": {"url": part.data_url()}}


def _write_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _read_call(number: int, call: dict[str, Any]) -> ToolCall:
    function = call.get("function") or {}
    name, text = str(function.get("name") or ""), function.get("arguments") or "{}"
    call_id = str(call.get("id") or f"call_{number}")
    try:
        arguments = text if isinstance(text, dict) else json.loads(text)
    except ValueError as error:
        return ToolCall(name, {}, call_id, f"its arguments are not JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, call_id, "its arguments are not a JSON object")
    return ToolCall(name, arguments, call_id)


def _short(text: str, most: int = 300) -> str:
    words = " ".join(text.split())
    return words if len(words) <= most else f"{words[:most]}…"
