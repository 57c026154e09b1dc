"""`memlens site` on an index of SmolLM2-135M's size, 46,080 memories with random triggers: seconds and bytes.

python benchmarks/site.py FOLDER [--layers 30] [--memories 1536] [--top 10]
"""

import argparse
import time
from pathlib import Path

from web_index import make_index

import memlens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--memories", type=int, default=1536)
    parser.add_argument("--top", type=int, default=10)
    given = parser.parse_args()
    index = given.folder / "index"
    if not index.exists():
        make_index(index, given.layers, given.memories, 50, 100_000)
    began, worked = time.perf_counter(), time.process_time()
    page = memlens.site(index, out=given.folder / "site", top=given.top)
    took, work = time.perf_counter() - began, time.process_time() - worked
    files = {path: path.stat().st_size for path in page.parent.rglob("*") if path.is_file()}
    first = ["index.html", "static/style.css", "static/overview.css", "static/site.js", "static/overview.js"]
    shown = sum(files[page.parent / name] for name in [*first, "data/map-max.js", "static/icon.svg"])
    print(f"{took:.0f} s ({work:.0f} s of processor time), {len(files):,} files, {sum(files.values()) / 1e6:.1f} MB")
    for part in sorted({path.relative_to(page.parent).parts[:2] for path in files}):
        own = sum(size for path, size in files.items() if path.relative_to(page.parent).parts[:2] == part)
        print(f"  {'/'.join(part):24} {own / 1e6:8.2f} MB")
    print(f"the first page: {shown / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
