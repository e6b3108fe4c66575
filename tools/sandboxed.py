"""``@tool(sandbox=True)``: a tool's own function in the sandbox for untrusted code.

For functions that are not to be trusted with this process: what they compute from a model's input
may loop for ever, eat all memory, or be talked into reading files. The function's source runs in a
fresh interpreter for each call, without network or files (:mod:`relax_agent.tools.sandbox`), so it
must be self-contained: imports inside it, nothing of its module. Arguments and result travel as
JSON; figures that it draws come back as pictures.
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import inspect
import json
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from pydantic_core import to_jsonable_python

from relax_agent.errors import ToolDeclarationError, ToolError

_ARGUMENTS, _RESULT = "arguments.json", "result.json"
_CALL = f"""
import json as _json
with open({_ARGUMENTS!r}) as _file:
    _given = _json.load(_file)
_made = {{name}}(**_given)
with open({_RESULT!r}, "w") as _file:
    _json.dump(_made, _file)
"""


def in_sandbox(function: Callable[..., Any], name: str, timeout_s: float) -> Callable[..., Any]:
    """Return an async function that runs a plain one in the sandbox.

    Args:
        function: A self-contained function.
        name: What messages call it.
        timeout_s: Seconds that it may run.

    Raises:
        ToolDeclarationError: It is not self-contained, or its source is not there.
    """
    code = _source(function, name) + _CALL.format(name=function.__name__)
    signature = inspect.signature(function)

    @functools.wraps(function)
    async def run(**values: Any) -> Any:
        from relax_agent.threads import THREADS
        from relax_agent.tools.python import shared_sandbox

        bound = signature.bind(**values)
        bound.apply_defaults()
        given = json.dumps(to_jsonable_python(bound.arguments)).encode()
        sandbox = await THREADS.run(shared_sandbox)
        async with sandbox.session() as session:
            await session.write_file(_ARGUMENTS, given)
            done = await session.run(code, timeout_s=timeout_s)
            if done.error is not None:
                told = done.error.message.strip().splitlines() or ["(no message)"]
                raise ToolError(told[-1], kind=done.error.kind)
            value = json.loads(await session.read_file(_RESULT))
        if not done.images:
            return value
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return [shown, *done.images]

    return run


def _source(function: Callable[..., Any], name: str) -> str:
    """Return a function's source without decorators and defaults, which stay on this side."""
    if inspect.iscoroutinefunction(function) or not inspect.isfunction(function):
        raise ToolDeclarationError(f"tool {name}: sandbox is for plain functions")
    outside = sorted(_outside(function.__code__))
    if outside or function.__closure__:
        told = f"uses {outside[0]!r}" if outside else "uses names around it"
        raise ToolDeclarationError(
            f"tool {name} {told}, which the sandbox does not have",
            hint="import and define everything inside the function",
        )
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError) as error:
        words = f"tool {name}: its source cannot be read: {error}"
        raise ToolDeclarationError(words, hint="define it in a file") from None
    body = next((each for each in tree.body if isinstance(each, ast.FunctionDef)), None)
    if body is None:
        raise ToolDeclarationError(f"tool {name}: sandbox is for functions, not for lambdas")
    body.decorator_list = []
    body.args.defaults, body.args.kw_defaults = [], [None] * len(body.args.kwonlyargs)
    return f"from __future__ import annotations\n{ast.unparse(body)}\n"


def _outside(code: CodeType) -> Iterator[str]:
    """Yield the names that a function takes from its module."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and not hasattr(builtins, str(step.argval)):
            yield str(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _outside(constant)
