"""The report page in a real browser: it fits a phone's screen and logs no errors."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fusewright.page.document import render
from tests.support.page_samples import HOSTILE, folder, record, with_failures

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --hide-scrollbars "
    "--enable-logging=stderr"
).split()
# Opens everything, follows a link, sorts, points at a mark and goes on with the keyboard.
PROBE = """
<script>
addEventListener("load", () => {
  const root = document.documentElement;
  document.querySelectorAll("details").forEach((each) => { each.open = true; });
  const heads = document.querySelectorAll("table.sortable th button");
  heads.forEach((each) => { each.click(); each.click(); });
  const chart = document.querySelector("svg.chart");
  chart.focus();
  chart.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
  const tip = document.getElementById("tip");
  const box = tip.getBoundingClientRect();
  const stuck = [...document.querySelectorAll("main *")].filter((each) =>
    each.getBoundingClientRect().right > root.clientWidth + 1 && !each.closest(".scroll"));
  const found = {
    width: root.clientWidth, needs: root.scrollWidth, stuck: stuck.length,
    tip: tip.hidden ? 0 : tip.textContent.length,
    inside: box.left >= 0 && box.right <= root.clientWidth ? 1 : 0,
    titles: document.querySelectorAll(".mark > title").length, sorted: heads.length,
  };
  const outside = parent.document.documentElement;
  for (const [name, value] of Object.entries(found)) outside.setAttribute("data-" + name, value);
});
</script>
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine"),
]


def visited(path: Path, width: int, *more: str) -> tuple[str, str]:
    """The page's elements after its scripts ran, and what the browser said."""
    assert BROWSER is not None
    profile = f"--user-data-dir={path.parent / 'profile'}"
    command = [BROWSER, *OPTIONS, profile, f"--window-size={width},900", *more, "--dump-dom"]
    done = subprocess.run(
        [*command, path.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout, done.stderr


def numbers(elements: str) -> dict[str, int]:
    head = re.search(r"<html[^>]*>", elements)
    assert head
    return {name: int(value) for name, value in re.findall(r'data-(\w+)="(\d+)"', head[0])}


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("kind", ["one", "many"])
def test_nothing_overflows_the_screen(kind: str, width: int, tmp_path: Path) -> None:
    text = render([with_failures()] if kind == "one" else folder(2))
    path = tmp_path / "page.html"
    # The page's own policy forbids a second script.
    opened = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    inner = html.escape(opened.replace("</body>", PROBE + "</body>"))
    # A window is never narrower than 500; a frame is as narrow as it is told.
    style = f"border:0;width:{width}px;height:900px"
    path.write_text(
        f'<!doctype html><html><iframe style="{style}" srcdoc="{inner}"></iframe></html>'
    )
    found = numbers(visited(path, 1400)[0])
    assert found["width"] == width
    assert found["needs"] <= width
    assert found["stuck"] == 0
    assert found["tip"] > 10
    assert found["inside"] == 1
    assert found["titles"] == 0
    assert (found["sorted"] > 0) == (kind == "many")


@pytest.mark.parametrize("dark", [False, True])
def test_the_browser_logs_no_errors(dark: bool, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(render([with_failures(), record(HOSTILE)]))
    theme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    elements, said = visited(path, 1280, *theme)
    assert [line for line in said.splitlines() if "CONSOLE" in line] == []
    assert 'id="tip"' in elements, "the page's own script did not run"
    assert HOSTILE not in elements
