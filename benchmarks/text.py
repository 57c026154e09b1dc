"""Speed of reading text before a scan, with one process and with several.

    python benchmarks/text.py FILE [FILE ...] [--megabytes 10] [--processes 2] [--model bundled] [--rounds 3]

Repeats the lines of the files, each time with another number in front, until there is enough text. Every run is a
separate process that does what `memlens scan` does before the model starts: split, tokenize, store and find repeats.

The speed-up compares processor time, which does not depend on other programs: one process against several that have a
core each. Finding repeats is sequential and counts in full. The speed-up by the clock is printed as well.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

TARGET = 1.8  # speed-up with two processes
Figures = dict[str, float]


def write_text(files: list[Path], megabytes: float, path: Path) -> None:
    """Write this much text without repeated lines."""
    remaining = int(megabytes * 1e6)
    with path.open("wb") as out:
        for turn in count():
            for file in files:
                for line in file.read_bytes().splitlines(keepends=True):
                    line = line if turn == 0 or not line.strip() else b"%d %s" % (turn, line)
                    remaining -= out.write(line)
                    if remaining <= 0:
                        return


def measure(text: str, model: str, processes: int) -> None:
    """Store the text as a scan does, and print the figures as JSON."""
    from memlens.corpus import store
    from memlens.corpus.sentences import corpus_stamps
    from memlens.index.build import longest_sentence
    from memlens.models.load import load
    from memlens.settings import CorpusSettings, ScanSettings

    figures: Figures = {}
    find_repeats = store.find_repeats

    def timed_find_repeats(*arguments: Any) -> Any:
        start = own_seconds()
        result = find_repeats(*arguments)
        figures["repeats"] = figures.get("repeats", 0.0) + own_seconds() - start
        return result

    store.find_repeats = timed_find_repeats
    loaded = load(model, prove=False)
    corpus, settings = CorpusSettings((text,)), ScanSettings()
    with TemporaryDirectory() as folder:
        clock, start = time.monotonic(), own_seconds()
        stored = store.store_corpus(
            Path(folder),
            corpus,
            loaded.tokenizer,
            stamps=corpus_stamps(corpus),
            vocabulary=loaded.vocabulary,
            model_name=loaded.name,
            max_length=longest_sentence(loaded, settings),
            max_tokens=settings.max_tokens,
            dedup=settings.dedup,
            processes=processes,
        )
        figures |= {"clock": time.monotonic() - clock, "driver": own_seconds() - start}
        figures |= {name: stored.counts[name] for name in ("sentences", "tokens")}
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(json.dumps(figures | {"workers": children.ru_utime + children.ru_stime}))


def own_seconds() -> float:
    """Return the processor time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run(text: Path, model: str, processes: int) -> Figures:
    command = [sys.executable, __file__, "--measure", str(text), model, str(processes)]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    figures: Figures = json.loads(subprocess.check_output(command, env=environment))
    size = text.stat().st_size / 1e6
    print(
        f"{size:.1f} MB, {processes} processes: processor {figures['driver'] + figures['workers']:.2f} s "
        f"(repeats {figures['repeats']:.2f} s), clock {figures['clock']:.2f} s, {size / figures['clock']:.2f} MB/s",
        flush=True,
    )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="Plain text.")
    parser.add_argument("--megabytes", type=float, default=10, help="Text to read.")
    parser.add_argument("--processes", type=int, default=2, help="Processes to compare with one.")
    parser.add_argument("--model", default="bundled", help="Model whose tokenizer is used.")
    parser.add_argument("--rounds", type=int, default=3, help="Repetitions; the fastest one counts.")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        write_text(options.files, options.megabytes, text)
        rounds = [
            [run(text, options.model, processes) for processes in (1, options.processes)] for _ in range(options.rounds)
        ]
    one, several = (
        min(column, key=lambda figures: figures["driver"] + figures["workers"]) for column in zip(*rounds, strict=True)
    )
    parallel = several["driver"] + several["workers"] - several["repeats"]
    longest = max(parallel / options.processes, several["driver"] - several["repeats"])
    ratio = (one["driver"] + one["workers"]) / (longest + several["repeats"])
    by_clock = ", ".join(f"{first['clock'] / second['clock']:.2f}" for first, second in rounds)
    print(f"{one['sentences']:,.0f} sentences, {one['tokens']:,.0f} tokens")
    print(f"speed-up by processor time {ratio:.2f} (target {TARGET} with 2 processes), by the clock {by_clock}")
    sys.exit(ratio < TARGET)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        from memlens.process_setup import prepare_process

        prepare_process()  # as the command does
        measure(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
