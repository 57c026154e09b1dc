"""Take the pictures of README and gallery from an index: parts of its report, and pages of the workbench.

    python docs/make_pictures.py INDEX NAME [--memory L5N12] [--parts claims refinement ...] [--pages memory trace ...]
        [--prompt TEXT --set L5N12=x4]

writes docs/pictures/NAME-PART.png. It needs what the browser tests need (`pip install -e '.[dev]'`, chromium). What the
pictures show is the index's matter; nothing is drawn or changed here.
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
PARTS = ("claims", "patterns", "local-edits", "agreement", "refinement", "composition", "cases")
PAGES = ("overview", "memory", "trace", "steer")
WIDTH, HEIGHT, ROOM = 1180, 800, 10


@contextmanager
def workbench(index: Path) -> Iterator[str]:
    """The address of the index's workbench while it is served."""
    command = [sys.executable, "-m", "memlens", "serve", str(index), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            assert server.stdout is not None
            yield next(found[0] for line in server.stdout if (found := re.search(r"http://[\d.:]+", line)))
        finally:
            server.terminate()


def take(page: Any, name: str, selector: str | None = None) -> None:
    """One element with some room around it, or what the window shows, as a picture."""
    path = PICTURES / f"{name}.png"
    page.wait_for_timeout(500)  # charts are drawn after the page is there
    clip = None
    if selector is not None:
        box = page.locator(selector).first.bounding_box()
        clip = {side: box[side] - ROOM for side in ("x", "y")}
        clip |= {side: box[side] + 2 * ROOM for side in ("width", "height")}
    page.screenshot(path=path, animations="disabled", full_page=clip is not None, clip=clip)
    print(f"{path}: {path.stat().st_size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("index", type=Path)
    parser.add_argument("name")
    parser.add_argument("--memory", default="L0N0")
    parser.add_argument("--prompt", default="The capital of France is", help="of the pages trace and steer")
    parser.add_argument("--set", dest="edit", default="L0N0=0", help="the edit of the page steer")
    parser.add_argument("--parts", nargs="*", default=PARTS)
    parser.add_argument("--pages", nargs="*", choices=PAGES, default=PAGES)
    chosen = parser.parse_args()

    from playwright.sync_api import sync_playwright

    PICTURES.mkdir(exist_ok=True)
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=1.5)
        page.goto((chosen.index / "report.html").resolve().as_uri())
        for part in chosen.parts:
            take(page, f"{chosen.name}-{part}", "#verdicts" if part == "claims" else f"#{part} figure")
        asked = urlencode({"prompt": chosen.prompt})
        paths = {"overview": "/", "memory": f"/m/{chosen.memory}", "trace": f"/trace?{asked}"}
        paths["steer"] = f"/steer?{asked}&{urlencode({'count': 24, 'set': chosen.edit})}"
        with workbench(chosen.index) as address:
            page.goto(address)
            page.locator(".model-status[data-status=ready]").wait_for(timeout=120_000)
            for name in chosen.pages:
                page.goto(address + paths[name])
                page.wait_for_load_state("networkidle")  # shading, texts that go on
                take(page, f"{chosen.name}-{name}")
        browser.close()


if __name__ == "__main__":
    main()
