"""Whatever is sent to a tool server, it answers with words and never with an error of its own."""

import asyncio
import dataclasses

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from relax_agent import Toolset, tool
from relax_agent.messages import Image
from relax_agent.tools import create_tool_app
from relax_agent.tools.calculator import calculator

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.checks import not_a_server_error  # noqa: E402


class Node(BaseModel):
    value: int
    children: list["Node"] = []


@dataclasses.dataclass
class Size:
    width: int
    height: int = 1


class Counter:
    """Counts."""

    @tool(requires_session=False)
    async def count(self, by: int = 1) -> int:
        """Count on."""
        return by


@tool
async def rich(tree: Node, sizes: list[Size], ratio: float = 0.5) -> dict[str, float]:
    """Take rich arguments."""
    return {"ratio": ratio, "sizes": len(sizes)}


@tool
async def look(image: Image) -> int:
    """Look at a picture."""
    return len(image.data)


TOOLS = Toolset([calculator, rich, look, Counter])
APP = create_tool_app(TOOLS)
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", create_tool_app(TOOLS))


@pytest.mark.filterwarnings("ignore:Skipped test cases")  # it cannot write frames
@SCHEMA.include(method=["POST", "DELETE"]).parametrize()
@settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_schemathesis_finds_no_error_of_the_servers_own(case):
    case.call_and_validate(checks=[not_a_server_error])


def ask(path, body, **headers):
    async def main():
        transport = httpx.ASGITransport(APP)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.post(path, content=body, headers=headers)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"tree": {"value": "seven"}, "sizes": []}', "argument 'tree.value'"),
        (b'{"tree": {"value": 1}}', "argument 'sizes' is missing"),
        (b'{"sizes": [], "sizes": []}', "argument 'sizes' is given twice"),
        (b'{"tree": {"value": 1}, "sizes": [], "ratio": NaN}', "argument 'ratio'"),
        (b'{"tree": {"value": Infinity}, "sizes": []}', "argument 'tree' holds NaN or Infinity"),
        (b'{"tree": {"value": 1e999}, "sizes": []}', "argument 'tree' holds NaN or Infinity"),
        (b'{"tree": "\\ud800", "sizes": []}', "argument 'tree' holds half a character"),
        (b'{"tree": ' + b"[" * 100_000, "nested too deep"),
        (b'{"tree": ' + b'{"value":1,"children":[' * 5000 + b"]}" * 5000 + b"}", "rich: "),
        (b"[1, 2]", "one JSON object, not list"),
        (b"null", "one JSON object, not NoneType"),
        (b'"text"', "one JSON object, not str"),
        (b"\xff\xfe", "not JSON"),
        (b"1" * 5000, "rich: "),
    ],
)
def test_odd_bodies_are_soft_errors_that_name_the_argument(body, words):
    response = ask("/tools/rich", body)
    assert response.status_code == 422
    result = response.json()
    assert result["error"] == "invalid_arguments"
    assert words in result["content"][0]["text"]
    assert len(result["content"][0]["text"]) < 1000


@settings(max_examples=40, deadline=None)
@given(
    st.binary(max_size=60),
    st.sampled_from(["/tools/rich", "/tools/look", "/sessions", "/sessions/renew", "/tools/x"]),
    st.sampled_from(["application/json", "application/x-relax-frame", "multipart/form-data", ""]),
    st.text("0123456789.-einfa", max_size=5),
)
def test_no_bytes_at_all_are_an_error_of_the_servers_own(body, path, content_type, deadline):
    headers = {"content-type": content_type}
    if deadline:
        headers["x-tool-deadline"] = deadline
    assert ask(path, body, **headers).status_code < 500
