"""SGLang's `/generate` as JSON: requests out, answers in, checked on the way.

Pure functions, shared by the client and by the scripted server, so both speak one dialect. An
answer that does not carry exactly one log-prob for each sampled token is an error, never a row
of zeros: training on silent zeros looks healthy and learns nothing. Routed experts travel as
base64 of little-endian int32 in C order ``[positions, layers, top_k]`` and leave this module as
one or two bytes each.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from relax_agent.engines.protocol import FinishReason, GenerateRequest, GenerateResult, Routes
from relax_agent.errors import EngineError, MissingLogprobs
from relax_agent.messages import Audio, Image, Video

_MEDIA_FIELDS = {Image: "image_data", Audio: "audio_data", Video: "video_data"}


@dataclass(frozen=True, slots=True)
class RouteShape:
    """The fixed part of the shape of a model's routes."""

    layers: int
    """All hidden layers, dense ones included."""
    top_k: int
    """Experts per token."""
    experts: int
    """Routed experts per layer; ids lie below."""

    @property
    def dtype(self) -> type[np.uint8] | type[np.uint16]:
        """The smallest type that holds every expert id."""
        return np.uint8 if self.experts <= 256 else np.uint16


def wire_rid(rid: str) -> str:
    """Give an id an end: SGLang aborts every request whose id *starts* with the given one."""
    return f"{rid};"


def encode_request(request: GenerateRequest, cache_key: str | None = None) -> dict[str, Any]:
    """Write a request as the body of ``POST /generate``.

    Args:
        request: What to ask.
        cache_key: Only prefixes that were cached under the same key are used.
    """
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
    }
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.ignore_eos:
        params["ignore_eos"] = True
    body: dict[str, Any] = {
        "rid": wire_rid(request.rid),
        "input_ids": list(request.input_ids),
        "sampling_params": params,
        "return_logprob": True,
        "stream": False,
    }
    if cache_key is not None:
        body["extra_key"] = cache_key
    for medium in request.media:
        body.setdefault(_MEDIA_FIELDS[type(medium)], []).append(medium.data_url())
    if request.return_routes:
        body |= {"return_routed_experts": True, "routed_experts_start_len": request.routes_start}
    return body


def decode_result(
    body: Mapping[str, Any], request: GenerateRequest, shape: RouteShape | None, engine: str
) -> GenerateResult:
    """Read the answer to ``request``.

    Raises:
        MissingLogprobs: if a sampled token has no log-prob of its own.
        EngineError: if anything else does not fit together.
    """
    try:
        meta, output_ids = body["meta_info"], [int(token) for token in body["output_ids"]]
        reason = _finish_reason(meta["finish_reason"])
        logprobs = _logprobs(meta.get("output_token_logprobs"), output_ids, engine)
        versions = _versions(meta, len(output_ids))
        routes = _routes(meta, request, len(output_ids), reason, shape)
        return GenerateResult(
            output_ids,
            logprobs,
            reason,
            versions,
            routes,
            prompt_tokens=int(meta.get("prompt_tokens", len(request.input_ids))),
            cached_tokens=int(meta.get("cached_tokens") or 0),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(
            f"{engine} answered request {request.rid} in a form that cannot be read: {error!r}"
        ) from error


def _finish_reason(reason: Any) -> FinishReason:
    kind = reason["type"] if isinstance(reason, Mapping) else reason
    if kind not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason {reason!r}")
    return cast("FinishReason", kind)


def _logprobs(entries: Any, output_ids: Sequence[int], engine: str) -> list[float]:
    if not output_ids:
        return []
    count = len(entries) if isinstance(entries, list) else 0
    if count != len(output_ids):
        raise MissingLogprobs(
            f"{engine} returned {count} log-probs for {len(output_ids)} sampled tokens"
        )
    return [
        _sampled_logprob(entry, token, position, engine)
        for position, (entry, token) in enumerate(zip(entries, output_ids, strict=True))
    ]


def _sampled_logprob(entry: Any, token: int, position: int, engine: str) -> float:
    """Take the log-prob of the token that was sampled, never that of a likelier one."""
    if isinstance(entry, Mapping):
        value = entry.get(str(token), entry.get(token))
        found = None if value is None else token
    else:
        value, found = entry[0], entry[1]
    if found != token or value is None or math.isnan(value):
        raise MissingLogprobs(
            f"{engine} returned no log-prob for sampled token {token} at output {position}: {entry}"
        )
    return float(value)


def _versions(meta: Mapping[str, Any], count: int) -> list[int]:
    """Spread version spans over output tokens; without spans the final version holds for all."""
    spans = meta.get("weight_versions")
    if not spans:
        return [parse_version(meta["weight_version"])] * count if count else []
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions):
            raise ValueError(f"weight_versions {spans} leave a gap")
        versions += [parse_version(span["version"])] * (span["end"] - span["start"])
    if len(versions) != count:
        raise ValueError(f"weight_versions {spans} do not cover {count} tokens")
    return versions


def parse_version(text: Any) -> int:
    """Read a weight version; SGLang keeps it as text and calls the first one "default"."""
    return 0 if text in (None, "default") else int(text)


def _routes(
    meta: Mapping[str, Any],
    request: GenerateRequest,
    count: int,
    reason: FinishReason,
    shape: RouteShape | None,
) -> Routes | None:
    if not request.return_routes:
        return None
    text = meta.get("routed_experts")
    if shape is None or text is None:
        if reason == "abort":  # aborted before the prompt was read: there is nothing to return
            return None
        raise EngineError(
            "the engine returned no routed experts",
            hint="serve a mixture-of-experts model with --enable-return-routed-experts",
        )
    routes = decode_routes(text, shape)
    expected = max(0, len(request.input_ids) + count - 1 - request.routes_start)
    if len(routes) != expected and reason != "abort":
        raise EngineError(f"routes cover {len(routes)} positions instead of {expected}")
    return routes[:expected]


def decode_routes(text: str, shape: RouteShape) -> Routes:
    """Turn base64 int32 into expert ids ``[positions, layers, top_k]`` of the smallest type."""
    try:
        flat = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
    except (binascii.Error, ValueError) as error:
        raise EngineError(f"routed experts are not base64 of int32: {error}") from error
    width = shape.layers * shape.top_k
    if flat.size % width:
        raise EngineError(
            f"{flat.size} routed experts do not divide into {shape.layers} layers of {shape.top_k}"
        )
    if flat.size and (flat.min() < 0 or flat.max() >= shape.experts):
        raise EngineError(
            f"expert ids from {flat.min()} to {flat.max()} do not fit {shape.experts} experts"
        )
    routes = flat.astype(shape.dtype).reshape(-1, shape.layers, shape.top_k)
    return cast("Routes", routes)


def encode_routes(routes: Routes) -> str:
    """Write expert ids ``[positions, layers, top_k]`` as SGLang does."""
    return base64.b64encode(np.ascontiguousarray(routes, dtype="<i4").tobytes()).decode()


def version_spans(versions: Sequence[int]) -> list[dict[str, Any]]:
    """Write one version per token as half-open spans, as SGLang does."""
    spans: list[dict[str, Any]] = []
    for position, version in enumerate(versions):
        if spans and spans[-1]["version"] == str(version):
            spans[-1]["end"] = position + 1
        else:
            spans.append({"version": str(version), "start": position, "end": position + 1})
    return spans
