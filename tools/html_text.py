"""The text of a web page, roughly as a person would read it: no scripts, no markup.

One pass that looks ahead for the end of a tag, a comment or a script, and stops where there is
none: its time is linear in the page, however broken that is.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable

_HIDDEN = ("script", "style", "template", "svg", "noscript", "iframe", "object")
_BLOCKS = frozenset(
    [
        *("address", "article", "aside", "blockquote", "br", "dd", "div", "dl", "dt"),
        *("figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6"),
        *("header", "hr", "li", "main", "nav", "ol", "option", "p", "pre", "section"),
        *("table", "title", "tr", "ul"),
    ]
)
_CELLS = ("td", "th")
_TAG = re.compile(r"</?([a-zA-Z][a-zA-Z0-9-]{0,30})")
_HREF = re.compile(r"""\shref\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>"']+))""", re.IGNORECASE)
_MAX_TAG = 2000
"""Characters of a tag in which a link's target is looked for."""
_END = {name: re.compile(rf"</{name}", re.IGNORECASE) for name in _HIDDEN}


def text_of(page: str, link: Callable[[str], str | None] | None = None) -> str:
    """Return the text of an HTML page.

    Args:
        page: The page.
        link: Says what to write for the target of a link, behind its words; None is nothing.
    """
    reader = _Reader(page, link)
    text = html.unescape("".join(reader.read()))
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


class _Reader:
    def __init__(self, page: str, link: Callable[[str], str | None] | None) -> None:
        self._page = page
        self._link = link
        self._targets: list[str | None] = []
        self._out: list[str] = []

    def read(self) -> list[str]:
        page, position = self._page, 0
        while (start := page.find("<", position)) >= 0:
            self._out.append(page[position:start].replace("\n", " "))
            position = self._pass(start)
            if position < 0:  # what begins here does not end
                return self._out
        self._out.append(page[position:].replace("\n", " "))
        return self._out

    def _pass(self, start: int) -> int:
        """Return where the page goes on after the ``<`` at a place; -1 if nowhere."""
        page = self._page
        if page.startswith("<!--", start):
            end = page.find("-->", start + 4)
            return end if end < 0 else end + 3
        found = _TAG.match(page, start)
        if found is None:
            if page[start + 1 : start + 2] in ("!", "?", "/"):
                return page.find(">", start) + 1 or -1
            self._out.append("<")  # no tag: somebody compares numbers
            return start + 1
        end = page.find(">", found.end())
        if end < 0:
            return -1
        name = found[1].lower()
        closes = page[start + 1] == "/"
        if name in _END and not closes:
            hidden = _END[name].search(page, end)
            return -1 if hidden is None else hidden.start()
        self._tag(name, closes, page[start : min(end, start + _MAX_TAG)])
        return end + 1

    def _tag(self, name: str, closes: bool, tag: str) -> None:
        if name in _BLOCKS:
            self._out.append("\n")
        elif name in _CELLS and not closes:
            self._out.append(" | ")
        elif name == "a" and self._link is not None:
            if not closes:
                href = _HREF.search(tag)
                target = html.unescape(next(filter(None, href.groups()), "")) if href else ""
                self._targets.append(self._link(target) if target else None)
            elif self._targets and (shown := self._targets.pop()):
                self._out.append(f" ({html.escape(shown)})")
