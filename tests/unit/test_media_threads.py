"""Decoding beside an event loop: the loop goes on, and what hangs is left behind."""

import asyncio
import threading
import time

import numpy as np
import pytest

from relax_agent.errors import MediaError
from relax_agent.media import (
    clock,
    decode_audio_async,
    decode_image_async,
    decode_video_async,
    encode_mp4,
    encode_png,
    encode_wav,
    in_thread,
    threaded,
)
from relax_agent.media.clock import Deadline


def test_a_ticker_ticks_while_fifty_pictures_are_decoded(monkeypatch):
    """T86: counted in ticks, not in time: a loop that is blocked by a decode has none."""
    picture = encode_png(np.zeros((2, 2, 3), np.uint8))
    ticks = 0
    ticks_seen = []

    def slow(part, *, max_pixels):
        before = ticks
        time.sleep(0.1)
        ticks_seen.append(ticks - before)
        return part

    monkeypatch.setattr(threaded, "decode_image", slow)

    async def main():
        nonlocal ticks

        async def ticker():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        ticking = asyncio.create_task(ticker())
        found = await asyncio.gather(*(decode_image_async(picture) for _ in range(50)))
        ticking.cancel()
        return found

    assert len(asyncio.run(main())) == 50
    assert min(ticks_seen) > 5  # of about 90; none if decoding were in the loop


def test_only_so_many_decode_at_a_time():
    running = most = 0
    lock = threading.Lock()

    def job():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.005)
        with lock:
            running -= 1

    async def main():
        await asyncio.gather(*(in_thread(job) for _ in range(40)))

    asyncio.run(main())
    assert most <= clock.DECODERS


def test_a_decoder_that_hangs_is_left_behind_and_takes_no_place():
    """T80: never a hang, also if native code never returns."""
    release = threading.Event()

    async def main():
        hung = [in_thread(release.wait, timeout_s=0.05) for _ in range(2 * clock.DECODERS)]
        results = await asyncio.gather(*hung, return_exceptions=True)
        return results, await in_thread(lambda: "next")

    try:
        results, after = asyncio.run(main())
    finally:
        release.set()
    assert after == "next"
    assert all(isinstance(each, MediaError) for each in results)
    assert "did not end within 0.05 s" in str(results[0])


def test_errors_and_time_outs_of_the_work_itself_come_through():
    def fail():
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        asyncio.run(in_thread(fail))


def test_a_cancelled_wait_frees_its_place():
    release = threading.Event()

    async def main():
        waits = [asyncio.create_task(in_thread(release.wait)) for _ in range(clock.DECODERS + 3)]
        await asyncio.sleep(0.01)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        return await in_thread(lambda: "next", timeout_s=5)

    try:
        assert asyncio.run(main()) == "next"
    finally:
        release.set()


def test_the_three_decoders_work_in_a_loop():
    async def main():
        image = await decode_image_async(encode_png(np.zeros((2, 3, 3), np.uint8)))
        samples, rate = await decode_audio_async(encode_wav(np.zeros(80), 8000))
        frames, times = await decode_video_async(encode_mp4(np.zeros((3, 16, 16, 3), np.uint8), 3))
        return image.size, samples.shape, rate, frames.shape, len(times)

    assert asyncio.run(main()) == ((3, 2), (1, 80), 8000, (3, 16, 16, 3), 3)


def test_a_deadline_speaks_when_it_is_past():
    now = 0.0
    deadline = Deadline(5, "decoding a sound", lambda: now)
    deadline.check()
    now = 5.1
    with pytest.raises(MediaError, match="decoding a sound took more than 5 s → timeout_s"):
        deadline.check()
