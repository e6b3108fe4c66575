"""``http_get``: the allow-list holds, whatever a name, a redirect or a server does."""

import asyncio
import contextlib
import gzip
import ipaddress
import socket
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_agent.errors import ConfigError, ToolErrorKind
from relax_agent.messages import ToolCall
from relax_agent.tools import http_get as module
from relax_agent.tools.html_text import text_of
from relax_agent.tools.http_get import HttpGet, HttpLimits, is_public

KINDS = ToolErrorKind


def reply(body=b"", status="200 OK", **headers):
    lines = {"Content-Type": "text/plain", "Content-Length": len(body)} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value is not None)
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


def ask(pages, path="/", hosts=None, lookup=None, monkeypatch=None, **options):
    """Serve pages on 127.0.0.1, ask for one of them, and return (result, paths asked for)."""
    asked = []

    async def main():
        async def serve(reader, writer):
            with contextlib.suppress(ConnectionError):
                head = await reader.readuntil(b"\r\n\r\n")
                asked.append(head.split(b" ", 2)[1].decode())
                data = pages[asked[-1]]
                if callable(data):
                    await data(writer)
                else:
                    writer.write(data.replace(b"PORT", str(port).encode()))
                await writer.drain()
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            names = [each.replace("PORT", str(port)) for each in hosts or ["localhost:PORT"]]
            limits = options.pop("limits", None)
            private = options.pop("allow_private", True)
            web = HttpGet(names, allow_private=private, limits=limits)
            url = path if "://" in path else f"http://localhost:PORT{path}"
            arguments = {"url": url.replace("PORT", str(port)), **options}
            return await web.toolset().call(ToolCall("http_get", arguments, "c"))

    return asyncio.run(main()), asked


def refused(url, hosts=("docs.example.org", "*.example.com"), **options):
    web = HttpGet(hosts, **options)
    return asyncio.run(web.toolset().call(ToolCall("http_get", {"url": url}, "c")))


PAGE = b"""<!DOCTYPE html><html><head><title>Owls &amp; hens</title>
<script>let a = "<p>no</p>"</script><style>p { color: red }</style></head>
<body><!-- <p>no</p> --><p>An owl<br>hunts at   night.</p>
<ul><li>One<li><a href="/two?x=1&amp;y=2#part">Two</a></ul><td>1</td><td>2 &lt; 3</td></body>"""


def test_a_page_comes_back_as_text():
    result, asked = ask({"/a?b=c": reply(PAGE, Content_Type="text/html; charset=utf-8")}, "/a?b=c")
    assert asked == ["/a?b=c"]
    assert result.text.splitlines() == [
        "Owls & hens", "", "An owl", "hunts at night.", "", "One", "Two", "| 1 | 2 < 3",
    ]  # fmt: skip
    result, _ = ask({"/": reply(PAGE, Content_Type="text/html")}, links=True)
    assert "Two (http://localhost:" in result.text and "/two?x=1&y=2)" in result.text


@pytest.mark.parametrize(
    ("kind", "body", "text"),
    [
        ("application/json", b'{"a": 1}', '{"a": 1}'),
        ("text/plain; charset=latin-1", b"caf\xe9", "café"),
        ("text/plain; charset=nonsense", "café".encode(), "café"),
        ("text/plain; charset=idna", b"xn--", "xn--"),
        ("text/plain; charset=utf-16", "owl".encode("utf-16"), "owl"),
        ("application/xhtml+xml", b"<p>a</p>", "a"),
        ("text/plain", b"\xff\xfe broken \xf0", None),
        (None, b"plain", "plain"),
        ("text/plain", b"", "(the page is empty)"),
    ],
)
def test_text_of_every_kind_is_read(kind, body, text):
    result, _ = ask({"/": reply(body, Content_Type=kind)})
    assert result.ok and (text is None or result.text == text)


@pytest.mark.parametrize("kind", ["image/png", "application/zip", "video/mp4", "x"])
def test_what_is_no_text_is_refused(kind):
    result, _ = ask({"/": reply(b"owl", Content_Type=kind)})
    assert result.error is KINDS.INVALID_ARGUMENTS and kind in result.text
    result, _ = ask({"/": reply(b"\0\1\2")})
    assert result.error is KINDS.INVALID_ARGUMENTS


@pytest.mark.parametrize(
    ("status", "kind"),
    [("404 Not Found", KINDS.NOT_FOUND), ("403 Forbidden", KINDS.DENIED),
     ("500 Oops", KINDS.UNAVAILABLE), ("429 Slow Down", KINDS.UNAVAILABLE),
     ("400 Bad Request", KINDS.INVALID_ARGUMENTS)],
)  # fmt: skip
def test_the_servers_refusals_are_errors_of_a_kind(status, kind):
    result, _ = ask({"/": reply(b"x", status)})
    assert result.error is kind and f"the server answered {status}" in result.text


def test_a_long_page_is_read_in_parts():
    pages = {"/": reply(b"0123456789" * 5)}
    limits = HttpLimits(max_chars=20)
    result, _ = ask(pages, limits=limits)
    assert result.text == "01234567890123456789\n\n(characters 0 to 20 of 50; go on with start=20)"
    assert ask(pages, limits=limits, start=40)[0].text == "0123456789"
    assert "beyond its end" in ask(pages, limits=limits, start=50)[0].text
    assert not ask(pages, limits=limits, start=-1)[0].ok


@pytest.mark.parametrize(
    "url",
    [
        "https://other.org/", "https://example.org/", "https://example.com/",
        "https://docs.example.org.evil.org/", "https://evil-docs.example.org/",
        "https://evil.org/docs.example.org", "https://evil.org#docs.example.org",
        "https://evil.org?docs.example.org", "https://docs.example.org:8443/",
        "http://docs.example.org:443/", "https://user:pass@docs.example.org/",
        "https://docs.example.org@evil.org/", "https://aexample.com/", "http://127.0.0.1/",
        "http://[::1]/", "http://2130706433/", "http://0x7f.1/", "https://ｅvil.org/",
    ],
)  # fmt: skip
def test_a_url_of_another_host_is_refused_and_the_allowed_ones_are_named(url):
    result = refused(url)
    assert result.error is KINDS.DENIED
    assert "docs.example.org, *.example.com" in result.text or "user" in result.text


@pytest.mark.parametrize(
    "url",
    ["", "docs.example.org", "ftp://docs.example.org/", "file:///etc/passwd", "data:text/plain,x",
     "https://", "https:///x", "http://[::1", "https://docs.example.org:99999/", "x" * 3000,
     "javascript:alert(1)", "//docs.example.org/"],
)  # fmt: skip
def test_what_is_no_web_address_is_refused(url):
    result = refused(url)
    assert result.error is KINDS.INVALID_ARGUMENTS and len(result.text) < 300


def test_names_are_compared_as_they_are_looked_up(monkeypatch):
    seen = []

    def lookup(host, port, family):
        seen.append((host, port))
        raise socket.gaierror("no such name")

    monkeypatch.setattr(module, "_lookup", lookup)
    for url in ("https://DOCS.Example.org/", "http://a.b.EXAMPLE.com", "https://bücher.de/x"):
        result = refused(url, ["docs.example.org", "*.example.com", "bücher.de"])
        assert result.error is KINDS.UNAVAILABLE, result.text
    assert seen == [("docs.example.org", 443), ("a.b.example.com", 80), ("xn--bcher-kva.de", 443)]


def found(*addresses):
    kinds = [socket.AF_INET6 if ":" in each else socket.AF_INET for each in addresses]
    return [
        (kind, socket.SOCK_STREAM, 6, "", (each, 0))
        for kind, each in zip(kinds, addresses, strict=True)
    ]


@pytest.mark.parametrize(
    "addresses",
    [["127.0.0.1"], ["10.0.0.1"], ["8.8.8.8", "192.168.0.1"], ["::1"], ["fe80::1%eth0"],
     ["::ffff:169.254.169.254"]],
)  # fmt: skip
def test_a_name_with_a_private_address_is_refused(monkeypatch, addresses):
    monkeypatch.setattr(module, "_lookup", lambda *_: found(*addresses))
    result = refused("https://docs.example.org/")
    assert result.error is KINDS.DENIED and "private address" in result.text


def test_an_address_on_the_list_must_be_public_too():
    assert "private address" in refused("http://127.0.0.1/", ["127.0.0.1"]).text
    assert "private address" in refused("http://[::1]:9/", ["[::1]:9"]).text
    result, _ = ask({"/": reply(b"own")}, "http://127.0.0.1:PORT/", ["127.0.0.1:PORT"])
    assert result.text == "own"


def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch):
    """DNS rebinding: the name is looked up once; what it means later does not matter."""
    answers = iter([found("127.0.0.1"), found("10.255.255.1")])
    monkeypatch.setattr(module, "_lookup", lambda *_: next(answers))
    result, _ = ask({"/": reply(b"first")}, "http://rebind.test:PORT/", ["rebind.test:PORT"])
    assert result.text == "first"
    checked = []
    monkeypatch.setattr(module, "is_public", lambda address: not checked.append(str(address)))
    monkeypatch.setattr(module, "_lookup", lambda *_: found("127.0.0.1"))
    result, _ = ask(
        {"/": reply(b"x")}, "http://rebind.test:PORT/", ["rebind.test:PORT"], allow_private=False
    )
    assert result.text == "x" and checked == ["127.0.0.1"]


@pytest.mark.parametrize(
    "address",
    ["0.0.0.0", "10.1.2.3", "100.64.0.1", "127.9.9.9", "169.254.169.254", "172.16.0.1",
     "192.0.0.8", "192.168.1.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255",
     "::", "::1", "::127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::1",
     "2002:7f00:1::", "2001:0:7f00:1::", "2001:db8::1", "fc00::1", "fe80::1", "fec0::1",
     "ff0e::1"],
)  # fmt: skip
def test_addresses_that_are_not_public_are_known(address):
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "64:ff9b::808:808",
                                     "::ffff:8.8.8.8"])  # fmt: skip
def test_public_addresses_are_known_too(address):
    assert is_public(ipaddress.ip_address(address))


def test_redirects_are_followed_within_the_list_only():
    pages = {
        "/a": reply(status="302 Found", Location="/b"),
        "/b": reply(status="301 Moved", Location="http://localhost:PORT/c#x"),
        "/c": reply(b"there"),
        "/out": reply(status="302 Found", Location="http://127.0.0.1:PORT/c"),
        "/ftp": reply(status="302 Found", Location="file:///etc/passwd"),
        "/loop": reply(status="307 Again", Location="/loop"),
        "/bad": reply(status="302 Found", Location="http://[::1"),
        "/none": reply(b"no location", status="302 Found"),
    }
    result, asked = ask(pages, "/a")
    assert result.text == "there" and asked == ["/a", "/b", "/c"]
    result, asked = ask(pages, "/out")
    assert result.error is KINDS.DENIED and asked == ["/out"]
    assert "redirects elsewhere: 127.0.0.1" in result.text
    assert ask(pages, "/ftp")[0].error is KINDS.DENIED
    result, asked = ask(pages, "/loop")
    assert "more than 5 redirects" in result.text and len(asked) == 6
    assert ask(pages, "/bad")[0].error is KINDS.UNAVAILABLE
    assert ask(pages, "/none")[0].text == "no location"


def test_only_so_much_of_a_page_is_read_also_of_one_that_was_packed():
    limits = HttpLimits(max_bytes=1000, max_chars=2000)
    result, _ = ask({"/": reply(b"x" * 5000)}, limits=limits)
    assert result.text.startswith("x" * 1000 + "\n") and "cut off" in result.text
    bomb = gzip.compress(bytes(b"x" * (64 << 20)), 9)
    started = time.process_time()
    result, _ = ask({"/": reply(bomb, Content_Encoding="gzip")}, limits=limits)
    assert result.text.startswith("x" * 1000 + "\n") and time.process_time() - started < 1
    result, _ = ask({"/": reply(gzip.compress(b"owl"), Content_Encoding="gzip")})
    assert result.text == "owl"
    for encoding in ("br", "zstd"):
        assert not ask({"/": reply(b"x", Content_Encoding=encoding)})[0].ok
    result, _ = ask({"/": reply(b"not packed", Content_Encoding="gzip")})
    assert result.error is KINDS.UNAVAILABLE and "damaged" in result.text


def test_servers_that_hang_flood_or_talk_nonsense_end_in_time():
    limits = HttpLimits(max_bytes=10_000)

    async def hang(writer):
        writer.write(b"HTTP/1.1 200 OK\r\n")
        await writer.drain()
        await asyncio.sleep(3)

    async def flood(writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()

    async def headers(writer):
        writer.write(b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 100_000 + b"\r\n")
        await writer.drain()

    async def close(writer):
        writer.close()

    assert ask({"/": hang}, limits=HttpLimits(timeout_s=0.3))[0].error is KINDS.TIMEOUT
    assert "cut off" in ask({"/": flood}, limits=limits)[0].text
    for odd in (headers, close, b"nonsense\r\n\r\n", reply(b"short", Content_Length=99)):
        assert ask({"/": odd}, limits=limits)[0].error is KINDS.UNAVAILABLE
    assert ask({}, "http://localhost:1/", ["localhost:1"])[0].error is KINDS.UNAVAILABLE


@pytest.mark.parametrize("entry", ["", "*", "*.com", "https://a.org", "a.org/x", "a b", "a.org:0",
                                   "a.org:99999", "*.*.org"])  # fmt: skip
def test_entries_that_are_no_hosts_are_refused(entry):
    with pytest.raises(ConfigError):
        HttpGet([entry])
    with pytest.raises(ConfigError):
        HttpGet([])


def test_limits_that_make_no_sense_are_refused():
    for wrong in ({"max_bytes": 0}, {"timeout_s": 0}, {"timeout_s": 999}, {"max_redirects": -1}):
        with pytest.raises(ConfigError):
            HttpLimits(**wrong)
    assert HttpLimits(max_redirects=0).max_redirects == 0


pieces = st.sampled_from(
    ["<", ">", "</", "<!--", "-->", "<p>", "<script>", "</script>", "<a href='x'>", "</a>", "a b",
     "&amp;", "\n", '"', "<br/>", "<td>", "<STYLE", "\0", "İ"]
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(pieces, max_size=30).map("".join))
def test_any_page_becomes_text(page):
    assert isinstance(text_of(page, lambda href: href), str)


@pytest.mark.parametrize(
    "piece", ["<", "<!--", "<script>", "<a href=", "<p", "&", "<a href='x'>", "</"]
)
def test_broken_pages_take_no_longer_than_whole_ones(piece):
    started = time.process_time()
    text_of(piece * 200_000, lambda href: href)
    assert time.process_time() - started < 2


def test_comparisons_in_text_stay():
    assert text_of("<p>1 < 2 and 3 > 2</p>") == "1 < 2 and 3 > 2"
    assert text_of("a <!-- b -- > c --> d") == "a d"
    assert text_of("<script>x</scr</SCRIPT >y") == "y"
