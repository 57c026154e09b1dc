"""Print what an index has to tell as Markdown: the table of claims, then findings, each with the command that shows it.

    python examples/smollm2/findings.py INDEX
    python examples/smollm2/findings.py INDEX docs/gallery.md bundled

The second writes it into a page, between `<!-- bundled -->` and `<!-- end of bundled -->`, with the pictures of that
name beside the page. Works on any index; what its tables do not support is left out.
"""

import re
import sys
from collections import Counter
from pathlib import Path

import memlens
from memlens.experiments.experiment import VERDICTS
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


def counted(index: memlens.Index) -> str:
    """Count the claims by verdict."""
    found = Counter(judged.judgement.verdict for judged in Tables(index).judge() if judged.judgement)
    verdicts = ", ".join(f"{found[verdict]} “{verdict}”" for verdict in VERDICTS if found[verdict])
    return f"Verdicts on {found.total()} claims of the paper: {verdicts}.\n"


def pictured(told: Insight, folder: Path, name: str) -> str:
    """The picture of the experiment behind a finding, where there is one."""
    experiment = re.search(r" experiment \S+ (\S+)", told.command)
    picture = folder / "pictures" / f"{name}-{experiment[1]}.png" if experiment else None
    return f"![{told.title}](pictures/{picture.name})\n" if picture and picture.is_file() else ""


def write_into(page: Path, name: str, text: str) -> None:
    """Replace the part of a page that has this name."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        sys.exit(f"findings: {page} has no lines {begin.strip()} and {end}")
    page.write_text(f"{before}{begin}{text}{end}{after}", encoding="utf-8")


def main() -> None:
    if len(sys.argv) not in (2, 4):
        sys.exit("usage: python examples/smollm2/findings.py INDEX [PAGE NAME]")
    try:
        index = memlens.open_index(sys.argv[1])
        text = claims(index) + "\n"
        for number, told in enumerate(find_all(index), 1):
            picture = pictured(told, Path(sys.argv[2]).parent, sys.argv[3]) if len(sys.argv) == 4 else ""
            text += as_markdown(number, told) + "\n" + (picture + "\n" if picture else "")
    except memlens.MemlensError as error:
        sys.exit(f"findings: {error}")
    if len(sys.argv) == 4:
        write_into(Path(sys.argv[2]), sys.argv[3], counted(index) + "\n" + text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
