"""Turn the enwik8 dump of English Wikipedia into plain sentences.

    python training/clean.py enwik8.gz --work DIR

writes DIR/articles.jsonl, one article a line: {"title": ..., "paragraphs": [[sentence, ...], ...]}.
The same input always gives the same output: nothing here is drawn at random.

The aim is clean English prose and not every last sentence: a line that still smells of markup after cleaning is
dropped rather than mended.
"""

import argparse
import gzip
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

import sentencex

PAGE = re.compile(r"<title>(.*?)</title>.*<text[^>]*>(.*)</text>", re.S)
# Namespaces other than articles; a title such as "2001: A Space Odyssey" must not be taken for one.
NAMESPACE = re.compile(r"(Talk|User|Wikipedia|Image|Media|MediaWiki|Template|Help|Category|Portal|Special)( talk)?:")
REDIRECT = re.compile(r"\s*#\s*redirect", re.I)

COMMENT = re.compile(r"<!--.*?(-->|\Z)", re.S)
# Elements whose contents are no prose go with their contents; other tags (<b>, <br>, <font> ...) go alone.
ELEMENT = re.compile(r"<(ref|pre|table|gallery|timeline|div)\b[^<>/]*>.*?</\1\s*>", re.S | re.I)
# A sentence with a formula, an IPA template or the like in it has a hole once that is gone: HOLE drops the sentence.
HOLE = "^"
FORMULA = re.compile(r"<(math|nowiki|code|sup|sub|tt)\b[^<>/]*>.*?</\1\s*>", re.S | re.I)
FOOTNOTE = re.compile(r"\{\{\s*(ref|note|fn|cite|citation|inote|fact|mn|web|book|an|anb|dubious)\b", re.I)
TAG = re.compile(r"</?[a-z][^<>]*>", re.I)
TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")  # innermost ones: applied until none is left
TABLE = re.compile(r"\{\|(?:(?!\{\|).)*?\n\|\}", re.S)
# Image captions hold links of their own, so links are undone from the inside out.
LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
DROPPED_LINK = re.compile(r"\s*(image|media|category|[a-z]{2,3}|[a-z]{2,3}-[a-z-]{2,10}|simple|tokipona)\s*:", re.I)
EXTERNAL = re.compile(r"\[(?:https?|ftp|mailto|news|irc):[^\[\]\s]*(\s[^\[\]]*)?\]", re.I)
URL = re.compile(r"(?:https?|ftp)://\S+", re.I)
QUOTES = re.compile(r"'{2,}")

EMPTY_BRACKETS = re.compile(r"\s*\(\s*(?:[,;:.\-–—/&]|or|and|from|in|see|\s)*\s*\)|\s*\[\s*\]")
BRACKET_START = re.compile(r"\(\s*[,;:]\s*")
BRACKET_END = re.compile(r"\s*[,;:]\s*\)")
SPACE_BEFORE = re.compile(r"\s+([,.;:!?)\]](?:\s|$))")
SPACE_AFTER = re.compile(r"([(\[])\s+")
SPACES = re.compile(r"\s+")

# A line that still holds one of these was not cleaned fully.
LEFTOVER = re.compile(r"[{}|\[\]<>=\\_^~*#•→←]|''|&[a-z]+;|www\.|\bpx\b|\(\)|\bISBN\b|,\s*,| [.)]|\bsee\.$", re.I)
# Sections of lists: titles and publishers are not prose, though "Oxford: Oxford University Press." may pass for it.
HEADING = re.compile(r"=+\s*(.*?)\s*=+\s*$")
LIST_SECTION = re.compile(
    r".*\b(references?|links?|reading|bibliograph|see also|notes|sources|books|literature|publications|works|discograph"
    r"|filmograph|credits|citations|resources|quotations|quotes|trivia)",
    re.I,
)
DASHES = re.compile(r"\s*(?:--+|—)\s*")
WORD = re.compile(r"[^\W\d_]{2,}")
PLAIN = re.compile(r"[A-Za-z ,.'\"-]")
SENTENCE_END = re.compile(r"[.!?][\"')]*$")


def pages(dump: str) -> Iterator[tuple[str, str]]:
    """Title and wiki text of every article that is neither a redirect nor of another namespace."""
    for source in dump.split("</page>"):
        page = PAGE.search(source)
        if page is None:  # no text, or cut off at the end of the dump
            continue
        title, text = html.unescape(page[1]), html.unescape(page[2])
        if not NAMESPACE.match(title) and not REDIRECT.match(text):
            yield title, text


def until_stable(pattern: re.Pattern, replace, text: str, rounds: int = 8) -> str:
    """Apply a substitution of innermost brackets until nothing changes (or the nesting is beyond reason)."""
    for _ in range(rounds):
        text, count = pattern.subn(replace, text)
        if not count:
            break
    return text


def template_text(template: re.Match) -> str:
    """Footnotes and templates with a line of their own (boxes, notices) -> nothing; others leave a hole."""
    at_line_start = template.start() == 0 or template.string[template.start() - 1] == "\n"
    return "" if at_line_start or FOOTNOTE.match(template[0]) else HOLE


def link_text(link: re.Match) -> str:
    """[[a|b]] -> b, [[a]] -> a; images, categories and links to other languages -> nothing."""
    target, _, label = link[1].partition("|")
    if DROPPED_LINK.match(target):
        return ""
    return label.rpartition("|")[2] or target.lstrip(":")


def strip_markup(text: str) -> str:
    """Wiki text -> text with one paragraph (or heading, or list item) a line."""
    text = COMMENT.sub("", text)
    # Twice: the XML of the dump hides HTML entities of the wiki text, as in &amp;nbsp;
    text = html.unescape(text).replace("\u00a0", " ").replace("\u200e", "")
    text = FORMULA.sub(HOLE, ELEMENT.sub("", text))
    text = until_stable(TEMPLATE, template_text, text)
    text = until_stable(TABLE, "", text)
    text = until_stable(LINK, link_text, text, rounds=4)
    # A bare external link is a footnote, a labelled one may be a part of its sentence or an entry of a list.
    text = EXTERNAL.sub(lambda link: HOLE if link[1] else "", text)
    text = URL.sub(HOLE, text)
    text = TAG.sub(" ", text)
    return QUOTES.sub("", text)


def tidy(line: str) -> str:
    """Mend what the removal of markup leaves behind: empty brackets, doubled spaces, spaces before commas."""
    line = line.replace("’", "'").replace("‘", "'").replace("“", '"').replace("”", '"').replace("…", "...")
    line = DASHES.sub(" - ", line)
    line = EMPTY_BRACKETS.sub("", line)
    line = BRACKET_END.sub(")", BRACKET_START.sub("(", line))
    line = SPACE_AFTER.sub(r"\1", SPACE_BEFORE.sub(r"\1", line))
    return SPACES.sub(" ", line).strip()


def is_prose(sentence: str) -> bool:
    """Does a sentence look like English prose: whole, of fitting length, mostly plain letters, no markup?"""
    words = WORD.findall(sentence)
    return (
        len(words) >= 4
        and len(sentence) <= 500
        and (sentence[0].isupper() or sentence[0].isdigit() or sentence[0] in "\"'(")
        and SENTENCE_END.search(sentence) is not None
        and LEFTOVER.search(sentence) is None
        and len(PLAIN.findall(sentence)) >= 0.9 * len(sentence)
        and sentence.count("(") == sentence.count(")")
        and sentence.count('"') % 2 == 0
    )


def paragraphs(text: str) -> Iterator[list[str]]:
    """Runs of consecutive prose sentences; a dropped sentence ends its run, as what follows may lean on it."""
    in_list_section = False
    for line in strip_markup(text).split("\n"):
        heading = HEADING.match(line)
        if heading:
            in_list_section = LIST_SECTION.match(heading[1]) is not None
        # Headings, tables and rules never hold prose; list items and indented lines may, after their mark.
        if in_list_section or line.startswith(("=", "|", "!", "{", "}", "----")):
            continue
        line = tidy(line.lstrip("*#:; \t"))
        if len(line) < 20:
            continue
        run: list[str] = []
        for piece in sentencex.segment("en", line):
            sentence = piece.strip()
            if sentence and is_prose(sentence):
                run.append(sentence)
            elif run:
                yield run
                run = []
        if run:
            yield run


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dump", type=Path, help="enwik8 or enwik8.gz")
    parser.add_argument("--work", type=Path, required=True, help="directory to write articles.jsonl to")
    options = parser.parse_args()
    opener = gzip.open if options.dump.suffix == ".gz" else open
    with opener(options.dump, "rb") as file:
        dump = file.read().decode("utf-8", errors="ignore")  # enwik8 is cut in the middle of an article

    articles = sentences = characters = 0
    options.work.mkdir(parents=True, exist_ok=True)
    with (options.work / "articles.jsonl").open("w", encoding="utf-8") as out:
        for title, text in pages(dump):
            found = list(paragraphs(text))
            if found:
                out.write(json.dumps({"title": title, "paragraphs": found}, ensure_ascii=False) + "\n")
                articles += 1
                sentences += sum(map(len, found))
                characters += sum(len(sentence) for run in found for sentence in run)
    print(f"{articles} articles, {sentences} sentences, {characters} characters")


if __name__ == "__main__":
    main()
