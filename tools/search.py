"""Ready-made search: ``search`` and ``open_page`` over a list of documents or a folder of texts.

    index = SearchIndex.from_folder("handbook")
    env = MyEnv(tools=index.toolset())

Documents are ranked by BM25 (the bm25s package, ``pip install 'relax-agent[envs]'``). Words are
compared without case and accents; in scripts without spaces each character is a word. Equal scores
keep the order of the documents, so equal calls give equal results. Everything is read when the
index is made: a call can name nothing but an id of a document, so no path ever leaves the folder.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import threading
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from relax_agent.errors import ConfigError, MissingExtraError, ToolError, ToolErrorKind
from relax_agent.tools.declaration import tool
from relax_agent.tools.toolset import Toolset

_SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_SPACELESS}]|[^\W_{_SPACELESS}]+")
_SENTENCE = re.compile(r"(?<=[.!?。！？])\s+|\n+")


@dataclass(frozen=True, slots=True)
class Document:
    """One text that can be found and opened."""

    id: str
    """What ``open_page`` is called with."""
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """What one call may give back and one index may hold."""

    max_results: int = 20
    """Results of one search."""
    max_query_chars: int = 1000
    snippet_chars: int = 160
    page_chars: int = 6000
    """Characters that ``open_page`` shows at once; longer documents have several pages."""
    max_file_bytes: int = 4 << 20
    """Size of one file of a folder."""
    max_total_bytes: int = 256 << 20
    """Size of all files of a folder together."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")


class SearchIndex:
    """BM25 over documents, with the two tools that a model needs to use it."""

    def __init__(
        self,
        documents: Iterable[Document | Mapping[str, str]],
        *,
        limits: SearchLimits | None = None,
        lazy: bool = False,
    ) -> None:
        """Take the documents and index them.

        Args:
            documents: Documents, or mappings with the keys ``id``, ``title`` and ``text``.
            limits: Sizes.
            lazy: Leave the indexing to :meth:`build`, or to the first search.

        Raises:
            MissingExtraError: bm25s is not installed.
            ConfigError: there is no document, or two have the same id.
        """
        self.limits = limits or SearchLimits()
        self._documents: dict[str, Document] = {}
        for document in map(_as_document, documents):
            if document.id in self._documents:
                raise ConfigError(f"two documents have the id {document.id!r}")
            self._documents[document.id] = document
        if not self._documents:
            raise ConfigError("there is no document to search", hint="give at least one")
        if not _is_installed("bm25s"):
            raise MissingExtraError("bm25s", "envs")
        self._ids = list(self._documents)
        self._ranking: _Ranking | None = None
        self._building = threading.Lock()
        if not lazy:
            self.build()

    @classmethod
    def from_folder(
        cls,
        folder: Path | str,
        *,
        suffixes: Sequence[str] = (".txt", ".md"),
        limits: SearchLimits | None = None,
    ) -> SearchIndex:
        """Index the text files of a folder and the folders in it; the id is the relative path.

        Hidden files are left out, and so is whatever a link leads to outside of the folder.

        Args:
            folder: Where the files are.
            suffixes: Endings of the files to read.
            limits: Sizes.

        Raises:
            ConfigError: no such folder, no such file in it, or one that is too large.
        """
        limits = limits or SearchLimits()
        root = Path(folder).resolve()
        if not root.is_dir():
            raise ConfigError(f"{folder} is not a folder")
        documents = [
            _read(path, root, limits)
            for path in _text_files(root, tuple(s.lower() for s in suffixes))
        ]
        if not documents:
            raise ConfigError(f"{folder} holds no {' or '.join(suffixes)} file")
        total = sum(len(document.text.encode()) for document in documents)
        if total > limits.max_total_bytes:
            raise ConfigError(
                f"{folder} holds {total:,} bytes of text, more than {limits.max_total_bytes:,}",
                hint="raise SearchLimits.max_total_bytes",
            )
        return cls(documents, limits=limits)

    def build(self) -> None:
        """Index the documents, unless that is done; may be called in any thread."""
        self._built()

    def _built(self) -> _Ranking:
        with self._building:
            if self._ranking is None:
                self._ranking = _Ranking(f"{d.title}\n{d.text}" for d in self._documents.values())
            return self._ranking

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, document_id: str) -> Document:
        return self._documents[document_id]

    def toolset(self) -> Toolset:
        """Return the tools ``search`` and ``open_page``."""
        return Toolset([self.search, self.open_page])

    def find(self, query: str, count: int = 5) -> list[Document]:
        """Return the best documents for a query, best first."""
        order = self._built().best(words(query), count)
        return [self._documents[self._ids[i]] for i in order]

    @tool(idempotent=True)
    def search(self, query: str, count: int = 5) -> list[dict[str, str]] | str:
        """Search the documents. Gives ids, titles and the sentence that fits best.

        Args:
            query: A few words that the document should contain.
            count: How many results to return.
        """
        if len(query) > self.limits.max_query_chars:
            raise _wrong(f"the query is longer than {self.limits.max_query_chars} characters")
        if not words(query):
            raise _wrong("the query holds no word; name what the document should contain")
        if not 1 <= count <= self.limits.max_results:
            raise _wrong(f"count must be from 1 to {self.limits.max_results}, not {count}")
        found = self.find(query, count)
        if not found:
            return "Nothing was found. Try other or fewer words."
        return [
            {"id": d.id, "title": d.title, "snippet": self._snippet(d.text, words(query))}
            for d in found
        ]

    @tool(idempotent=True)
    def open_page(self, id: str, page: int = 1) -> str:
        """Read a document.

        Args:
            id: The document's id, as the search gave it.
            page: Which page of a long document.
        """
        document = self._documents.get(id.strip())
        if document is None:
            raise ToolError(self._unknown(id), kind=ToolErrorKind.NOT_FOUND)
        size = self.limits.page_chars
        pages = max(1, -(-len(document.text) // size))
        if not 1 <= page <= pages:
            raise _wrong(
                f"{document.id} has {pages} page{'s' * (pages > 1)}; there is no page {page}"
            )
        text = f"{document.title}\n\n{document.text[(page - 1) * size : page * size]}"
        return text if pages == 1 else f"{text}\n\n(page {page} of {pages})"

    def _unknown(self, id: str) -> str:
        known = {each.casefold(): each for each in self._ids[:5000]}
        near = difflib.get_close_matches(id[:200].strip().casefold(), known, n=1)
        advice = f"did you mean {known[near[0]]!r}?" if near else "take an id that search gave"
        return f"there is no document {id[:80]!r}; {advice}"

    def _snippet(self, text: str, query: Sequence[str]) -> str:
        """Return the first of the sentences that hold the most words of the query."""
        wanted = set(query)
        sentences = [s for s in _SENTENCE.split(text[:100_000]) if s.strip()] or [""]
        best = max(sentences, key=lambda sentence: len(wanted.intersection(words(sentence))))
        return _shorten(" ".join(best.split()), self.limits.snippet_chars)


class _Ranking:
    """BM25 scores of all texts, and the best of them in an order without chance."""

    def __init__(self, texts: Iterable[str]) -> None:
        import bm25s

        self._scores = bm25s.BM25(auto_compile=False)
        corpus = [words(text) for text in texts]
        self._is_empty = not any(corpus)  # which bm25s cannot index
        if not self._is_empty:
            self._scores.index(corpus, show_progress=False)

    def best(self, query: list[str], count: int) -> list[int]:
        """Return the positions of at most ``count`` texts that hold a word of the query."""
        import numpy as np

        ids = [] if self._is_empty else self._scores.get_tokens_ids(query)
        if not ids or count < 1:
            return []
        scores = self._scores.get_scores_from_ids(ids)
        least = np.partition(scores, -count)[-count] if count < len(scores) else 0.0
        candidates = np.flatnonzero((scores > 0) & (scores >= least))
        order = np.argsort(-scores[candidates], kind="stable")
        return [int(i) for i in candidates[order][:count]]


def words(text: str) -> list[str]:
    """Return the words of a text as they are compared: no case, no accents."""
    plain = unicodedata.normalize("NFKD", text).casefold()
    return _WORD.findall("".join(c for c in plain if not unicodedata.combining(c)))


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # it was loaded in some odd way, or set to None
        return False


def _as_document(item: Document | Mapping[str, str]) -> Document:
    if isinstance(item, Document):
        return item
    try:
        return Document(str(item["id"]), str(item["title"]), str(item["text"]))
    except (KeyError, TypeError) as error:
        raise ConfigError(f"not a document: {error!r}", hint='{"id", "title", "text"}') from error


def _text_files(root: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Yield plain files inside ``root`` in one order; links may not lead out of it."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if name.startswith(".") or not name.lower().endswith(suffixes):
                continue
            if path.is_file() and path.resolve().is_relative_to(root):
                yield path


def _read(path: Path, root: Path, limits: SearchLimits) -> Document:
    name = path.relative_to(root).as_posix()
    try:
        with path.open("rb") as file:
            data = file.read(limits.max_file_bytes + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from error
    if len(data) > limits.max_file_bytes:
        raise ConfigError(
            f"{name} is larger than {limits.max_file_bytes:,} bytes",
            hint="split it, or raise SearchLimits.max_file_bytes",
        )
    text = data.decode("utf-8", "replace").strip()
    heading = text.partition("\n")[0].lstrip("# ").strip()
    return Document(name, _shorten(heading, 100) or name, text)


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1].rstrip()}…"


def _wrong(message: str) -> ToolError:
    return ToolError(message, kind=ToolErrorKind.INVALID_ARGUMENTS)
