"""Findings: sentences about an index, each with the command that shows the evidence.

    find_all(index)               every finding that the tables of this index support
    find(index, "memory", ...)    the findings with these names

Every word and number comes from the index. A finding about a trend has the verdict of the report's table of claims,
which may be "does not appear". Ties between memories go to the lower layer, then to the lower memory. Findings about
words leave out the most frequent tokens and tokens that are not words, unless there are no other tokens.
"""

import shlex
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from memlens.errors import UnknownName
from memlens.experiments.experiment import (
    ABSENT,
    APPEARS,
    NOT_APPLICABLE,
    NOT_JUDGED,
    PARTLY,
    SAME,
    UNCLEAR,
    UNCOMPARED,
    JudgedClaim,
    Row,
    in_third,
)
from memlens.experiments.prefixes import frequent_tokens
from memlens.experiments.run import EXPERIMENTS
from memlens.index.reader import Index
from memlens.memory import MemoryId, Trigger
from memlens.reports.galleries import dead_memories, same_triggers
from memlens.reports.sections import Tables
from memlens.text import curve, percent, tail, visible

_KINDS = ("shallow", "semantic", "both")
_TRIGGERS, _TOKENS, _ROOM, _CURVE = 3, 6, 64, 16
_CANDIDATES, _PHRASE, _PROMOTED = 1000, 5, 10
_COMMON = 10  # patterns of at least this many triggers come first
_LEAST = 5  # minimum number of triggers of a memory


@dataclass(frozen=True)
class Insight:
    """A sentence, its evidence, and a command."""

    name: str
    title: str
    lines: tuple[str, ...]
    command: str
    verdict: str = ""  # verdict on a claim of the paper


class Material:
    """An index and the data for findings. Each part is read once."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.tables = Tables(index)

    @cached_property
    def claims(self) -> dict[str, JudgedClaim]:
        """The judged claims of the paper, by slug."""
        return {judged.claim.slug: judged for judged in self.tables.judge() if judged.judgement is not None}

    def rows(self, name: str) -> list[Row]:
        """Return the rows of an experiment, or [] if it was not run."""
        return self.tables.rows(name) or []

    @cached_property
    def _frequent_tokens(self) -> Collection[int]:
        return frequent_tokens(self.index)

    @cached_property
    def _corpus_tokens(self) -> Collection[int]:
        """Tokens that occur in the corpus. Values also promote pieces of words that the model has rarely seen."""
        rows = self.index.sql("SELECT DISTINCT unnest(tokens) AS token FROM {corpus}")
        return {row["token"] for row in rows}

    @cached_property
    def _marks_words(self) -> bool:
        """Whether a leading space marks the first piece of a word."""
        return any(text[:1] == " " and text.strip() for text in self.index.vocabulary)

    def is_word(self, token: int) -> bool:
        """Return True if the token starts a word of the corpus and is not one of the most frequent tokens."""
        text = self.index.vocabulary[token]
        starts_word = text[:1] == " " or not self._marks_words
        has_letters = len(text.strip()) >= 3 and text.strip().isalpha()
        return starts_word and has_letters and token in self._corpus_tokens and token not in self._frequent_tokens

    def first_word(self, rows: Sequence[Row], token_of: Callable[[Row], int]) -> Row | None:
        """Return the first row whose token is a word, or the first row if there is none. Returns None without rows."""
        return next((row for row in rows if self.is_word(token_of(row))), rows[0] if rows else None)

    def command(self, verb: str, *words: str) -> str:
        """Return a command line that can be pasted into a shell."""
        return shlex.join(["memlens", verb, str(self.index.folder), *words])

    def command_of(self, name: str) -> str:
        """Return the command that computes and prints the table of an experiment with the same settings."""
        words = shlex.split(self.tables.command(name))  # "memlens VERB INDEX ...", as in the report
        return self.command(words[1], *words[3:])


Finder = Callable[[Material], Insight | None]


def find_all(index: Index) -> list[Insight]:
    """Return every finding that this index supports."""
    return find(index, *finders())


def find(index: Index, *names: str) -> list[Insight]:
    """Return the findings with these names, in this order. Leaves out those that the index does not support."""
    finders_by_name = finders()
    for name in names:
        if name not in finders_by_name:
            raise UnknownName(f"there is no finding '{name}'; known: {', '.join(finders_by_name)}")
    material = Material(index)
    insights = (finders_by_name[name](material) for name in names)
    return [insight for insight in insights if insight is not None]


def finders() -> dict[str, Finder]:
    """Return the functions that make findings, by name: on single memories first, then on trends over depth."""
    functions = (memory, right, rarest, wanted, changed, forbids, twins, below, settling, depth, composition, dead)
    by_name: dict[str, Finder] = {finder.__name__: finder for finder in functions}
    claims = (
        "shallow", "last-token", "agreement", "agreement-chance", "rank", "confident-values", "active", "confidence",
        "residual", "changes",
    )  # fmt: skip
    return by_name | {f"claim-{slug}": _by_claim(slug) for slug in claims}


_PRELUDES = {
    APPEARS: "",
    PARTLY: "In part: ",
    SAME: "As in a shuffled network: ",
    ABSENT: "Not here: ",
    UNCLEAR: "Unclear here: ",
    UNCOMPARED: "Not compared with a shuffled network: ",
    NOT_APPLICABLE: "Not applicable to this model: ",
    NOT_JUDGED: "Without a verdict: ",
}


def _by_claim(slug: str, extra: Callable[[Material], Iterable[str]] = lambda material: ()) -> Finder:
    """Return a function that makes a finding about a claim of the paper.

    If the claim does not appear, the title begins by saying so. `extra` yields lines to show first.
    """

    def finder(material: Material) -> Insight | None:
        judged = material.claims.get(slug)
        if judged is None or judged.judgement is None:
            return None
        claim, judgement = judged.claim, judged.judgement
        interval = f" ({judgement.interval})" if judgement.interval else ""
        lines = [f"here: {judgement.yours}{interval}", f"in the paper: {claim.published}"]
        lines += [f"in shuffled networks: {judgement.shuffled}"] if judgement.shuffled else []
        return Insight(
            f"claim-{slug}",
            _PRELUDES[judgement.verdict] + claim.text,
            (*extra(material), *_curves(material, judged.experiment), *lines, f"verdict: {judgement.verdict}"),
            material.command_of(judged.experiment),
            judgement.verdict,
        )

    return finder


def _curves(material: Material, name: str) -> Iterable[str]:
    """Yield the curves of an experiment by layer, next to the curves of the paper."""
    experiment = EXPERIMENTS[name]
    if experiment.picture is None:
        return
    theirs = experiment.picture.headline(experiment.tables[0].published())
    for place, (label, numbers, write) in enumerate(experiment.picture.headline(material.rows(name))):
        measured = [number for number in numbers if number is not None]
        if measured:
            ends = f"{write(measured[0])} to {write(measured[-1])}"
            paper = theirs[place][1] if place < len(theirs) and any(theirs[place][1]) else []
            beside = f"; paper {curve(paper, _CURVE)}" if paper else ""
            yield f"{label} by layer: {curve(numbers, _CURVE)} {ends}{beside}"


def settling(material: Material) -> Insight | None:
    """Return a finding about the accuracy of the residual by layer, and the first layer where it exceeds one half."""

    def by_layer(material: Material) -> Iterable[str]:
        rows = [row for row in material.rows("refinement") if row["prefixes"]]
        examples = [rows[place * (len(rows) - 1) // 3] for place in range(4)] if len(rows) > 4 else rows
        shares = ", ".join(f"{percent(row['rate'])} in layer {row['layer']}" for row in examples)
        yield f"residuals whose top token is already the final token: {shares}"
        half = next((row["layer"] for row in rows if row["low" if "low" in row else "rate"] >= 0.5), None)
        where = "no layer" if half is None else f"layer {half} is the first layer"
        yield f"{where} in which more than half of the residuals predict the final token (95% interval)"

    insight = _by_claim("refinement", by_layer)(material)
    return replace(insight, name="settling") if insight else None


def depth(material: Material) -> Insight | None:
    """Return a finding about the shares of shallow and semantic patterns by depth."""

    def by_third(material: Material) -> Iterable[str]:
        for which in ("lower", "middle", "upper"):
            rows = in_third(material.rows("patterns"), which, material.tables.layers)
            total = sum(row["prefixes"] for row in rows)
            if total:
                kinds = (f"{percent(sum(row[kind] for row in rows) / total, 0)} {kind}" for kind in _KINDS)
                yield f"{which} third of the layers: {', '.join(kinds)}"

    insight = _by_claim("semantic", by_third)(material)
    return replace(insight, name="depth") if insight else None


def composition(material: Material) -> Insight | None:
    """Return a finding about the share of layer outputs that match no single memory."""
    rows = [row for row in material.rows("composition") if row["prefixes"]]
    if not rows:
        return None
    mean = sum(row["rate"] for row in rows) / len(rows)
    title = f"{percent(mean)} of layer outputs match no single memory"

    def of_active(material: Material) -> Iterable[str]:
        active = [row["rate_active"] for row in rows if row.get("rate_active") is not None]
        if active:
            yield f"outputs that match no active memory: {percent(sum(active) / len(active))}"

    insight = _by_claim("composition", of_active)(material)
    return replace(insight, name="composition", title=title) if insight else None


def dead(material: Material) -> Insight | None:
    """Return a finding about the number of dead memories."""
    layers = dead_memories(material.index)
    count, total = sum(row.dead for row in layers), sum(row.memories for row in layers)
    if not count:
        title = f"All {total:,} memories are active somewhere in this corpus"
        return Insight("dead", title, (), material.command("report"))
    most = max(layers, key=lambda row: row.share)
    title = f"{count:,} of {total:,} memories ({percent(count / total)}) are never active in this corpus"
    line = f"largest share in layer {most.layer}: {most.dead:,} of {most.memories:,}, for example {most.names[0]}"
    return Insight("dead", title, (line,), material.command("report"))


def _quoted(text: str) -> str:
    return f"'{visible(text)}'"


def _name(material: Material, row: Row) -> MemoryId:
    return material.index.names.name(row["layer"], row["memory"])


def _trigger_lines(triggers: Sequence[Trigger]) -> list[str]:
    return [f"  {tail(trigger.text, _ROOM)}" for trigger in triggers[:_TRIGGERS]]


def memory(material: Material) -> Insight | None:
    """Return a finding about the memory with the clearest subject, or with the clearest wording if there is no subject.

    Patterns are compared by these criteria, in this order: they are subjects, at least _COMMON triggers share them,
    their triggers are whole phrases, the share of the ten strongest held-out triggers that have them, and the number of
    words in the sentences of their triggers that the value promotes.
    """
    index = material.index
    if not (index.has("patterns") and index.has("values")):
        return None
    rows = index.sql(
        """WITH clear AS (
               SELECT *, kind = 'semantic' AS is_subject, len(prefixes) >= $1 AS is_common FROM {patterns}
               WHERE kind <> 'next'
               ORDER BY is_subject DESC, is_common DESC, precision DESC NULLS LAST, confidence DESC, layer, memory,
                        pattern LIMIT $2
           ),
           read AS (
               SELECT layer, memory, pattern, median(t.position) >= $3 AS is_phrase,
                      list_distinct(flatten(list(list_intersect(c.tokens, v.tokens[1:$4])))) AS promoted
               FROM clear JOIN {triggers} t USING (layer, memory) JOIN {corpus} c USING (sentence)
               JOIN {values} v USING (layer, memory)
               WHERE t."end" = 'top' AND list_contains(prefixes, t.rank) GROUP BY layer, memory, pattern
           )
           SELECT layer, memory, is_subject, is_common, is_phrase, precision, description, prefixes, v.tokens, promoted,
                  m.frequency
           FROM clear JOIN read USING (layer, memory, pattern) JOIN {values} v USING (layer, memory)
           JOIN {memories} m USING (layer, memory)
           ORDER BY precision DESC NULLS LAST, confidence DESC, layer, memory, pattern""",
        [_COMMON, _CANDIDATES, _PHRASE, _PROMOTED],
    )
    if not rows:
        return None
    for row in rows:
        row["promoted"] = [token for token in row["tokens"] if token in row["promoted"] and material.is_word(token)]
    row = max(
        rows,
        key=lambda row: (
            row["is_subject"],
            row["is_common"],
            row["is_phrase"],
            row["precision"] or 0,
            len(row["promoted"]),
        ),
    )
    name, ranks = _name(material, row), set(row["prefixes"])
    every = index.triggers(name)
    triggers = [trigger for trigger in every if trigger.rank in ranks]
    compared = min(len(every), index.manifest.patterns.top) if index.manifest.patterns else len(every)
    heading = f"shared by {len(ranks)} of its {compared} strongest triggers:"
    tokens = ", ".join(_quoted(index.vocabulary[token]) for token in row["promoted"])
    in_sentences = [f"top tokens that occur in these sentences: {tokens}"] if tokens else []
    active = f"active on {percent(row['frequency'])} of prefixes"
    promotes = "promotes " + ", ".join(_quoted(index.vocabulary[token]) for token in row["tokens"][:_TOKENS])
    lines = (heading, *_trigger_lines(triggers), promotes, *in_sentences, active)
    kind = "a subject" if row["is_subject"] else "a wording"
    title = f"{name} detects {kind}: {visible(row['description']).removeprefix('about: ')}"
    return Insight("memory", title, lines, material.command("show", str(name)))


def right(material: Material) -> Insight | None:
    """Return a finding about the memory whose value's top token follows the largest share of its triggers."""
    index = material.index
    if not index.has("values"):
        return None
    rows = index.sql(
        """SELECT layer, memory, v.argmax, v.tokens, count(t.next_token) AS followed,
                  count(*) FILTER (t.next_token = v.argmax) AS agree
           FROM {triggers} t JOIN {values} v USING (layer, memory)
           WHERE t."end" = 'top' GROUP BY ALL HAVING agree > 0 AND followed >= $1
           ORDER BY agree / followed DESC, followed DESC, layer, memory""",
        [_LEAST],
    )
    row = material.first_word(rows, lambda row: row["argmax"])
    if row is None:
        return None
    name, token = _name(material, row), row["argmax"]
    every = index.triggers(name)
    triggers = [trigger for trigger in every if trigger.next_token == token]
    word = _quoted(index.vocabulary[token])
    title = f"{name} promotes {word}, and {word} follows {row['agree']} of its {row['followed']} strongest triggers"
    command = material.command("show", str(name), "--top", str(len(every)))
    return Insight("right", title, tuple(_trigger_lines(triggers)), command)


def rarest(material: Material) -> Insight | None:
    """Return a finding about the memory with the lowest activation frequency and enough triggers."""
    index = material.index
    rows = index.sql(
        """SELECT layer, memory, frequency FROM {memories}
           JOIN (SELECT layer, memory, count(*) AS n FROM {triggers} WHERE "end" = 'top' GROUP BY ALL)
           USING (layer, memory)
           WHERE NOT dead AND n >= $1 ORDER BY frequency, layer, memory LIMIT 1""",
        [_LEAST],
    )
    if not rows:
        return None
    name = _name(material, rows[0])
    title = f"{name} is rarely active: on {rows[0]['frequency']:.2%} of prefixes"
    lines = (
        *_trigger_lines(index.triggers(name)),
        f"lowest activation frequency among memories with at least {_LEAST} triggers",
    )
    return Insight("rarest", title, lines, material.command("show", str(name)))


def wanted(material: Material) -> Insight | None:
    """Return a finding about the word that is the top token of most values."""
    index = material.index
    if not index.has("values"):
        return None
    rows = index.sql(
        """SELECT argmax, count(*) AS n, min(layer) AS low, max(layer) AS high FROM {values}
           GROUP BY argmax ORDER BY n DESC, argmax"""
    )
    row = material.first_word(rows, lambda row: row["argmax"])
    if row is None or row["n"] < 2:
        return None
    text = index.vocabulary[row["argmax"]]
    kind = "word (apart from the most frequent tokens)" if material.is_word(row["argmax"]) else "token"
    line = f"no other {kind} is the top token of more values; these are in layers {row['low']} to {row['high']}"
    title = f"{_quoted(text)} is the top token of {row['n']:,} values"
    listed = index.sql("SELECT count(*) AS n FROM {values} WHERE list_contains(tokens, $1)", [row["argmax"]])[0]["n"]
    command = material.command("search", text, "--in", "values", "--limit", str(listed))  # all values that list it
    return Insight("wanted", title, (line,), command)


def changed(material: Material) -> Insight | None:
    """Return a finding about the change of a prediction by the last layer to which one memory contributed most."""
    rows = [row for row in material.rows("last-layer") if row["pushes"] and material.is_word(row["residual"])]
    row = material.first_word(sorted(rows, key=lambda row: -row["pushes"][0]), lambda row: row["output"])
    if row is None:
        return None
    name = material.index.names.name(row["layer"], row["memories"][0])
    before, after = _quoted(row["residual_text"]), _quoted(row["output_text"])
    lines = (
        f"  {tail(row['text'], _ROOM)}",
        f"the residual predicts {before}, and the model predicts {after}; {name} contributed most: it raised {after} "
        f"over {before} by {row['pushes'][0]:.2f} logits",
    )
    title = f"The last layer changed the prediction from {before} to {after}"
    return Insight("changed", title, lines, material.command_of("last-layer"))


def forbids(material: Material) -> Insight | None:
    """Return a finding about the memory that most often vetoes the residual's top token."""
    rows = [row for row in material.rows("vetoes") if row["times"] >= 3]
    if not rows:
        return None
    row = min(rows, key=lambda row: (-row["times"] / row["compositions"], row["layer"], row["memory"]))
    name, token = _name(material, row), _quoted(row["token_text"])
    title = f"{name} is among the ten strongest vetoes in {row['times']} of {row['compositions']} compositions"
    line = f"it vetoes {token} most often ({row['token_times']} times), by {-row['push']:.2f} logits on average"
    return Insight("forbids", title, (line,), material.command_of("vetoes"))


def twins(material: Material) -> Insight | None:
    """Return a finding about the largest group of memories with mostly the same triggers."""
    gallery = same_triggers(material.index)
    if not gallery.cards:
        return None
    card = gallery.cards[0]
    others = card.count - 1
    title = f"{card.memories[0]} and {others:,} other{'s' * (others > 1)} have mostly the same triggers"
    lines = (
        *(f"  {tail(example.before + example.token, _ROOM)}" for example in card.examples),
        f"the largest of {gallery.groups:,} groups with {gallery.memories:,} memories in total; the Jaccard index with "
        f"the triggers of {card.memories[0]} is at least {card.least:.2f}",
    )
    return Insight("twins", title, lines, material.command("report"))


def below(material: Material) -> Insight | None:
    """Return a finding about the memory with the largest ratio of its minimum to its maximum coefficient."""
    index = material.index
    rows = index.sql(
        """SELECT layer, memory, min, max FROM {memories}
           JOIN (SELECT DISTINCT layer, memory FROM {triggers} WHERE "end" = 'bottom') USING (layer, memory)
           WHERE max > 0 ORDER BY min / max, layer, memory LIMIT 1"""
    )
    if not rows or rows[0]["min"] >= 0:
        return None
    name = _name(material, rows[0])
    title = f"{name} has the most negative range of coefficients: {rows[0]['min']:.3g} to {rows[0]['max']:.3g}"
    lines = _trigger_lines(index.triggers(name, "bottom"))
    return Insight("below", title, tuple(lines), material.command("show", str(name), "--bottom"))
