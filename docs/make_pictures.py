"""Take screenshots of an index for the README and the gallery: charts of its report and pages of the workbench.

    python docs/make_pictures.py INDEX NAME [--memory L5N12] [--parts pictures patterns ...] [--pages memory trace ...]
        [--prompt TEXT --set L5N12=x4]

Writes docs/pictures/NAME-PART.png. Needs the dependencies of the browser tests (`pip install -e '.[dev]'`, chromium).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

PICTURES = Path(__file__).with_name("pictures")
PARTS = ("pictures", "patterns")
SECTIONS = ("findings", "pictures", "verdicts")  # parts of the report that are shown as a whole
PAGES = ("overview", "memory", "trace", "steer")
WIDTH, HEIGHT, MARGIN = 1180, 800, 10


@contextmanager
def serve_workbench(index: Path) -> Iterator[str]:
    """Serve the workbench inside the block. Yields its address."""
    command = [sys.executable, "-m", "memlens", "serve", str(index), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            assert server.stdout is not None
            yield next(match[0] for line in server.stdout if (match := re.search(r"http://[\d.:]+", line)))
        finally:
            server.terminate()


def take_screenshot(page: Any, name: str, selector: str | None = None) -> None:
    """Save one element with a margin, or the visible page, as a picture."""
    path = PICTURES / f"{name}.png"
    page.wait_for_timeout(500)  # charts are drawn after the page has loaded
    clip = None
    if selector is not None:
        box = page.locator(selector).first.bounding_box()
        clip = {side: box[side] - MARGIN for side in ("x", "y")}
        clip |= {side: box[side] + 2 * MARGIN for side in ("width", "height")}
    page.screenshot(path=path, animations="disabled", full_page=clip is not None, clip=clip)
    print(f"{path}: {path.stat().st_size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("index", type=Path, help="Index with a report.")
    parser.add_argument("name", help="Start of the file names.")
    parser.add_argument("--memory", default="L0N0", help="Memory of the memory page.")
    parser.add_argument("--prompt", default="The capital of France is", help="Prompt of the trace and steer pages.")
    parser.add_argument("--set", dest="edit", default="L0N0=0", help="Edit of the steer page.")
    parser.add_argument("--parts", nargs="*", default=PARTS, help="Sections of the report.")
    parser.add_argument("--pages", nargs="*", choices=PAGES, default=PAGES, help="Pages of the workbench.")
    options = parser.parse_args()

    from playwright.sync_api import sync_playwright

    PICTURES.mkdir(exist_ok=True)
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=1.5)
        page.goto((options.index / "report.html").resolve().as_uri())
        for part in options.parts:
            take_screenshot(page, f"{options.name}-{part}", f"#{part}" if part in SECTIONS else f"#{part} figure")
        query = urlencode({"prompt": options.prompt})
        paths = {"overview": "/", "memory": f"/m/{options.memory}", "trace": f"/trace?{query}"}
        paths["steer"] = f"/steer?{query}&{urlencode({'count': 24, 'set': options.edit})}"
        if options.pages:
            with serve_workbench(options.index) as address:
                page.goto(address)
                page.locator(".model-status[data-status=ready]").wait_for(timeout=120_000)
                for name in options.pages:
                    page.goto(address + paths[name])
                    page.wait_for_load_state("networkidle")  # shading and generated text
                    take_screenshot(page, f"{options.name}-{name}")
        browser.close()


if __name__ == "__main__":
    main()
