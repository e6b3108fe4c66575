"""``Closing``: the end of ``async with`` awaits ``close``, and hides no error."""

import asyncio

import pytest

from relax_agent.closing import Closing


class Thing(Closing):
    def __init__(self):
        self.closed = 0

    async def close(self):
        await asyncio.sleep(0)
        self.closed += 1
        return ["what close returns hides no error"]


def test_it_gives_the_thing_itself_and_closes_it_once():
    async def main():
        thing = Thing()
        async with thing as same:
            assert same is thing and thing.closed == 0
        return thing.closed

    assert asyncio.run(main()) == 1


@pytest.mark.parametrize("error", [KeyError("x"), asyncio.CancelledError()])
def test_it_is_closed_after_errors_too_which_go_on(error):
    thing = Thing()

    async def main():
        async with thing:
            raise error

    with pytest.raises(type(error)):
        asyncio.run(main())
    assert thing.closed == 1
