"""A long episode with tool calls, rendered turn by turn in two ways."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_agent.messages import Message, ToolCall, assistant, system, to_openai, tool_message, user
from relax_agent.models.tokenizer import build_tokenizer, chat_texts
from relax_agent.rendering import Renderer, RendererSettings, load_renderer

TURNS = 64
_WORDS = 245
"""Words of a tool's answer; a turn is about 500 tokens."""
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.title()} in the collection of documents and say what is there.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for."},
                    "page": {"type": "integer", "description": "Which page of the answers."},
                },
                "required": ["query"],
            },
        },
    }
    for name in ("search", "open", "find")
]


@dataclass(frozen=True)
class LongEpisode:
    """The messages of an episode, and the tokenizer that knows their words."""

    folder: Path
    tokenizer: Any
    head: list[Message]
    rounds: list[tuple[Message, Message]]
    """What the assistant said, and what came back."""
    tokens: int

    def renderer(self, name: str) -> Renderer:
        """Return a renderer of the folder."""
        return load_renderer(self.folder, RendererSettings(name=name))


def episode() -> LongEpisode:
    """Make an episode of 64 turns and about 32,000 tokens."""
    draw = random.Random(0)
    vocabulary = [
        "".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 8))) for _ in range(900)
    ]

    def words(count: int) -> str:
        return " ".join(draw.choices(vocabulary, k=count))

    head = [system("You look for answers in documents. " + words(60)), user(words(40) + "?")]
    rounds: list[tuple[Message, Message]] = []
    for number in range(TURNS):
        call = ToolCall("search", {"query": words(6), "page": number}, "call_0")
        said = assistant(words(20), tool_calls=[call])
        rounds.append((said, tool_message(words(_WORDS), call)))
    whole = [*head, *(message for each in rounds for message in each)]
    texts = chat_texts([whole[: 2 + 2 * 8]], _TOOLS)
    tokenizer = build_tokenizer(texts, 2048)
    folder = Path(tempfile.mkdtemp(prefix="rendering-"))
    tokenizer.model_max_length = 1_000_000
    tokenizer.save_pretrained(folder)
    tokens = len(_rendered(tokenizer, whole))
    return LongEpisode(folder, tokenizer, head, rounds, tokens)


def rerendering_ms(long: LongEpisode) -> float:
    """Render the whole history before each turn and return the sum."""
    history = list(long.head)
    begun = time.perf_counter()
    _rendered(long.tokenizer, history)
    for said, came in long.rounds:
        history += [said, came]
        _rendered(long.tokenizer, history)
    return (time.perf_counter() - begun) * 1e3


def appending_ms(renderer: Renderer, long: LongEpisode) -> float:
    """Render the first prompt, then append to every turn; return the sum."""
    sampled = _sampled(renderer, long)
    history = list(long.head)
    begun = time.perf_counter()
    log = list(renderer.start(long.head, _TOOLS).ids)
    for turn, (said, came) in zip(sampled, long.rounds, strict=True):
        log += turn
        history.append(said)
        log += renderer.extend(turn, [came], _TOOLS, history).ids
        history.append(came)
    return (time.perf_counter() - begun) * 1e3


def last_and_second(renderer: Renderer, long: LongEpisode, count: int) -> float:
    """Return what the last turn costs by what the second costs, each the fastest of ``count``."""
    sampled = _sampled(renderer, long)
    history = [*long.head, *(message for each in long.rounds for message in each)]
    second, last = 1, TURNS - 1
    best = {second: float("inf"), last: float("inf")}
    for _ in range(count):
        for number in best:
            before = history[: len(long.head) + 2 * number + 1]
            came = [long.rounds[number][1]]
            begun = time.perf_counter()
            renderer.extend(sampled[number], came, _TOOLS, before)
            best[number] = min(best[number], time.perf_counter() - begun)
    return best[last] / best[second]


def _sampled(renderer: Renderer, long: LongEpisode) -> list[list[int]]:
    return [renderer.completion(said) for said, _ in long.rounds]  # type: ignore[arg-type]


def _rendered(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    plain = [to_openai(message) for message in messages]
    ids: list[int] = tokenizer.apply_chat_template(
        plain, tools=_TOOLS, add_generation_prompt=True, return_dict=False
    )
    return ids
