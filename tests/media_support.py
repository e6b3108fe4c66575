"""Media, tiny models that see and hear, and reference forwards that tests of media share."""

from __future__ import annotations

import io
import tempfile
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np

from relax_agent.media import encode_mp4, encode_png, encode_wav
from relax_agent.messages import Audio, Image, Video

TEXTS = [
    "<|im_start|>system\nYou see and hear.<|im_end|>\n<|im_start|>user\nWhat is it? Say red, green"
    " or blue.<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
    '{"name": "look", "arguments": {}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n'
    "<0.5 seconds>\n</tool_response><|im_end|>\n"
]
KINDS = {"qwen3_vl": ("image", "video"), "qwen3_omni": ("image", "video", "audio")}


def picture(seed=0, height=70, width=110) -> Image:
    rng = np.random.default_rng(seed)
    return encode_png(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))


def clip(seconds=1.0, rate=16_000, hertz=440.0) -> Audio:
    time = np.arange(round(seconds * rate)) / rate
    return encode_wav(0.5 * np.sin(2 * np.pi * hertz * time).astype(np.float32), rate)


def film(seed=0, frames=12, fps=6) -> Video:
    rng = np.random.default_rng(seed)
    return encode_mp4(rng.integers(0, 255, (frames, 64, 96, 3), dtype=np.uint8), fps)


@cache
def film_with_sound(seed=0) -> Video:
    """Two seconds of picture and sound in one file."""
    import av

    rng, rate, file = np.random.default_rng(seed), 16_000, io.BytesIO()
    sound = (0.3 * np.sin(np.arange(2 * rate) * 0.2)).astype(np.float32)[None]
    with av.open(file, "w", format="mp4") as container:
        seen = container.add_stream("libx264", rate=6)
        seen.width, seen.height, seen.pix_fmt = 96, 64, "yuv420p"
        heard = container.add_stream("aac", rate=rate, layout="mono")
        for number in range(12):
            pixels = rng.integers(0, 255, (64, 96, 3), dtype=np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, 6)
            container.mux(seen.encode(frame))
        container.mux(seen.encode())
        for start in range(0, sound.shape[1], 1024):
            block = np.ascontiguousarray(sound[:, start : start + 1024])
            frame = av.AudioFrame.from_ndarray(block, format="fltp", layout="mono")
            frame.sample_rate, frame.pts = rate, start
            container.mux(heard.encode(frame))
        container.mux(heard.encode())
    return Video(file.getvalue())


def media_of(kind: str, seed=0):
    """One medium of each kind that a model takes."""
    made = {"image": picture(seed), "video": film(seed), "audio": clip(0.6 + 0.2 * seed)}
    return [made[name] for name in KINDS[kind]]


@cache
def tiny(kind: str) -> Path:
    """Make a tiny model once for all tests of a process; return its folder."""
    from relax_agent.models import TinySettings, create_tiny_model

    folder = Path(tempfile.mkdtemp(prefix="relax-tests-")) / kind
    settings = TinySettings(
        kind=kind, vocab=400, hidden=64, layers=2, expert_hidden=32, init_std=0.06
    )
    create_tiny_model(folder, settings, TEXTS)
    return folder


@cache
def processor(kind: str):
    from relax_agent.rendering.media import MediaProcessor

    return MediaProcessor.load(tiny(kind))


def prompt_of(kind: str, *parts):
    """Return ids and media of text (as token ids) and media in turn."""
    ids, media = [], []
    for part in parts:
        if isinstance(part, list):
            ids += part
        else:
            ids += processor(kind).layout(part).ids
            media.append(part)
    return ids, media


class FullForward:
    """transformers' own forward over a whole sequence, its features from our processor."""

    def __init__(self, kind: str):
        import torch

        from relax_agent.models.load import load_pretrained

        self.kind, self.processor = kind, processor(kind)
        self.model = load_pretrained(tiny(kind), torch.float32).eval()

    def logits(self, ids, media):
        import torch

        tokens = torch.tensor([ids])
        features = self.processor.features(media)
        inputs = {name: torch.from_numpy(value) for name, value in features.items()}
        pads = self.processor.placeholder_ids
        if self.kind == "qwen3_vl":
            kinds = (tokens == pads["image"]) + 2 * (tokens == pads["video"])
            inputs["mm_token_type_ids"] = kinds.int()
        else:
            inputs["attention_mask"] = torch.ones_like(tokens)
            inputs |= self._sounds(inputs) | self._seconds(inputs)
        with torch.no_grad():
            return self.model(input_ids=tokens, use_cache=False, **inputs).logits[0]

    def _sounds(self, inputs):
        """Undo the joining: transformers wants clips padded to the longest."""
        import torch

        if "feature_lens" not in inputs:
            return {}
        lengths = inputs.pop("feature_lens").tolist()
        parts = inputs.pop("input_features").split(lengths, dim=1)
        padded = torch.nn.utils.rnn.pad_sequence([part.T for part in parts], batch_first=True)
        mask = torch.arange(padded.shape[1]) < torch.tensor(lengths)[:, None]
        return {"input_features": padded.transpose(1, 2), "feature_attention_mask": mask.long()}

    def _seconds(self, inputs):
        """The films here are of two seconds and four frames: one second a step."""
        import torch

        if "video_grid_thw" not in inputs:
            return {}
        return {"video_second_per_grid": torch.ones(len(inputs["video_grid_thw"]))}

    def logprobs(self, ids, media, start):
        """Log-probs of ``ids[start:]``, media tokens left out of the distribution."""
        import torch

        logits = self.logits(ids, media)[start - 1 : -1]
        logits[:, self.processor.suppressed_ids] = -torch.inf
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(ids[start:])[:, None])
        return chosen[:, 0].tolist()
