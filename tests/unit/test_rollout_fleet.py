"""The fleet: where requests go, and that counters come back to 0 whatever happens."""

import asyncio

import pytest
from rollout_support import FakeEngine, dead, ids_of, replies, result, run

from relax_agent.engines.protocol import GenerateRequest, SamplingParams
from relax_agent.errors import EngineRejected, EngineUnavailable, MissingLogprobs
from relax_agent.rollout import Fleet


def ask(episode: str, turn: int = 0, prompt=(1, 2, 3)) -> GenerateRequest:
    return GenerateRequest(list(prompt), SamplingParams(8), rid=f"{episode}.{turn:04d}.00")


def fleet(count=2, script="ok", **changes) -> tuple[Fleet, list[FakeEngine]]:
    engines = [FakeEngine(script, name=f"engine-{i}") for i in range(count)]
    return Fleet(engines, **changes), engines


def slowly(seconds):
    async def script(request):
        await asyncio.sleep(seconds)
        return result(ids_of("ok"), request=request)

    return script


def assert_idle(fleet: Fleet) -> None:
    assert [load.requests for load in fleet.loads()] == [0] * len(fleet.engines)


def homes(engines) -> dict[str, set[str]]:
    """Which engines each episode has used."""
    found: dict[str, set[str]] = {}
    for engine in engines:
        for request in engine.requests:
            found.setdefault(request.rid.partition(".")[0], set()).add(engine.name)
    return found


def test_the_turns_of_an_episode_stay_on_one_engine():
    async def main():
        router, engines = fleet(4)

        async def episode(name):
            for turn in range(10):
                await router.generate(ask(name, turn))

        await asyncio.gather(*(episode(f"e{i}") for i in range(16)))
        assert all(len(used) == 1 for used in homes(engines).values())
        assert_idle(router)

    run(main())


def test_episodes_whose_names_begin_alike_are_told_apart():
    """T148: session-1 and session-12 do not collide."""

    async def main():
        router, engines = fleet(2)
        for turn in range(3):
            for name in ("session-1", "session-12"):
                await router.generate(ask(name, turn))
        assert homes(engines) == {"session-1": {"engine-0"}, "session-12": {"engine-1"}}

    run(main())


def test_a_common_prefix_does_not_gather_all_episodes_on_one_engine():
    """T149: 64 sessions that share a 4k prompt: max load over mean load below 1.5."""

    async def main():
        router, engines = fleet(4, slowly(1))
        prompt = list(range(4096))
        await asyncio.gather(*(router.generate(ask(f"s{i}", 0, prompt)) for i in range(64)))
        counts = [len(engine.requests) for engine in engines]
        assert max(counts) / (sum(counts) / len(counts)) < 1.5
        for i in range(64):  # one after another: nothing is under way when the next arrives
            await router.generate(ask(f"t{i}", 0, prompt))
        episodes = [load.episodes for load in router.loads()]
        assert max(episodes) / (sum(episodes) / len(episodes)) < 1.5

    run(main())


def test_an_episode_escapes_from_an_engine_that_is_clearly_busier_and_stays_away():
    async def main():
        router, engines = fleet(2, escape_load=2)
        await router.generate(ask("mine"))
        home, other = engines
        home.script = slowly(100)
        busy = []
        for i in range(6):  # gather more requests on one engine than the fleet itself would
            router._sticky[f"b{i}"] = router._members[0]
            busy.append(asyncio.create_task(router._send(router._members[0], ask(f"b{i}"))))
        await asyncio.sleep(1)
        await router.generate(ask("mine", 1))
        assert [request.rid for request in other.requests] == ["mine.0001.00"]
        await asyncio.gather(*busy)
        await router.generate(ask("mine", 2))
        assert homes([other])["mine"] == {"engine-1"}

    run(main())


def test_a_little_more_work_is_no_reason_to_lose_the_prefix_cache():
    async def main():
        router, engines = fleet(2, escape_load=4)
        await router.generate(ask("mine"))
        engines[0].script = slowly(100)
        busy = [
            asyncio.create_task(router._send(router._members[0], ask(f"b{i}"))) for i in range(4)
        ]
        await asyncio.sleep(1)
        engines[0].script = "ok"
        await router.generate(ask("mine", 1))
        assert homes(engines)["mine"] == {"engine-0"}
        await asyncio.gather(*busy)

    run(main())


@pytest.mark.parametrize("error", [dead(None), EngineRejected("400"), RuntimeError("bug")])
def test_load_is_released_after_every_kind_of_failure(error):
    """T125: five failures leave load 0, not a worker that seems busy for ever."""

    async def main():
        router, _ = fleet(2, lambda request: error)
        for i in range(5):
            with pytest.raises(type(error)):
                await router.generate(ask(f"e{i}"))
        assert_idle(router)

    run(main())


def test_load_is_released_when_a_request_is_cancelled():
    async def main():
        router, engines = fleet(1, slowly(1000))
        tasks = [asyncio.create_task(router.generate(ask(f"e{i}"))) for i in range(5)]
        await asyncio.sleep(1)
        assert router.loads()[0].requests == 5
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert_idle(router)
        assert engines[0].running == 0

    run(main())


def test_a_request_of_a_dead_engine_goes_to_another_one_as_it_was():
    """T116: the second try is the clean original."""

    async def main():
        router, engines = fleet(3)
        engines[0].script = dead
        request = ask("e")
        answer = await router.generate(request)
        assert answer.output_ids == ids_of("ok")
        assert engines[1].requests == [request]
        assert router.loads()[0].failures == 1
        await router.generate(ask("e", 1))
        assert homes(engines)["e"] == {"engine-0", "engine-1"}

    run(main())


def test_two_engines_that_fail_at_one_request_are_enough():
    async def main():
        router, engines = fleet(3, dead)
        with pytest.raises(EngineUnavailable):
            await router.generate(ask("e"))
        assert [len(engine.requests) for engine in engines] == [1, 1, 0]

    run(main())


@pytest.mark.parametrize("error", [EngineRejected("too long"), MissingLogprobs("none")])
def test_a_refused_request_is_not_tried_elsewhere(error):
    async def main():
        router, engines = fleet(2, lambda request: error)
        with pytest.raises(type(error)):
            await router.generate(ask("e"))
        assert sum(len(engine.requests) for engine in engines) == 1

    run(main())


def test_an_engine_that_failed_is_avoided_for_a_while_and_then_used_again():
    async def main():
        router, engines = fleet(2, avoid_s=5)
        engines[0].script = replies(dead, *["ok"] * 100)
        await router.generate(ask("a"))
        for i in range(6):
            await router.generate(ask(f"b{i}"))
        assert len(engines[0].requests) == 1
        await asyncio.sleep(6)
        for i in range(9):
            await router.generate(ask(f"c{i}"))
        assert len(engines[0].requests) > 1

    run(main())


def test_a_single_engine_that_failed_once_is_asked_again():
    async def main():
        router, _ = fleet(1, replies(dead, "ok"))
        with pytest.raises(EngineUnavailable, match="gone"):
            await router.generate(ask("a"))
        assert (await router.generate(ask("a", 1))).output_ids == ids_of("ok")

    run(main())


def test_without_any_engine_the_error_says_so():
    with pytest.raises(EngineUnavailable, match="none"):
        run(Fleet([]).generate(ask("e")))


# -- versions ------------------------------------------------------------------------------------


def test_an_engine_whose_weights_are_behind_gets_no_request():
    """T146: a new engine is registered before it has the weights."""

    async def main():
        router, engines = fleet(1)
        with router.updating(3):
            pass
        newcomer = FakeEngine("ok", name="newcomer", version=0)
        await router.add(newcomer)
        for i in range(8):
            await router.generate(ask(f"e{i}"))
        assert newcomer.requests == []
        with router.updating(4):
            newcomer.version = 4
        for i in range(8):
            await router.generate(ask(f"f{i}"))
        assert len(newcomer.requests) == 8, "it has the fewest episodes"
        assert router.weight_version == 4
        assert len(engines[0].requests) == 8

    run(main())


def test_an_engine_that_missed_an_update_is_left_out():
    async def main():
        router, engines = fleet(2)
        router.published(1, names=["engine-1"])
        for i in range(4):
            await router.generate(ask(f"e{i}"))
        assert (len(engines[0].requests), len(engines[1].requests)) == (0, 4)
        router.published(1, names=["engine-0"])
        await router.generate(ask("f"))
        assert len(engines[0].requests) == 1

    run(main())


def test_when_no_engine_has_the_weights_the_error_names_the_version():
    async def main():
        router, _ = fleet(1)
        router.published(2, names=[])
        with pytest.raises(EngineUnavailable, match="version 2"):
            await router.generate(ask("e"))

    run(main())


def test_refresh_asks_the_engines_what_they_serve():
    async def main():
        router, engines = fleet(2)
        engines[0].version = engines[1].version = 7
        await router.refresh()
        assert router.weight_version == 7
        await router.generate(ask("e"))

    run(main())


def test_a_failed_update_leaves_the_version_as_it_was():
    async def main():
        router, _ = fleet(1)
        with pytest.raises(OSError, match="disk"), router.updating(1):
            raise OSError("disk")
        assert router.weight_version == 0
        await router.generate(ask("e"))

    run(main())


def test_pauses_add_up_and_the_running_one_counts():
    """T134: two pauses in one interval: the sum of both."""

    async def main():
        router, _ = fleet(1)
        assert router.paused_s() == 0
        for version in (1, 2):
            with router.updating(version):
                await asyncio.sleep(10)
                assert router.paused_s() == pytest.approx(10 * version)
            await asyncio.sleep(100)
        assert router.paused_s() == pytest.approx(20)

    run(main())


# -- the rest ------------------------------------------------------------------------------------


def test_abort_reaches_the_engine_that_has_the_request():
    async def main():
        router, engines = fleet(2, slowly(100))
        first = asyncio.create_task(router.generate(ask("a")))
        second = asyncio.create_task(router.generate(ask("b")))
        await asyncio.sleep(1)
        await router.abort("b.0000.00")
        assert (engines[0].aborted, engines[1].aborted) == ([], ["b.0000.00"])
        await router.abort("unknown")
        await router.abort()
        assert (engines[0].aborted, engines[1].aborted[1:]) == ([None], [None])
        await asyncio.gather(first, second)

    run(main())


def test_ended_episodes_are_forgotten_and_memory_stays_bounded():
    async def main():
        router, _ = fleet(2)
        for i in range(1000):
            await router.generate(ask(f"e{i}"))
            router.forget(f"e{i}")
            router.forget(f"e{i}")
        assert sum(load.episodes for load in router.loads()) == 0
        assert router._sticky == {}

    run(main())


def test_a_removed_engine_gets_nothing_more():
    async def main():
        router, engines = fleet(2)
        await router.generate(ask("e"))
        router.remove("engine-0")
        await router.generate(ask("e", 1))
        assert [len(engine.requests) for engine in engines] == [1, 1]
        router.forget("e")
        assert router.loads()[0].episodes == 0

    run(main())
