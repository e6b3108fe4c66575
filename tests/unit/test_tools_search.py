"""Ready-made search: ranking without chance, any script, limits, and no way out of the folder."""

import asyncio
import concurrent.futures
import json
import os
import sys

import pytest

from relax_agent.errors import ConfigError, MissingExtraError, ToolError, ToolErrorKind
from relax_agent.messages import ToolCall
from relax_agent.tools.search import Document, SearchIndex, SearchLimits, words

BIRDS = [
    {"id": "owl", "title": "Owl", "text": "The owl hunts at night.\nOwls hear well."},
    {"id": "hen", "title": "Hen", "text": "The hen lays eggs by day."},
    {"id": "day", "title": "Daybreak", "text": "The day begins. A bird sings at day."},
]


def index(*texts, **limits):
    documents = [{"id": f"d{i}", "title": f"T{i}", "text": text} for i, text in enumerate(texts)]
    return SearchIndex(documents, limits=SearchLimits(**limits))


def call(found, name, **arguments):
    return asyncio.run(found.toolset().call(ToolCall(name, arguments, "c")))


def ids(found, query, count=5):
    return [document.id for document in found.find(query, count)]


def test_the_tools_find_and_open_documents():
    found = SearchIndex(BIRDS)
    assert found.toolset().names == ("search", "open_page")
    results = json.loads(call(found, "search", query="bird by day", count=2).text)
    assert [result["id"] for result in results] == ["day", "hen"]
    assert results[0] == {"id": "day", "title": "Daybreak", "snippet": "A bird sings at day."}
    assert call(found, "open_page", id=" owl ").text == f"Owl\n\n{BIRDS[0]['text']}"


def test_documents_are_documents_too():
    assert SearchIndex([Document("a", "b", "c d")])["a"].text == "c d"


def test_the_title_is_searched_as_well():
    assert ids(index("x", "y"), "t1") == ["d1"]


def test_equal_scores_keep_the_order_of_the_documents():
    found = index(*["same words here"] * 40)
    assert ids(found, "words", 7) == [f"d{i}" for i in range(7)]
    assert ids(found, "words", 40) == [f"d{i}" for i in range(40)]


def test_only_documents_with_a_word_of_the_query_are_found():
    found = index("apple", "pear", "apple pear", "fig")
    assert set(ids(found, "apple kiwi", 20)) == {"d0", "d2"}


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("ECOLES", "Les écoles"),
        ("écoles", "LES ECOLES"),
        ("strasse", "Die Straße"),
        ("東京", "私は東京に住んでいます"),
        ("Москва", "город москва"),
        ("ﬁnd", "find"),
        ("३", "हिन्दी ३"),
        ("naïve café", "a naive cafe"),
        ("snake", "snake_case"),
    ],
)
def test_words_are_compared_without_case_accents_and_in_any_script(query, text):
    found = index("nothing of it", text, "nor here")
    assert ids(found, query) == ["d1"]


def test_characters_of_scripts_without_spaces_are_words():
    assert words("東京 Tokyo2") == ["東", "京", "tokyo2"]


@pytest.mark.parametrize("query", ["", "   ", "?!", "🙂", "_", "\x00"])
def test_a_query_without_a_word_is_refused_in_words(query):
    result = call(index("a b"), "search", query=query)
    assert result.error is ToolErrorKind.INVALID_ARGUMENTS
    assert "no word" in result.text


def test_a_query_that_nothing_matches_is_not_an_error():
    result = call(index("a b"), "search", query="zebra")
    assert result.ok and "Nothing was found" in result.text


@pytest.mark.parametrize("count", [0, -1, 21, 10**12])
def test_the_number_of_results_is_limited(count):
    result = call(index("a b"), "search", query="b", count=count)
    assert result.error is ToolErrorKind.INVALID_ARGUMENTS
    assert "from 1 to 20" in result.text


def test_a_very_long_query_is_refused():
    assert "longer than" in call(index("a b"), "search", query="b " * 600).text


def test_odd_queries_are_just_words():
    found = index("alpha beta", "gamma")
    for query in (
        "'; DROP TABLE",
        "alpha OR *",
        "../../etc/passwd alpha",
        "(((alpha",
        "alpha" * 90,
    ):
        assert call(found, "search", query=query).ok


def test_a_snippet_is_the_sentence_that_fits_and_is_short():
    found = index("First things. The red fox runs.\nThe end. " + "long " * 200, snippet_chars=40)
    (result,) = json.loads(call(found, "search", query="red fox").text)
    assert result["snippet"] == "The red fox runs."
    (result,) = json.loads(call(found, "search", query="long").text)
    assert len(result["snippet"]) <= 40 and result["snippet"].endswith("…")


def test_a_long_document_has_pages():
    found = index("a" * 25, page_chars=10)
    assert call(found, "open_page", id="d0").text == f"T0\n\n{'a' * 10}\n\n(page 1 of 3)"
    assert call(found, "open_page", id="d0", page=3).text == "T0\n\naaaaa\n\n(page 3 of 3)"
    result = call(found, "open_page", id="d0", page=4)
    assert result.error is ToolErrorKind.INVALID_ARGUMENTS and "has 3 pages" in result.text
    assert not call(found, "open_page", id="d0", page=0).ok


@pytest.mark.parametrize("id", ["hens", "", "../hen", "/etc/passwd", "x" * 10_000])
def test_an_id_that_does_not_exist_is_told_with_advice(id):
    result = call(SearchIndex(BIRDS), "open_page", id=id)
    assert result.error is ToolErrorKind.NOT_FOUND
    assert ("did you mean" in result.text) == ("hen" in id)
    assert len(result.text) < 300


def test_an_id_in_other_letters_is_recognised():
    assert "did you mean 'owl'?" in call(SearchIndex(BIRDS), "open_page", id=" OWL").text


def test_empty_documents_do_no_harm():
    assert ids(index("", "word", ""), "word") == ["d1"]
    assert SearchIndex([{"id": "a", "title": "", "text": ""}]).find("word") == []


def test_no_document_two_of_one_id_and_things_that_are_none_are_refused():
    for wrong in ([], [BIRDS[0], BIRDS[0]], [{"id": "a"}], ["text"]):
        with pytest.raises(ConfigError):
            SearchIndex(wrong)


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(MissingExtraError, match=r"relax-agent\[envs\]"):
        SearchIndex(BIRDS)


# -- folders -------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "one.md").write_text("# The first\n\nabout apples\n")
    (root / "sub" / "two.TXT").write_bytes(b"caf\xc3\xa9 \xff pears")
    (root / "three.py").write_text("apples = 1")
    (root / ".hidden.md").write_text("apples")
    (tmp_path / "secret.md").write_text("apples and a password")
    return root


def test_a_folder_is_read_with_paths_as_ids_and_headings_as_titles(folder):
    found = SearchIndex.from_folder(folder)
    assert len(found) == 2
    assert found["one.md"].title == "The first"
    assert ids(found, "cafe pears") == ["sub/two.TXT"]
    assert ids(found, "apples", 20) == ["one.md"]


def test_links_out_of_the_folder_are_not_followed(folder):
    (folder / "link.md").symlink_to(folder.parent / "secret.md")
    (folder / "up").symlink_to(folder.parent)
    (folder / "loop").symlink_to(folder)
    (folder / "inside.md").symlink_to(folder / "one.md")
    (folder / "dangling.md").symlink_to(folder / "nowhere.md")
    found = SearchIndex.from_folder(folder)
    assert ids(found, "password") == []
    assert ids(found, "apples", 20) == ["inside.md", "one.md"]
    for id in ("link.md", "../secret.md", "sub/../../secret.md", str(folder.parent / "secret.md")):
        with pytest.raises(ToolError):
            found.open_page(id)


def test_a_pipe_in_the_folder_is_not_waited_for(folder):
    os.mkfifo(folder / "pipe.md")
    assert len(SearchIndex.from_folder(folder)) == 2


def test_what_changes_in_the_folder_later_changes_nothing(folder):
    found = SearchIndex.from_folder(folder)
    (folder / "one.md").unlink()
    (folder / "one.md").symlink_to(folder.parent / "secret.md")
    assert "password" not in found.open_page("one.md")


def test_folders_that_cannot_be_indexed_are_refused_in_words(folder, tmp_path):
    with pytest.raises(ConfigError, match="not a folder"):
        SearchIndex.from_folder(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no \.rst file"):
        SearchIndex.from_folder(folder, suffixes=[".rst"])
    with pytest.raises(ConfigError, match="larger than 10 bytes"):
        SearchIndex.from_folder(folder, limits=SearchLimits(max_file_bytes=10))
    with pytest.raises(ConfigError, match="max_total_bytes"):
        SearchIndex.from_folder(folder, limits=SearchLimits(max_total_bytes=20))


def test_limits_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="page_chars"):
        SearchLimits(page_chars=0)


def test_no_result_is_asked_for():
    assert ids(index("a b"), "b", 0) == [] == ids(index("a b"), "b", -3)


def test_a_lazy_index_is_built_once_whoever_asks_first():
    found = SearchIndex(BIRDS, lazy=True)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: ids(found, "owl"), range(20)))
    assert results == [["owl"]] * 20
    assert found._built() is found._built()
