"""verifiers before its version 1, which the benchmark of environments is compared with."""

from peer_support import assert_pinned, run_contestant


def test_the_library_is_the_pinned_one():
    assert_pinned("verifiers-0.1.14")


def test_the_benchmark_s_rollouts_call_the_tool_and_are_scored():
    """The script itself checks every rollout's tool messages and reward."""
    assert run_contestant("verifiers_steps.py", 3, 2)["steps_per_s"] > 0
