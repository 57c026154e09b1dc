"""Reading text before a scan: speed with one process and with several, memory, and where the time goes.

    python benchmarks/text.py FILE [FILE ...] [--model bundled] [--processes 2] [--megabytes 10] [--threads]
    python benchmarks/text.py FILE --memory 10 100           # peak memory of the text stage, megabytes of text each
    python benchmarks/text.py FILE --store 10 1000           # of writing and finding repeats alone, at doublings of the
                                                             # text as beside a scan, without tokenizing

FILE is plain text; its lines are repeated, each with a number that was not there before, until there is enough. Every
run is a process of its own that does what `memlens scan` does before the model starts. Processor time is that of all
its processes, of the fastest of several rounds, in which all ways take turns. The speed-up is the processor time of
one process with one thread over what several take with a core each: their sum shared evenly, and what one of them does
alone after the others. On a machine that does nothing else the clock says the same.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

TARGET = 1.8  # times as fast with two processes
FLAT = 1.15  # times the memory of the smallest text, at most


def write_text(files: list[Path], megabytes: float, path: Path) -> None:
    """Lines of the files, again and again; later ones begin with a number, so that no line is repeated."""
    left = int(megabytes * 1e6)
    with path.open("wb") as out:
        for turn in count():
            for file in files:
                for line in file.read_bytes().splitlines(keepends=True):
                    line = line if turn == 0 or not line.strip() else b"%d %s" % (turn, line)
                    left -= out.write(line)
                    if left <= 0:
                        return


def measure(text: str, model: str, processes: int, dedup: str) -> None:
    """The text stage by itself, its figures as JSON."""
    from memlens.corpus.sentences import corpus_fingerprint, corpus_stamps
    from memlens.corpus.store import store_corpus
    from memlens.index.build import longest_sentence
    from memlens.models.load import load
    from memlens.settings import CorpusSettings, ScanSettings

    loaded = load(model, prove=False)
    corpus, settings = CorpusSettings((text,)), ScanSettings(dedup=dedup)
    figures: dict[str, float] = {"before_mb": peak_mb()}
    time_repeats(figures)
    with TemporaryDirectory() as folder:
        clock, began = time.monotonic(), spent()
        stamps = corpus_stamps(corpus)
        corpus_fingerprint(corpus)
        figures["fingerprint"] = spent() - began
        store = store_corpus(
            Path(folder),
            corpus,
            loaded.tokenizer,
            stamps=stamps,
            vocabulary=loaded.vocabulary,
            model_name=loaded.name,
            max_length=longest_sentence(loaded, settings),
            max_tokens=settings.max_tokens,
            dedup=dedup,
            processes=processes,
        )
        figures |= {"clock": time.monotonic() - clock, "own": spent() - began, "sentences": store.counts["sentences"]}
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures |= {"others": children.ru_utime + children.ru_stime, "others_mb": children.ru_maxrss / 1024}
    figures |= {"tokens": store.counts["tokens"], "peak_mb": peak_mb()}
    print(json.dumps(figures))


def time_repeats(figures: dict[str, float]) -> None:
    """Have the processor time of finding repeats noted when that is done."""
    from memlens.corpus import store

    find_repeats = store.find_repeats

    def timed(*arguments: Any) -> Any:
        began = spent()
        found = find_repeats(*arguments)
        figures["repeats"] = figures.get("repeats", 0.0) + spent() - began
        return found

    store.find_repeats = timed


def measure_store(text: str, model: str, megabytes: float) -> None:
    """What comes after tokenizing: one megabyte is encoded, and stored again and again with other tokens each time."""
    import numpy as np
    import pyarrow as pa

    from memlens.corpus.encoding import EncodedChunk, encode_corpus
    from memlens.corpus.store import CorpusStore, write_corpus
    from memlens.models.load import load
    from memlens.settings import CorpusSettings

    loaded = load(model, prove=False)
    given = list(
        encode_corpus(CorpusSettings((text,)), loaded.tokenizer, max_length=loaded.context, max_tokens=300_000)
    )

    def chunks() -> Iterator[EncodedChunk]:
        read = 0
        for turn in count():
            other = np.random.default_rng(turn).permutation(loaded.vocabulary).astype(np.int32)
            for chunk in given:
                lists = chunk.rows.column("tokens")
                tokens = pa.ListArray.from_arrays(lists.offsets, pa.array(other[lists.values.to_numpy()]))
                yield EncodedChunk(chunk.rows.set_column(1, chunk.rows.schema.field(1), tokens), chunk.read)
                read += chunk.read
                if read >= megabytes * 1e6:
                    return

    figures: dict[str, float] = {"before_mb": peak_mb(), "others_mb": 0}
    time_repeats(figures)
    with TemporaryDirectory() as folder:
        clock, began = time.monotonic(), spent()
        write_corpus(Path(folder), chunks(), "prefix", lambda read: None, lambda windows: None)
        store = CorpusStore(Path(folder))
        figures |= {"clock": time.monotonic() - clock, "own": spent() - began, "sentences": store.counts["sentences"]}
    print(json.dumps(figures | {"peak_mb": peak_mb()}))


def spent() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(text: Path, given: argparse.Namespace, processes: int, threads: bool = False) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", str(text), given.model, str(processes), given.dedup]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "true" if threads else "false"}
    figures: dict[str, float] = json.loads(subprocess.check_output(command, env=environment))
    return figures


def compare_speed(text: Path, given: argparse.Namespace) -> bool:
    size = text.stat().st_size / 1e6
    several = f"{given.processes} processes"
    ways = {"one process, one thread": (1, False), several: (given.processes, False)}
    if given.threads:
        ways["one process, threads of the tokenizer"] = (1, True)
    rounds: list[dict[str, dict[str, float]]] = []
    for _ in range(given.rounds):
        rounds.append({})
        for name, way in ways.items():
            one = rounds[-1][name] = run(text, given, *way)
            print(
                f"{size:.1f} MB, {name:38s} processor {one['own']:6.2f} s + {one['others']:6.2f} s (repeats "
                f"{one['repeats']:.2f}, fingerprint {one['fingerprint']:.2f}); clock {one['clock']:6.2f} s, "
                f"{size / one['clock']:.2f} MB/s",
                flush=True,
            )
    best = {name: min((one[name] for one in rounds), key=lambda one: one["own"] + one["others"]) for name in ways}
    alone, shared = best["one process, one thread"], best[several]
    at_once = shared["own"] + shared["others"] - shared["repeats"]
    longest = max(at_once / given.processes, shared["own"] - shared["repeats"])
    ratio = alone["own"] / (longest + shared["repeats"])
    clocks = sorted(one["one process, one thread"]["clock"] / one[several]["clock"] for one in rounds)
    by_clock = ", ".join(f"{clock:.2f}" for clock in clocks)
    print(f"{alone['sentences']:,.0f} sentences, {alone['tokens']:,.0f} tokens, --dedup {given.dedup}")
    print(f"speed-up by processor time {ratio:.2f} (target {TARGET} with 2), by the clock {by_clock}")
    return ratio >= TARGET


def compare_memory(folder: Path, given: argparse.Namespace) -> bool:
    peaks = []
    for megabytes in given.memory or given.store:
        text = folder / "text.txt"
        write_text(given.files, megabytes if given.memory else 2, text)
        if given.memory:
            one = run(text, given, given.processes)
        else:
            command = [sys.executable, __file__, "--measure-store", str(text), given.model, str(megabytes)]
            one = json.loads(subprocess.check_output(command))
        peaks.append(one["peak_mb"])
        print(
            f"{megabytes:8,.0f} MB of text: peak {one['peak_mb']:,.0f} MB ({one['before_mb']:,.0f} before it began), "
            f"another process {one['others_mb']:,.0f} MB; {one['sentences']:,} sentences; "
            f"processor {one['own']:,.1f} s (repeats {one['repeats']:,.1f}), clock {one['clock']:,.0f} s",
            flush=True,
        )
    return max(peaks) <= FLAT * peaks[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", action="store_true", help="one process with threads of the tokenizer, too")
    parser.add_argument("--dedup", default="prefix")
    parser.add_argument("--memory", nargs="+", type=float, metavar="MB")
    parser.add_argument("--store", nargs="+", type=float, metavar="MB")
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        if given.memory or given.store:
            sys.exit(not compare_memory(Path(folder), given))
        text = Path(folder) / "text.txt"
        write_text(given.files, given.megabytes, text)
        sys.exit(not compare_speed(text, given))


if __name__ == "__main__":
    if sys.argv[1:2] in (["--measure"], ["--measure-store"]):
        from memlens.process_setup import prepare_process

        prepare_process()  # as the command does
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
    elif sys.argv[1:2] == ["--measure-store"]:
        measure_store(sys.argv[2], sys.argv[3], float(sys.argv[4]))
    else:
        main()
