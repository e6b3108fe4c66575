"""What an inference engine is: the words and the rules that every implementation keeps.

An :class:`Engine` turns token ids into sampled token ids. It never sees text: token in, token
out. Three kinds exist (real SGLang, the embedded CPU engine, the scripted engine for tests);
all pass one contract suite, so the rest of the project knows only this module. Rules:

* ``generate`` returns what was sampled, with one log-prob and one weight version per token. A
  request that ``abort`` ends returns its partial answer with ``finish_reason`` "abort"; it is
  never confused with a normal stop. A request that was wrong raises
  :class:`~relax_agent.errors.EngineRejected`.
* Log-probs are those of the distribution that was sampled from, after temperature and logit
  bias. Greedy (temperature 0) reports the log-probs of temperature 1.
* ``pause`` stops sampling and keeps every request alive in the modes ``retract`` (the key-value
  cache is given up and computed anew after ``resume``) and ``in_place`` (it is kept). Mode
  ``abort`` ends all requests.
* New weights come between ``begin_weight_update`` and ``end_weight_update``, under a pause. An
  update that does not fit the model is refused and leaves the old weights in place.
* Routed experts ``[positions, layers, top_k]`` cover the positions ``routes_start`` to
  ``prompt + completion - 2``: the last sampled token has not been read by the model yet. Of an
  answer that an update has interrupted they are, position by position, the experts that were used
  when the token was sampled; only SGLang under ``retract`` reports those of the new weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from relax_agent.errors import ConfigError
from relax_agent.media import Media

Routes = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
"""Expert ids ``[positions, layers, top_k]``; one byte each for up to 256 experts, else two."""

FinishReason = Literal["stop", "length", "abort"]
"""Why sampling ended: a stop token (the last output id), the token limit, or an abort."""

PauseMode = Literal["abort", "retract", "in_place"]
"""What a pause does to running requests."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. Top-p and top-k are not offered: they would bias the policy gradient."""

    max_new_tokens: int
    """Upper limit of sampled tokens."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    stop_token_ids: Sequence[int] = ()
    """Sampling one of these ends the answer; it stays in the output ids."""
    seed: int | None = None
    """Makes the request repeatable; None draws from the engine's own generator."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits before the temperature, by token id."""
    ignore_eos: bool = False
    """Whether only the token limit ends the answer. SGLang then also ignores stop tokens that the
    request names, so naming some is refused."""

    def __post_init__(self) -> None:
        if self.ignore_eos and self.stop_token_ids:
            raise ConfigError("ignore_eos and stop_token_ids contradict each other")


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One question to an engine."""

    input_ids: Sequence[int]
    """The whole prompt as token ids."""
    sampling: SamplingParams
    rid: str
    """Identity of the request, unique among those that are running; ``abort`` names it."""
    return_routes: bool = False
    """Whether to return routed experts (mixture-of-experts models only)."""
    routes_start: int = 0
    """First position whose route is returned; what came before is known from earlier turns."""
    media: Sequence[Media] = ()
    """All media of the prompt, in its order and in every request: an engine keeps none. Their
    placeholders stand in ``input_ids`` already."""


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """One answer. The three lists beside each other have one entry per sampled token."""

    output_ids: list[int]
    logprobs: list[float]
    """Log-prob of each sampled token under the distribution that it was sampled from."""
    finish_reason: FinishReason
    versions: list[int]
    """Weight version that sampled each token; more than one after an update in mid-answer."""
    routes: Routes | None = None
    """Positions ``routes_start`` to ``prompt + completion - 2``; None where not asked for."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """How many prompt tokens were found in the prefix cache."""


@runtime_checkable
class Engine(Protocol):
    """An inference server, wherever it runs. All methods may be called concurrently."""

    @property
    def name(self) -> str:
        """What errors and logs call this engine, for example its address."""
        ...

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one answer."""
        ...

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop sampling; see the module's rules for what becomes of running requests."""
        ...

    async def resume(self) -> None:
        """Go on sampling."""
        ...

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all of them with None; each returns its partial answer."""
        ...

    async def flush_cache(self) -> None:
        """Forget all cached prefixes; refused while requests hold them."""
        ...

    async def begin_weight_update(self) -> None:
        """Open a session of weight updates."""
        ...

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        """Load all weights from a folder in Hugging Face layout that the engine can read."""
        ...

    async def update_weights_from_tensor(self, bucket: bytes, version: int) -> None:
        """Take some weights as one safetensors file; a session may bring several."""
        ...

    async def end_weight_update(self) -> None:
        """Close the session: the new weights and their version are in force, or it raises."""
        ...

    async def health(self) -> bool:
        """Whether the engine answers and can serve; never raises for an engine that is down."""
        ...

    async def model_info(self) -> dict[str, Any]:
        """What is served: ``model_path``, ``weight_version`` and more."""
        ...

    async def server_info(self) -> dict[str, Any]:
        """The engine's own settings and load."""
        ...

    async def close(self) -> None:
        """Let go of connections; the engine itself goes on."""
        ...
