"""What tests with real runs share."""

import pytest


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """The folder of all run folders: its tiny models are made once and found again."""
    return tmp_path_factory.mktemp("runs")
