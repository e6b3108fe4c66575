"""Media in prompts: how many tokens they take, which, and what the model's towers get to see.

One :class:`MediaProcessor` is read from the model's own folder and used by the renderer, the
embedded engine and the trainer alike, so their counts cannot differ. It needs NumPy and the
``media`` extra, no torch and no torchvision.

    config.py      what the model's folder says: sizes, patches, rates, token ids
    layout.py      a medium's place in the prompt: token ids and rotary positions
    vision.py      pictures and frames to patches
    film.py        which frames of a video, and its sound
    sound.py       samples to log-mel features
    processor.py   all of it behind one object, with a bounded cache
    renderer.py    messages with media to token ids, on top of a renderer of text
"""

from relax_agent.rendering.media.config import MediaConfig, MediaFamily, read_media_config
from relax_agent.rendering.media.layout import Layout, PlacedMedium, find_media, positions_of
from relax_agent.rendering.media.processor import MediaProcessor
from relax_agent.rendering.media.renderer import MediaRenderer, PreparesMedia, prepare_media

__all__ = [
    "Layout",
    "MediaConfig",
    "MediaFamily",
    "MediaProcessor",
    "MediaRenderer",
    "PlacedMedium",
    "PreparesMedia",
    "find_media",
    "positions_of",
    "prepare_media",
    "read_media_config",
]
