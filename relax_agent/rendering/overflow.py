"""What to leave out of a conversation that does not fit.

Only whole messages are left out, never a part of one, so no call loses its answer and no medium
its placeholders. What stands before the first answer stays: the instructions and the task. Behind
it, a **round** is an assistant message with everything that came back for it; the oldest rounds go
first, and the last one always stays.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from relax_agent.errors import PromptTooLong
from relax_agent.messages import Message


def truncate_messages(
    messages: Sequence[Message],
    most_tokens: int,
    count: Callable[[Sequence[Message]], int],
) -> list[Message]:
    """Return the conversation without as many of its oldest rounds as must go.

    Args:
        messages: The whole conversation.
        most_tokens: What may remain.
        count: How many tokens messages take as a prompt; fewer messages must not take more. It is
            called about log2 of the number of rounds times.

    Raises:
        PromptTooLong: it does not fit even without all rounds but the last.
    """
    head, rounds = _rounds(messages)
    most = max(len(rounds) - 1, 0)

    def without(dropped: int) -> list[Message]:
        return [*head, *(message for each in rounds[dropped:] for message in each)]

    dropped = bisect_left(range(most), True, key=lambda n: count(without(n)) <= most_tokens)
    kept = without(dropped)
    if dropped == most and (tokens := count(kept)) > most_tokens:
        raise PromptTooLong(
            f"the last round and what comes before the first take {tokens} tokens of {most_tokens}",
            hint="raise the context length, or let tools return less",
        )
    return kept


def _rounds(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    head: list[Message] = []
    rounds: list[list[Message]] = []
    for message in messages:
        if message.role == "assistant":
            rounds.append([message])
        elif rounds:
            rounds[-1].append(message)
        else:
            head.append(message)
    return head, rounds
