"""The servers behind one client: one or several that serve the same tools.

A call without state goes where least is under way; a server that cannot be reached is left alone
for a while, longer each time. A session stays with the server that opened it.
"""

from __future__ import annotations

import asyncio
import json
import select
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from yarl import URL

from relax_agent.errors import ConfigError
from relax_agent.tools.wire import MANIFEST_VERSION

CONNECT_S = 5.0
_MANIFEST_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


@dataclass(frozen=True, slots=True)
class RemoteTool:
    """A tool as its server's manifest tells of it."""

    name: str
    schema: dict[str, Any]
    timeout_s: float
    """Seconds that the server may take for one request, all its own attempts included."""
    idempotent: bool
    requires_session: bool
    stateful: bool
    """Whether its calls must reach the same session."""
    takes_media: bool
    max_request_bytes: int
    max_output_bytes: int

    @classmethod
    def read(cls, item: dict[str, Any]) -> RemoteTool:
        """Read one entry of a manifest. Raises KeyError, TypeError or ValueError."""
        attempts = item["retries"] + 1
        name = item["schema"]["function"]["name"]
        if not isinstance(name, str):
            raise TypeError("a tool's name must be a string")
        return cls(
            name,
            item["schema"],
            float((item["timeout_s"] + item["queue_timeout_s"]) * attempts),
            bool(item["idempotent"]),
            bool(item.get("requires_session", False)),
            bool(item.get("stateful", False)),
            bool(item.get("takes_media", False)),
            int(item.get("max_request_bytes", 1 << 20)),
            int(item.get("max_output_bytes", 1 << 30)),
        )


@dataclass(eq=False, slots=True)
class Replica:
    """One server."""

    url: str
    urls: dict[str, URL] = field(default_factory=dict)
    """The address of each tool."""
    in_flight: int = 0
    sessions: int = 0
    down_until: float = 0.0
    """Until when it is left alone, on the loop's clock."""
    pause_s: float = _FIRST_PAUSE_S

    def failed(self) -> None:
        """Leave it alone for a while."""
        self.down_until = asyncio.get_running_loop().time() + self.pause_s
        self.pause_s = min(2 * self.pause_s, _LONGEST_PAUSE_S)

    def answered(self) -> None:
        """Trust it again."""
        self.pause_s = _FIRST_PAUSE_S
        self.down_until = 0.0


class Replicas:
    """All servers of one client."""

    def __init__(self, urls: Sequence[str], names: Sequence[str]) -> None:
        self.all = [
            Replica(url, {name: URL(f"{url}/tools/{name}") for name in names}) for url in urls
        ]

    def pick(self, tried: Sequence[Replica] = ()) -> Replica | None:
        """Return the one with the least to do, of those not tried yet; None if there is none."""
        if len(self.all) == 1:
            return None if tried else self.all[0]
        now = asyncio.get_running_loop().time()
        left = [each for each in self.all if each not in tried]
        return min(left, key=lambda each: _burden(each, now), default=None)


def _burden(replica: Replica, now: float) -> tuple[bool, int]:
    return replica.down_until > now, replica.in_flight + replica.sessions


class FreshConnector(aiohttp.TCPConnector):
    """A pool that looks at a connection before it lends it.

    A server may have closed one since the event loop last heard of it. A request sent there would
    be lost, and nobody could tell whether it had been begun.
    """

    async def _get(self, *args: Any, **kwargs: Any) -> Any:
        while (connection := await super()._get(*args, **kwargs)) is not None:
            if not _has_ended(connection):
                return connection
            connection.close()
        return None


def _has_ended(connection: Any) -> bool:
    """Tell whether something can be read: on an idle connection, that is its end."""
    found = connection.transport and connection.transport.get_extra_info("socket")
    if not found:
        return False
    poll = select.poll()
    poll.register(found.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def split_urls(url: str | Sequence[str]) -> list[str]:
    """Return the addresses that are meant: one, several, or several between commas."""
    given = url.split(",") if isinstance(url, str) else list(url)
    urls = [each.strip().rstrip("/") for each in given if each.strip()]
    if not urls:
        raise ConfigError("no tool server is named", hint="http://HOST:PORT")
    return list(dict.fromkeys(urls))


async def read_manifests(
    session: aiohttp.ClientSession, urls: Sequence[str], *, has_token: bool
) -> dict[str, Any]:
    """Return the manifest of all servers, which must be the same.

    Raises:
        ConfigError: One does not answer, refuses us, or serves other tools.
    """
    found = [await _read(session, url, has_token) for url in urls]
    for url, manifest in zip(urls, found, strict=True):
        if manifest["tools"] != found[0]["tools"]:
            raise ConfigError(
                f"{url} serves other tools than {urls[0]}",
                hint="replicas must serve the same module, in the same version",
            )
    return found[0]


async def _read(session: aiohttp.ClientSession, url: str, has_token: bool) -> dict[str, Any]:
    try:
        timeout = aiohttp.ClientTimeout(total=_MANIFEST_S, sock_connect=CONNECT_S)
        async with session.get(f"{url}/tools", timeout=timeout) as response:
            status, body = response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"no tool server answers at {url}: {reason}",
            hint="relax-agent tools serve MODULE starts one",
        ) from error
    if status in (401, 403):
        raise ConfigError(
            f"the tool server at {url} {'refuses this token' if has_token else 'needs a token'}"
        )
    try:
        manifest: dict[str, Any] = json.loads(body)
        version, tools = int(manifest.get("version", 1)), manifest["tools"]
        manifest["read"] = [RemoteTool.read(item) for item in tools]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{url} is not a tool server (GET /tools: {status})") from error
    if version > MANIFEST_VERSION:
        raise ConfigError(
            f"the tool server at {url} speaks version {version}, this client {MANIFEST_VERSION}",
            hint="upgrade relax-agent here",
        )
    return manifest
