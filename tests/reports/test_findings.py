"""Findings: which are selected, in which order, and that each sentence follows from the tables."""

import shlex
from typing import Any

import pytest
from report_tables import like_the_paper, write_rows

import memlens
from memlens.cli import main
from memlens.experiments.experiment import ABSENT, APPEARS, NOT_JUDGED, SAME, UNCLEAR
from memlens.reports.findings import count_verdicts, describe_verdicts, select_findings
from memlens.reports.sections import Tables


def silenced(memory: int, factor: float, token: int = 3, p_mean: float = 0.5, **more: Any) -> list[dict[str, Any]]:
    row = {"layer": 2, "memory": memory, "token": token, "token_text": f" word{token}", "follows": 6, "followed": 8}
    row |= {"p": 0.6, "p_without": 0.2, "p_mean": p_mean, "factor": factor, **more}
    prompts = ({"rank": rank, "prompt": f"The {rank} river", "last_token": " river"} for rank in range(3))
    return [row | prompt for prompt in prompts]


def test_memories_come_before_claims_and_the_claim_that_fails_comes_last(full: memlens.Index) -> None:
    one_prompt = silenced(6, 9.0, token=6)[:1]
    write_rows(full, "silencing", one_prompt + silenced(1, 3.0) + silenced(2, 2.0, token=4) + silenced(5, 1.5, token=5))
    names = [finding.name for finding in select_findings(full)]
    assert names[:2] == ["silencing L2N1", "silencing L2N2"]
    assert [name.split()[0] for name in names] == ["silencing", "silencing", "pattern", "claim", "claim"]
    verdicts = [finding.verdict for finding in select_findings(full)][3:]
    assert verdicts[0] == APPEARS and verdicts[1] in (ABSENT, SAME, UNCLEAR)


def test_a_memory_without_an_effect_or_a_likely_token_and_a_second_one_of_the_same_token_are_left_out(
    full: memlens.Index,
) -> None:
    rows = silenced(1, 3.0) + silenced(2, 2.9) + silenced(3, 2.0, token=4, p_mean=0.01) + silenced(4, 1.05, token=5)
    write_rows(full, "silencing", rows)
    names = [finding.name for finding in select_findings(full)]
    assert [name for name in names if name.startswith("silencing")] == ["silencing L2N1"]
    assert len([name for name in names if name.startswith("pattern")]) == 2 and len(names) == 5


def test_a_silenced_memory_has_its_prompts_as_triggers_and_the_measured_effect(full: memlens.Index) -> None:
    continued = {"continuation": " of a", "continuation_without": " is"}
    write_rows(full, "silencing", silenced(1, 3.0, **continued) + silenced(2, 2.0, token=4))
    first, second = select_findings(full)[:2]
    assert first.title == "L2N1 promotes ' word3', which follows 6 of its 8 strongest triggers"
    assert first.triggers == tuple((f"The {rank}", " river") for rank in range(3))
    assert first.lines == ("without it, p falls 0.6 → 0.2; ' of a' becomes ' is'",)
    assert second.lines == ("without it, p falls 0.6 → 0.2",)
    command = ["memlens", "trace", str(full.folder), "The 0 river", "--token", " word3", "--set", "L2N1=0"]
    assert shlex.split(first.command) == command


def test_patterns_are_subjects_of_ten_triggers_first_then_by_auroc(bare: memlens.Index) -> None:
    def pattern(memory: int, kind: str, auroc: float, same: float | None, count: int = 10) -> dict[str, Any]:
        row = {"layer": 1, "memory": memory, "pattern": f"p{memory}", "kind": kind, "description": "about: rivers"}
        numbers = {"confidence": 1.0, "share": 0.1, "q": 0.0, "auroc": auroc, "auroc_same_token": same}
        return row | numbers | {"prefixes": list(range(count))}

    rows = [
        pattern(0, "shallow", 1.0, None),  # a wording
        pattern(1, "semantic", 0.9, 0.6),
        pattern(2, "semantic", 0.8, 0.7),
        pattern(3, "semantic", 0.7, 0.9),  # below the least AUROC
        pattern(4, "semantic", 0.9, 0.9, count=9),
        pattern(5, "next", 1.0, 1.0),
    ]
    write_rows(bare, "patterns", rows, folder="")
    findings = select_findings(bare)
    assert [finding.memory for finding in findings] == ["L1N2", "L1N1", "L1N4"]
    assert findings[0].title == "L1N2 detects a subject: rivers"
    triggers = bare.triggers("L1N2")
    assert findings[0].triggers == tuple((trigger.before, trigger.token) for trigger in triggers[:3])
    count = len(triggers)
    assert findings[0].lines == (f"shared by 10 of its {count} triggers; held-out AUROC 0.80 (0.70, same last tokens)",)


def test_a_claim_has_its_curve_next_to_the_papers(full: memlens.Index) -> None:
    claims = [finding for finding in select_findings(full) if finding.curve and finding.curve.published]
    assert claims
    for finding in claims:
        curve = finding.curve
        assert curve is not None and len(curve.numbers) == len(curve.published) == 16
        assert curve.ends[0] and curve.published_ends[1]
        assert finding.title.startswith(finding.verdict.capitalize() + ": ")


def test_without_patterns_and_experiments_there_is_no_finding(bare: memlens.Index) -> None:
    assert select_findings(bare) == []
    assert describe_verdicts(count_verdicts(Tables(bare))) == "No claim of the paper was tested yet."


def test_claims_fill_the_list_if_there_are_no_memories(bare: memlens.Index) -> None:
    for name, rows in like_the_paper(bare).items():
        write_rows(bare, name, rows)
    assert [finding.name.split()[0] for finding in select_findings(bare)] == ["claim"] * 5


def test_claims_that_were_not_tested_are_not_counted(full: memlens.Index) -> None:
    verdicts = [judged.judgement.verdict for judged in Tables(full).judge() if judged.judgement]
    counts = count_verdicts(Tables(full))
    assert NOT_JUDGED in verdicts and NOT_JUDGED not in counts
    assert counts[APPEARS] == verdicts.count(APPEARS)
    assert describe_verdicts(counts).startswith(f"Of {sum(counts.values())} claims of the paper that were tested: ")


def test_commands_can_be_pasted_whatever_the_folder_is_called(
    full: memlens.Index, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = full.folder.with_name("an index; with $signs")
    full.folder.rename(folder)
    findings = select_findings(memlens.open_index(folder))
    assert all(shlex.split(finding.command)[::2][:2] == ["memlens", str(folder)] for finding in findings)
    shown = [finding for finding in findings if finding.name.startswith("pattern")]
    for finding in shown:
        assert main(shlex.split(finding.command)[1:]) == 0 and finding.memory in capsys.readouterr().out
    assert shown
