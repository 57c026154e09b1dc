"""What a prefix's last word looks like: a year, a number, a capital, an opening quote, -ing, un-.

A shape is a named class of spellings, an affix two to four letters at either end of a word that is longer by at least
one. Every affix of the corpus is a candidate; whether it matters is for statistics to say. Knows spellings only.
"""

from __future__ import annotations

import re

SUFFIX, PREFIX = "suffix", "prefix"
_AFFIXES = (2, 3, 4)
_STEM = 1

# From the special to the general; a word has every shape that it matches.
_SHAPES = {
    "year": re.compile(r"1[0-9]{3}|20[0-9]{2}"),
    "decade": re.compile(r"1[0-9]{2}0s|20[0-9]0s"),
    "ordinal": re.compile(r"[0-9]+(?:st|nd|rd|th)", re.IGNORECASE),
    "number": re.compile(r"[0-9][0-9.,]*"),
    "digit": re.compile(r"[0-9].*[^\W\d_].*|[^\W\d_]+[0-9].*"),
}
OPENING_QUOTE = "opening quote"
DESCRIPTIONS = {
    "year": "ends with a year",
    "decade": "ends with a decade",
    "ordinal": "ends with an ordinal number",
    "number": "ends with a number",
    "digit": "ends with letters and digits",
    "capitals": "ends with a word in capitals",
    "capital": "ends with a capitalised word",
    OPENING_QUOTE: "ends with an opening quote",
}


def features(spelling: str) -> list[str]:
    """Shapes and affixes of a word as written; an affix is `-ing` or `un-`."""
    found = [name for name, form in _SHAPES.items() if form.fullmatch(spelling)]
    if spelling[:1].isupper():
        found.append("capitals" if len(spelling) > 1 and spelling.isupper() else "capital")
    word = spelling.lower()
    if word.isalpha():
        lengths = [size for size in _AFFIXES if len(word) >= size + _STEM]
        found += [f"-{word[-size:]}" for size in lengths]
        found += [f"{word[:size]}-" for size in lengths]
    return found


def describe(feature: str) -> str:
    if feature in DESCRIPTIONS:
        return DESCRIPTIONS[feature]
    side = "in" if feature.startswith("-") else "with a word in"
    return f"ends {side} {feature}"
