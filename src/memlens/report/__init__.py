"""`memlens report`: an index as one self-contained page that a person can read and share.

    make_report(index, Path("report.html"), assets=Path("figures"))

The name is imported when first used: others need this package's words and colours alone, without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memlens.report.make import make_report

__all__ = ["make_report"]


def __getattr__(name: str) -> Any:
    if name != "make_report":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("memlens.report.make").make_report
