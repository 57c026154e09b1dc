"""Print the table of claims and the findings of an index as Markdown, each finding with the command that shows it.

    python examples/smollm2/findings.py INDEX
    python examples/smollm2/findings.py INDEX docs/findings.md bundled

The second command writes the text into a page, between `<!-- bundled -->` and `<!-- end of bundled -->`, with the
pictures whose names start with `bundled`. Any index can be used. Findings whose tables are missing are left out.
"""

import re
import sys
from pathlib import Path

import memlens
from memlens.reports.findings import Finding, count_verdicts, describe_verdicts, select_findings
from memlens.reports.sections import Tables
from memlens.text import visible


def claims(index: memlens.Index) -> str:
    """Return the table of claims with the verdicts on this model."""
    lines = ["| the paper's claim | published | this model | 95% interval | shuffled networks | verdict |"]
    lines.append("| --- " * 6 + "|")
    for judged in Tables(index).judge():
        claim, judgement = judged.claim, judged.judgement
        if judgement is None:
            continue
        found = (judgement.yours, judgement.interval or "–", judgement.shuffled or "–", f"**{judgement.verdict}**")
        lines.append(f"| {' | '.join((claim.text, claim.published, *found))} |")
    return "\n".join(lines) + "\n"


def as_markdown(number: int, finding: Finding) -> str:
    """Return a finding as a section: triggers with the last token in bold, the evidence, and the command."""
    lines = []
    for before, token in finding.triggers:
        space = " " * (token != token.lstrip())
        lines.append(f"- {visible(before)}{space}**{visible(token.strip())}**")
    if finding.curve and finding.curve.numbers:
        first, last = finding.curve.ends
        lines.append(f"- {finding.curve.label} by layer: {first} in the first layer, {last} in the last")
        if finding.curve.published:
            lines[-1] += f" (paper: {' and '.join(finding.curve.published_ends)})"
    lines += [f"- {line}" for line in finding.lines]
    return "\n".join([f"### {number}. {finding.title}", "", *lines, "", "```", finding.command, "```", ""])


def picture_of(finding: Finding, folder: Path, name: str) -> str:
    """Return the picture of the experiment behind a finding, or an empty string if there is none."""
    experiment = re.search(r" experiment \S+ (\S+)", finding.command)
    picture = folder / "pictures" / f"{name}-{experiment[1]}.png" if experiment else None
    return f"![{finding.title}](pictures/{picture.name})\n" if picture and picture.is_file() else ""


def write_into(page: Path, name: str, text: str) -> None:
    """Replace the block of a page with this name."""
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
        for number, finding in enumerate(select_findings(index), 1):
            picture = picture_of(finding, Path(sys.argv[2]).parent, sys.argv[3]) if len(sys.argv) == 4 else ""
            text += as_markdown(number, finding) + "\n" + (picture + "\n" if picture else "")
    except memlens.MemlensError as error:
        sys.exit(f"findings: {error}")
    if len(sys.argv) == 4:
        write_into(Path(sys.argv[2]), sys.argv[3], describe_verdicts(count_verdicts(Tables(index))) + "\n\n" + text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
