"""What bare text means is said by the tool's schema."""

import json

import pytest
from parser_support import xml

from relax_agent.rendering import tool_parser

SILENT = [[None], [{}], [{"function": 3}], [{"name": "f", "parameters": []}]]


@pytest.mark.parametrize("tools", SILENT)
def test_schemas_that_say_nothing_do_no_harm(tools):
    """T52"""
    (call,) = tool_parser("qwen3_coder").parse(xml("f", {"a": 1}), tools).tool_calls
    assert (call.name, call.arguments, call.error) == ("f", {"a": 1}, None)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, " 42 ", " 42 "),
        ({"type": ["string", "null"]}, "42", "42"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "42", 42),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "4.5", "4.5"),
        ({"type": "integer"}, " 42\n", 42),
        ({"type": "integer"}, "1,000", "1,000"),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "1"}, "1", "1"),
        ({"$ref": "#/$defs/Text"}, "1", "1"),
        ({"$ref": "#/$defs/Loop"}, "1", 1),
        ({"$ref": "#/$defs/None"}, "1", 1),
        ({}, "1", 1),
        ({}, "one", "one"),
        ({}, "True", "True"),
        ({"type": "object"}, "{'a': 1}", {"a": 1}),
        ({"type": "object"}, '{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
        ({"type": "array"}, "(1, 2)", [1, 2]),
        ({"type": "array"}, "1, 2", "1, 2"),
    ],
)
def test_the_schema_says_what_bare_text_means(schema, text, value):
    """T55: an integer is no text, a text of digits is no integer."""
    parameters = {
        "properties": {"p": schema},
        "$defs": {"Text": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}},
    }
    for tool in ({"name": "f", "parameters": parameters},):
        for shape in (tool, {"type": "function", "function": tool}):
            (call,) = tool_parser("qwen3_coder").parse(xml("f", {"p": text}), [shape]).tool_calls
            assert json.dumps(call.arguments) == json.dumps({"p": value})
