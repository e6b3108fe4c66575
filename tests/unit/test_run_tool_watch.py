"""A broken tool server is told of, and ends the run when nothing comes of it any more."""

from types import SimpleNamespace

import pytest

from relax_agent.errors import ToolError
from relax_agent.run.tool_watch import MOST_UNANSWERED, ToolWatch
from relax_agent.tools.client import CallCounts


@pytest.fixture
def server():
    """A toolset's counts, a watch over them, and what it has told."""
    toolset = SimpleNamespace(counts=CallCounts(), url="http://there")
    told = []
    return SimpleNamespace(counts=toolset.counts, watch=ToolWatch(toolset, told.append), told=told)


def fail(server, count):
    server.counts.unanswered += count
    server.counts.last_failure = "Error: add: the tool server failed (500)"


def test_tools_in_this_process_have_no_server_to_fail():
    assert ToolWatch(None, pytest.fail).look("step 1") == 0


def test_answered_calls_are_no_news(server):
    server.counts.answered = 50
    assert (server.watch.look("step 1"), server.told) == (0, [])


def test_failed_calls_are_counted_once_and_told(server):
    server.counts.answered = 20
    fail(server, 30)
    assert server.watch.look("step 1") == 30
    assert server.watch.look("step 2") == 0
    assert server.told == [
        "30 of 50 tool calls failed during step 1, the last one with:"
        " Error: add: the tool server failed (500)"
    ]


def test_a_server_that_answers_nothing_any_more_ends_the_run(server):
    fail(server, MOST_UNANSWERED - 1)
    server.watch.look("step 1")
    fail(server, 1)
    words = rf"none of {MOST_UNANSWERED} calls, .* during step 2: add: the tool server failed"
    with pytest.raises(ToolError, match=words):
        server.watch.look("step 2")


def test_one_answer_in_between_is_a_sign_of_life(server):
    for step in range(5):
        fail(server, MOST_UNANSWERED - 1)
        server.watch.look(f"step {step}")
        server.counts.answered += 1
        server.watch.look(f"step {step}")
