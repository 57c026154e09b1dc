"""Write docs/api.md from the docstrings of memlens' public names: functions, options, then types.

python docs/make_api.py            # write the page
python docs/make_api.py --check    # fail if the page is out of date (a test does this as well)
"""

from __future__ import annotations

import inspect
import sys
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

PAGE = Path(__file__).with_name("api.md")
HEAD = """# Python API

Verbs are functions with the option names of the command line: analyze, scan, merge, check, repair, values, patterns,
roles, experiment, report, site, trace, circuit, probe, compare, push, pull, demo. To read an index (`show` and `search`
on the command line), use the methods of `Index`: `facts`, `triggers`, `table` and `sql`. Every name is imported when it
is first used, so `import memlens` is fast. Every expected error is a `memlens.MemlensError` with a message of one line.

`python docs/make_api.py` generates this page from the docstrings.
"""
# The classes that `**options` of a verb can contain.
SETTINGS = (
    *(ScanSettings, CorpusSettings, ScanRunSettings, ValueSettings, PatternSettings, RoleSettings, SampleSettings),
    *(ProbeSettings, TaskSettings),
)


def page() -> str:
    public = {name: getattr(memlens, name) for name in sorted(memlens.__all__, key=str.lower)}
    functions = {name: found for name, found in public.items() if not inspect.isclass(found)}
    classes = {name: found for name, found in public.items() if inspect.isclass(found)}
    parts = [HEAD, "## Functions\n"]
    parts += [_entry("###", f"memlens.{name}", found) for name, found in functions.items()]
    parts.append("## Options\n\nValues for `**options` of a verb. The command line uses the same names.\n")
    parts += [f"### {settings.__name__}\n\n{_words(settings)}\n\n{_fields(settings)}\n" for settings in SETTINGS]
    parts.append("## Types\n")
    parts += [_class(name, found) for name, found in classes.items()]
    return "\n".join(parts)


def _entry(level: str, name: str, function: Callable[..., Any]) -> str:
    return f"{level} `{name}`\n\n```python\n{_signature(name, function)}\n```\n\n{_words(function)}\n"


def _class(name: str, kind: type) -> str:
    parts = [f"### `memlens.{name}`\n\n{_words(kind)}\n"]
    if is_dataclass(kind):
        parts.append(_fields(kind) + "\n")
    for member, found in _members(kind):
        if isinstance(found, property | cached_property):
            getter = found.fget if isinstance(found, property) else found.func
            parts.append(f"- `.{member}`: {_first_line(getter)}")
        else:
            function = found.__func__ if isinstance(found, classmethod | staticmethod) else found
            parts.append(f"- `{_signature('.' + member, function, is_method=True)}`: {_first_line(function)}")
    return "\n".join([*parts, ""])


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
            type_ = field.type.__name__ if isinstance(field.type, type) else field.type
            lines.append(f"- `{field.name}: {type_}{default}`{words}")
    return "\n".join(lines)


def _signature(name: str, function: Callable[..., Any], is_method: bool = False) -> str:
    """Return the signature on one line if it fits, otherwise with one line per parameter."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1 if is_method else 0 :]
    shown: list[str] = []
    for place, one in enumerate(parameters):
        is_first_named = one.kind is one.KEYWORD_ONLY and not any(
            before.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL) for before in parameters[:place]
        )
        shown += ["*"] if is_first_named else []
        shown.append(_parameter(one))
    back = "" if signature.return_annotation is signature.empty else f" -> {_type(signature.return_annotation)}"
    line = f"{name}({', '.join(shown)}){back}"
    if is_method or len(line) <= 100:
        return line
    return "\n".join([f"{name}(", *(f"    {one}," for one in shown), f"){back}"])


def _parameter(one: inspect.Parameter) -> str:
    stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    kind = "" if one.annotation is one.empty else f": {_type(one.annotation)}"
    default = "" if one.default is one.empty else f" = {_default(one.default)}"
    return f"{stars}{one.name}{kind}{default}"


def _type(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _default(value: Any) -> str:
    return value.__name__ if callable(value) else repr(value)  # the repr of a function contains an address


def _words(thing: Any) -> str:
    text = inspect.getdoc(thing) or ""
    return "" if is_dataclass(thing) and text.startswith(f"{thing.__name__}(") else text  # generated by dataclass


def _first_line(function: Any) -> str:
    return (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")


def main() -> None:
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8", newline="\n")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit("docs/api.md is not up to date; run python docs/make_api.py")


if __name__ == "__main__":
    main()
