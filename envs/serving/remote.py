"""``make("ws://…")``: an environment on another machine, used as if it were here.

:func:`connect_env` asks the server what it serves (a short blocking request) and returns a
:class:`RemoteEnv`. It takes an environment from the server at its first ``reset``, and waits for a
while if all are taken.

* A connection that is lost between two episodes is made anew, once, without a word: a server that
  was restarted or that took an idle environment back is no failure.
* In the middle of an episode a lost connection is an EnvError. The episode is never begun again
  behind the driver's back: its conversation would belong to another environment.
* Cancelling a call gives the environment up; the server cancels the step and frees the slot.

Keep an episode within one ``asyncio.run``: a WebSocket belongs to the loop that opened it.
"""

from __future__ import annotations

import asyncio
import os
from urllib.parse import urlsplit, urlunsplit

from relax_agent.envs.serving import wire
from relax_agent.envs.serving.connections import (
    Connection,
    HttpConnection,
    Lost,
    WebSocketConnection,
    refusal,
)
from relax_agent.envs.serving.protocol import PROTOCOL_VERSION, Manifest
from relax_agent.envs.serving.proxies import ProxyEnv
from relax_agent.envs.serving.wire import Blobs, Json
from relax_agent.envs.specs import EnvSpec
from relax_agent.errors import ConfigError, EnvError, RelaxError, ResetNeeded

TOKEN_VARIABLE = "RELAX_AGENT_ENV_TOKEN"
_CLOSE_S = 5.0
_SCHEMES = {"ws": "http", "wss": "https", "http": "http", "https": "https"}


def connect_env(
    url: str,
    *,
    token: str | None = None,
    start_timeout_s: float = 30.0,
    slot_timeout_s: float = 60.0,
) -> RemoteEnv:
    """Return the environment that is served at an address; blocks for one short request.

    Args:
        url: ``ws://host:port`` or ``wss://…``; ``http://`` uses plain requests instead.
        token: The server's bearer token; by default that of ``RELAX_AGENT_ENV_TOKEN``, if it is
            set.
        start_timeout_s: Seconds that the server may take to answer.
        slot_timeout_s: Seconds that a ``reset`` may wait for a free environment.

    Raises:
        ConfigError: This is no such address.
        EnvError: Nothing is served there, or the token is wrong.
    """
    token = token or os.environ.get(TOKEN_VARIABLE) or None
    base = _base(url)
    manifest = _fetch_manifest(url, f"{base}/env", token, start_timeout_s)
    return RemoteEnv(url, base, manifest, token, start_timeout_s, slot_timeout_s)


def _base(url: str) -> str:
    """Return the address as HTTP, without a slash at its end."""
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES or not parts.hostname:
        raise ConfigError(f"{url!r} is no address of an environment", hint="ws://host:port")
    path = parts.path.rstrip("/").removesuffix("/ws")
    return urlunsplit((_SCHEMES[parts.scheme], parts.netloc, path, "", ""))


def _fetch_manifest(url: str, address: str, token: str | None, timeout_s: float) -> Manifest:
    import httpx

    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        # Certificates are read at once, which takes longer than the request; only if they count.
        secure = address.startswith("https:")
        with httpx.Client(timeout=timeout_s, trust_env=False, verify=secure) as client:
            response = client.get(address, headers=headers)
    except httpx.TimeoutException:
        raise EnvError(
            f"{url} did not answer within {timeout_s:g} s",
            hint="a server in this very event loop needs make_async(…)",
        ) from None
    except (httpx.HTTPError, OSError) as error:
        raise refusal(url, error) from error
    if response.status_code != 200:
        raise refusal(url, _Status(response.status_code))
    try:
        manifest = wire.read_manifest(wire.loads(response.content))
    except EnvError as error:
        raise EnvError(f"{url} serves no environment: {error}") from None
    if manifest["version"] != PROTOCOL_VERSION:
        raise EnvError(
            f"{url} speaks version {manifest['version']} of the protocol, not {PROTOCOL_VERSION}",
            hint="use the same version of relax-agent on both sides",
        )
    return manifest


class _Status(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class RemoteEnv(ProxyEnv):
    """An environment on another machine; see the module's promises. Made by :func:`connect_env`."""

    def __init__(
        self,
        url: str,
        base: str,
        manifest: Manifest,
        token: str | None,
        start_timeout_s: float,
        slot_timeout_s: float,
    ) -> None:
        # Without the token: a spec is printed and stored.
        self.spec = EnvSpec(manifest["id"], f"{__name__}:connect_env", {"url": url})
        self._url = url
        self._base = base
        self._token = token
        self._start_timeout_s = start_timeout_s
        self._slot_timeout_s = slot_timeout_s
        self._connection: Connection | None = None
        self._closed = False
        self._max_bytes = manifest.get("max_request_bytes")
        self._introduce(manifest)

    async def _connect(self) -> Connection:
        await self._drop()
        limits = self._token, self._start_timeout_s, self._slot_timeout_s
        if urlsplit(self._url).scheme.startswith("http"):
            self._connection = HttpConnection(self._base, *limits)
        else:
            self._connection = await WebSocketConnection.open(self._base, *limits)
        return self._connection

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.drop()

    def _check_size(self, op: str, blobs: Blobs) -> None:
        """Refuse in words what the server would cut the connection for."""
        size = sum(map(len, blobs))
        if self._max_bytes is not None and size > self._max_bytes:
            raise EnvError(
                f"{op}: {size:,} bytes of media; {self._url} takes {self._max_bytes:,} at most",
                hint="send smaller media, or fewer at once",
            )

    async def _ask(self, request: Json, blobs: Blobs) -> tuple[Json, Blobs]:
        if blobs:
            self._check_size(request["op"], blobs)
        connection = self._connection
        if connection is None or not connection.alive:
            if self._closed:
                raise ResetNeeded(f"{self._url} is closed", hint="make() another one")
            if request["op"] == "step":
                raise self._lost_episode(connection)
            return await self._ask_anew(request, blobs)
        try:
            return await connection.ask(request, blobs)
        except RelaxError:
            raise  # what the environment raised: the connection is as good as before
        except Lost as lost:
            await connection.interrupt()
            if request["op"] == "step":
                raise EnvError(
                    f"{self._url} was lost in the middle of an episode: {lost}",
                    hint="reset() begins another one",
                ) from lost
        except BaseException:
            await connection.interrupt()
            raise
        return await self._ask_anew(request, blobs)

    async def _ask_anew(self, request: Json, blobs: Blobs) -> tuple[Json, Blobs]:
        """Ask on a new connection."""
        connection = await self._connect()
        try:
            return await connection.ask(request, blobs)
        except RelaxError:
            raise
        except BaseException as error:
            await connection.interrupt()
            if isinstance(error, Lost):
                words = f"{self._url} does not answer {request['op']}: {error}"
                raise EnvError(words) from error
            raise

    def _lost_episode(self, connection: Connection | None) -> EnvError:
        if connection is not None and connection.loop is not asyncio.get_running_loop():
            return EnvError(
                f"the connection to {self._url} ended with its event loop",
                hint="keep an episode within one asyncio.run",
            )
        return EnvError(
            f"the connection to {self._url} is lost, and the episode with it",
            hint="reset() begins another one",
        )

    async def close(self) -> None:
        """Give the environment back to the server. May be called twice."""
        if self._closed:
            return
        connection, self._connection = self._connection, None
        self._closed = True
        if connection is None:
            return
        if not connection.alive:
            await connection.drop()
            return
        try:
            async with asyncio.timeout(_CLOSE_S):
                await connection.ask({"op": "close"}, [])
        except (Lost, TimeoutError):
            pass
        except BaseException:
            await connection.drop()
            raise
        await connection.close()
