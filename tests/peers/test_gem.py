from peer_support import assert_pinned


def test_the_library_is_the_pinned_one():
    assert_pinned("gem")
