"""``HttpGet``: a tool that reads web pages of a few hosts, and of no others.

    web = HttpGet(["docs.python.org", "*.wikipedia.org"])
    env = MyEnv(tools=web.toolset())

Which hosts is said when the tool is made. A URL of another host is refused, and so is a redirect
to one. A name is looked up once for each connection, every address must be a public one, and the
connection goes to the address that was checked: a name that means something else a moment later
leads nowhere. (``allow_private=True`` is for services of one's own.) There are no proxies, cookies
or passwords. Time and size are limited, also of what was compressed.

A page comes back as text: HTML without its markup, other text as it is, anything else is refused.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

from pydantic import Field

from relax_agent.errors import ConfigError, ToolError, ToolErrorKind
from relax_agent.threads import THREADS
from relax_agent.tools.declaration import tool
from relax_agent.tools.html_text import text_of
from relax_agent.tools.toolset import Toolset

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

_TOOL_TIMEOUT_S = 120.0
"""The time limit that counts is in :class:`HttpLimits`."""
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = {301, 302, 303, 307, 308}
_HOST = re.compile(r"(\*\.)?([\w.-]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?")
_TEXT = re.compile(r"text/.*|application/(.*\+)?(json|xml|javascript|yaml|x-yaml|x-ndjson)")
_CHARSET = re.compile(
    r"utf-?(8|16|32)|(us-)?ascii|latin-?1|iso-|windows-|cp12|koi8|euc|gb|big5|shift"
)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_GLOBAL_V6 = ipaddress.ip_network("2000::/3")
_SPECIAL_V4 = ipaddress.ip_network("192.0.0.0/24")


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one call may take."""

    timeout_s: float = 20.0
    """Everything together: names, connections, redirects, and the page itself."""
    max_bytes: int = 2 << 20
    """Bytes of a page, unpacked; the rest is not read."""
    max_chars: int = 10_000
    """Characters of text that one call gives back."""
    max_redirects: int = 5
    max_url_chars: int = 2000

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = {"timeout_s": 0.01, "max_redirects": 0}.get(name, 1)
            if not value >= least:
                raise ConfigError(f"{name} must be at least {least}, not {value}")
        if self.timeout_s >= _TOOL_TIMEOUT_S:
            raise ConfigError(f"timeout_s must be below {_TOOL_TIMEOUT_S:g}, not {self.timeout_s}")


class _Host(NamedTuple):
    """An entry of the allow-list."""

    name: str
    below: bool
    """Whether all names below this one are meant, and not the name itself."""
    port: int | None
    """None: the usual one of http or https."""


class HttpGet:
    """The tool ``http_get`` with its allow-list."""

    def __init__(
        self,
        hosts: Iterable[str],
        *,
        allow_private: bool = False,
        limits: HttpLimits | None = None,
    ) -> None:
        """Take the allow-list.

        Args:
            hosts: Names such as ``docs.python.org``, ``*.wikipedia.org`` (every name below it) or
                ``localhost:8000``; without a port the usual ones are meant.
            allow_private: Whether their addresses may be private ones, such as 127.0.0.1.
            limits: Time and sizes.

        Raises:
            ConfigError: An entry is no host, or there is none.
        """
        entries = [hosts] if isinstance(hosts, str) else list(hosts)
        self._hosts = [_read_host(each) for each in entries]
        if not self._hosts:
            raise ConfigError("an empty allow-list allows nothing", hint="name hosts")
        self._shown = ", ".join(entries[:10]) + (" …" if len(entries) > 10 else "")
        self._allow_private = allow_private
        self.limits = limits or HttpLimits()

    def toolset(self) -> Toolset:
        """Return the tool ``http_get``."""
        return Toolset([self.http_get])

    @tool(timeout=_TOOL_TIMEOUT_S, max_concurrency=32, idempotent=True)
    async def http_get(
        self, url: str, start: Annotated[int, Field(ge=0)] = 0, links: bool = False
    ) -> str:
        """Read a web page as text. Only some hosts are allowed; a refusal names them.

        Args:
            url: The address, beginning with http:// or https://.
            start: From which character on, for pages that are longer than what one call shows.
            links: Show where the page's links lead.
        """
        place = self._checked(url)
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                page = await self._fetch(place)
                text = await THREADS.run(partial(page.text, links=links))
        except TimeoutError:
            words = f"no answer within {self.limits.timeout_s:g} s"
            raise ToolError(words, kind=ToolErrorKind.TIMEOUT) from None
        return self._part(text, start, page.is_cut)

    def _part(self, text: str, start: int, is_cut: bool) -> str:
        if start and start >= len(text):
            raise _wrong(f"the page has {len(text):,} characters; start is beyond its end")
        end = start + self.limits.max_chars
        shown = text[start:end]
        if end < len(text):
            return (
                f"{shown}\n\n(characters {start} to {end} of {len(text)}; go on with start={end})"
            )
        if is_cut:
            return f"{shown}\n\n(the page is longer than {self.limits.max_bytes:,} bytes: cut off)"
        return shown or "(the page is empty)"

    # -- what is allowed -------------------------------------------------------------------------

    def _checked(self, text: str) -> URL:
        """Return a URL that is allowed, or raise ToolError."""
        from yarl import URL

        if len(text) > self.limits.max_url_chars:
            raise _wrong(f"the URL is longer than {self.limits.max_url_chars:,} characters")
        try:
            url = URL(text.strip()).with_fragment(None)
            host, port = url.raw_host, url.port
        except ValueError as error:
            raise _wrong(f"{text[:80]!r} is no URL: {error}") from None
        if url.scheme not in _PORTS or not host:
            raise _wrong(f"{text[:80]!r} is no web address; begin with https://")
        if url.raw_user is not None or url.raw_password is not None:
            raise _denied("a URL with a user or a password in it is not allowed")
        if not any(_allows(each, host, port, url.scheme) for each in self._hosts):
            shown = f"{host[:80]}:{port}" if port != _PORTS[url.scheme] else host[:80]
            raise _denied(f"{shown} is not allowed; allowed are: {self._shown}")
        return url

    # -- what is fetched -------------------------------------------------------------------------

    async def _fetch(self, url: URL) -> _Page:
        import aiohttp

        connector = aiohttp.TCPConnector(
            resolver=_resolver(self._allow_private), use_dns_cache=False, force_close=True
        )
        try:
            async with aiohttp.ClientSession(
                connector=connector,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"User-Agent": "relax-agent", "Accept-Encoding": "gzip"},
            ) as session:
                return await self._follow(session, url)
        except aiohttp.ClientError as error:
            words = " ".join(str(error).split())[:200] or type(error).__name__
            message = f"{url.raw_host} cannot be read: {words}"
            raise ToolError(message, kind=ToolErrorKind.UNAVAILABLE) from error

    async def _follow(self, session: aiohttp.ClientSession, url: URL) -> _Page:
        for _ in range(self.limits.max_redirects + 1):
            self._check_literal(url)
            async with session.get(url, allow_redirects=False) as response:
                target = response.headers.get("Location")
                if response.status not in _REDIRECTS or target is None:
                    return await self._read(response)
            url = self._joined(url, target)
        raise ToolError(
            f"more than {self.limits.max_redirects} redirects", kind=ToolErrorKind.UNAVAILABLE
        )

    def _joined(self, url: URL, target: str) -> URL:
        from yarl import URL

        try:
            joined = str(url.join(URL(target)))
        except ValueError:
            words = f"{url.raw_host} redirects to {target[:80]!r}, which is no URL"
            raise ToolError(words, kind=ToolErrorKind.UNAVAILABLE) from None
        try:
            return self._checked(joined)
        except ToolError as error:
            raise _denied(f"the page redirects elsewhere: {error.message}") from None

    def _check_literal(self, url: URL) -> None:
        """Check a host that is an address already and will not be looked up."""
        try:
            address = ipaddress.ip_address(url.raw_host or "")
        except ValueError:
            return
        if not self._allow_private and not is_public(address):
            raise _denied(_PRIVATE.format(url.raw_host))

    async def _read(self, response: aiohttp.ClientResponse) -> _Page:
        if response.status >= 400:
            raise _status_error(response.status, response.reason or "")
        kind = response.headers.get("Content-Type", "text/plain").partition(";")[0].strip().lower()
        if not _TEXT.fullmatch(kind):
            raise _wrong(f"this is of type {kind[:60]}, not text")
        body, is_cut = await self._body(response)
        if b"\0" in body[:1024] and not body.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise _wrong("this is not text")
        return _Page(body, kind, _charset(response), response.url, is_cut)

    async def _body(self, response: aiohttp.ClientResponse) -> tuple[bytes, bool]:
        """Return what the server sent, unpacked, up to the limit, and whether there is more."""
        unpack = _Unpacker(response.headers.get("Content-Encoding", ""))
        limit = self.limits.max_bytes
        body = bytearray()
        async for chunk in response.content.iter_chunked(1 << 16):
            body += unpack(chunk, limit + 1 - len(body))
            if len(body) > limit:
                return bytes(body[:limit]), True
        return bytes(body), False


@dataclass(frozen=True, slots=True)
class _Page:
    body: bytes
    kind: str
    charset: str
    url: Any
    is_cut: bool
    """Whether it was longer than may be read."""

    def text(self, links: bool) -> str:
        """Return the page as text."""
        text = self.body.decode(self.charset, "replace")
        if "html" in self.kind or text.lstrip()[:14].lower() == "<!doctype html":
            return text_of(text, self._target if links else None)
        return text.strip()

    def _target(self, href: str) -> str | None:
        from yarl import URL

        try:
            target = self.url.join(URL(href)).with_fragment(None)
        except ValueError:
            return None
        is_page = target.scheme in _PORTS and target != self.url.with_fragment(None)
        return str(target) if is_page else None


class _Unpacker:
    """Undoes a Content-Encoding, never giving more than was asked for."""

    def __init__(self, encoding: str) -> None:
        encoding = encoding.strip().lower()
        if encoding in ("", "identity"):
            self._zlib = None
        elif encoding in ("gzip", "x-gzip"):
            self._zlib = zlib.decompressobj(wbits=31)
        else:
            raise _wrong(f"the page is packed in a way that is not read: {encoding[:40]}")

    def __call__(self, chunk: bytes, most: int) -> bytes:
        if self._zlib is None:
            return chunk[:most]
        try:
            return self._zlib.decompress(chunk, most)
        except zlib.error as error:
            words = "the page arrived damaged; it cannot be unpacked"
            raise ToolError(words, kind=ToolErrorKind.UNAVAILABLE) from error


_PRIVATE = "{} is a private address, which is not allowed"


def is_public(address: Address) -> bool:
    """Tell whether an address is one of the public internet, whatever it is wrapped in."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        is_tunnel = address.sixtofour is not None or address.teredo is not None
        return address in _GLOBAL_V6 and address.is_global and not is_tunnel
    return address.is_global and not address.is_multicast and address not in _SPECIAL_V4


def _lookup(host: str, port: int, family: socket.AddressFamily) -> list[tuple[Any, ...]]:
    return socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)


def _resolver(allow_private: bool) -> aiohttp.abc.AbstractResolver:
    """Return a resolver that gives only addresses that may be connected to."""
    from aiohttp.abc import AbstractResolver

    class Checked(AbstractResolver):
        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
        ) -> list[Any]:
            try:
                found = await THREADS.run(partial(_lookup, host, port, family))
            except UnicodeError:
                raise _wrong(f"{host[:80]!r} cannot be the name of a host") from None
            addresses = [(kind, str(place[0])) for kind, *_, place in found]
            for _, text in addresses:
                if not allow_private and not is_public(ipaddress.ip_address(text.split("%")[0])):
                    raise _denied(_PRIVATE.format(host[:80]))
            return [
                {"hostname": host, "host": text, "port": port, "family": kind,
                 "proto": 0, "flags": socket.AI_NUMERICHOST}
                for kind, text in addresses
            ]  # fmt: skip

        async def close(self) -> None:
            pass

    return Checked()


def _read_host(entry: str) -> _Host:
    found = _HOST.fullmatch(entry.strip().lower())
    if found is None:
        hint = "a name as in 'docs.python.org', '*.wikipedia.org' or 'localhost:8000'"
        raise ConfigError(f"{entry!r} is no host", hint=hint)
    name = found[2].strip("[]").rstrip(".")
    try:
        name = name if name.isascii() else name.encode("idna").decode()
    except UnicodeError as error:
        raise ConfigError(f"{entry!r} is no host: {error}") from None
    if found[1] and "." not in name:
        raise ConfigError(f"{entry!r} allows far too much", hint="name a domain below it")
    port = int(found[3]) if found[3] else None
    if port is not None and not 1 <= port <= 65_535:
        raise ConfigError(f"{entry!r} is no host: ports end at 65535")
    return _Host(name, bool(found[1]), port)


def _allows(entry: _Host, host: str, port: int | None, scheme: str) -> bool:
    if port != (_PORTS[scheme] if entry.port is None else entry.port):
        return False
    host = host.rstrip(".").lower()
    return host.endswith(f".{entry.name}") if entry.below else host == entry.name


def _charset(response: aiohttp.ClientResponse) -> str:
    """Return the page's encoding; UTF-8 unless it names another one of text."""
    named = (response.charset or "").strip().lower()
    if not _CHARSET.match(named):
        return "utf-8"
    try:
        b"".decode(named)
    except (LookupError, ValueError):
        return "utf-8"
    return named


def _status_error(status: int, reason: str) -> ToolError:
    kind = ToolErrorKind.UNAVAILABLE
    if status in (404, 410):
        kind = ToolErrorKind.NOT_FOUND
    elif status in (401, 402, 403, 451):
        kind = ToolErrorKind.DENIED
    elif status in (400, 405, 414, 422):
        kind = ToolErrorKind.INVALID_ARGUMENTS
    return ToolError(f"the server answered {status} {reason[:60]}".strip(), kind=kind)


def _wrong(message: str) -> ToolError:
    return ToolError(message, kind=ToolErrorKind.INVALID_ARGUMENTS)


def _denied(message: str) -> ToolError:
    return ToolError(message, kind=ToolErrorKind.DENIED)
