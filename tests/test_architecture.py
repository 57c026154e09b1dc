"""Imports between the parts of memlens point one way."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "memlens"

# A part may import the parts of the rows above it, and no other part of its own row.
ORDER = (
    ("errors", "text", "process_setup", "compiling", "signals", "progress"),
    ("memory", "settings"),
    ("files", "stats", "pool"),
    ("models", "corpus"),
    ("scanner",),
    ("index",),
    ("vocab",),
    ("pattern", "role", "tracer", "comparison"),
    ("annotations", "probing", "circuits"),
    ("experiments",),
    ("reports",),
    ("web",),
    ("api",),
    ("pipeline",),
    ("cli",),
)
LEVEL = {part: level for level, row in enumerate(ORDER) for part in row}
# `testing` builds models for tests; __init__ and __main__ may import everything.
ALLOWED = {("testing", "models"), ("testing", "errors")}
ENTRY_POINTS = ("__init__", "__main__")
FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path.parent != SOURCE or path.stem not in ENTRY_POINTS]


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and part of every import of memlens in a file, also inside functions and through import_module."""
    package = ["memlens", *path.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
        return True  # add new parts to ORDER
    return LEVEL[imported] >= LEVEL[importer]


def test_imports_point_one_way() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)}, line {line}: {part_of(path)} -> {part}"
        for path in FILES
        for line, part in imported_parts(path)
        if is_backward(part_of(path), part)
    ]
    assert not wrong, "\n".join(wrong)


def test_backward_imports_are_detected() -> None:
    assert is_backward("models", "corpus") and is_backward("corpus", "models")
    assert is_backward("scanner", "index") and is_backward("index", "api") and is_backward("errors", "memory")
    assert not is_backward("cli", "errors") and not is_backward("experiments", "vocab")
    build = {part for _, part in imported_parts(SOURCE / "index" / "build.py")}
    assert build >= {"errors", "models", "scanner", "corpus"} and {part_of(path) for path in FILES} >= set(LEVEL)
