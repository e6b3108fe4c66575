"""Floors: a folder imports only from its own floor and those below, and nothing heavy at import."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OUTER = ("envs", "tools", "trainers")
FLOORS = [
    "errors messages episode media pages timeline processes guardian threads files importing "
    "limits status frames keeper links link_server references closing",
    "tools",
    "envs",
    "rendering engines queue weights models",
    "rollout",
    "trainers gateway",
    "run cluster monitor cli gymnasium",
]
FLOOR = {part: number for number, parts in enumerate(FLOORS, 1) for part in parts.split()}
HEAVY = {"torch", "transformers", "ray", "openai", "gymnasium", "fastapi", "uvicorn"}
LIGHT = {"errors", "messages", "episode", "media", "pages", "timeline"} | {
    "processes", "guardian", "threads", "files", "importing", "limits", "status", "frames",
    "keeper", "links", "link_server", "references", "closing", "tools", "envs",
}  # fmt: skip


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the project under the name it is imported by."""
    for folder, prefix in [("relax_agent", "relax_agent")] + [
        (o, f"relax_agent.{o}") for o in OUTER
    ]:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "shims" in path.parts:  # stand-ins for other packages, run inside SGLang only
                continue
            inner = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join([prefix, *(p for p in inner if p != "__init__")]), path


def is_for_types_only(node: ast.If) -> bool:
    return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(tree: ast.AST, *, everywhere: bool) -> Iterator[tuple[int, str]]:
    """Names that a module imports; with ``everywhere`` also inside functions and for types."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            assert node.module is not None
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif everywhere or not (
            isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            or (isinstance(node, ast.If) and is_for_types_only(node))
        ):
            yield from imports(node, everywhere=everywhere)


def part_of(module: str) -> str | None:
    """``relax_agent.engines.client`` → ``engines``; None for other packages and the root."""
    names = module.split(".")
    return names[1] if names[0] == "relax_agent" and len(names) > 1 else None


MODULES = list(modules())
EDGES = {
    (part_of(module), target, f"{path.relative_to(ROOT)}:{line}")
    for module, path in MODULES
    for line, name in imports(ast.parse(path.read_text()), everywhere=True)
    if (target := part_of(name)) in FLOOR
}


def test_every_part_of_the_package_has_a_floor():
    parts = {part_of(module) for module, _ in MODULES} - {None}
    assert parts <= set(FLOOR), f"give {parts - set(FLOOR)} a floor in this test and in docs/"


def test_imports_go_down_or_stay_on_their_floor():
    wrong = [
        f"{place}: {source} (floor {FLOOR[source]}) imports {target} (floor {FLOOR[target]})"
        for source, target, place in sorted(EDGES, key=str)
        if source in FLOOR and FLOOR[target] > FLOOR[source]
    ]
    assert wrong == []


def test_the_root_imports_only_what_authors_need():
    lowest = " ".join(FLOORS[:3]).split()
    assert {target for source, target, _ in EDGES if source is None} <= set(lowest)


def test_parts_do_not_import_each_other_in_a_circle():
    below: dict[str, set[str]] = {part: set() for part in FLOOR}
    for source, target, _ in EDGES:
        if source in FLOOR and source != target:
            below[source].add(target)
    while free := [part for part, needs in below.items() if not needs]:
        for part in free:
            del below[part]
        for needs in below.values():
            needs -= set(free)
    assert below == {}, "these import each other in a circle"


@pytest.mark.parametrize("bare", OUTER)
def test_the_outer_folders_are_imported_by_their_full_name(bare):
    everything = [*MODULES, *((p.stem, p) for p in sorted((ROOT / "tests").rglob("*.py")))]
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for _, path in everything
        for line, name in imports(ast.parse(path.read_text()), everywhere=True)
        if name.split(".")[0] == bare
    ]
    assert wrong == []


def test_the_lower_floors_import_nothing_heavy_at_module_level():
    """FastAPI is left out: server modules may have it, the next test says who may not load it."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for module, path in MODULES
        if part_of(module) in LIGHT
        for line, name in imports(ast.parse(path.read_text()), everywhere=False)
        if name.split(".")[0] in HEAVY - {"fastapi", "uvicorn"}
    ]
    assert wrong == []


@pytest.mark.parametrize("module", ["relax_agent", "relax_agent.envs", "relax_agent.tools"])
def test_what_an_author_imports_needs_nothing_heavy(module):
    """In a process of its own, for what `import` really pulls in."""
    code = f"import sys, {module}; print(*({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_the_check_itself_sees_imports_in_functions_and_under_conditions():
    tree = ast.parse(
        "import a\n"
        "def f():\n    from b.c import d\n"
        "class K:\n    import e\n"
        "if TYPE_CHECKING:\n    import g\n"
        "try:\n    import h\nexcept ImportError:\n    pass\n"
    )
    assert {n for _, n in imports(tree, everywhere=True)} == {"a", "b.c", "b.c.d", "e", "g", "h"}
    assert {n for _, n in imports(tree, everywhere=False)} == {"a", "e", "h"}
