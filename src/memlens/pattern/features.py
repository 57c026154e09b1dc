"""Shallow features of prefixes as 63-bit keys, their descriptions, and their frequencies in random prefixes.

    FRAME          the last three words with a gap: "was … on", "was …", "was the …"
    ENDING + n     the last n words, n = 1..3
    ANYWHERE + n   n consecutive words anywhere in the window
    SHAPE          properties of the last word: its shape (year, capital, opening quote), an affix (-ing, un-), the last
                   token as a piece inside a word, the class of the last token (tokens.parquet), a word list, and the
                   kind of word inside which the prefix ends (any, capitalized, number, year); also a word list or word
                   form of the second-to-last word, the first word of the sentence, the number of words in the sentence
                   so far, whether a bracket is open, and the next token

An affix has two to four letters and is shorter than its word. A key contains the kind of the feature and up to three
word numbers, so it can be decoded without a table of keys.

Classes of words come from the model's embeddings and have no names. If three quarters of the words of a class are in
one of the lists below, the class is described by the name of the list, otherwise by its most frequent words. Each list
is also a feature, because people describe words as "a preposition" even if the model does not treat them as similar.
The lists are English.

The background is a seeded sample of all prefixes, which is processed by the same compiled code as triggers. The
frequency of an ending or shape is its count in this sample. An n-gram is more likely in a longer prefix: its
probability in a prefix of L words is 1 - exp(-rate L). The rate is chosen so that the mean of this probability over the
sample equals the frequency of the n-gram in the sample.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memlens.compiling import compiled, compiled_part, sort_, sort_with_
from memlens.pattern.words import GROUNDED, NEXT, WINDOW, PrefixWords, Words
from memlens.stats import upper_share

SHOWN = 3
_ENOUGH = 0.75

_LISTS = {
    "a month": "january february march april may june july august september october november december jan feb mar apr "
    "jun jul aug sept sep oct nov dec",
    "a day of the week": "monday tuesday wednesday thursday friday saturday sunday",
    "a number word": "one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty hundred "
    "thousand million billion dozen",
    "an ordinal word": "first second third fourth fifth sixth seventh eighth ninth tenth last next",
    "a personal pronoun": "i you he she it we they me him her us them himself herself itself themselves myself",
    "a possessive": "my your his her its our their whose",
    "a relative or question word": "who which that what where when why how whose whom whether",
    "a modal verb": "can could may might must shall should will would cannot",
    "a form of be": "be is are was were been being am",
    "a form of have": "have has had having",
    "an article": "the a an",
    "a demonstrative": "this that these those such",
    "a preposition": "of in on at by for with from to into through during under over between among against about near "
    "across after before within without upon toward towards along around behind beyond until since",
    "a conjunction": "and or but nor although though while whereas because since if unless however whilst",
    "a word of amount": "many much several few some most all both each every any more less various numerous other",
    "a word of frequency": "often usually sometimes always never rarely generally frequently commonly typically",
    "a word of degree": "very quite rather so too extremely fairly highly particularly especially more most less",
    "a word of approximation": "about around approximately roughly nearly almost over least estimated",
    "a word of time": "now then later soon today already still ago before after once again",
    "a word of size": "large small big tiny huge great little larger smaller largest smallest vast",
    "a word of kinship": "father mother son daughter brother sister wife husband uncle aunt cousin nephew niece "
    "grandson grandfather grandmother parents children child family sons daughters",
    "a direction": "north south east west northern southern eastern western northeast northwest southeast southwest",
    "a color": "red blue green yellow black white brown grey gray orange purple pink",
    "a title": "mr mrs ms dr sir lord lady president king queen prince princess emperor pope general captain saint st",
    "a unit of time": "year years month months week weeks day days hour hours minute minutes second seconds decade "
    "decades century centuries",
    "a unit of measure": "km m cm mm kg g miles mile metres meters feet foot inches kilometers kilometres pounds tons "
    "acres",
    "a continent": "europe asia africa america australia antarctica",
    "a country": "england france germany spain italy russia china japan india canada australia britain scotland "
    "ireland wales mexico brazil poland greece egypt turkey iran iraq israel sweden norway denmark finland austria "
    "hungary switzerland belgium netherlands portugal argentina cuba vietnam korea pakistan afghanistan",
    "a nationality or language": "english french german spanish italian russian chinese japanese indian canadian "
    "australian british scottish irish welsh mexican polish greek egyptian turkish dutch swedish norwegian danish "
    "finnish american latin arabic hebrew hungarian portuguese roman european african asian jewish",
    "a first name": "john william james george charles thomas robert henry richard edward david michael peter paul "
    "joseph samuel daniel frank arthur walter mary elizabeth anne margaret alexander martin stephen philip louis",
    "a closing mark": ") ] } ” \" '",
    "a mark": ". , ; : ! ? - – — ( ) / & % $",
}
_WORDS = {name: frozenset(words.split()) for name, words in _LISTS.items()}


FUNCTION_LISTS = (
    *("a personal pronoun", "a possessive", "a relative or question word", "a modal verb", "a form of be"),
    *("a form of have", "an article", "a demonstrative", "a preposition", "a conjunction"),
)


def is_content_word(word: str) -> bool:
    """Return True if a lower-case word of at least three letters is not a function word.

    Words that are not ASCII may be shorter.
    """
    has_letters = word.isalpha() and (len(word) > 2 or not word.isascii())
    return has_letters and not any(word in _WORDS[name] for name in FUNCTION_LISTS)


def lists_of(word: str) -> list[str]:
    """Return the names of the lists that contain a lower-case word, such as "a month" and "a modal verb" for may."""
    return [name for name, words in _WORDS.items() if word in words]


def describe_class(examples: Sequence[str]) -> str:
    """Return `ends with a month: may, june, july`, or `ends with a word like barge, ferry, canoe`."""
    shown = ", ".join(examples[:SHOWN])
    lower = [word.lower() for word in examples]
    shares = {name: sum(word in words for word in lower) / len(lower) for name, words in _WORDS.items()}
    best = max(shares, key=lambda name: shares[name])
    return f"ends with {best}: {shown}" if shares[best] >= _ENOUGH else f"ends with a word like {shown}"


LONGEST = 3
FRAME, ENDING, ANYWHERE, SHAPE = 0, 0, 3, 7  # an ending has a word, so ENDING + 0 is free for frames
# The bits above the lowest 40 encode what a SHAPE key describes: the last word, the first word of the sentence, a word
# list with this first word, the number of words of the sentence, the second-to-last word, an open bracket, the class of
# the last token, or the next token.
LAST, FIRST, FIRST_LIST, EARLY, BEFORE, INSIDE, LAST_CLASS, FOLLOWING = 0, 1, 2, 3, 4, 5, 6, 7
EARLY_WORDS = (1, 3, 6)  # a tuple, so that compiled code can read it
_EARLY = {1: "with the first word", 3: "within the first three words", 6: "within the first six words"}
GAP = 0  # stands for any word in a frame
_GAP = " …"  # text of a gap at the end of a frame
BITS, KIND = 20, 60
_MASK = (1 << BITS) - 1
_AFFIXES = (2, 3, 4)
_STEM = 1

KeyArray = NDArray[np.int64]
# Families of hypotheses. Each family has its own cutoff, because there are few classes of words, more single words, and
# very many sequences of words.
_WORDINGS = ("one word at the end", "two words at the end", "three words at the end", "words with a gap at the end")
_ANYWHERE = ("one word anywhere", "two words anywhere", "three words anywhere")
_SORTS_OF = ("forms of last words", "openings of sentences", "sorts of words before them", "classes of last words")
FAMILIES = (*_WORDINGS, *_ANYWHERE, *_SORTS_OF, "next tokens")
GAPS, OF_ANYWHERE = 3, 4  # indexes into FAMILIES; endings of 1 to 3 words have the indexes 0 to 2
OF_LAST_WORDS, OF_OPENINGS, OF_BEFORE, OF_CLASSES, OF_FOLLOWING = 7, 8, 9, 10, 11
_FAMILY = {"frame": GAPS, **dict.fromkeys(("shape", "piece", "list"), OF_LAST_WORDS), "class": OF_CLASSES}
_FAMILY |= {"opening": OF_OPENINGS, "early": OF_OPENINGS, "inside": OF_BEFORE, "before": OF_BEFORE, NEXT: OF_FOLLOWING}

# Shapes of words, most specific first. A word has every shape that it matches.
_SHAPES = {
    "year": re.compile(r"1[0-9]{3}|20[0-9]{2}"),
    "decade": re.compile(r"1[0-9]{2}0s|20[0-9]0s"),
    "ordinal": re.compile(r"[0-9]+(?:st|nd|rd|th)", re.IGNORECASE),
    "number": re.compile(r"[0-9][0-9.,]*"),
    "digit": re.compile(r"[0-9].*[^\W\d_].*|[^\W\d_]+[0-9].*"),
}
OPENING_QUOTE, UNFINISHED = "opening quote", "unfinished"
INSIDE_NAME, INSIDE_NUMBER, INSIDE_YEAR = "inside name", "inside number", "inside year"
_INSIDE = {
    UNFINISHED: "a word",
    INSIDE_NAME: "a capitalized word",
    INSIDE_NUMBER: "a number",
    INSIDE_YEAR: "a year",
}  # descriptions of the word inside which a prefix ends, by shape
STOP, SIGN, SHORT = 1, 2, 3
MOST_LISTS = 3  # maximum number of lists per word
MOST_SORTS = 5  # maximum number of word lists and word forms of the second-to-last word
_SORTS = ("-s", "-ed", "-ing", "-ly", "year", "number")  # word forms of the second-to-last word
PLURAL = "-s"  # words in -ss, -us and -is do not count
_OF_WHOLE_WORDS = (PLURAL, "year", "decade", "ordinal", "number")  # shapes that an incomplete word cannot have
PIECE, CLASS, LIST = "piece ", "class ", "list "  # prefixes of feature names
_DESCRIPTIONS = {
    "year": "ends with a year",
    "decade": "ends with a decade",
    "ordinal": "ends with an ordinal number",
    "number": "ends with a number",
    "digit": "ends with letters and digits",
    "capitals": "ends with a word in capitals",
    "capital": "ends with a capitalized word",
    OPENING_QUOTE: "ends with an opening quote",
    **{shape: f"ends inside {word}" for shape, word in _INSIDE.items()},
    PLURAL: "ends with a plural or another word in -s",
}


def shapes_of(spelling: str) -> list[str]:
    """Return the shapes, affixes (`-ing`, `un-`) and lists of a word as it is written."""
    shapes = [name for name, form in _SHAPES.items() if form.fullmatch(spelling)]
    if spelling[:1].isupper():
        shapes.append("capitals" if len(spelling) > 1 and spelling.isupper() else "capital")
    word = spelling.lower()
    if word.isalpha():
        lengths = [size for size in _AFFIXES if len(word) >= size + _STEM]
        shapes += [f"-{word[-size:]}" for size in lengths]
        shapes += [f"{word[:size]}-" for size in lengths]
        if len(word) > 3 and word.endswith("s") and word[-2] not in "siu":
            shapes.append(PLURAL)
    return shapes + [f"{LIST}{name}" for name in lists_of(word)]


def inside_shapes(spelling: str) -> list[str]:
    """Return the shapes of a prefix that ends inside a word with this complete spelling."""
    if spelling[:1].isdigit():
        is_year = any(_SHAPES[name].fullmatch(spelling) for name in ("year", "decade"))
        return [INSIDE_NUMBER, INSIDE_YEAR] if is_year else [INSIDE_NUMBER]
    return [UNFINISHED, INSIDE_NAME] if spelling[:1].isupper() else [UNFINISHED]


def _mark(word: str) -> int:
    """Return STOP for the end of a sentence, SIGN for other punctuation, SHORT for a short word, or 0."""
    if word and not word[0].isalnum():
        return STOP if word in ".!?" else SIGN
    return SHORT if len(word) <= 2 else 0


def _is_piece(token: str) -> bool:
    """Return True if a token can describe the word that contains it, because it has two letters or is a number."""
    return token.isdigit() or (token.isalpha() and len(token) > 1)


def _describe_shape(shape: str) -> str:
    affix = f"ends {'in' if shape.startswith('-') else 'with a word in'} {shape}"
    return _DESCRIPTIONS.get(shape, affix)


def _describe_before(shape: str) -> str:
    """Return the description of a word list or word form of the second-to-last word."""
    plain = {PLURAL: "a plural or another word in -s", "year": "a year", "number": "a number"}
    return plain.get(shape, f"a word in {shape}" if shape.startswith("-") else shape)


class SpellingFeatures(NamedTuple):
    """The feature numbers of spellings, words and tokens, 0 for none.

    This is a tuple so that compiled code can read it.
    """

    shapes: NDArray[np.int32]  # shapes, affixes and lists of all spellings
    offsets: NDArray[np.int64]  # [spellings + 1]: first entry of each spelling in `shapes`
    inside: NDArray[np.int32]  # [spellings, 2]: shapes of prefixes that end inside the word with this complete spelling
    classes: NDArray[np.int32]  # [grains, vocabulary]: class of each token at each grain (broad to finest)
    pieces: NDArray[np.int32]  # [vocabulary]: feature of the token as a piece inside a word
    lengths: NDArray[np.int32]  # [spellings]: number of letters
    token_lengths: NDArray[np.int32]  # [vocabulary]: number of letters
    marks: NDArray[np.int8]  # [words]: STOP, SIGN (other punctuation), SHORT (may be an abbreviation), or 0
    lists: NDArray[np.int32]  # [words, MOST_LISTS]: lists that contain the word
    sorts: NDArray[np.int32]  # [words, MOST_SORTS]: word lists and word forms of a second-to-last word
    brackets: NDArray[np.int64]  # [2]: word numbers of "(" and ")"
    of_whole_words: NDArray[np.bool_]  # [names + 1]: whether the feature applies to complete words only


def number_features(
    words: Words, last: NDArray[Any], tokens: Sequence[str], classes: NDArray[np.int32]
) -> tuple[SpellingFeatures, list[str]]:
    """Number the features of spellings, words and tokens. Returns the numbers, and the names from number 1 on.

    Args:
        words: The vocabulary.
        last: Spellings that end a prefix. Other spellings get no features.
        tokens: The text of every token.
        classes: The class of every token at each grain (broad to finest), -1 for none. [grains, vocabulary]
    """
    numbers = {name: number for number, name in enumerate((OPENING_QUOTE, *_INSIDE), 1)}

    def number_of(name: str) -> int:
        return numbers.setdefault(name, len(numbers) + 1)

    ends_prefix = np.zeros(len(words.spellings), np.bool_)
    ends_prefix[last] = True
    shapes: list[int] = []
    offsets = [0]
    inside = np.zeros((len(words.spellings), 2), np.int32)
    for row, spelling in enumerate(words.spellings):
        for place, name in enumerate(inside_shapes(spelling)):
            inside[row, place] = numbers[name]
    for spelling, is_last in zip(words.spellings, ends_prefix.tolist(), strict=True):
        if is_last:
            shapes += [number_of(name) for name in shapes_of(spelling)]
        offsets.append(len(shapes))
    pieces = [number_of(f"{PIECE}{text.lower()}") if _is_piece(text) else 0 for text in tokens]
    grains = [
        [0 if number < 0 else number_of(f"{CLASS}{grain}.{number}") for number in row]
        for grain, row in enumerate(classes.tolist())
    ]
    lists = np.zeros((len(words.texts), MOST_LISTS), np.int32)
    sorts = np.zeros((len(words.texts), MOST_SORTS), np.int32)
    for word, text in enumerate(words.texts):
        named = [f"{LIST}{name}" for name in lists_of(text)]
        forms = [name for name in shapes_of(text) if name in _SORTS] if len(text) > 3 else []
        for table, names in ((lists, named), (sorts, named + forms)):
            for place, name in enumerate(names[: table.shape[1]]):
                table[word, place] = number_of(name)
    lengths, token_lengths = (
        np.array([len(text.strip()) for text in texts], np.int32) for texts in (words.spellings, tokens)
    )
    features = SpellingFeatures(
        shapes=np.array(shapes, np.int32),
        offsets=np.array(offsets, np.int64),
        inside=inside,
        classes=np.array(grains, np.int32).reshape(len(grains), len(tokens)),
        pieces=np.array(pieces, np.int32),
        lengths=lengths,
        token_lengths=token_lengths,
        marks=np.array([_mark(text) for text in words.texts], np.int8),
        lists=lists,
        sorts=sorts,
        brackets=np.array([words.find("("), words.find(")")], np.int64),
        of_whole_words=np.array([False, *(name in _OF_WHOLE_WORDS or name.startswith(LIST) for name in numbers)]),
    )
    return features, list(numbers)


@dataclass(frozen=True)
class Feature:
    """A feature, decoded from its key."""

    kind: str  # "ending", "n-gram" or a key of _FAMILY
    words: tuple[int, ...] = ()  # word numbers; GAP for any word
    shape: str = ""  # name of the shape, or the number of a next token

    @property
    def family(self) -> int:
        """The index of the feature's family in FAMILIES."""
        if self.kind in ("ending", "n-gram"):
            return min(len(self.words), LONGEST) - 1 + (OF_ANYWHERE if self.kind == "n-gram" else 0)
        return _FAMILY[self.kind]

    @property
    def places(self) -> frozenset[int]:
        """The places that the feature describes. An n-gram has no places.

        1 is the last word, 2 the second-to-last word, 0 the start of the sentence, and -1 an open bracket.
        """
        if self.kind == "n-gram":
            return frozenset()
        if self.kind in ("opening", "early", "before", "inside"):
            return frozenset([{"before": 2, "inside": -1}.get(self.kind, 0)])
        words = reversed(self.words or (1,))
        return frozenset(place for place, word in enumerate(words, 1) if word != GAP)

    @property
    def is_of_last_word(self) -> bool:
        """Whether the feature describes the last word without naming it."""
        return self.family in (OF_LAST_WORDS, OF_CLASSES) and self.shape != OPENING_QUOTE

    @property
    def is_inside(self) -> bool:
        """Whether the feature describes the word inside which the prefix ends."""
        return self.kind == "shape" and self.shape in _INSIDE

    @property
    def is_broad(self) -> bool:
        """Whether the feature describes a class of words or a position, without naming a word or a piece of a word."""
        of_words = self.kind in ("list", "opening", "early", "before", "inside")
        return of_words or self.shape in (PLURAL, *_INSIDE)

    def text(self, words: Sequence[str] | Mapping[int, str]) -> str:
        """Return the words of the feature as one string. `words` holds the text of each word by number."""
        texts = ["…" if number == GAP else words[number] for number in self.words]
        return " ".join(texts).removeprefix("… ")

    def describe(self, words: Mapping[int, str], examples: Sequence[str] = ()) -> str:
        """Return a description of the feature.

        `words` holds the spellings of the feature's words by number. `examples` are whole words at the described place,
        most frequent first.
        """
        if self.kind == "class":
            return describe_class(examples)
        if self.kind == "early":
            return f"ends {_EARLY[int(self.shape)]} of a sentence"
        if self.kind == "inside":
            return "ends inside brackets"
        shown = f": {', '.join(examples[:SHOWN])}" if examples else ""
        if self.kind == "list":
            return f"ends with {self.shape}{shown}"
        if self.kind == "before":
            return f"{_describe_before(self.shape)} before the last word{shown}"
        if self.kind == "opening":
            return "sentence begins with " + (self.shape + shown if self.shape else f'"{self.text(words)}"')
        if self.kind == "piece":
            return f'ends inside a {"number" if self.shape.isdigit() else "word"} with "{self.shape}"{shown}'
        if self.kind == "shape":
            return _describe_shape(self.shape) + ("" if self.shape == OPENING_QUOTE else shown)
        text = self.text(words)
        if text.endswith(_GAP):
            return f'ends one word after "{text.removesuffix(_GAP)}"'
        return f'{"contains" if self.kind == "n-gram" else "ends with"} "{text}"'

    def name(self, words: Words) -> str:
        """Return a name that is equal for equal features of different memories."""
        return f"{self.kind}:{self.shape or self.text(words.texts)}"


def read_key(key: int, names: Sequence[str]) -> Feature:
    """Decode a key. `names` are the names of numbered features."""
    kind, body = key >> KIND, key & ((1 << KIND) - 1)
    if kind == SHAPE:
        about, number = body >> (2 * BITS), body & _MASK
        if about == EARLY:
            return Feature("early", shape=str(number))
        if about == INSIDE:
            return Feature("inside", shape="brackets")
        if about == FIRST:
            return Feature("opening", (number,))
        if about == FOLLOWING:
            return Feature(NEXT, shape=str(number))
        name = names[number - 1]
        if about == BEFORE:
            return Feature("before", shape=name.removeprefix(LIST))
        if about == FIRST_LIST:
            return Feature("opening", shape=name.removeprefix(LIST))
        for start in (PIECE, CLASS, LIST):
            if name.startswith(start):
                return Feature(start.strip(), shape=name.removeprefix(start))
        return Feature("shape", shape=name)
    if kind == FRAME:
        return Feature("frame", tuple((body >> (BITS * place)) & _MASK for place in (2, 1, 0)))
    length = kind - (ANYWHERE if kind > ANYWHERE else ENDING)
    numbers = tuple((body >> (BITS * place)) & _MASK for place in reversed(range(length)))
    return Feature("ending" if kind <= ANYWHERE else "n-gram", numbers)


_RATES = np.geomspace(1e-9, 20, 4000)


@compiled_part
def _add_keys_(prefixes: PrefixWords, spelled: SpellingFeatures, row: int, keys: Any, count: int) -> int:
    """Append the keys of one prefix to `keys` and return the new count. Repeated n-grams give repeated keys."""
    words, end = prefixes.words, prefixes.offsets[row + 1]
    for start in range(prefixes.offsets[row], end):
        body = np.int64(0)
        for n in range(1, LONGEST + 1):
            if start + n > end or words[start + n - 1] == 0:
                break
            body = (body << BITS) | np.int64(words[start + n - 1])
            if start + n < end or not prefixes.goes_on[row]:  # an incomplete last word is not a word of the text
                keys[count] = (np.int64(ANYWHERE + n) << KIND) | body
                count += 1
            if start + n == end:
                keys[count] = (np.int64(ENDING + n) << KIND) | body
                count += 1
    last = prefixes.last[row]
    for place in range(spelled.offsets[last], spelled.offsets[last + 1]):
        if not (prefixes.goes_on[row] and spelled.of_whole_words[spelled.shapes[place]]):
            keys[count] = (np.int64(SHAPE) << KIND) | np.int64(spelled.shapes[place])
            count += 1
    if prefixes.opens[row]:
        keys[count] = (np.int64(SHAPE) << KIND) | np.int64(1)  # number_features gives OPENING_QUOTE the number 1
        count += 1
    if prefixes.goes_on[row]:
        for number in spelled.inside[prefixes.whole[row]]:
            if number > 0:
                keys[count] = (np.int64(SHAPE) << KIND) | np.int64(number)
                count += 1
    following = np.int64(prefixes.following[row])
    if following >= 0:
        keys[count] = (np.int64(SHAPE) << KIND) | (np.int64(FOLLOWING) << (2 * BITS)) | following
        count += 1
    token = prefixes.tokens[row]
    if token >= 0:
        for grain in range(len(spelled.classes)):
            if spelled.classes[grain, token] > 0:
                own = (np.int64(LAST_CLASS) << (2 * BITS)) | np.int64(spelled.classes[grain, token])
                keys[count] = (np.int64(SHAPE) << KIND) | own
                count += 1
        if spelled.pieces[token] > 0 and spelled.token_lengths[token] < spelled.lengths[last]:
            keys[count] = (np.int64(SHAPE) << KIND) | np.int64(spelled.pieces[token])
            count += 1
    count = _add_opening_(prefixes, spelled, prefixes.offsets[row], end, keys, count)
    count = _add_before_(prefixes, spelled, prefixes.offsets[row], end, keys, count)
    return _add_frames_(words, prefixes.offsets[row], end, keys, count)


@compiled_part
def sentence_start(words: Any, marks: Any, begin: int, end: int) -> int:
    """Return the start of the sentence at the end of words[begin:end], or -1 if the sentence starts before `begin`."""
    start = -1 if end - begin >= WINDOW else begin
    for place in range(end - 2, begin, -1):
        if marks[words[place]] == STOP and marks[words[place - 1]] != SHORT:
            start = place + 1
            break
    while 0 <= start < end - 1 and (marks[words[start]] == STOP or marks[words[start]] == SIGN):
        start += 1
    return start


@compiled_part
def _add_opening_(prefixes: PrefixWords, spelled: SpellingFeatures, begin: int, end: int, keys: Any, count: int) -> int:
    """Append the position in the sentence. If the sentence has several words, append its first word and word lists."""
    start = sentence_start(prefixes.words, spelled.marks, begin, end) if end > begin else -1
    if start < 0:
        return count
    for bound in EARLY_WORDS:
        if end - start <= bound:
            keys[count] = (np.int64(SHAPE) << KIND) | (np.int64(EARLY) << (2 * BITS)) | np.int64(bound)
            count += 1
    first = np.int64(prefixes.words[start])
    if end - start > 1 and first > 0:
        keys[count] = (np.int64(SHAPE) << KIND) | (np.int64(FIRST) << (2 * BITS)) | first
        count += 1
        for number in spelled.lists[first]:
            if number > 0:
                keys[count] = (np.int64(SHAPE) << KIND) | (np.int64(FIRST_LIST) << (2 * BITS)) | np.int64(number)
                count += 1
    return count


@compiled_part
def _add_before_(prefixes: PrefixWords, spelled: SpellingFeatures, begin: int, end: int, keys: Any, count: int) -> int:
    """Append word lists and word forms of the second-to-last word, and whether a bracket is open."""
    if end - begin >= 2:
        for number in spelled.sorts[prefixes.words[end - 2]]:
            if number > 0:
                keys[count] = (np.int64(SHAPE) << KIND) | (np.int64(BEFORE) << (2 * BITS)) | np.int64(number)
                count += 1
    words, opens, closes = prefixes.words, spelled.brackets[0], spelled.brackets[1]
    place = end - 1
    while place >= begin and words[place] != opens and words[place] != closes:
        place -= 1
    # if the bracket is the last word, there is already an ending; unknown words have number 0
    if begin <= place < end - 1 and words[place] == opens and opens > 0:
        keys[count] = (np.int64(SHAPE) << KIND) | (np.int64(INSIDE) << (2 * BITS)) | np.int64(1)
        count += 1
    return count


@compiled_part
def _add_frames_(words: Any, begin: int, end: int, keys: Any, count: int) -> int:
    """Append the frames of the last three words: "one … three", "… two …", "one two …"."""
    if end - begin < 2:
        return count
    first = np.int64(words[end - 3]) if end - begin >= 3 else np.int64(0)
    second, third = np.int64(words[end - 2]), np.int64(words[end - 1])
    if second > 0:
        keys[count] = second << BITS
        count += 1
    if first > 0 and third > 0:
        keys[count] = (first << (2 * BITS)) | third
        count += 1
    if first > 0 and second > 0:
        keys[count] = (first << (2 * BITS)) | (second << BITS)
        count += 1
    return count


@compiled_part
def _room(prefixes: PrefixWords, row: int) -> int:
    """Return an upper bound on the number of keys of a prefix."""
    return (prefixes.offsets[row + 1] - prefixes.offsets[row] + 1) * LONGEST + 58


@compiled
def _all_keys(prefixes: PrefixWords, spelled: SpellingFeatures) -> KeyArray:
    """Return the distinct keys of every prefix, concatenated."""
    total = 0
    for row in range(len(prefixes.last)):
        total += _room(prefixes, row)
    distinct = np.empty(total, np.int64)
    kept = 0
    for row in range(len(prefixes.last)):
        keys = np.empty(_room(prefixes, row), np.int64)
        count = _add_keys_(prefixes, spelled, row, keys, 0)
        sort_(keys, count)
        for i in range(count):
            if i == 0 or keys[i] != keys[i - 1]:
                distinct[kept] = keys[i]
                kept += 1
    return distinct[:kept]


@compiled
def _shared_keys(rows: Any, least: int, prefixes: PrefixWords, spelled: SpellingFeatures) -> tuple[Any, Any, Any, Any]:
    memories, triggers = rows.shape
    total, largest = 0, 0
    for m in range(memories):
        room = 0
        for i in range(triggers):
            if rows[m, i] >= 0:
                room += _room(prefixes, rows[m, i])
        total += room // least + 1
        largest = max(largest, room)
    out_memory, out_key = np.empty(total, np.int32), np.empty(total, np.int64)
    out_set, out_size = np.empty(total, np.uint64), np.empty(total, np.int64)
    keys, owners = np.empty(largest, np.int64), np.empty(largest, np.int64)
    kept = 0
    for m in range(memories):
        count = 0
        for i in range(triggers):
            if rows[m, i] >= 0:
                before = count
                count = _add_keys_(prefixes, spelled, rows[m, i], keys, count)
                for place in range(before, count):
                    owners[place] = i
        sort_with_(keys, owners, count)
        begin = 0
        while begin < count:
            key, members, end = keys[begin], np.uint64(0), begin
            while end < count and keys[end] == key:
                members |= np.uint64(1) << np.uint64(owners[end])
                end += 1
            size = _size(members) if end - begin >= least else 0
            if size >= least:
                out_memory[kept], out_key[kept], out_set[kept], out_size[kept] = m, key, members, size
                kept += 1
            begin = end
    return out_memory[:kept], out_key[:kept], out_set[:kept], out_size[:kept]


@compiled_part
def _size(members: Any) -> int:
    count = 0
    while members:
        members &= members - np.uint64(1)
        count += 1
    return count


def shared_keys(
    rows: NDArray[np.int64], prefixes: PrefixWords, spelled: SpellingFeatures, least: int
) -> tuple[NDArray[np.int32], KeyArray, NDArray[np.uint64], NDArray[np.int64]]:
    """Find keys that at least `least` triggers of a memory share.

    Returns four arrays with one entry per match: the memory, the key, a bit mask of the triggers that have the key, and
    the number of these triggers.
    """
    memory, keys, sets, sizes = _shared_keys(rows, least, prefixes, spelled)
    return memory, keys, sets, sizes


@compiled
def _key_shares(rows: Any, keys: Any, offsets: Any, prefixes: PrefixWords, spelled: SpellingFeatures) -> Any:
    shares = np.zeros(len(keys))
    for m in range(len(rows)):
        first, last = offsets[m], offsets[m + 1]
        there = 0
        for row in rows[m]:
            if row < 0 or first == last:
                continue
            there += 1
            own = np.empty(_room(prefixes, row), np.int64)
            count = _add_keys_(prefixes, spelled, row, own, 0)
            for k in range(first, last):
                for i in range(count):
                    if own[i] == keys[k]:
                        shares[k] += 1
                        break
        if there:
            for k in range(first, last):
                shares[k] /= there
    return shares


def key_shares(
    rows: NDArray[np.int64],
    keys: KeyArray,
    offsets: NDArray[np.int64],
    prefixes: PrefixWords,
    spelled: SpellingFeatures,
) -> NDArray[np.float64]:
    """Return, for each key of each memory, the share of the memory's prefixes that have the key.

    `rows` [memories, t] are the prefixes, -1 for none. The keys of memory m are keys[offsets[m]:offsets[m + 1]].
    """
    shares: NDArray[np.float64] = _key_shares(np.ascontiguousarray(rows), keys, offsets, prefixes, spelled)
    return shares


def families_of(keys: KeyArray) -> NDArray[np.int64]:
    """Return the index of every key's family in FAMILIES, like Feature.family."""
    kinds, about = keys >> KIND, (keys >> (2 * BITS)) & ((1 << BITS) - 1)
    of_wordings = np.array([GAPS, *range(LONGEST), *range(OF_ANYWHERE, OF_ANYWHERE + LONGEST)])[kinds % SHAPE]
    of_shapes = np.full(FOLLOWING + 1, OF_OPENINGS)
    of_shapes[[LAST, BEFORE, INSIDE, LAST_CLASS]] = OF_LAST_WORDS, OF_BEFORE, OF_BEFORE, OF_CLASSES
    of_shapes[FOLLOWING] = OF_FOLLOWING
    of_shapes = of_shapes[np.minimum(about, FOLLOWING)]
    return np.where(kinds == SHAPE, of_shapes, of_wordings)


@dataclass(frozen=True, eq=False)
class Background:
    """The frequencies of features in random prefixes."""

    keys: KeyArray  # keys that occur more than once, sorted
    counts: NDArray[np.int64]
    prefixes: int
    length_shares: NDArray[np.float64]  # [WINDOW + 1]: share of prefixes of each length
    hypotheses: tuple[int, ...]  # number of hypotheses per memory, by family

    @classmethod
    def of(cls, prefixes: PrefixWords, spelled: SpellingFeatures) -> Background:
        keys, counts = np.unique(_all_keys(prefixes, spelled), return_counts=True)
        kept = counts > 1  # a key that is not stored has a count of 1
        lengths = np.bincount(prefixes.lengths, minlength=WINDOW + 1) / max(prefixes.size, 1)
        hypotheses = np.bincount(families_of(keys[counts >= GROUNDED]), minlength=len(FAMILIES))
        return cls(keys[kept], counts[kept], prefixes.size, lengths, tuple(hypotheses.tolist()))

    def count(self, keys: KeyArray) -> NDArray[np.int64]:
        """Return the number of random prefixes with each feature, at least 1."""
        if len(self.keys) == 0:
            return np.ones(len(keys), np.int64)
        where = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[where] == keys, self.counts[where], 1)

    def shares(self, keys: KeyArray, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return an upper bound on the probability that a random prefix has each feature.

        `lengths` [keys, t] are the lengths of the memory's prefixes, -1 for none. The bound of an n-gram is the mean
        over these lengths.
        """
        shares = upper_share(self.count(keys), self.prefixes)
        anywhere = (families_of(keys) >= OF_ANYWHERE) & (families_of(keys) < OF_ANYWHERE + LONGEST)
        there = lengths[anywhere] >= 0
        rates = np.interp(shares[anywhere], self._shares_by_rate(), _RATES)
        chances = (1 - np.exp(-rates[:, None] * np.maximum(lengths[anywhere], 0))) * there
        shares[anywhere] = chances.sum(1) / np.maximum(there.sum(1), 1)
        return np.maximum(shares, 1e-300)

    def _shares_by_rate(self) -> NDArray[np.float64]:
        chances = 1 - np.exp(-_RATES[:, None] * np.arange(WINDOW + 1)[None, :])
        by_rate: NDArray[np.float64] = chances @ self.length_shares
        return by_rate
