"""The model: loading it, and one forward over all rows.

Any transformers causal LM works whose attention goes through transformers' attention interface:
it is replaced by ours (:mod:`.attention`), and the experts of a mixture by ours (:mod:`.routes`).
Start-up runs a short prompt both ways, with ours in three pieces and with transformers' own in
one, and refuses a model on which they differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relax_agent.engines.embedded.attention import ATTENTION, Step, make_step, slot_attention
from relax_agent.engines.embedded.kv import KvShape, Slots
from relax_agent.engines.embedded.media import PromptMedia
from relax_agent.engines.embedded.routes import EXPERTS, record_routes
from relax_agent.errors import ConfigError
from relax_agent.models.load import load_pretrained
from relax_agent.models.media_model import MediaModel, Piece, tower_inputs

_PROBE = (1, 2, 3, 4, 5, 6)
_PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}


class _CurrentStep:
    """Shared by all attention layers of one model: the step that is being run."""

    def __init__(self) -> None:
        self.current: Step | None = None


class ModelRunner:
    """A model in memory and the slots of its running requests."""

    def __init__(
        self, model: Any, max_tokens: int | None = None, media: MediaModel | None = None
    ) -> None:
        """Prepare a loaded model; see :func:`load_model`.

        Args:
            model: A causal LM.
            max_tokens: Key-value slots.
            media: The same model with its towers, if it takes media.
        """
        self.model = model
        self.media = media
        self.suppressed = None if media is None else media.suppressed
        """``[ids]``: tokens that are never sampled; None if there are none."""
        self._backbone = model if media is None else media.language_model
        self.config = model.config.get_text_config()
        self.vocabulary = int(self.config.vocab_size)
        self._step = _CurrentStep()
        self.routes = record_routes(self._backbone, self.config)
        self._use_slot_attention()
        shape = self._probe_shape()
        self.slots = Slots(shape, max_tokens or 2**62)
        self._verify()

    @property
    def dtype(self) -> torch.dtype:
        """Number type of the weights."""
        return self.model.dtype  # type: ignore[no-any-return]

    @torch.inference_mode()
    def forward(
        self,
        tokens: Sequence[Sequence[int]],
        lengths: Sequence[int],
        full: Sequence[int] = (),
        media: Sequence[PromptMedia | None] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Read new tokens of every row.

        Args:
            tokens: New tokens of row 0, 1, …; rows with one token first.
            lengths: Tokens of each row that are in the slots already.
            full: Rows for which the logits of all new tokens are wanted as well.
            media: The media of each row's prompt; may be left out where there are none.

        Returns:
            Logits after the last token of each row, ``[rows, vocabulary]`` float32, and for
            each of ``full`` ``[new tokens, vocabulary]``.
        """
        step = make_step(self.slots, tokens, lengths)
        spans = [_span(step, tokens, row) for row in full]
        wanted = torch.cat([step.last, *spans]) if spans else step.last
        logits = self._run(step, wanted, list(media) or [None] * len(tokens))
        rows, *others = logits.split([len(tokens), *(len(span) for span in spans)])
        return rows, list(others)

    def _run(self, step: Step, wanted: Tensor, prompts: Sequence[PromptMedia | None]) -> Tensor:
        self._step.current = step
        if self.media is None:
            logits: Tensor = self.model(
                input_ids=step.input_ids,
                position_ids=step.position_ids,
                use_cache=False,
                logits_to_keep=wanted,
            ).logits[0]
        else:
            logits = self._run_media(self.media, step, wanted, prompts)
        self._step.current = None
        if self.routes is not None:
            self.slots.routes[step.rows, step.position_ids[0]] = self.routes.take()
        return logits.float()

    def _run_media(
        self,
        model: MediaModel,
        step: Step,
        wanted: Tensor,
        prompts: Sequence[PromptMedia | None],
    ) -> Tensor:
        """Run the towers over the media whose tokens are read now, then the language model."""
        known = step.position_ids[0].numpy()
        positions = np.broadcast_to(known.astype(np.float32), (3, len(known))).copy()
        pieces: list[Piece] = []
        first = 0
        for prompt, last in zip(prompts, step.last.tolist(), strict=True):
            if prompt is not None:
                start, stop = int(known[first]), int(known[last]) + 1
                positions[:, first : last + 1] = prompt.positions_from(start, stop)
                pieces += prompt.pieces(start, stop, first)
            first = last + 1
        inputs = tower_inputs(pieces, model.processor.placeholder_ids)
        return model.logits(step.input_ids, torch.from_numpy(positions), inputs, wanted)

    def row_routes(self, row: int, length: int) -> npt.NDArray[np.int32] | None:
        """Return the routes of a row's first tokens, ``[length, layers, top_k]``."""
        if self.routes is None:
            return None
        return self.routes.spread(self.slots.routes[row, :length].numpy())

    def _use_slot_attention(self) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if not getattr(self._backbone, "_supports_attention_backend", False):
            name = type(self.model).__name__
            raise ConfigError(f"{name} does not let its attention be replaced")
        kinds = set(getattr(self.config, "layer_types", None) or ())
        if odd := kinds - {"full_attention", "sliding_attention"}:
            raise ConfigError(f"layers of kind {', '.join(sorted(odd))} are not supported")
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, slot_attention)
        self._backbone.set_attn_implementation(ATTENTION)
        for module in self._backbone.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.relax_step = self._step

    @torch.inference_mode()
    def _probe_shape(self) -> KvShape:
        """Learn the shape of keys and values from a forward of two tokens."""
        seen: dict[int, tuple[int, int, int]] = {}

        def spy(
            module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
        ) -> tuple[Tensor, None]:
            seen[module.layer_idx] = (key.shape[1], key.shape[-1], value.shape[-1])
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None

        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, spy)
        self.model(input_ids=torch.tensor([_PROBE[:2]]), use_cache=False)
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, slot_attention)
        layers = int(self.config.num_hidden_layers)
        if set(seen) != set(range(layers)) or len(set(seen.values())) != 1:
            raise ConfigError(f"{type(self.model).__name__}: key-value shapes differ by layer")
        width = self.routes.width if self.routes is not None else 0
        return KvShape(layers, *seen[0], width, self.dtype)

    @torch.inference_mode()
    def _verify(self) -> None:
        """Refuse a model on which our attention and transformers' own do not agree."""
        parts = [_PROBE[:3], _PROBE[3:5], _PROBE[5:]]
        own = [self.forward([part], [_PROBE.index(part[0])])[0] for part in parts][-1][0]
        self._implement("sdpa" if self._backbone._supports_sdpa else "eager", "eager")
        theirs = self.model(input_ids=torch.tensor([_PROBE]), use_cache=False).logits[0, -1].float()
        self._implement(ATTENTION, EXPERTS)
        own, theirs = own.log_softmax(-1), theirs.log_softmax(-1)
        difference = float((own - theirs).abs().max())
        limit = _PROBE_TOLERANCE[str(self.dtype).removeprefix("torch.")]
        if difference > limit:  # NaN passes: bad weights are not the attention's fault
            raise ConfigError(
                f"{type(self.model).__name__}: log-probs differ by {difference:.2g} from "
                "transformers' own attention",
                hint="serve this model with real SGLang (engine.kind: sglang)",
            )

    def _implement(self, attention: str, experts: str) -> None:
        self._backbone.set_attn_implementation(attention)
        if self.routes is not None:
            self._backbone.set_experts_implementation(experts)


def _span(step: Step, tokens: Sequence[Sequence[int]], row: int) -> Tensor:
    end = int(step.last[row]) + 1
    return torch.arange(end - len(tokens[row]), end)


def load_model(folder: Path, dtype: str) -> Any:
    """Load a causal LM from a folder.

    Raises:
        ConfigError: if there is no model that transformers can load.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"no model in {folder}: config.json is missing")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    model = load_pretrained(folder, getattr(torch, dtype))
    for parameter in model.parameters():
        # Own memory instead of the mapped file, which somebody may write again.
        parameter.data = parameter.data.clone()
    return model.eval().requires_grad_(False)


def stop_tokens(model: Any) -> frozenset[int]:
    """Return the ids that end an answer according to the model's own files."""
    ids: set[int] = set()
    for config in (model.generation_config, model.config.get_text_config()):
        found = getattr(config, "eos_token_id", None)
        ids.update(found if isinstance(found, list) else [] if found is None else [found])
    return frozenset(ids)
