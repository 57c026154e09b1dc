"""Print what an index has to tell as Markdown: the table of claims, then findings, each with the command that shows it.

    python examples/smollm2/findings.py INDEX

The raw material of docs/gallery.md. Works on any index; what its tables do not support is left out.
"""

import sys

import memlens
from memlens.reports.findings import Insight, find_all
from memlens.reports.sections import Tables


def claims(index: memlens.Index) -> str:
    """The report's table: what the paper says, and whether this model shows it."""
    lines = ["| the paper's claim | published | this model | 95% interval | verdict | why |", "| --- " * 6 + "|"]
    for judged in Tables(index).judge():
        claim, judgement = judged.claim, judged.judgement
        if judgement is None:
            continue
        found = (judgement.yours, judgement.interval or "–", f"**{judgement.verdict}**", judgement.reason)
        lines.append(f"| {' | '.join((claim.text, claim.published, *found))} |")
    return "\n".join(lines) + "\n"


def as_markdown(number: int, told: Insight) -> str:
    """Lines that begin with spaces are text of the corpus; they belong to the line above."""
    lines = [f"  - {line.strip()}" if line.startswith(" ") else f"- {line}" for line in told.lines]
    return "\n".join([f"### {number}. {told.title}", "", *lines, "", "```", told.command, "```", ""])


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/smollm2/findings.py INDEX")
    try:
        index = memlens.open_index(sys.argv[1])
        print(claims(index))
        for number, told in enumerate(find_all(index), 1):
            print(as_markdown(number, told))
    except memlens.MemlensError as error:
        sys.exit(f"findings: {error}")


if __name__ == "__main__":
    main()
