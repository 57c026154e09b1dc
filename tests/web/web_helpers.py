"""What several tests of the workbench do to an index of their own."""

from __future__ import annotations

from memlens.index.reader import Index


def fewer_patterns(index: Index) -> None:
    """Replace the table of patterns as a stage does: all but one are gone."""
    table = index.table("patterns")
    index.write({"patterns": (table.schema, [table.slice(0, 1)])}, dict)
