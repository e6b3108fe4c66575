"""Checks of pictures, sounds and videos: that they can be decoded, and are what they say."""

from __future__ import annotations

from relax_agent.envs.checking.forms import media_problems
from relax_agent.envs.checking.lab import Lab
from relax_agent.envs.checking.places import place_of_method
from relax_agent.envs.checking.report import Findings
from relax_agent.envs.checking.running import Check
from relax_agent.envs.checking.subject import authors_class
from relax_agent.envs.policies import RandomPolicy
from relax_agent.errors import MediaError, MissingExtraError
from relax_agent.media import (
    decode_audio_async,
    decode_image_async,
    decode_video_async,
    mime_of,
)
from relax_agent.media.kinds import HEAD_BYTES, Kind
from relax_agent.messages import Audio, Image, Video

_DECODED = 6
"""Parts that are decoded whole; of the others only the beginning is looked at."""


async def _media(lab: Lab, tell: Findings) -> None:
    env = await lab.main()
    kind = authors_class(env)
    policies = [RandomPolicy(lab.seed), RandomPolicy(lab.seed, call_share=1.0)]
    expert = lab.expert(env)
    seen: dict[tuple[str, bytes], tuple[str, Image | Audio | Video]] = {}
    for policy in [*policies, *([expert] if expert else [])]:
        trace = await lab.play(env, policy)
        for turn in trace.turns:
            call = "reset" if turn.action is None else "step"
            for message in turn.messages:
                for part in message.media:
                    seen.setdefault((part.mime, part.data), (call, part))
    if not seen:
        tell.seen("it shows no media")
        return
    for number, (call, part) in enumerate(seen.values()):
        where = place_of_method(kind, call)
        for problem in media_problems(call, part):
            (tell.warn if problem.warning else tell.fail)(problem.message, where)
        await _decode(tell, call, part, where, whole=number < _DECODED)
    if tell.empty:
        names = ", ".join(sorted({part.mime for _, part in seen.values()}))
        tell.seen(f"{len(seen)} different media ({names}) can be decoded")


async def _decode(
    tell: Findings, call: str, part: Image | Audio | Video, where: str, *, whole: bool
) -> None:
    what = type(part).__name__.lower()
    if not isinstance(part.data, bytes) or not part.data:
        return
    try:
        kind: Kind = "image" if isinstance(part, Image) else "audio"
        real = mime_of(part.data[:HEAD_BYTES], "video" if isinstance(part, Video) else kind)
        if real is None or not real.startswith(f"{what}/"):
            words = f"the {what} of {call}() is none: its bytes are {real or 'of no known format'}"
            tell.fail(f"{words}; give an encoded file, e.g. PNG, WAV or MP4", where)
            return
        if real.partition("/")[2].removeprefix("x-") != part.mime.partition("/")[2].removeprefix(
            "x-"
        ):
            words = f"the {what} of {call}() calls itself {part.mime} and is {real}"
            tell.warn(f"{words}; give the right type", where)
        if whole:
            await _decoded(part)
    except MissingExtraError as error:
        tell.skip(f"media were not decoded: {error}")
    except MediaError as error:
        tell.fail(f"the {what} of {call}() cannot be decoded: {error}", where)


async def _decoded(part: Image | Audio | Video) -> None:
    if isinstance(part, Image):
        await decode_image_async(part)
    elif isinstance(part, Audio):
        await decode_audio_async(part)
    else:
        await decode_video_async(part)


MEDIA_CHECKS = [Check("media", "media can be decoded", _media)]
