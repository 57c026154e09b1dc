"""`local-edits` and the pass over prefixes with one process, with two workers and on Ray: ratios, and equal bytes.

    python benchmarks/edits.py INDEX [--model MODEL] [--workers 2] [--sample 100] [--ray]    # an index that has values

With --ray the same on a cluster of this machine that is there already, beside the workers.

Every process has one thread. Starting workers (libraries, the model) is in the time, as it is for who waits. There are
two ratios: by the clock, which says nothing on a machine that does anything else, and by processor time, of one process
to the busiest of several. The second is what the first would be on idle cores, if no process waited for another.
"""

import argparse
import resource
import shutil
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import memlens
from memlens.process_setup import prepare_process

NAMES = {"local-edits": ("local-edits",), "refinement": ("prefixes", "prefix-layers", "refinement")}


def busy(whose: int) -> float:
    """Processor seconds so far: of this process, or of children that have ended."""
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime


def run(
    index: Path, name: str, sample: int, model: str | None, workers: int, executor: str = "local"
) -> tuple[float, tuple[float, float], list[bytes]]:
    """Seconds by the clock, processor seconds of this process and of each other one on average, and the tables."""
    with TemporaryDirectory() as scratch:
        copy = shutil.copytree(index, Path(scratch) / "index")
        shutil.rmtree(copy / "experiments", ignore_errors=True)
        began, here, there = time.monotonic(), busy(resource.RUSAGE_SELF), busy(resource.RUSAGE_CHILDREN)
        memlens.experiment(copy, name, model=model, sample=sample, threads=1, workers=workers, executor=executor)
        seconds, here = time.monotonic() - began, busy(resource.RUSAGE_SELF) - here
        there = (busy(resource.RUSAGE_CHILDREN) - there) / max(workers - 1, 1)  # the driver is one of the workers
        return (
            seconds,
            (here, there),
            [(copy / "experiments" / f"{table}.parquet").read_bytes() for table in NAMES[name]],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index", type=Path)
    parser.add_argument("--model", help="where it is now, if not where it was scanned")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sample", type=int, default=100, help="memories per layer; forty times as many prefixes")
    parser.add_argument("--ray", action="store_true", help="also on a Ray cluster with so many workers")
    given = parser.parse_args()
    if given.ray:
        import ray

        from memlens.pool import ensure_ray_token

        ensure_ray_token()
        ray.init("local", num_cpus=given.workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    for name in NAMES:
        sample = given.sample if name == "local-edits" else 40 * given.sample
        run(given.index, name, 2, given.model, 1)  # libraries are imported, loops compiled
        one, alone, here = run(given.index, name, sample, given.model, 1)
        more, shared, there = run(given.index, name, sample, given.model, given.workers)
        same = "the same bytes" if here == there else "OTHER BYTES"
        print(f"{name}: {one:.1f} s, with {given.workers} workers {more:.1f} s: {one / more:.2f} x (goal 1.7); {same}")
        print(
            f"  processor time: {alone[0]:.1f} s; {shared[0]:.1f} s here and {shared[1]:.1f} s in a worker process: "
            f"{alone[0] / max(shared):.2f} x"
        )
        if given.ray:
            on_ray, _, there = run(given.index, name, sample, given.model, given.workers, "ray")
            same = "the same bytes" if here == there else "OTHER BYTES"
            print(f"  on Ray {on_ray:.1f} s: {on_ray / more:.2f} x the time of workers (goal 1.10); {same}")


if __name__ == "__main__":
    prepare_process()  # as the command does
    main()
