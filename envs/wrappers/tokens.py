"""Counting tokens at the level of messages, where no tokenizer is.

The model's own figures (:class:`~relax_agent.messages.Usage`) are used wherever a message carries
them. The estimate fills the gaps; it is total over every kind of content part.
"""

from __future__ import annotations

import json

from relax_agent.messages import AssistantMessage, Audio, Image, Message, Text, Video

BYTES_PER_TOKEN = 4
MEDIA_TOKENS = {Image: 256, Audio: 256, Video: 1024}
"""What one image, clip or video is taken for; a model's real figure depends on its size."""
_FRAME = 4
"""Tokens of a message's role and separators."""


def estimated_tokens(message: Message) -> int:
    """Return about how many tokens a message has."""
    size, media = 0, 0
    for part in message.content:
        if isinstance(part, Text):
            size += len(part.text.encode())
        else:
            media += MEDIA_TOKENS[type(part)]
    if isinstance(message, AssistantMessage):
        size += len((message.reasoning or "").encode())
        for call in message.tool_calls:
            size += len(call.name) + len(json.dumps(call.arguments, default=str))
    return _FRAME + media + -(-size // BYTES_PER_TOKEN)


def completion_tokens(message: AssistantMessage) -> int:
    """Return the tokens that a policy spent on a message, by its usage or by the estimate."""
    return message.usage.completion_tokens or estimated_tokens(message)
