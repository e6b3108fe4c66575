"""``relax-agent gateway``: one episode, played by a program with OpenAI's or Anthropic's SDK."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relax_agent.errors import ConfigError

if TYPE_CHECKING:
    from relax_agent.engines.client import EngineClient
    from relax_agent.episode import Episode
    from relax_agent.gateway import GatewaySession

_TOKEN = "RELAX_ENGINE_TOKEN"


def gateway(
    engine: Annotated[
        str, typer.Option(metavar="URL", help="An engine that runs, e.g. http://127.0.0.1:30000.")
    ],
    model: Annotated[
        Path, typer.Option(metavar="FOLDER", help="The folder of the model that it serves.")
    ],
    renderer: Annotated[
        str, typer.Option(help="How messages become tokens: auto, template, or a format's name.")
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append the episode to this .jsonl file.")
    ] = None,
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 0,
    temperature: Annotated[float, typer.Option(help="Of all answers.", min=0.0)] = 1.0,
    max_turns: Annotated[int, typer.Option(help="Answers in all.", min=1)] = 100,
    max_tokens_per_turn: Annotated[int, typer.Option(help="Tokens of one answer.", min=1)] = 1024,
    max_context: Annotated[int, typer.Option(help="Tokens of the whole sequence.", min=2)] = 32768,
) -> None:
    """Let a program play one episode, until Ctrl-C.

    Prints what to set for the program; its SDK then talks to the engine, and
    all that is said becomes one episode, token for token:

      relax-agent gateway --engine http://127.0.0.1:30000 --model my-model --out episode.jsonl

      relax-agent view episode.jsonl --tokens --tokenizer my-model

    The engine's token, if it wants one, is read from RELAX_ENGINE_TOKEN.
    """
    from relax_agent.engines.client import EngineClient
    from relax_agent.engines.protocol import SamplingParams
    from relax_agent.episode import Episode
    from relax_agent.gateway import GatewaySession
    from relax_agent.rendering import RendererSettings, load_renderer
    from relax_agent.rollout import EpisodeLimits, EpisodeOptions

    if not (model / "config.json").is_file():
        raise ConfigError(f"there is no model in {model}", hint="give its Hugging Face folder")
    formats = load_renderer(model, RendererSettings(name=renderer))
    typer.echo(formats.summary, err=True)
    limits = EpisodeLimits(
        max_turns=max_turns,
        max_tokens_per_turn=max_tokens_per_turn,
        max_context=max_context,
        timeout_s=float("inf"),
    )
    options = EpisodeOptions(SamplingParams(max_tokens_per_turn, temperature=temperature), limits)
    episode = Episode("gateway", "by hand", "gateway", 0)
    client = EngineClient(engine, token=os.environ.get(_TOKEN), model_path=str(model))
    asyncio.run(_serve(client, lambda: GatewaySession(episode, client, formats, options), port))
    _finish(episode, out)


async def _serve(
    client: EngineClient, make_session: Callable[[], GatewaySession], port: int
) -> None:
    from relax_agent.gateway import Gateway

    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, over.set)
    gateway = Gateway()
    async with client, gateway.serve(port=port) as url:
        key = gateway.open(make_session())  # its time begins now
        for name, value in (
            ("OPENAI_BASE_URL", f"{url}/v1"),
            ("OPENAI_API_KEY", key),
            ("ANTHROPIC_BASE_URL", url),
            ("ANTHROPIC_API_KEY", key),
        ):
            typer.echo(f"export {name}={value}")
        typer.echo("Ctrl-C ends the episode", err=True)
        await over.wait()
        gateway.close(key)


def _finish(episode: Episode, out: Path | None) -> None:
    from relax_agent.episode import EpisodeStatus
    from relax_agent.files import append_to_file
    from relax_agent.run.episodes import episode_line

    episode.finish(EpisodeStatus.COMPLETED)
    told = f"{len(episode.turns)} answers, {episode.sampled_tokens} sampled tokens"
    if out is not None:
        append_to_file(out, episode_line(episode).encode())
        told += f", in {out}"
    typer.echo(told, err=True)
