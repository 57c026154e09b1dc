"""Search for memories: one engine for `memlens search` and for the workbench.

    triggers   prefixes that contain the text, or end with it; case matters only if the text has capitals
    values     tokens equal to the text, with or without a leading space; if there are none, all tokens that contain it
    patterns   descriptions in which each word of the text is the beginning of a word, ignoring case
    name       a name like L3N51, or its beginning
    no text    all memories, sorted by a statistic

DuckDB searches the tables. Filters apply to every kind of search.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal, get_args

from memlens.errors import SettingError, UnknownName
from memlens.index.memory import read_summaries
from memlens.index.reader import Index, trigger_of
from memlens.memory import ROLES, MemoryId, Trigger, parse_beginning
from memlens.text import visible

Place = Literal["triggers", "values", "patterns", "name"]
Kind = Literal["none", "shallow", "semantic", "both"]
Statistic = Literal["max", "frequency", "mean", "max_p"]
PLACES: tuple[str, ...] = get_args(Place)
_OPTION_PLACES = {  # options that have an effect in some places only
    "ends": ("triggers",),
    "ignore_case": ("triggers",),
    "substring": ("values", "patterns"),
    "bottom": ("values",),
}
_VALUE_COLUMNS = {"top": ("tokens", "p"), "bottom": ("bottom_tokens", "bottom_p")}
_MOST_HITS = 10**9
_MOST_LETTERS = 1000  # maximum number of characters of a query
_MOST_PIECES = 50  # maximum number of tokens to show for a text that is not one token
_SHOWN = 10  # memories in the repr of a result
_MOST_TOKENS = 200  # maximum number of tokens that a text may match


@dataclass(frozen=True)
class SearchQuery:
    """A search: the texts, where to search for them, and filters of memories."""

    texts: tuple[str, ...] = ()  # several texts only for values; without a text, memories are listed by `order`
    place: Place = "triggers"
    layers: tuple[int, ...] | None = None
    kind: Kind | None = None  # memories that have patterns of this kind
    agreement: Literal["yes", "no"] | None = None  # "yes" if the value's top token follows the top trigger
    role: str | None = None  # role from `memlens roles`
    order: Statistic = "max"
    limit: int = 20
    ends: bool = False
    ignore_case: bool | None = None  # None ignores case unless the text has capitals
    substring: bool = False
    bottom: bool = False

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    def condition(self, index: Index, row: str) -> str:
        """Return the filters as an SQL condition on layer and memory. Raises UnknownName or IndexFolderError."""
        key, parts = f"({row}.layer::BIGINT << 32 | {row}.memory)", []
        if self.layers is not None:
            for layer in self.layers:
                index.memories(layer)  # raises UnknownName for a layer that was not scanned
            parts.append(f"{row}.layer IN ({', '.join(map(str, self.layers))})")
        having = "(SELECT layer::BIGINT << 32 | memory FROM {{{}}} WHERE {})"
        for kind in () if self.kind is None else ("shallow", "semantic"):
            is_in = "IN" if self.kind in (kind, "both") else "NOT IN"
            parts.append(f"{key} {is_in} " + having.format("patterns", f"kind = '{kind}'"))
        if self.role is not None:
            if self.role not in ROLES:
                raise UnknownName(f"there is no role '{self.role}'; choose one of: {', '.join(ROLES)}")
            parts.append(f"{key} IN " + having.format("roles", f"list_contains(roles, '{self.role}')"))
        if self.agreement is not None:
            parts.append(
                f"{key} IN " + having.format("values", f"argmax {'=' if self.agreement == 'yes' else '<>'} target")
            )
        return " AND ".join(parts) or "true"


@dataclass(frozen=True)
class MemoryHit:
    """A memory that a search found, with its summary."""

    name: MemoryId
    summary: str | None


@dataclass(frozen=True)
class TriggerHit(MemoryHit):
    """A memory with matching triggers at one end (top or bottom)."""

    end: str
    matches: int
    trigger: Trigger  # the best matching trigger


@dataclass(frozen=True)
class ListedToken:
    """A matching token in the list of a value."""

    token: int
    text: str
    rank: int  # position in the list, from 0
    p: float


@dataclass(frozen=True)
class ValueHit(MemoryHit):
    """A memory whose value lists at least one of the tokens."""

    p: float  # total probability of the matching tokens
    rank: int  # best position of a matching token, from 0
    tokens: tuple[ListedToken, ...]  # matching tokens by rank
    coherence: float  # share of random directions whose top tokens are less similar to each other


@dataclass(frozen=True)
class PatternHit(MemoryHit):
    """A memory with the matching pattern that has the highest confidence."""

    matches: int
    description: str
    kind: str
    confidence: float
    prefixes: int


@dataclass(frozen=True)
class StatisticHit(MemoryHit):
    """A memory with the statistic by which the list is sorted."""

    statistic: str
    number: float


@dataclass(frozen=True, repr=False)
class SearchResult:
    """The best matches and the total number of matches."""

    query: tuple[str, ...]
    place: str
    total: int
    found: tuple[TriggerHit | ValueHit | PatternHit | StatisticHit | MemoryHit, ...]
    note: str | None = None

    def __repr__(self) -> str:
        lines = [f"{hit.name!s:<9} {visible(hit.summary or '')}" for hit in self.found[:_SHOWN]]
        more = [f"... {self.total - len(lines):,} more"] * (self.total > len(lines))
        return "\n".join([f"{self.total:,} memories", *lines, *more])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{hit.name}</td><td style='text-align:left'>{escape(visible(hit.summary or ''))}</td></tr>"
            for hit in self.found
        )
        caption = f"{len(self.found):,} of {self.total:,} memories"
        return f"<table><caption>{caption}</caption><tr><th>memory</th><th>summary</th></tr>{rows}</table>"


Rows = list[dict[str, Any]]


def search(index: Index, query: SearchQuery) -> SearchResult:
    """Return the memories that pass all filters, best matches first."""
    if not 1 <= query.limit <= _MOST_HITS:
        raise SettingError(f"--limit is {query.limit}; it must be 1 or more, and at most {_MOST_HITS:,}")
    if len(query.text) > _MOST_LETTERS:
        raise SettingError(f"the text to search for has {len(query.text):,} characters; give at most {_MOST_LETTERS:,}")
    for option, value, choices in (
        ("in", query.place, PLACES),
        ("kind", query.kind or "none", get_args(Kind)),
        ("agreement", query.agreement or "no", ("yes", "no")),
        ("order", query.order, get_args(Statistic)),
    ):
        if value not in choices:
            raise SettingError(f"--{option} is '{value}'; choose one of: {', '.join(choices)}")
    for option, places in _OPTION_PLACES.items():
        if getattr(query, option) and query.place not in places:
            purpose = f"--{option.replace('_', '-')} is for --in {' or '.join(places)}"
            raise SettingError(f"{purpose} and has no effect with --in {query.place}; leave it out")
    if not query.texts:
        return _list_memories(index, query)
    if query.place == "values":
        return search_values(index, query, "substring" if query.substring else "word")
    if query.place == "patterns":
        return _search_patterns(index, query)
    if query.place == "name":
        return _search_names(index, query)
    return _search_triggers(index, query)


def _result(
    index: Index, query: SearchQuery, rows: Rows, make: Callable[..., Any], note: str | None = None
) -> SearchResult:
    """Return rows as hits. `make` turns a row, the memory's name and its summary into a hit."""
    names = [index.names.name(row["layer"], row["memory"]) for row in rows]
    summaries = read_summaries(index, names)
    hits = tuple(make(row, name, summaries.get(name)) for row, name in zip(rows, names, strict=True))
    return SearchResult(query.texts, query.place, rows[0]["total"] if rows else 0, hits, note)


def _list_memories(index: Index, query: SearchQuery) -> SearchResult:
    table = "{values}" if query.order == "max_p" else "{memories}"
    sql = f"""SELECT layer, memory, {query.order} AS number, count(*) OVER () AS total FROM {table} m
              WHERE isfinite({query.order}) AND {query.condition(index, "m")}
              ORDER BY number DESC, layer, memory LIMIT $1"""
    rows = index.sql(sql, [query.limit])
    return _result(index, query, rows, lambda row, *who: StatisticHit(who[0], who[1], query.order, row["number"]))


def _search_names(index: Index, query: SearchQuery) -> SearchResult:
    typed = parse_beginning(query.text)
    if typed is None:
        raise SettingError(f"'{query.text}' is not the name of a memory; write it like L3N51, counted from 0")
    layer, beginning = typed
    index.memories(layer)  # raises UnknownName for a layer that was not scanned
    sql = f"""SELECT layer, memory, count(*) OVER () AS total FROM {{memories}} m
              WHERE layer = $1 AND starts_with({index.names.sql(layer, "memory")}, $2) AND {query.condition(index, "m")}
              ORDER BY memory LIMIT $3"""
    rows = index.sql(sql, [layer, beginning, query.limit])
    return _result(index, query, rows, lambda row, *who: MemoryHit(who[0], who[1]))


# Words in patterns

_PATTERNS = """
WITH matching AS (
    SELECT p.*, description || ' ' || pattern AS searched FROM {{patterns}} p WHERE {matches} AND {condition}
), best AS (
    SELECT layer, memory, count(*) AS matches, arg_min(pattern, row(-confidence, -len(prefixes), pattern)) AS pattern
    FROM matching GROUP BY layer, memory
)
SELECT layer, memory, best.matches, p.description, p.kind, p.confidence, len(p.prefixes) AS prefixes,
       count(*) OVER () AS total
FROM best JOIN {{patterns}} p USING (layer, memory, pattern)
ORDER BY p.confidence DESC, len(p.prefixes) DESC, layer, memory LIMIT $1
"""


def _search_patterns(index: Index, query: SearchQuery) -> SearchResult:
    """Search the descriptions of patterns. Spaces, quotes, commas and colons separate words."""
    words = re.findall(r'[^\s",:]+', query.text)
    if not words:
        raise SettingError("the text to search for contains no words; give at least one")
    parameters = [query.text] if query.substring else words
    matches = [f"contains(lower(searched), lower(${place}))" for place in range(2, len(parameters) + 2)]
    if not query.substring:  # regular expressions are slower, but few descriptions remain
        parameters = parameters + [rf'(?i)(^|[\s",:]){re.escape(word)}' for word in words]
        matches += [f"regexp_matches(searched, ${place})" for place in range(len(words) + 2, 2 * len(words) + 2)]
    sql = _PATTERNS.format(matches=" AND ".join(matches), condition=query.condition(index, "p"))
    columns = ("matches", "description", "kind", "confidence", "prefixes")
    rows = index.sql(sql, [query.limit, *parameters])
    return _result(index, query, rows, lambda row, *who: PatternHit(*who, *(row[name] for name in columns)))


# Tokens in values

_VALUES = """
WITH searched AS (SELECT unnest($1::INTEGER[]) AS token, unnest($2::INTEGER[]) AS query),
listed AS (
    SELECT layer, memory, coherence, unnest({tokens}) AS token, unnest({p}) AS p, unnest(range(len({tokens}))) AS rank
    FROM {{values}} v WHERE {condition}
), hits AS (
    SELECT layer, memory, any_value(coherence) AS coherence, count(DISTINCT query) AS queries,
           sum(p::DOUBLE) AS sum_p, min(rank) AS best,
           list(struct_pack(token := token, rank := rank, p := p) ORDER BY rank) AS found
    FROM listed JOIN searched USING (token) GROUP BY layer, memory
)
SELECT *, count(*) OVER () AS total FROM hits ORDER BY queries DESC, {order}, layer, memory LIMIT $3
"""


def search_values(index: Index, query: SearchQuery, mode: str = "token") -> SearchResult:
    """Return the memories whose values promote (or, with `query.bottom`, demote) the texts.

    Memories that match more of the texts come first, then those with a better position in the value's list, then those
    with a higher total probability (with `query.bottom`, a lower total probability).

    Args:
        index: The index.
        query: The texts and filters.
        mode: "token" requires that each text is one token. "substring" takes all tokens that contain a text. "word"
            takes the tokens that equal a text or, if there are none, the tokens that contain it.

    Raises:
        UnknownName: No token matches a text. In mode "token", the message shows how to split the text into tokens.
        SettingError: There is no text, or too many tokens contain a text.
    """
    if "" in query.texts or not query.texts:
        raise SettingError("the query is empty; give the text of a token, like ' Paris'")
    index.path("values")  # a missing table is reported before unknown tokens
    tokens, note = _find_tokens(index, query.texts, mode)
    query_numbers = [0 if mode == "substring" else number for number in tokens.values()]
    names, numbers = _VALUE_COLUMNS["bottom" if query.bottom else "top"]
    order = "best, sum_p" if query.bottom else "best, sum_p DESC"
    sql = _VALUES.format(tokens=names, p=numbers, condition=query.condition(index, "v"), order=order)
    rows = index.sql(sql, [list(tokens), query_numbers, query.limit])

    def hit(row: dict[str, Any], name: MemoryId, summary: str | None) -> ValueHit:
        matches = tuple(ListedToken(text=index.vocabulary[token["token"]], **token) for token in row["found"])
        return ValueHit(name, summary, row["sum_p"], row["best"], matches, row["coherence"])

    return _result(index, query, rows, hit, note)


def _find_tokens(index: Index, texts: Sequence[str], mode: str) -> tuple[dict[int, int], str | None]:
    """Return {token: number of the first text that it matches}, and a note for the user, or None."""
    numbers: dict[int, int] = {}
    note = None
    readings: dict[str, list[int]] = {}
    for token, reading in enumerate(index.vocabulary):
        readings.setdefault(reading, []).append(token)
    for number, text in enumerate(texts):
        forms = [text] if mode == "token" or text.startswith(" ") else [text, f" {text}"]
        exact = [] if mode == "substring" else [token for form in forms for token in readings.get(form, ())]
        within = [] if exact or mode == "token" else [t for t, word in enumerate(index.vocabulary) if text in word]
        if mode == "substring" and not within:
            raise UnknownName(f"no token of this model contains {text!r}; try a shorter text")
        if not exact and not within:
            raise UnknownName(_describe_split(text, set(readings) - {""}))
        if mode == "word" and within:
            if len(within) > _MOST_TOKENS:
                raise SettingError(f"{len(within):,} tokens of this model contain {text!r}; use a longer text")
            note = f"{text!r} is not a token; {len(within)} tokens contain it"
        for token in exact or within:
            numbers.setdefault(token, number)
    return numbers, note


def _describe_split(text: str, readings: set[str]) -> str:
    advice = "name one of its tokens, or search for a substring"
    split = _split_into_tokens(text, readings)
    if not split:
        return f"{text!r} is neither a token of this model nor a sequence of tokens; {advice}"
    pieces = [*map(repr, split[:_MOST_PIECES]), *["…"] * (len(split) > _MOST_PIECES)]
    return f"{text!r} is not a token of this model but can be split into {' + '.join(pieces)}; {advice}"


def _split_into_tokens(text: str, readings: set[str]) -> list[str] | None:
    """Split the text into the fewest tokens, or return None. The tokenizer may split it differently."""
    # for each position: how many tokens the rest of the text needs, and where the first of these tokens ends
    longest = max((len(reading) for reading in readings), default=0)
    count: list[int | None] = [None] * len(text) + [0]
    ends = [0] * len(text)
    for first in range(len(text) - 1, -1, -1):
        for last in range(min(first + longest, len(text)), first, -1):
            rest, current = count[last], count[first]
            if rest is not None and (current is None or rest + 1 < current) and text[first:last] in readings:
                count[first], ends[first] = rest + 1, last
    if count[0] is None:
        return None
    pieces, first = [], 0
    while first < len(text):
        pieces.append(text[first : ends[first]])
        first = ends[first]
    return pieces


# Text in triggers

# Sentences are filtered first, which makes searching for a rare text fast. A prefix contains the text if it ends no
# earlier than the first occurrence of the text in its sentence. Position -1 is BOS alone, which has no text.
_TRIGGERS = """
WITH hit AS MATERIALIZED (
    SELECT sentence, text, ends, strpos({text}, {pattern}) + length({pattern}) - 1 AS least_end
    FROM {{corpus}} WHERE contains({text}, {pattern})
), matching AS (
    SELECT t.layer, t.memory, t."end", t.rank, struct_pack(rank := t.rank, coefficient := t.coefficient,
           sentence := t.sentence, position := t.position, next_token := t.next_token) AS trigger
    FROM {{triggers}} t JOIN hit ON t.sentence = hit.sentence
    WHERE t.position >= 0 AND {matches} AND {condition}
)
SELECT layer, memory, "end", count(*) AS matches, min(rank) AS rank, arg_min(trigger, rank) AS best,
       count(*) OVER () AS total
FROM matching GROUP BY layer, memory, "end" ORDER BY matches DESC, rank, layer, memory, "end" DESC LIMIT $2
"""


def _search_triggers(index: Index, query: SearchQuery) -> SearchResult:
    if len(query.texts) > 1:
        raise SettingError(f"--in triggers takes one text, but {len(query.texts)} were given; put the text in quotes")
    if not query.text:
        raise SettingError("the text to search for is empty; give at least one character")
    ignores = query.text == query.text.lower() if query.ignore_case is None else query.ignore_case
    text, pattern = ("lower(text)", "lower($1)") if ignores else ("text", "$1")
    stop = "hit.ends[t.position + 1]"
    sql = _TRIGGERS.format(
        text=text,
        pattern=pattern,
        matches=f"suffix(left({text}, {stop}), {pattern})" if query.ends else f"{stop} >= hit.least_end",
        condition=query.condition(index, "t"),
    )
    rows = index.sql(sql, [query.text, query.limit])
    sentences = index.sentences(sorted({row["best"]["sentence"] for row in rows}))

    def hit(row: dict[str, Any], name: MemoryId, summary: str | None) -> TriggerHit:
        trigger = trigger_of(row["best"], sentences.get(row["best"]["sentence"]), index.vocabulary)
        return TriggerHit(name, summary, row["end"], row["matches"], trigger)

    return _result(index, query, rows, hit)
