"""The oldest Gymnasium that is promised: the tests of the newest, run again."""

import pytest
from peer_support import assert_pinned

pytest.register_assert_rewrite("integration.test_gymnasium")
from integration.test_gymnasium import *  # noqa: E402, F403


def test_the_library_is_the_pinned_one():
    assert_pinned("gymnasium-1.0")
