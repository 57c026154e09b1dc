"""Write the pages of docs/api from the docstrings of memlens' public names, one page per task.

python docs/make_api.py            # write the pages
python docs/make_api.py --check    # fail if a page is out of date (a test does this as well)
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import memlens
from memlens.settings import (
    CorpusSettings,
    PatternSettings,
    ProbeSettings,
    RoleSettings,
    SampleSettings,
    ScanRunSettings,
    ScanSettings,
    TaskSettings,
    ValueSettings,
)

FOLDER = Path(__file__).with_name("api")
TASKS = {  # page -> title, introduction, public names in the order of the page
    "build": (
        "Build an index",
        "Load a model, scan a corpus, and add the tables of later stages. Each function has the options of the command "
        "with the same name.",
        "analyze demo load MemoryModel scan merge values patterns roles check repair",
    ),
    "read": (
        "Read an index",
        "Look up memories, search them, and query the tables. Neither the model nor the text is needed.",
        "open_index Index MemoryId Prefix Trigger compare",
    ),
    "trace": (
        "Trace and edit a model",
        "Run prompts through the model, attribute predictions to memories, and change coefficients or values.",
        "trace coefficients_on fires_on intervene generate hooked Intervention Edit promoting silence_each integrate "
        "in_common ValueChange trying side_effects save_changed as_sae",
    ),
    "circuits": (
        "Find circuits and concepts",
        "Find the memories behind a prediction, a task or a labeled concept.",
        "circuit task_circuit probe SparseProbe",
    ),
    "share": (
        "Evaluate and share",
        "Run the paper's experiments, and publish the results.",
        "experiment chart report site push pull MemlensError",
    ),
}
# the classes whose fields `**options` of a function can contain
SETTINGS = (
    *(ScanSettings, CorpusSettings, ScanRunSettings, ValueSettings, PatternSettings, RoleSettings, SampleSettings),
    *(ProbeSettings, TaskSettings),
)
_SHORT_TYPES = (  # long unions and what to call them
    ("str | PathLike[str]", "path"),
    ("Source | Sequence[Source]", "path or list of paths"),
    ("path | Sequence[path]", "path or list of paths"),
    ("Source", "path"),
    ("MemoryModel | path | Any", "model"),
    ("MemoryModel | path", "model"),
    ("Index | path", "index"),
    ("Intervention | Edit | str | Iterable[Edit | str]", "edits"),
)


def make_pages() -> dict[str, str]:
    """Return {file name: content}. Raises ValueError if a public name is on no page or on two."""
    listed = sorted(name for _, _, names in TASKS.values() for name in names.split())
    if listed != sorted(memlens.__all__):
        raise ValueError(f"TASKS and memlens.__all__ differ: {set(listed) ^ set(memlens.__all__)}")
    pages = {f"{page}.md": _task_page(*task) for page, task in TASKS.items()}
    options = "\n".join(f"## {kind.__name__}\n\n{_parse(kind)['words']}\n\n{_fields(kind)}\n" for kind in SETTINGS)
    pages["options.md"] = f"# Options\n\nValues for `**options`. The command line uses the same names.\n\n{options}"
    return pages


def _task_page(title: str, introduction: str, names: str) -> str:
    entries = [(name, getattr(memlens, name)) for name in names.split()]
    parts = [_class(name, found) if inspect.isclass(found) else _function(name, found) for name, found in entries]
    return "\n".join([f"# {title}\n\n{introduction}\n", *parts])


def _function(name: str, function: Callable[..., Any]) -> str:
    doc = _parse(function)
    lines = [
        f"## {name}\n",
        _example(doc),
        f"{doc['words']}\n",
        f"```text\n{_call(f'memlens.{name}', function)}\n```\n",
    ]
    kinds = {parameter.name: parameter for parameter in inspect.signature(function).parameters.values()}
    for argument, words in _entries(doc.get("Args", "")):
        parameter = kinds[argument.lstrip("*")]
        has_type = parameter.annotation is not parameter.empty and not argument.startswith("*")
        type_ = f" ({_type(parameter.annotation)})" if has_type and parameter.annotation not in ("Any", Any) else ""
        lines.append(f"- `{argument}`{type_}: {words}")
    lines.append("")
    if "Returns" in doc:
        lines.append(f"**Returns** {_join(doc['Returns'])}\n")
    if "Raises" in doc:
        lines += ["**Raises**", "", *(f"- `{error}`: {words}" for error, words in _entries(doc["Raises"])), ""]
    return "\n".join(lines)


def _class(name: str, kind: type) -> str:
    doc = _parse(kind)
    lines = [f"## {name}\n", _example(doc), f"{doc['words']}\n"]
    if is_dataclass(kind):
        lines += ["Fields:", "", _fields(kind), ""]
    for member, found in _members(kind):
        if isinstance(found, property | cached_property):
            getter = found.fget if isinstance(found, property) else found.func
            lines.append(f"- `.{member}`: {_first_line(getter)}")
        else:
            function = found.__func__ if isinstance(found, classmethod | staticmethod) else found
            call = " ".join(_call(f".{member}", function, skip=not isinstance(found, staticmethod)).split())
            lines.append(f"- `{call}`: {_first_line(function)}")
    return "\n".join([*lines, ""])


def _parse(thing: Any) -> dict[str, str]:
    """Return the parts of a Google docstring: "words", "Args", "Returns", "Raises" and "Example"."""
    text = inspect.getdoc(thing) or ""
    if is_dataclass(thing) and text.startswith(f"{getattr(thing, '__name__', '')}("):
        text = ""  # generated by dataclass
    words, *rest = re.split(r"^(Args|Returns|Raises|Example):\n", text, flags=re.MULTILINE)
    parts = {name: textwrap.dedent(block).strip("\n") for name, block in zip(rest[::2], rest[1::2], strict=True)}
    return {"words": words.strip(), **parts}


def _example(doc: dict[str, str]) -> str:
    return f"```python\n{doc['Example']}\n```\n" if "Example" in doc else ""


def _entries(block: str) -> list[tuple[str, str]]:
    """Return the (name, words) of a block of "name: words" with indented continuation lines."""
    parts = re.split(r"^(\*{0,2}\w+): ", block, flags=re.MULTILINE)
    return [(name, _join(words)) for name, words in zip(parts[1::2], parts[2::2], strict=True)]


def _join(text: str) -> str:
    return " ".join(text.split())


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that have a docstring, in source order."""
    for name, found in vars(kind).items():
        if name.startswith("_"):
            continue
        inner = found.fget if isinstance(found, property) else getattr(found, "__func__", getattr(found, "func", found))
        if callable(inner) and inspect.getdoc(inner) and not inspect.isclass(inner):
            yield name, found


def _fields(kind: Any) -> str:
    lines = []
    for field in fields(kind):
        if not field.name.startswith("_"):
            default = "" if field.default is MISSING else f" = {_default(field.default)}"
            words = f": {field.metadata['help']}" if field.metadata.get("help") else ""
            lines.append(f"- `{field.name}{default}` ({_type(field.type)}){words}")
    return "\n".join(lines)


def _call(name: str, function: Callable[..., Any], skip: bool = False) -> str:
    """Return a call with parameters and defaults, wrapped to 100 columns. `skip` leaves out the first parameter."""
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    shown: list[str] = []
    for place, one in enumerate(parameters):
        if one.kind is one.KEYWORD_ONLY and not any(
            before.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL) for before in parameters[:place]
        ):
            shown.append("*")
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        shown.append(f"{stars}{one.name}" + ("" if one.default is one.empty else f"={_default(one.default)}"))
    return textwrap.fill(f"{name}({', '.join(shown)})", 100, subsequent_indent="    ", break_long_words=False)


def _type(annotation: Any) -> str:
    """Return a type in a few words: "path or None" for `Source | None`."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    text = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", str(annotation) if "|" in str(annotation) else text)
    for long, short in _SHORT_TYPES:
        text = text.replace(long, short)
    return text.replace(" | ", " or ").replace("[", "\\[").replace("]", "\\]")


def _default(value: Any) -> str:
    return value.__name__ if callable(value) else repr(value)  # the repr of a function contains an address


def _first_line(function: Any) -> str:
    return _join((inspect.getdoc(function) or "").split("\n\n")[0])


def main() -> None:
    pages = make_pages()
    if "--check" not in sys.argv[1:]:
        FOLDER.mkdir(exist_ok=True)
        for name, content in pages.items():
            (FOLDER / name).write_text(content, encoding="utf-8", newline="\n")
        return
    written = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    if old := sorted(name for name in {*pages, *written} if pages.get(name) != written.get(name)):
        sys.exit(f"docs/api is not up to date ({', '.join(old)}); run python docs/make_api.py")


if __name__ == "__main__":
    main()
