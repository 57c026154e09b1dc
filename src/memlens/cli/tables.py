"""Tables of the terminal that show and search share: triggers, patterns, both ends of a value, related memories.

Prefixes end in one column, so that what they have in common stands one below the other; long ones are cut at the left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

import memlens
from memlens.cli.screen import Screen
from memlens.memory import MemoryId, Trigger
from memlens.text import cut_left, cut_right, letter, number, percent, plain_table, quoted, sparkline, visible

if TYPE_CHECKING:
    from memlens.index.memory import ExpertRecord, MemoryPattern, MemoryRecord, MemoryValue, TokenNumber

_NEXT_WIDTH = 16
_LEAST_WIDTH = 20  # of a prefix, on the narrowest terminal
_GAPS = 2 * 3
_BOS = "(BOS)"  # the prefix that is nothing but BOS has no text of its own
_WITHIN = "◌"  # a token that is a further byte of the character before it
_END = "(end)"
_MARKED = "bold black on yellow"
_TOKEN_WIDTH = 22
_RARE = " °"  # behind a token that the model hardly met
_KEY_TOKENS = 8
_RELATED = 5


def trigger_table(
    screen: Screen, triggers: Sequence[Trigger], marks: Callable[[int], str] | None = None, head: str = "coeff."
) -> Table:
    """One line per trigger; `marks` gives the letters of the patterns that the trigger of a rank contains."""
    coefficients = [number(trigger.coefficient) for trigger in triggers]
    ranks = [str(trigger.rank) for trigger in triggers]
    letters = [marks(trigger.rank) if marks else "" for trigger in triggers]
    taken = max(map(len, [*coefficients, head])) + max(map(len, [*ranks, "#"])) + _NEXT_WIDTH + _GAPS
    taken += max(map(len, [*letters, "has"])) + 2 if marks else 0
    room = max(screen.out.width - taken, _LEAST_WIDTH)
    rows = [
        [
            rank,
            coefficient,
            *([Text(letter, "magenta")] if marks else []),
            marked_prefix(trigger, room, screen.styled),
            _next_token(trigger),
        ]
        for rank, coefficient, letter, trigger in zip(ranks, coefficients, letters, triggers, strict=True)
    ]
    prefix = ">prefix" if screen.out.is_terminal else "prefix"
    return plain_table([">#", f">{head}", *(["has"] if marks else []), prefix, "next"], rows)


def match_table(screen: Screen, hits: Any) -> Table:
    """Memories that a search has found in triggers, each with its best matching prefix."""
    names = [str(hit.name) for hit in hits]
    has_bottom = any(hit.end == "bottom" for hit in hits)
    taken = max(map(len, [*names, "memory"])) + len("matches" + "rank") + has_bottom * len("bottom  ") + _GAPS
    room = max(screen.out.width - taken, _LEAST_WIDTH)
    rows = [
        [
            name,
            *([hit.end] if has_bottom else []),
            str(hit.matches),
            str(hit.trigger.rank),
            marked_prefix(hit.trigger, room, screen.styled),
        ]
        for name, hit in zip(names, hits, strict=True)
    ]
    prefix = ">prefix" if screen.out.is_terminal else "prefix"
    return plain_table(["memory", *(["end"] if has_bottom else []), ">matches", ">rank", prefix], rows)


def marked_prefix(trigger: Trigger, room: int, styled: bool) -> Text:
    """The prefix in at most `room` columns, its last token in reverse, or between « and » where there is no style."""
    token = (visible(trigger.token) or _WITHIN) if trigger.prefix.position >= 0 else _BOS
    marks = ("", "") if styled else ("«", "»")
    token = cut_left(token, room - len("".join(marks)))
    before = cut_left(visible(trigger.before), room - cell_len(token) - len("".join(marks)))
    return Text.assemble(before, marks[0], (token, _MARKED if styled else ""), marks[1], no_wrap=True)


def _next_token(trigger: Trigger) -> Text:
    if trigger.next_text is None:
        return Text(_END, "dim")
    return Text(cut_right(visible(trigger.next_text), _NEXT_WIDTH), "cyan")


def print_value(screen: Screen, value: MemoryValue, count: int) -> None:
    """Numbers in one line, then both ends as two columns, then the key's own tokens."""
    screen.result()
    over = "" if value.vocabulary == "all" else f", over {value.vocabulary} tokens"
    line = Text.assemble("value", (f" ({value.reading}{over})", "dim"))
    for name, fact in (("max p", value.max_p), ("entropy", value.entropy), ("norm", value.norm)):
        line.append_text(Text.assemble((f"   {name} ", "dim"), number(fact)))
    screen.result(line)
    screen.result(_agreement(value))
    low, high = value.demotes[0].score, value.promotes[0].score
    if value.histogram and low is not None and high is not None:
        spread = Text.assemble(("scores ", "dim"), f"{low:.2f} ", sparkline(value.histogram), f" {high:+.2f}")
        screen.result(spread)

    def cells(token: TokenNumber, style: str) -> list[Any]:
        return [Text(quoted(token.text, _TOKEN_WIDTH) + ("" if token.trained else _RARE), style), number(token.number)]

    ends = zip(value.promotes[:count], value.demotes[:count], strict=True)
    rows = [cells(up, "green") + cells(down, "red") for up, down in ends]
    screen.result(plain_table(["promotes", ">p", "demotes", ">p"], rows))
    if any(not token.trained for token in (*value.promotes[:count], *value.demotes[:count])):
        words = "hardly met in training; without such tokens: memlens values INDEX --vocabulary trained"
        screen.result(Text(f"{_RARE.strip()} {words}", "dim"))
    if value.key:
        tokens = [quoted(token.text, _TOKEN_WIDTH) for token in value.key[:_KEY_TOKENS]]
        screen.result(Text.assemble(("its key alone matches  ", "dim"), _fitting(tokens, screen.out.width - 23)))


def _agreement(value: MemoryValue) -> Text:
    if value.target_text is None:
        return Text("nothing follows its top trigger, so there is no agreement to speak of", "dim")
    target = quoted(value.target_text, _TOKEN_WIDTH)
    if value.agrees:
        return Text.assemble(("✓ agrees", "bold green"), (": its top token follows its top trigger, ", "dim"), target)
    words = ("✗ ", "bold"), (f"{target} follows its top trigger, here at rank {value.target_rank:,}", "dim")
    return Text.assemble(*words)


def _fitting(tokens: list[str], room: int) -> str:
    """Join as many tokens as fit one line."""
    line = tokens[0]
    for token in tokens[1:]:
        if cell_len(line) + 1 + cell_len(token) > room:
            break
        line += " " + token
    return line


def pattern_letters(record: MemoryRecord) -> Callable[[int], str]:
    """The letters of the patterns that the top trigger of a rank contains."""
    return lambda rank: "".join(letter(place) for place in record.patterns_of(rank))


def print_patterns(screen: Screen, record: MemoryRecord) -> None:
    """The memory in one line, how much of it is covered, and each pattern with its letter."""
    summary, patterns = record.summary, record.patterns
    if summary is None or patterns is None:
        return
    screen.result()
    screen.result(Text(visible(summary.name), "bold"))
    words = f"{len(patterns)} {'pattern' if len(patterns) == 1 else 'patterns'}"
    screen.result(Text(f"{words}, {summary.covered} of {summary.triggers} triggers covered", "dim"))
    _print_pattern_table(screen, patterns)


def print_lower_patterns(screen: Screen, record: MemoryRecord) -> None:
    """Print what the most negative triggers have in common, if the index keeps them."""
    if record.lower_patterns is not None:
        screen.result()
        count = len(record.lower_patterns)
        words = f"{count} {'pattern' if count == 1 else 'patterns'} of the most negative triggers"
        screen.result(Text(words, "dim"))
        _print_pattern_table(screen, record.lower_patterns)


def _print_pattern_table(screen: Screen, patterns: Sequence[MemoryPattern]) -> None:
    rows = [
        [
            Text(letter(place), "magenta"),
            pattern.kind,
            str(len(pattern.prefixes)),
            f"{pattern.confidence:.2f}",
            *("–" if score is None else f"{score:.2f}" for score in (pattern.auroc, pattern.auroc_same_token)),
            Text(visible(pattern.description), "cyan"),
        ]
        for place, pattern in enumerate(patterns)
    ]
    if rows:
        heads = ["", "kind", ">prefixes", ">confidence", ">AUROC", ">same token", "pattern"]
        screen.result(plain_table(heads, rows, last_wraps=screen.out.is_terminal))


def print_related(screen: Screen, index: memlens.Index, memory: MemoryId) -> None:
    """The memories that have most in common with this one, and what."""
    from memlens.pattern.related import related_memories

    rows = [
        [
            str(other.name),
            str(other.triggers),
            "–" if other.tokens is None else str(other.tokens),
            Text(visible(", ".join(other.patterns)) or "–"),
        ]
        for other in related_memories(index, memory, _RELATED)
    ]
    if rows:
        screen.result()
        screen.result("related memories")
        heads = ["memory", ">equal triggers", ">equal tokens", "equal patterns"]
        screen.result(plain_table(heads, rows, last_wraps=True))


def print_expert(screen: Screen, expert: ExpertRecord) -> None:
    """One expert: how often it is chosen, on which tokens, what its router's row matches, its strongest memories."""
    line = Text.assemble((str(expert.name), "bold"), f"  {visible(expert.model)}   ", f"{expert.memories:,} memories")
    line.append(f", {expert.dead:,} of them dead" if expert.dead else "")
    screen.result(line)
    if expert.chosen is None:
        screen.result("shared: every token reaches it")
    elif expert.chosen == 0:
        screen.result(Text("never chosen in this corpus", "bold red"))
    else:
        share = f"chosen for {expert.chosen:,} prefixes ({percent(expert.share or 0)}), mean weight "
        screen.result(f"{share}{number(expert.weight or 0)}; a prefix goes to {expert.top_k or 0:.3g} experts here")
    if expert.tokens:
        screen.result()
        screen.result(f"last tokens of {expert.drawn:,} random prefixes that are sent to it")
        screen.result(Text("  ".join(f"{quoted(token.text)} {percent(token.number)}" for token in expert.tokens)))
    if expert.router:
        screen.result()
        screen.result("tokens that its router's row matches, the embedding alone")
        screen.result(Text("  ".join(quoted(token.text) for token in expert.router)))
    if expert.heaviest:
        screen.result()
        screen.result("prefixes with the largest weights")
        screen.result(trigger_table(screen, expert.heaviest, head="weight"))
    screen.result()
    screen.result("memories with the largest coefficients")
    rows = [
        [str(memory.name), number(memory.max), percent(memory.frequency), memory.summary or "–"]
        for memory in expert.strongest
    ]
    screen.result(plain_table(["memory", ">max", ">fires on", "summary"], rows, last_wraps=True))
