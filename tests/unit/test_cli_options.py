"""Options that several commands share."""

import pytest

from relax_agent.cli.options import import_modules, read_arguments
from relax_agent.errors import ConfigError


def test_values_are_read_as_yaml():
    items = ["count=3", "name=pear", "flag=true", "size=[1, 2]", "share=0.5", "none=null", "eq=a=b"]
    assert read_arguments(items) == {
        "count": 3, "name": "pear", "flag": True, "size": [1, 2], "share": 0.5, "none": None,
        "eq": "a=b",
    }  # fmt: skip
    assert read_arguments(None) == {}


@pytest.mark.parametrize("items", [["count"], ["=3"], ["a-b=1"], ["a=1", "a=2"], ["a=[1"]])
def test_what_is_no_argument_is_refused_with_words(items):
    with pytest.raises(ConfigError) as caught:
        read_arguments(items)
    assert "argument" in str(caught.value) or "--arg" in str(caught.value)


def test_a_module_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="no_such_module_here"):
        import_modules(["no_such_module_here"])
