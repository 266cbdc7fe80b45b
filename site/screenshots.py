"""Make the pictures of docs/view.md: pages of `rllm view` over runs that are there, in a real Chromium.

    python site/screenshots.py runs

Four pictures: wide and narrow, light and dark. The first two runs by name are shown, and of one the episode
with the most tokens that were trained on.
"""

import math
import os
import secrets
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from rllm.environments.web.chromium import find_chromium, require_browser
from rllm.errors import ConfigError
from rllm.store.episodes import TRAIN_PHASE, EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.view.server import ViewServer
from rllm.view.sources import Sources

PICTURES = Path(__file__).parents[1] / "docs" / "view"


@dataclass(kw_only=True, slots=True, frozen=True)
class Picture:
    """One page as a browser shows it."""

    name: str
    place: str
    """Behind `#/` in its address."""
    width: int
    height: int
    scheme: str
    scale: float = 1.0
    """Pixels of the picture for each of the page: 3840 are too many for a page of a book."""


def pictures_of(runs: Path) -> list[Picture]:
    """Raises ConfigError where there are not two runs, or nothing was learned from in the first."""
    found = Sources([runs])
    keys = sorted(found.runs())[:2]
    if len(keys) < 2:
        raise ConfigError(f"{runs} holds {len(keys)} runs; train two, so that they can be compared.")
    episode = _learned_episode(found.run(keys[0]))
    both = "&".join(f"run={key}" for key in keys)
    return [
        Picture(name="run", place=f"run?run={keys[0]}", width=1400, height=1100, scheme="light"),
        Picture(
            name="tokens",
            place=f"episode?run={keys[0]}&id={episode}&color=entropy",
            width=1400,
            height=1100,
            scheme="dark",
        ),
        Picture(
            name="narrow",
            place=f"run?run={keys[0]}",
            width=400,
            height=900,
            scheme="light",
        ),
        Picture(name="wide", place=f"compare?{both}", width=3840, height=2160, scheme="dark", scale=0.5),
    ]


def _learned_episode(run: RunDirectory) -> int:
    """The one with the most tokens that were trained on."""
    with EpisodeStore.open(run.store_path, read_only=True) as store:
        counts = {
            row_id: sum(not math.isnan(value) for value in store.token_numbers(row_id).get("entropy", []))
            for row_id in store.row_ids(TRAIN_PHASE)
        }
    best = max(counts, key=lambda row_id: counts[row_id], default=None)
    if best is None or not counts[best]:
        raise ConfigError(f"{run.path} has no episode that was learned from; train it for more steps.")
    return best


def take(browser: Browser, server: ViewServer, picture: Picture) -> None:
    viewport: Any = {"width": picture.width, "height": picture.height}
    scheme: Any = picture.scheme
    context = browser.new_context(viewport=viewport, color_scheme=scheme)
    page = context.new_page()
    page.goto(server.url)
    page.goto(f"{server.origin}/#/{picture.place}")
    page.wait_for_selector("h1")
    page.wait_for_function("() => !document.querySelector('#content').hasAttribute('aria-busy')")
    page.wait_for_timeout(1000)
    path = PICTURES / f"{picture.name}.png"
    page.screenshot(path=path)
    context.close()
    _shrink(path, picture.scale)


def _shrink(path: Path, scale: float) -> None:
    """Fewer pixels, and colours of a table: a page has few."""
    from PIL import Image

    with Image.open(path) as whole:
        size = (round(whole.width * scale), round(whole.height * scale))
        small = whole.convert("RGB").resize(size, Image.Resampling.LANCZOS)
    small.quantize(128).save(path, optimize=True)


def main() -> None:
    require_browser()
    runs = Path(sys.argv[1])
    pictures = pictures_of(runs)
    PICTURES.mkdir(exist_ok=True)
    server = ViewServer(Sources([runs]), token=secrets.token_urlsafe(24))
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        with sync_playwright() as playwright:
            arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
            browser = playwright.chromium.launch(executable_path=find_chromium().path, args=arguments)
            for picture in pictures:
                take(browser, server, picture)
            browser.close()
    finally:
        server.stop()
        thread.join()


if __name__ == "__main__":
    main()
