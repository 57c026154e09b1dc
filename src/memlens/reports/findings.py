"""Findings: the five best supported statements about an index, each with the command that shows its evidence.

`demo`, `analyze` and the report show the same findings. They are selected and ordered by evidence:

1. Memories whose silencing makes a token that follows their triggers less likely, largest factor first.
2. Memories with a pattern that separates held-out triggers from other prefixes, subjects before wordings, then largest
   AUROC first.
3. Claims of the paper that appear in this model, in the order of the paper, then one claim that does not.

Every word and number comes from the index. Ties between memories go to the lower layer, then to the lower memory.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from memlens.experiments.experiment import (
    ABSENT,
    APPEARS,
    PARTLY,
    SAME,
    UNCLEAR,
    UNCOMPARED,
    UNTESTED,
    VERDICTS,
    JudgedClaim,
    Row,
    as_points_per_layer,
)
from memlens.experiments.run import EXPERIMENTS
from memlens.experiments.silencing import LIKELY, PROMPTS
from memlens.index.reader import Index
from memlens.memory import MemoryId, Trigger
from memlens.reports.sections import Tables
from memlens.text import visible

COUNT = 5  # number of findings
_SILENCED, _MEMORIES = 2, 3  # maximum number of findings about silenced memories, and about all memories
_FACTOR = 1.1  # minimum factor of a silenced memory
_AUROC = 0.75  # minimum held-out AUROC of a pattern
_COMMON = 10  # patterns of at least this many triggers come before rarer patterns
_TRIGGERS = 3  # number of triggers of a finding
_HELD, _FAILED = (APPEARS, PARTLY, UNCOMPARED), (ABSENT, SAME, UNCLEAR)  # verdicts on claims, clearest first


@dataclass(frozen=True)
class Curve:
    """Numbers by layer in this model and in the paper, with the first and last number of both curves as text."""

    label: str
    numbers: tuple[float | None, ...]
    ends: tuple[str, str]
    published: tuple[float | None, ...] = ()
    published_ends: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Finding:
    """A statement about a memory or a claim, with its evidence."""

    name: str
    title: str
    command: str
    memory: str = ""  # name of the memory; empty for a claim
    triggers: tuple[tuple[str, str], ...] = ()  # text of a trigger without its last token, and this token
    lines: tuple[str, ...] = ()  # further sentences
    curve: Curve | None = None
    verdict: str = ""  # verdict on a claim


def select_findings(index: Index, tables: Tables | None = None) -> list[Finding]:
    """Return at most COUNT findings, best supported first. The list is empty without experiments and patterns."""
    tables = tables or Tables(index)
    silenced = _silenced_memories(index, tables)
    memories = silenced[:_SILENCED]
    named = {finding.memory for finding in memories}
    patterns = [finding for finding in _patterns(index) if finding.memory not in named]
    memories = [*memories, *patterns[: _MEMORIES - len(memories)]]
    held, failed = (_with_verdict(tables, verdicts) for verdicts in (_HELD, _FAILED))
    claims = [*held[:1], *failed[:1], *held[1:], *failed[1:]][: COUNT - len(memories)]
    claims.sort(key=[*held, *failed].index)
    return [*memories, *(_claim(judged, index, tables) for judged in claims)]


def _with_verdict(tables: Tables, verdicts: Sequence[str]) -> list[JudgedClaim]:
    """Return the claims with these verdicts, in the order of `verdicts`, and claims with a curve first."""
    judged = [(one.judgement.verdict, one) for one in tables.judge() if one.judgement]
    judged.sort(key=lambda entry: not entry[1].claim.curve)
    return [one for wanted in verdicts for verdict, one in judged if verdict == wanted]


def count_verdicts(tables: Tables) -> dict[str, int]:
    """Return {verdict: number of claims}, without claims that were not tested."""
    verdicts = [judged.judgement.verdict for judged in tables.judge() if judged.judgement]
    return {verdict: verdicts.count(verdict) for verdict in VERDICTS if verdict in verdicts and verdict not in UNTESTED}


def describe_verdicts(counts: dict[str, int]) -> str:
    """Return one sentence with the number of tested claims for each verdict."""
    if not counts:
        return "No claim of the paper was tested yet."
    parts = ", ".join(f"{count} “{verdict}”" for verdict, count in counts.items())
    return f"Of {sum(counts.values())} claims of the paper that were tested: {parts}."


def _silenced_memories(index: Index, tables: Tables) -> list[Finding]:
    """Return findings on memories whose silencing has an effect, at most one per token.

    Memories with the full number of prompts come first. Within each group, the largest factor comes first.
    """
    memories: dict[tuple[int, int], list[Row]] = {}
    for row in tables.rows("silencing") or []:
        memories.setdefault((row["layer"], row["memory"]), []).append(row)
    findings: dict[int, Finding] = {}
    for prompts in sorted(memories.values(), key=lambda prompts: (len(prompts) < PROMPTS, -prompts[0]["factor"])):
        first = prompts[0]
        if first["factor"] >= _FACTOR and first["p_mean"] >= LIKELY and first["token"] not in findings:
            findings[first["token"]] = _silenced(index, prompts)
    return list(findings.values())


def _silenced(index: Index, prompts: Sequence[Row]) -> Finding:
    row = prompts[0]
    name, token = index.names.name(row["layer"], row["memory"]), _quoted(row["token_text"])
    triggers = [(one["prompt"].removesuffix(one["last_token"]), one["last_token"]) for one in prompts]
    effect = f"without it, p falls {row['p']:.2g} → {row['p_without']:.2g}"
    if row["continuation"] is not None:
        after, without = (_quoted(row[column]) for column in ("continuation", "continuation_without"))
        effect += f"; {after} becomes {without}" if after != without else f"; the model still writes {after}"
    edits = ["--token", row["token_text"], "--set", f"{name}=0"]
    return Finding(
        f"silencing {name}",
        f"{name} promotes {token}, which follows {row['follows']} of its {row['followed']} strongest triggers",
        _command(index, "trace", row["prompt"], *edits),
        str(name),
        tuple(triggers),
        (effect,),
    )


def _patterns(index: Index) -> list[Finding]:
    """Return findings on the memories with the best patterns, subjects before wordings."""
    if not index.has("patterns") or not {"auroc", "auroc_same_token"} <= {*index.schema_names("patterns")}:
        return []
    rows = index.sql(
        """SELECT layer, memory, kind, description, prefixes, auroc, auroc_same_token FROM {patterns}
           WHERE kind <> 'next' AND auroc >= $1
           ORDER BY kind = 'semantic' DESC, len(prefixes) >= $2 DESC, coalesce(auroc_same_token, auroc) DESC,
                    auroc DESC, len(prefixes) DESC, layer, memory, pattern LIMIT $3""",
        [_AUROC, _COMMON, 2 * _MEMORIES],
    )
    names = [index.names.name(row["layer"], row["memory"]) for row in rows]
    triggers = index.triggers_of(names)
    top = index.manifest.patterns.top if index.manifest.patterns else None
    findings: dict[MemoryId, Finding] = {}
    for name, row in zip(names, rows, strict=True):
        findings.setdefault(name, _pattern(index, name, row, triggers[name][:top]))
    return list(findings.values())


def _pattern(index: Index, name: MemoryId, row: Row, triggers: Sequence[Trigger]) -> Finding:
    ranks = set(row["prefixes"])
    examples = [(trigger.before, trigger.token) for trigger in triggers if trigger.rank in ranks]
    kind = "a subject" if row["kind"] == "semantic" else "a wording"
    score = f"held-out AUROC {row['auroc']:.2f}"
    score += "" if row["auroc_same_token"] is None else f" ({row['auroc_same_token']:.2f}, same last tokens)"
    return Finding(
        f"pattern {name}",
        f"{name} detects {kind}: {visible(row['description']).removeprefix('about: ')}",
        _command(index, "show", str(name)),
        str(name),
        tuple(examples[:_TRIGGERS]),
        (f"shared by {len(ranks)} of its {len(triggers)} triggers; {score}",),
    )


def _claim(judged: JudgedClaim, index: Index, tables: Tables) -> Finding:
    claim, judgement = judged.claim, judged.judgement
    assert judgement is not None
    curve = _curve(judged, tables)
    numbers = judgement.yours + (f" ({judgement.interval})" if judgement.interval and not curve else "")
    if judgement.measure and claim.write is as_points_per_layer:
        numbers = claim.write(judgement.measure.value)  # same unit as the number of the shuffled networks
    numbers += f"; shuffled: {judgement.shuffled}" if judgement.shuffled else ""
    numbers += "" if curve and curve.published else f"; in the paper {claim.published}"
    words = shlex.split(tables.command(judged.experiment))  # "memlens VERB INDEX ...", as in the report
    return Finding(
        f"claim {claim.slug}",
        f"{judgement.verdict.capitalize()}: {claim.text}",
        _command(index, words[1], *words[3:]),
        lines=(numbers,),
        curve=curve,
        verdict=judgement.verdict,
    )


def _curve(judged: JudgedClaim, tables: Tables) -> Curve | None:
    """Return the curve that shows a claim, or None if the claim has no curve."""
    experiment = EXPERIMENTS[judged.experiment]
    if experiment.picture is None or not judged.claim.curve:
        return None
    place = [*experiment.picture.curves].index(judged.claim.curve)
    label, numbers, write = experiment.picture.headline(tables.rows(experiment.name) or [])[place]

    def ends(values: Sequence[float | None]) -> tuple[str, str]:
        measured = [value for value in values if value is not None]
        return (write(measured[0]), write(measured[-1])) if measured else ("", "")

    published = experiment.picture.headline(experiment.tables[0].published())[place][1]
    published = published if any(value is not None for value in published) else []
    return Curve(label, tuple(numbers), ends(numbers), tuple(published), ends(published))


def _quoted(text: str) -> str:
    return f"'{visible(text)}'"


def _command(index: Index, verb: str, *words: str) -> str:
    """Return a command line that can be pasted into a shell."""
    return shlex.join(["memlens", verb, str(index.folder), *words])
