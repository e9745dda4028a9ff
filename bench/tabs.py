"""Measure how long tabs take to open, with a running video, a long history and a full queue.

`python -m bench.tabs` prints a table and ends with one line of JSON. Times are milliseconds in the
browser, from the click on the tab to the first frame that shows the answer to that click; "first" is after a reload.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from tests.app_server import serving
from tests.browser.conftest import ARGUMENTS, CHROMIUM, DESKTOP, ready
from tests.browser.filled import fill

# Counts the answers of each panel, and tells when a click was drawn.
SCRIPT = """
(() => {
  const answers = window.answers = {};
  const ask = window.fetch;
  window.fetch = async (url, options) => {
    const answer = await ask(url, options);
    const panel = /tandem\\/panels\\/(\\w+)/.exec(String(url))?.[1];
    if (!panel) return answer;
    const read = answer.json.bind(answer);
    answer.json = async () => {
      const reply = await read();
      setTimeout(() => { answers[panel] = (answers[panel] ?? 0) + 1; }, 0);
      return reply;
    };
    return answer;
  };
  window.opened = (title, panel, shown) => new Promise((resolve) => {
    const before = answers[panel] ?? 0, start = performance.now();
    [...document.querySelectorAll('#tabs [role=tab]')].find((one) => one.textContent.trim() === title).click();
    const look = () => {
      const there = document.querySelector(shown)?.offsetParent && (answers[panel] ?? 0) > before;
      if (there) requestAnimationFrame(() => setTimeout(() => resolve(performance.now() - start), 0));
      else requestAnimationFrame(look);
    };
    look();
  });
})();
"""
TABS = {"Queue": ("queue", "#queue-list li"), "History": ("history", "#history-gallery li")}


def main() -> None:
    """Fill a cache folder, start the app, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--history", type=int, default=500)
    parser.add_argument("--queued", type=int, default=100)
    parser.add_argument("--times", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cache = fill(Path(folder), arguments.history, arguments.queued)
        with serving(cache) as server, sync_playwright() as playwright:
            viewport: Any = DESKTOP
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
            page: Any = browser.new_context(viewport=viewport).new_page()
            page.add_init_script(SCRIPT)
            found = measure(page, server.url, arguments.times)
            browser.close()
    load = os.getloadavg()[0]
    for name, milliseconds in found.items():
        low, high = min(milliseconds), max(milliseconds)
        sys.stdout.write(f"{name:16} median {statistics.median(milliseconds):6.0f} ms  ({low:.0f} to {high:.0f})\n")
    medians = {name: round(statistics.median(values)) for name, values in found.items()}
    sys.stdout.write(json.dumps({"milliseconds": medians, "load": load, "cores": os.cpu_count()}) + "\n")


def measure(page: Any, url: str, times: int) -> dict[str, list[float]]:
    """Return the times of each tab and of the next page of the history, in milliseconds."""
    found: dict[str, list[float]] = {}
    page.goto(url)
    ready(page)
    page.wait_for_selector("#status .status[data-state=running]")
    for number in range(times):
        for title, (panel, shown) in TABS.items():
            if number % 3 == 0:
                page.reload()
                ready(page)
                time.sleep(1)
            name = f"{title}, first" if number % 3 == 0 else f"{title}, again"
            took = page.evaluate("(arguments) => window.opened(...arguments)", [title, panel, shown])
            found.setdefault(name, []).append(took)
            time.sleep(0.5)
            page.click("[role=tab]:has-text('Make')")
            time.sleep(0.3)
    return found


if __name__ == "__main__":
    main()
