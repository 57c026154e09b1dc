"""Turn the enwik8 dump of English Wikipedia into plain sentences.

    python training/clean.py enwik8.gz --work DIR

Writes DIR/articles.jsonl with one article per line: {"title": ..., "paragraphs": [[sentence, ...], ...]}. The output is
deterministic. Lines that still contain markup after cleaning are dropped.
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
# Namespaces other than articles. A title such as "2001: A Space Odyssey" is not in one of them.
NAMESPACE = re.compile(r"(Talk|User|Wikipedia|Image|Media|MediaWiki|Template|Help|Category|Portal|Special)( talk)?:")
REDIRECT = re.compile(r"\s*#\s*redirect", re.I)

COMMENT = re.compile(r"<!--.*?(-->|\Z)", re.S)
# Elements that are removed with their content. Of other tags (<b>, <br>, <font> ...), the content is kept.
ELEMENT = re.compile(r"<(ref|pre|table|gallery|timeline|div)\b[^<>/]*>.*?</\1\s*>", re.S | re.I)
# Marks the place of a removed formula or template. Sentences that contain it are dropped.
HOLE = "^"
FORMULA = re.compile(r"<(math|nowiki|code|sup|sub|tt)\b[^<>/]*>.*?</\1\s*>", re.S | re.I)
FOOTNOTE = re.compile(r"\{\{\s*(ref|note|fn|cite|citation|inote|fact|mn|web|book|an|anb|dubious)\b", re.I)
TAG = re.compile(r"</?[a-z][^<>]*>", re.I)
TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")  # matches the innermost ones; applied repeatedly
TABLE = re.compile(r"\{\|(?:(?!\{\|).)*?\n\|\}", re.S)
# Image captions can contain links, so the innermost links are resolved first.
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

# Lines with one of these were not cleaned completely.
LEFTOVER = re.compile(r"[{}|\[\]<>=\\_^~*#•→←]|''|&[a-z]+;|www\.|\bpx\b|\(\)|\bISBN\b|,\s*,| [.)]|\bsee\.$", re.I)
# Sections that contain lists. "Oxford: Oxford University Press." would otherwise pass for prose.
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
    """Yield the title and wiki text of every article, without redirects and other namespaces."""
    for source in dump.split("</page>"):
        page = PAGE.search(source)
        if page is None:  # no text, or cut off at the end of the dump
            continue
        title, text = html.unescape(page[1]), html.unescape(page[2])
        if not NAMESPACE.match(title) and not REDIRECT.match(text):
            yield title, text


def until_stable(pattern: re.Pattern, replace, text: str, rounds: int = 8) -> str:
    """Apply a substitution of innermost brackets until nothing changes, at most `rounds` times."""
    for _ in range(rounds):
        text, count = pattern.subn(replace, text)
        if not count:
            break
    return text


def template_text(template: re.Match) -> str:
    """Return "" for footnotes and for templates at the start of a line (boxes, notices), otherwise HOLE."""
    at_line_start = template.start() == 0 or template.string[template.start() - 1] == "\n"
    return "" if at_line_start or FOOTNOTE.match(template[0]) else HOLE


def link_text(link: re.Match) -> str:
    """Return b for [[a|b]], a for [[a]], and "" for images, categories and links to other languages."""
    target, _, label = link[1].partition("|")
    if DROPPED_LINK.match(target):
        return ""
    return label.rpartition("|")[2] or target.lstrip(":")


def strip_markup(text: str) -> str:
    """Return wiki text as plain text with one paragraph, heading or list item per line."""
    text = COMMENT.sub("", text)
    # Unescape a second time: entities of the wiki text are escaped in the XML, as in &amp;nbsp;
    text = html.unescape(text).replace("\u00a0", " ").replace("\u200e", "")
    text = FORMULA.sub(HOLE, ELEMENT.sub("", text))
    text = until_stable(TEMPLATE, template_text, text)
    text = until_stable(TABLE, "", text)
    text = until_stable(LINK, link_text, text, rounds=4)
    # An external link without a label is a footnote. One with a label may be part of a sentence.
    text = EXTERNAL.sub(lambda link: HOLE if link[1] else "", text)
    text = URL.sub(HOLE, text)
    text = TAG.sub(" ", text)
    return QUOTES.sub("", text)


def tidy(line: str) -> str:
    """Remove empty brackets, double spaces and spaces before commas, which removed markup leaves behind."""
    line = line.replace("’", "'").replace("‘", "'").replace("“", '"').replace("”", '"').replace("…", "...")
    line = DASHES.sub(" - ", line)
    line = EMPTY_BRACKETS.sub("", line)
    line = BRACKET_END.sub(")", BRACKET_START.sub("(", line))
    line = SPACE_AFTER.sub(r"\1", SPACE_BEFORE.sub(r"\1", line))
    return SPACES.sub(" ", line).strip()


def is_prose(sentence: str) -> bool:
    """Return True for a complete sentence of moderate length with mostly plain letters and no markup."""
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
    """Yield runs of consecutive prose sentences. A dropped sentence ends the run, because the next may refer to it."""
    in_list_section = False
    for line in strip_markup(text).split("\n"):
        heading = HEADING.match(line)
        if heading:
            in_list_section = LIST_SECTION.match(heading[1]) is not None
        # Headings, tables and rules never contain prose. List items and indented lines may.
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
