"""Whether a program's history is the conversation that we know, told in other words.

Programs replay what they were answered, and seldom word for word: they drop the reasoning, re-order
the arguments of a call, trim a text. None of that is an edit. The sampled ids are known here, so
what counts is only whether the same was *said*; the ids themselves are never made from text again.
"""

from __future__ import annotations

from collections.abc import Sequence

from relax_agent.messages import AssistantMessage, Message


def known_part(history: Sequence[Message], known: Sequence[Message]) -> int:
    """Return how many of the first messages of ``history`` are those of ``known``."""
    count = 0
    for told, own in zip(history, known, strict=False):
        if not same(told, own):
            break
        count += 1
    return count


def same(told: Message, own: Message) -> bool:
    """Tell whether a message that a program sent is one that we know."""
    if told.role != own.role:
        return False
    if isinstance(told, AssistantMessage) and isinstance(own, AssistantMessage):
        return _same_answer(told, own)
    same_call = told.tool_call_id in (None, own.tool_call_id)
    return same_call and told.media == own.media and told.text.strip() == own.text.strip()


def _same_answer(told: AssistantMessage, own: AssistantMessage) -> bool:
    calls = [call for call in own.tool_calls if call.error is None]  # programs get no others
    ids = [call.id for call in told.tool_calls]
    if ids and ids == [call.id for call in calls]:
        return True  # ids are unique, so this is our answer whatever became of its text
    if len(ids) != len(calls) or told.text.strip() != own.text.strip():
        return False
    return all(
        (one.name, one.arguments) == (other.name, other.arguments)
        for one, other in zip(told.tool_calls, calls, strict=True)
    )
