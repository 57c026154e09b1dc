"""Templates of a package, as the report and the workbench use them: every text is escaped, every name must be known."""

from __future__ import annotations

from functools import partial
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined

from memlens.report.text import number, token, visible


def template_environment(package: str) -> Environment:
    """For the templates in a package's folder templates/."""
    environment = Environment(
        loader=FunctionLoader(partial(read_template, package)),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(number=number, visible=visible, token=token)
    return environment


def read_template(package: str, name: str) -> str:
    """A template, or a style or script that lies beside it."""
    return files(package).joinpath("templates", name).read_text(encoding="utf-8")
