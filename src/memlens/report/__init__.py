"""`memlens report`: an index as one self-contained page that a person can read and share.

make_report(index, Path("report.html"), assets=Path("figures"))
"""

from memlens.report.make import make_report

__all__ = ["make_report"]
