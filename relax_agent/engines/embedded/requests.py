"""`/generate` requests, checked; answers in SGLang's form.

Unknown keys of ``sampling_params`` are refused as SGLang does. Keys that SGLang knows but this
engine does not do (top-p, penalties, grammars …) are accepted only with the value that has no
effect: whoever asks for more must learn that it would not happen.
"""

from __future__ import annotations

import base64
import binascii
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from relax_agent.engines.embedded.media import PromptMedia
from relax_agent.engines.embedded.sampling import Sampling
from relax_agent.errors import EngineRejected
from relax_agent.media import Kind, Media, mime_of
from relax_agent.messages import Audio, Image, Video

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 1 << 30),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "n": (1,),
    "stop": (None, []),
    "stop_regex": (None, []),
    "beam_width": (None,),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "custom_params": (None,),
    "watermark": (None,),
    "choice": (None,),
    "stream_interval": (None,),
    # About text, of which this engine has none.
    "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True, False),
    "no_stop_trim": (True, False),
}
"""Keys that SGLang knows and this engine does not do, with the values that change nothing."""
_DONE = frozenset(
    {
        "max_new_tokens",
        "temperature",
        "stop_token_ids",
        "sampling_seed",
        "logit_bias",
        "ignore_eos",
        "min_new_tokens",
    }
)
_REFUSED = ("text", "input_embeds", "lora_path")
_MEDIA: dict[Kind, type[Image] | type[Audio] | type[Video]] = {
    "image": Image,
    "audio": Audio,
    "video": Video,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the engine allow."""

    context_length: int
    max_total_tokens: int
    vocabulary: int
    stop_token_ids: frozenset[int]
    """The model's own end tokens."""


@dataclass(frozen=True, slots=True)
class Job:
    """One checked request."""

    rid: str
    input_ids: list[int]
    sampling: Sampling
    return_logprob: bool
    prompt_logprobs: bool
    """Whether the prompt's log-probs are wanted, at temperature 1 and without bias."""
    return_routes: bool
    routes_start: int
    media: Mapping[Kind, list[Media]] = field(default_factory=dict)
    """The media of each kind, in the order of the prompt."""
    prompt: PromptMedia | None = None
    """The same, decoded and in their places; None for text alone."""


def parse_generate(body: Any, limits: Limits, default_seed: int) -> Job:
    """Check the body of ``POST /generate``.

    Args:
        body: The decoded JSON.
        limits: What can be served.
        default_seed: Used where the request brings no ``sampling_seed``.

    Raises:
        EngineRejected: naming what is wrong.
    """
    if not isinstance(body, Mapping):
        raise EngineRejected("the body must be a JSON object")
    for key in _REFUSED:
        if body.get(key):
            raise EngineRejected(f"{key} is not supported: send input_ids")
    if body.get("stream"):
        raise EngineRejected("stream is not supported: leave it out or send false")
    input_ids = _token_ids("input_ids", body.get("input_ids"), limits.vocabulary)
    if not input_ids:
        raise EngineRejected("input_ids is empty")
    sampling = _sampling(body.get("sampling_params") or {}, limits, default_seed)
    _check_length(len(input_ids), sampling.max_new_tokens, limits)
    start = body.get("logprob_start_len", -1)
    if start not in (-1, 0, None):
        raise EngineRejected(f"logprob_start_len {start!r} is not supported: send -1 or 0")
    if body.get("top_logprobs_num") or body.get("token_ids_logprob"):
        raise EngineRejected("top_logprobs_num and token_ids_logprob are not supported")
    return_logprob = bool(body.get("return_logprob"))
    return Job(
        rid=_rid(body.get("rid")),
        input_ids=input_ids,
        sampling=sampling,
        return_logprob=return_logprob,
        prompt_logprobs=return_logprob and start == 0,
        return_routes=bool(body.get("return_routed_experts")),
        routes_start=_integer("routed_experts_start_len", body.get("routed_experts_start_len", 0)),
        media=_media(body),
    )


def _media(body: Mapping[str, Any]) -> dict[Kind, list[Media]]:
    found: dict[Kind, list[Media]] = {}
    for kind in _MEDIA:
        value = body.get(f"{kind}_data")
        items = value if isinstance(value, list) else [] if value in (None, "") else [value]
        if items:
            found[kind] = [_medium(kind, item) for item in items]
    return found


def _medium(kind: Kind, item: Any) -> Media:
    """Read a data URL or bare base64; this engine opens no file and fetches nothing."""
    text = item if isinstance(item, str) else ""
    head, comma, rest = text.partition(",")
    inline = head.startswith("data:") and head.endswith(";base64")
    try:
        data = base64.b64decode(rest if comma else text, validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if not data or (comma and not inline):
        raise EngineRejected(f"{kind}_data: each item must be base64 or a base64 data URL")
    mime = (head[5:-7] if inline else "") or mime_of(data, kind) or f"{kind}/unknown"
    return _MEDIA[kind](data, mime)


def _rid(rid: Any) -> str:
    if rid is None:
        return uuid.uuid4().hex
    if not isinstance(rid, str) or not rid:
        raise EngineRejected(f"rid must be a non-empty string, not {rid!r}")
    return rid


def _sampling(params: Any, limits: Limits, default_seed: int) -> Sampling:
    if not isinstance(params, Mapping):
        raise EngineRejected("sampling_params must be an object")
    _check_keys(params)
    stops = _token_ids("stop_token_ids", params.get("stop_token_ids") or [], limits.vocabulary)
    own = frozenset() if params.get("ignore_eos") else limits.stop_token_ids
    seed = params.get("sampling_seed")
    return Sampling(
        max_new_tokens=_integer("max_new_tokens", params.get("max_new_tokens", 128)),
        temperature=_temperature(params.get("temperature", 1.0)),
        seed=default_seed if seed is None else _integer("sampling_seed", seed, least=-(2**63)),
        stop_token_ids=own.union(stops),
        min_new_tokens=_integer("min_new_tokens", params.get("min_new_tokens", 0)),
        logit_bias=_logit_bias(params.get("logit_bias") or {}, limits.vocabulary),
    )


def _check_keys(params: Mapping[str, Any]) -> None:
    unknown = sorted(params.keys() - _DONE - _NEUTRAL.keys())
    if unknown:
        names = ", ".join(f"`{key}`" for key in unknown)
        raise EngineRejected(f"unknown field {names}, expected one of {', '.join(sorted(_DONE))}")
    for key, neutral in _NEUTRAL.items():
        if key in params and params[key] not in neutral:
            why = "log-probs would not be those of what is sampled" if key[:3] == "top" else ""
            raise EngineRejected(
                f"{key}={params[key]!r} is not supported" + (f": {why}" if why else "")
            )


def _integer(name: str, value: Any, *, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise EngineRejected(f"{name} must be an integer of at least {least}, not {value!r}")
    return value


def _temperature(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
        raise EngineRejected(f"temperature must be a number of at least 0, not {value!r}")
    return float(value)


def _token_ids(name: str, value: Any, vocabulary: int) -> list[int]:
    if not isinstance(value, list):
        raise EngineRejected(f"{name} must be a list of integers")
    if set(map(type, value)) - {int}:
        odd = next(item for item in value if type(item) is not int)
        raise EngineRejected(f"{name} must be a list of integers, found {odd!r}"[:200])
    if value and not (min(value) >= 0 and max(value) < vocabulary):
        at, token = next((i, t) for i, t in enumerate(value) if not 0 <= t < vocabulary)
        raise EngineRejected(f"{name}[{at}] is {token}, but the vocabulary has {vocabulary} tokens")
    return value


def _logit_bias(value: Any, vocabulary: int) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise EngineRejected("logit_bias must be an object of token id to number")
    try:
        bias = {int(token): float(amount) for token, amount in value.items()}
    except (TypeError, ValueError) as error:
        raise EngineRejected("logit_bias must be an object of token id to number") from error
    _token_ids("logit_bias", list(bias), vocabulary)
    if any(amount != amount or amount == float("inf") for amount in bias.values()):
        raise EngineRejected("logit_bias values must be below infinity")
    return bias


def _check_length(prompt: int, new: int, limits: Limits) -> None:
    if prompt >= limits.context_length:
        raise EngineRejected(
            f"The input ({prompt} tokens) is longer than the model's context length "
            f"({limits.context_length} tokens)."
        )
    for limit, what in (
        (limits.context_length, "the model's maximum context length"),
        (limits.max_total_tokens, "the engine's max_total_tokens"),
    ):
        if prompt + new > limit:
            raise EngineRejected(
                f"Requested token count exceeds {what} of {limit} tokens. You requested a total "
                f"of {prompt + new} tokens: {prompt} tokens from the input and {new} tokens for "
                "the completion."
            )


def encode_routes(routes: npt.NDArray[np.int32]) -> str:
    """Return little-endian int32 in C order as base64."""
    return base64.b64encode(np.ascontiguousarray(routes, dtype="<i4").tobytes()).decode()


def token_logprobs(logprobs: list[float], tokens: list[int]) -> list[list[Any]]:
    """Pair log-probs with their tokens in SGLang's form (log-prob, id, no text)."""
    return [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)]
