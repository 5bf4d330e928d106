"""The tree stays one that others can live in: sizes, names, import directions."""

import ast
from collections import Counter, defaultdict
from pathlib import Path

from paths import ROOT

LAYERS = ["alspec", "kernels", "models", "runtime", "launch"]  # each may import those before it, and itself
SOURCES = [path for layer in LAYERS for path in (ROOT / layer).rglob("*.py") if path.is_relative_to(ROOT / layer)]


def name_of(path: Path) -> str:
    """Module name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "alspec" else ("alspec", *parts)).removesuffix(".__init__")


def imports_of(path: Path) -> set[str]:
    """Modules of this project that a file imports when it is imported: not those inside functions or type checks."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "alspec":
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & MODULES.keys()


MODULES = {name_of(path): path for path in SOURCES}
GRAPH = {name: imports_of(path) for name, path in MODULES.items()}


def layer_of(module: str) -> str:
    """Which of the five folders a module is in."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else "alspec"


def test_links_are_not_followed_into_the_folders_twice() -> None:
    assert len(set(MODULES.values())) == len(MODULES) > 150


def test_files_and_folders_are_small() -> None:
    for path in SOURCES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 600, path
    folders = Counter(path.parent for path in SOURCES if path.name != "__init__.py")
    for folder, count in folders.items():
        assert count <= 12, folder


def test_no_two_modules_have_one_name() -> None:
    places = defaultdict(list)
    for path in SOURCES:
        if path.name != "__init__.py":
            places[path.stem].append(path)
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}


def test_imports_go_one_way() -> None:
    for module, imported in GRAPH.items():
        for other in imported:
            assert LAYERS.index(layer_of(other)) <= LAYERS.index(layer_of(module)), f"{module} imports {other}"


def test_communication_imports_no_attention() -> None:
    for module, imported in GRAPH.items():
        if module.startswith("alspec.kernels.comm"):
            assert not [other for other in imported if "attention" in other], module


def test_there_are_no_circles() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for other in GRAPH[module]:
                visit(other, (*path, module))
            done.add(module)

    for module in GRAPH:
        visit(module, ())
