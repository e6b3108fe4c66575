"""Checks of what the model may call: schemas that every chat format takes, soft failures."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from relax_agent.envs.checking.contract import odd_actions
from relax_agent.envs.checking.lab import CallFailed, Lab
from relax_agent.envs.checking.places import place_of, place_of_method
from relax_agent.envs.checking.report import Findings
from relax_agent.envs.checking.running import Check
from relax_agent.envs.checking.subject import authors_class
from relax_agent.messages import ToolCall
from relax_agent.tools import AnyToolset, ToolResult

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_MANY = 64


async def _schemas(lab: Lab, tell: Findings) -> None:
    env = await lab.main()
    where = place_of(authors_class(env))
    tools: Any = env.tools
    if not isinstance(tools, AnyToolset):
        words = f"tools is a {type(tools).__name__}; wrap it: self.tools = Toolset([...])"
        tell.fail(words, where)
        return
    try:
        schemas = tools.schemas()
        json.dumps(schemas)
    except Exception as error:
        tell.fail(f"the tools' schemas cannot be had: {type(error).__name__}: {error}", where)
        return
    if not schemas:
        tell.seen("it has no tools")
        return
    for schema in schemas:
        _check_schema(tell, schema, _tool_place(tools, schema) or where)
    names = [str(_function(schema).get("name")) for schema in schemas]
    for name, count in Counter(names).items():
        if count > 1:
            tell.fail(f"{count} tools are called {name!r}; rename them", where)
    if tuple(names) != tuple(tools.names):
        words = f"the toolset's names {list(tools.names)} are not those of its schemas {names}"
        tell.fail(f"{words}; both in the same order", where)
    if len(names) > _MANY:
        tell.warn(f"{len(names)} tools are more than a model handles well; offer fewer", where)
    if tell.empty:
        tell.seen(f"{len(names)} tool{'s' if len(names) > 1 else ''}: {', '.join(names[:6])}")


def _tool_place(tools: Any, schema: Any) -> str:
    """Return where a tool is defined, if it is defined here."""
    try:
        function = tools[_function(schema).get("name")].function
    except Exception:  # a remote toolset, or one of another make
        return ""
    return place_of(getattr(function, "func", function))


def _function(schema: Any) -> dict[str, Any]:
    function = schema.get("function") if isinstance(schema, dict) else None
    return function if isinstance(function, dict) else {}


def _check_schema(tell: Findings, schema: Any, where: str) -> None:
    function = _function(schema)
    name = function.get("name")
    if not isinstance(schema, dict) or schema.get("type") != "function" or not function:
        words = "a tool's schema is not {'type': 'function', 'function': {…}}"
        tell.fail(f"{words}; declare the tool with @tool", where)
        return
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        words = f"{name!r} cannot be a tool's name"
        tell.fail(f"{words}; letters, digits, '_' and '-', at most 64", where)
    if not str(function.get("description") or "").strip():
        tell.fail(f"the tool {name} has no description; write a docstring", where)
    parameters = function.get("parameters")
    if not isinstance(parameters, dict) or parameters.get("type") != "object":
        tell.fail(f"the parameters of {name} are no object schema", where)
        return
    problem = _schema_problem(parameters)
    if problem:
        tell.fail(f"the parameters of {name} are no valid JSON schema: {problem}", where)
        return
    properties = parameters.get("properties") or {}
    missing = [each for each in parameters.get("required") or () if each not in properties]
    if missing:
        tell.fail(f"{name} requires {missing[0]!r}, which its schema does not describe", where)
    for argument, item in properties.items():
        if isinstance(item, dict) and not _described(item, parameters):
            words = f"the argument {argument!r} of {name} has no description"
            tell.warn(f"{words}; add it under `Args:` in the docstring", where)
        if isinstance(item, dict) and not item.keys() & _TYPES:
            tell.warn(f"the argument {argument!r} of {name} has no type; annotate it", where)


_TYPES = {"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"}


def _described(item: dict[str, Any], parameters: dict[str, Any]) -> bool:
    if item.get("description"):
        return True
    name = str(item.get("$ref", "")).rpartition("/")[2]
    return bool(parameters.get("$defs", {}).get(name, {}).get("description"))


def _schema_problem(schema: dict[str, Any]) -> str:
    import jsonschema

    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        return error.message
    return ""


async def _soft(lab: Lab, tell: Findings) -> None:
    """Called wrongly, a tool says so in words; it never raises."""
    env = await lab.main()
    schemas = lab.schemas(env)
    if not schemas:
        tell.seen("it has no tools")
        return
    await lab.reset(env, lab.seed)
    where = place_of(authors_class(env))
    for what, action in odd_actions(schemas):
        for call in action.tool_calls[:1]:
            await _call_wrongly(lab, tell, env, call, what, where)
    for schema in schemas:
        name = _function(schema).get("name", "")
        listed: Any = ["not", "an", "object"]
        await _call_wrongly(
            lab, tell, env, ToolCall(name, listed, "c0"), f"a call of {name} with a list", where
        )


async def _call_wrongly(
    lab: Lab, tell: Findings, env: Any, call: ToolCall, what: str, where: str
) -> None:
    tools = env.tools
    try:
        result = await lab.call(env, "call", lambda: tools.call(call))
    except CallFailed as failed:
        words = f"{what} raises {type(failed.error).__name__}: {failed.error}"
        hint = "a toolset returns ToolResult.failure(…), which the model can read"
        tell.fail(f"{words}; {hint}", failed.where or where)
        return
    if not isinstance(result, ToolResult):
        words = f"{what} gives a {type(result).__name__}; a toolset returns a ToolResult"
        tell.fail(words, where)
    elif (call.error is not None or call.name not in tools.names) and result.ok:
        tell.fail(f"{what} succeeds; refuse it with ToolResult.failure(…)", where)


async def _same_tools(lab: Lab, tell: Findings) -> None:
    """Schemas are part of the prompt: those of one episode stay what they are."""
    env = await lab.main()
    lab.sound(await lab.play(env, max_turns=1))
    before = json.dumps(lab.schemas(env), sort_keys=True, default=repr)
    lab.sound(await lab.play(env, max_turns=2))
    if json.dumps(lab.schemas(env), sort_keys=True, default=repr) != before:
        words = "equal seeds offer different tools; make them in the constructor, or by the seed"
        tell.warn(words, place_of_method(authors_class(env), "reset"))


TOOL_CHECKS = [
    Check("tools", "tool schemas are valid and described", _schemas),
    Check("wrong calls", "a tool that is called wrongly says so in words", _soft),
    Check("same tools", "equal seeds offer equal tools", _same_tools),
]
