"""Media in prompts: counts, features and caches, against transformers' own processors."""

import asyncio
import gc
import json
import shutil
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from media_support import KINDS, clip, film, film_with_sound, media_of, picture, processor, tiny

from relax_agent.errors import ConfigError, MediaError
from relax_agent.messages import Audio, Image
from relax_agent.rendering.media import MediaProcessor, find_media, positions_of, sound, vision
from relax_agent.rendering.media.config import PatchConfig
from relax_agent.rendering.media.processor import BoundedCache

PATCHES = PatchConfig(16, 2, 2, 32 * 32, 16 * 32 * 32, (0.5, 0.4, 0.3), (0.5, 0.6, 0.7))


@given(st.integers(1, 400), st.integers(1, 400))
@settings(max_examples=40, deadline=None)
def test_pictures_become_what_transformers_makes_of_them(height, width):
    """T71: the sizes are the processor's own; resized pictures agree too."""
    from PIL import Image as Pictures
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    theirs = Qwen2VLImageProcessorPil(
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": PATCHES.min_pixels, "longest_edge": PATCHES.max_pixels},
        image_mean=list(PATCHES.mean),
        image_std=list(PATCHES.std),
    )
    pixels = np.random.default_rng(height * 1000 + width).integers(
        0, 255, (height, width, 3), dtype=np.uint8
    )
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(MediaError, match="200 times"):
            vision.image_grid(height, width, PATCHES)
        return
    found, grid = vision.image_patches(Pictures.fromarray(pixels), PATCHES)
    expected = theirs(images=[Pictures.fromarray(pixels)], return_tensors="np")
    assert [list(grid)] == expected["image_grid_thw"].tolist()
    np.testing.assert_allclose(found, expected["pixel_values"], atol=2e-6)
    assert vision.tokens_of(grid, PATCHES) == vision.tokens_of(
        vision.image_grid(height, width, PATCHES), PATCHES
    )


def test_a_film_is_cut_like_its_frames_as_pictures():
    """Two equal frames are what one repeated picture is; a last odd frame is repeated."""
    from PIL import Image as Pictures

    pixels = np.random.default_rng(0).integers(0, 255, (64, 96, 3), dtype=np.uint8)
    config = PatchConfig(16, 2, 2, 1, 10**9, PATCHES.mean, PATCHES.std)
    still, _ = vision.image_patches(Pictures.fromarray(pixels), config)
    moving, grid = vision.video_patches(np.stack([pixels] * 3), config)
    assert grid == (2, 4, 6)
    np.testing.assert_array_equal(moving, np.concatenate([still, still]))


@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_those_of_the_features(kind):
    """T71: what a filter counts is what the towers return, for every medium."""
    own = processor(kind)
    merge = own.config.image.merge**2
    for medium in [*media_of(kind), *media_of(kind, 3), film_with_sound(), film(2, 1), film(3, 5)]:
        layout, features = own.layout(medium), own.features([medium])
        pads = {name: int((layout.body == pad).sum()) for name, pad in own.config.pads.items()}
        patches = {
            name: int(np.prod(features[key], axis=1).sum()) // merge if key in features else 0
            for name, key in (("image", "image_grid_thw"), ("video", "video_grid_thw"))
        }
        assert (pads["image"], pads["video"]) == (patches["image"], patches["video"])
        assert own.count(medium) == layout.count >= sum(pads.values())
        if "feature_lens" in features:
            assert pads["audio"] == sound.tokens_of(
                int(features["feature_lens"][0]), own.config.audio
            )


def test_the_patch_size_is_the_folders_own(tmp_path):
    """T71: a patch of 14 instead of 16 changes counts and features together."""
    folder = tmp_path / "model"
    shutil.copytree(tiny("qwen3_vl"), folder)
    file = folder / "preprocessor_config.json"
    values = json.loads(file.read_text()) | {
        "patch_size": 14,
        "size": {"shortest_edge": 1, "longest_edge": 10**7},
    }
    file.write_text(json.dumps(values))
    own, large = MediaProcessor.load(folder), picture(0, 280, 280)
    assert own.count(large) == 100 == len(own.features([large])["pixel_values"]) // 4
    file.unlink()
    with pytest.raises(ConfigError, match="patch_size"):
        MediaProcessor.load(folder)


def test_a_joint_processor_file_says_the_same(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny("qwen3_omni"), folder)
    single = json.loads((folder / "preprocessor_config.json").read_text())
    film_file = folder / "video_preprocessor_config.json"
    joint = {
        "image_processor": single,
        "feature_extractor": single,
        "video_processor": json.loads(film_file.read_text()),
    }
    (folder / "processor_config.json").write_text(json.dumps(joint))
    (folder / "preprocessor_config.json").unlink()
    film_file.unlink()
    assert MediaProcessor.load(folder).config == processor("qwen3_omni").config


@pytest.mark.parametrize("seconds", [0.2, 1.0, 2.37])
def test_a_second_is_as_many_tokens_at_any_rate(seconds):
    """T83: resampled first, counted then."""
    own = processor("qwen3_omni")
    counts = {own.count(clip(seconds, rate)) for rate in (8_000, 16_000, 22_050, 44_100, 48_000)}
    assert len(counts) == 1


def test_features_of_a_clip_do_not_depend_on_its_neighbours():
    """T82: nothing is padded to the longest or cut to a limit of text."""
    own = processor("qwen3_omni")
    short, long = clip(0.5), clip(31.0, hertz=300)
    alone, both = own.features([long]), own.features([short, long])
    assert both["feature_lens"].tolist() == [50, 3100]
    np.testing.assert_array_equal(both["input_features"][:, 50:], alone["input_features"])


def test_log_mel_is_that_of_whisper():
    """Against the extractor over a padded batch, as transformers' own processor calls it."""
    from transformers import WhisperFeatureExtractor

    own = processor("qwen3_omni").config.audio
    samples = [np.sin(np.arange(n) * 0.1).astype(np.float32) for n in (8000, 20_000)]
    whole = WhisperFeatureExtractor(feature_size=128)(
        samples, sampling_rate=16_000, padding=True, truncation=False, return_tensors="np"
    )["input_features"]
    found = sound.log_mel(samples[1], own)
    np.testing.assert_allclose(found, whole[1][:, : found.shape[1]], atol=1e-5)


def test_sampling_of_frames_comes_with_file_and_folder_alone(monkeypatch):
    """T79: nothing in the environment of a process changes which frames are seen."""
    medium = film(5, 40, 10)
    before = processor("qwen3_vl").features([medium])
    for name in ("FPS", "FPS_MAX_FRAMES", "VIDEO_MAX_PIXELS", "MAX_FRAMES", "NFRAMES"):
        monkeypatch.setenv(name, "1")
    after = MediaProcessor.load(tiny("qwen3_vl"))
    assert after.count(medium) == processor("qwen3_vl").count(medium)
    for name, values in after.features([medium]).items():
        np.testing.assert_array_equal(values, before[name])


def test_decoding_leaves_the_event_loop_alone(monkeypatch):
    """T86: 50 slow decodes, and a ticker that still ticks."""
    own = MediaProcessor.load(tiny("qwen3_vl"))
    pictures = [Image(bytes([at]), "image/png") for at in range(50)]
    monkeypatch.setattr(own, "layout", lambda medium: time.sleep(0.02))
    ticks = 0

    async def main():
        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        ticker = asyncio.create_task(tick())
        await own.prepare(pictures)
        ticker.cancel()

    asyncio.run(main())
    assert ticks > 100  # 50 decodes of 20 ms block for a second if they block at all


def test_a_damaged_medium_is_named_before_anything_is_rendered():
    own = MediaProcessor.load(tiny("qwen3_vl"))
    with pytest.raises(MediaError, match="not an image"):
        asyncio.run(own.prepare([picture(7), Image(b"nothing"), picture(8)]))


def test_ten_thousand_pictures_leave_memory_flat():
    """T88: the caches are bounded in bytes, not in pictures."""
    base = processor("qwen3_vl")
    own = MediaProcessor(base.folder, base.config, layout_bytes=100_000, feature_bytes=1_000_000)
    data = picture(0, 32, 32).data
    sizes = []
    tracemalloc.start()
    try:
        for number in range(10_000):
            medium = Image(data + number.to_bytes(4, "big"))  # what follows a PNG is not read
            own.layout(medium)
            if number % 10 == 0:
                own.features_of(medium)
            if number % 2500 == 2499:
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert sizes[-1] < sizes[0] + 200_000
    assert own._layouts.bytes <= 100_000 and own._features.bytes <= 1_000_000


def test_a_bounded_cache_keeps_the_newest_and_nothing_that_is_too_large():
    cache = BoundedCache(10, len)
    for key, value in (("a", "xxxx"), ("b", "xxxx"), ("a", ""), ("c", "xxxx"), ("d", "x" * 11)):
        assert cache.get(key, lambda value=value: value)
    assert cache.get("a", lambda: "new") == "xxxx" and cache.get("b", lambda: "new") == "new"
    assert cache.bytes <= 10


def test_a_model_says_what_it_does_not_take():
    with pytest.raises(MediaError, match="image and video, not audio"):
        processor("qwen3_vl").layout(clip())
    with pytest.raises(MediaError):
        processor("qwen3_vl").layout(Image(b"nothing"))
    with pytest.raises(MediaError, match="too short"):
        processor("qwen3_omni").layout(clip(0.005))
    with pytest.raises(MediaError):
        processor("qwen3_omni").layout(Audio(b"RIFF"))
    assert MediaProcessor.load(tiny("qwen3_vl").parent) is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_policy_samples_moves_no_position(kind):
    """T70: placeholders and markers in sampled text are text to the positions."""
    own = processor(kind)
    layout = own.layout(picture(1))
    ids = [5, *layout.ids, 6]
    places = find_media(ids, {"image": [layout]}, own.placeholder_ids)
    before = positions_of(len(ids) + 4, places)
    assert before[:, -4:].tolist() == [[p + before[0, -5] for p in (1, 2, 3, 4)]] * 3
    assert np.isfinite(before).all() and (np.diff(before[0]) >= 0).all()
    cut = positions_of(5, places)
    np.testing.assert_array_equal(cut, before[:, :5])
