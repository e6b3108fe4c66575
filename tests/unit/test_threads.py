"""Daemon threads for blocking code: abandoned jobs are counted, and nobody waits for them."""

import asyncio
import contextvars
import subprocess
import sys
import threading

import pytest

from relax_agent.threads import Threads, Worker


def test_a_worker_keeps_one_thread_and_the_order_of_jobs():
    async def main():
        worker = Worker()
        done = []

        def job(number):
            done.append(number)
            return threading.get_ident()

        idents = await asyncio.gather(*(worker.run(lambda n=n: job(n)) for n in range(20)))
        worker.close()
        return done, idents

    done, idents = asyncio.run(main())
    assert done == list(range(20))
    assert len(set(idents)) == 1
    assert idents[0] != threading.get_ident()


def test_errors_come_back_and_stop_iteration_does_not_confuse():
    async def main():
        threads = Threads()
        with pytest.raises(KeyError):
            await threads.run(lambda: {}["x"])
        with pytest.raises(RuntimeError, match="StopIteration"):
            await threads.run(lambda: next(iter(())))

    asyncio.run(main())


def test_context_variables_reach_the_thread():
    variable = contextvars.ContextVar("variable", default=0)

    async def main():
        variable.set(7)
        return await Threads().run(variable.get)

    assert asyncio.run(main()) == 7


def test_an_abandoned_job_is_counted_until_it_ends():
    release = threading.Event()

    async def main():
        threads, ended = Threads(), asyncio.Event()
        job = threads.submit(lambda: release.wait(30), ended.set)
        job.cancel()
        before = threads.running
        release.set()
        await asyncio.wait_for(ended.wait(), 30)
        return before, threads.running

    assert asyncio.run(main()) == (1, 0)


def test_threads_are_reused():
    async def main():
        threads = Threads()
        idents = set()
        for _ in range(50):
            idents.add(await threads.run(threading.get_ident))
        return idents

    assert len(asyncio.run(main())) == 1


def test_run_blocking_gives_the_value_or_the_error():
    worker = Worker()
    assert worker.run_blocking(lambda: 3, 30) == 3
    with pytest.raises(ZeroDivisionError):
        worker.run_blocking(lambda: 1 / 0, 30)
    worker.close()


def test_a_hung_job_does_not_keep_the_interpreter_alive():
    """T155: nothing waits for threads at exit."""
    program = """
import asyncio, threading
from relax_agent.threads import THREADS
async def main():
    THREADS.submit(threading.Event().wait)
asyncio.run(main())
print("over")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "over\n"
