"""The house: imports point one way, modules say what they are for, classes have their own names, files fit a look."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "memlens"

# Each row may import the rows above it and itself; parts in one row do not know each other.
ORDER = (
    ("errors", "loop_sources", "own_process"),
    ("memory", "text", "parallel", "processes", "settings"),
    ("files", "stats", "sorting"),
    ("models", "corpus"),
    ("scanner",),
    ("index",),
    ("vocab",),
    ("pattern", "role", "tracer", "comparison"),
    ("annotations", "probing"),
    ("experiments",),
    ("reports",),
    ("web",),
    ("api", "estimate"),
    ("pipeline",),
    ("cli",),
)
LEVEL = {part: level for level, row in enumerate(ORDER) for part in row}
# `testing` and `testing_types` build models for tests; __init__ and __main__ are the two front doors.
ALLOWED = {("testing", "models"), ("testing_types", "models"), ("testing_types", "errors")}
DOORS = ("__init__", "__main__")


TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> Iterator[tuple[int, str]]:
    """Line and part of memlens of every import in a file, also inside functions and by name."""
    package = ["memlens", *path.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(TREES[path]):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            names = [f"memlens.{alias.name}" for alias in node.names] if module == "memlens" else [module]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module":
            names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        for name in names:
            if name.startswith("memlens."):
                yield getattr(node, "lineno", 0), name.split(".")[1]


def is_backward(importer: str, imported: str) -> bool:
    if importer == imported or (importer, imported) in ALLOWED or imported.startswith("__"):
        return False
    if importer not in LEVEL or imported not in LEVEL:
        return True  # an unknown part has no place yet: give it one in ORDER
    return LEVEL[imported] >= LEVEL[importer]


FILES = [path for path in TREES if part_of(path) not in DOORS]


def test_no_import_points_back() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)}, line {line}: {part_of(path)} -> {part}"
        for path in FILES
        for line, part in imported_parts(path)
        if is_backward(part_of(path), part)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_check_sees_an_arrow_that_points_back() -> None:
    assert is_backward("models", "corpus") and is_backward("corpus", "models")
    assert is_backward("scanner", "index") and is_backward("index", "api") and is_backward("errors", "memory")
    assert not is_backward("cli", "errors") and not is_backward("experiments", "vocab")
    assert {part for path in FILES for _, part in imported_parts(path)} >= {"errors", "models", "scanner", "index"}


RIDDLES = ("What ", "Where ", "Whether ", "How ", "Who ", "Which ", "By which ", "From what ")
LONGEST = 450


def test_every_module_says_plainly_what_it_is_for() -> None:
    assert not [str(path) for path, tree in TREES.items() if not ast.get_docstring(tree)]


def test_no_docstring_is_a_riddle() -> None:
    described = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    words = [
        (path.relative_to(SOURCE), ast.get_docstring(node) or "")
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, described)
    ]
    assert not [(str(path), text[:80]) for path, text in words if text.startswith(RIDDLES)]


def test_no_two_classes_share_a_name() -> None:
    found: dict[str, list[str]] = {}
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.lstrip("_"), []).append(str(path.relative_to(SOURCE)))
    assert not {name: files for name, files in found.items() if len(files) > 1}


def test_no_file_is_too_long_to_read() -> None:
    lengths = {str(path.relative_to(SOURCE)): len(path.read_text(encoding="utf-8").splitlines()) for path in TREES}
    assert not {name: length for name, length in lengths.items() if length > LONGEST}
