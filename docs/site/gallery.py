"""Makes the pictures of docs/gallery.md again, from what the page itself says.

Each block of commands on the page is run in a folder, and each comment `<!-- picture NAME: FILE.html N -->` takes the
N-th figure of a page that they wrote, in light and in dark, to docs/images/gallery/NAME.png and NAME-dark.png.

    python docs/site/gallery.py [--work FOLDER] [NAME …]

A command whose --out exists in the folder is not run again.
"""

from __future__ import annotations

import argparse
import io
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from course import CHROMIUM, browser_path
from links import ROOT
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

PAGE, PICTURES = ROOT / "docs" / "gallery.md", ROOT / "docs" / "images" / "gallery"
MOST = 150_000  # bytes of a picture
# One that could stand beside another takes as much room as if it did.
_NARROW = "one => { if (one.querySelector('svg').style.getPropertyValue('--width') < 400) one.style.width = '430px' }"
_BLOCK = re.compile(r"^```console [^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_PICTURE = re.compile(r"<!-- picture ([\w-]+): (\S+) (\d+) -->")


def listed() -> list[tuple[str, str, int, list[str]]]:
    """Each picture with the page and the number of its figure, and the commands that stand above it."""
    found, commands = [], []
    for part in re.finditer(rf"{_BLOCK.pattern}|{_PICTURE.pattern}", PAGE.read_text(encoding="utf-8"), _BLOCK.flags):
        if part[1] is not None:
            commands = part[1].splitlines()
        else:
            found.append((part[2], part[3], int(part[4]), commands))
    return found


def make(command: str, work: Path) -> None:
    """Runs one of regard's commands, unless what it writes is there."""
    words = shlex.split(command, comments=True)
    if "--out" in words and (work / words[words.index("--out") + 1]).exists():
        return
    print(command, flush=True)
    subprocess.run([sys.executable, "-m", *words], cwd=work, check=True, stdout=subprocess.DEVNULL)


def take(browser: Browser, page: Path, figure: int, scheme: str, to: Path) -> None:
    """One figure of a page as a picture of few colours, twice as fine as it is shown."""
    tab = browser.new_page(viewport={"width": 940, "height": 900}, device_scale_factor=2, color_scheme=scheme)
    tab.goto(page.resolve().as_uri())
    shown = tab.locator("figure").nth(figure - 1)
    tab.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    shown.evaluate(_NARROW)
    taken = Image.open(io.BytesIO(shown.screenshot())).convert("RGB")
    tab.close()
    taken.quantize(96, dither=Image.Dither.NONE).save(to, optimize=True)
    if to.stat().st_size > MOST:
        raise SystemExit(f"{to} has {to.stat().st_size:,} bytes, more than {MOST:,}: show a smaller figure")
    print(f"{to.relative_to(ROOT)}  {to.stat().st_size // 1000} KB")


def main() -> None:
    asked = argparse.ArgumentParser(description="Make the pictures of docs/gallery.md again.")
    asked.add_argument("names", nargs="*", help="all unless said")
    asked.add_argument("--work", type=Path, help="where the commands are run; a temporary folder unless said")
    given = asked.parse_args()
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as play:
        work = given.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        if not (work / "examples").exists():
            (work / "examples").symlink_to(ROOT / "examples")
        PICTURES.mkdir(parents=True, exist_ok=True)
        browser = play.chromium.launch(executable_path=browser_path(), args=CHROMIUM)
        for name, page, figure, commands in listed():
            if given.names and name not in given.names:
                continue
            for command in commands:
                make(command, work)
            for scheme, suffix in (("light", ""), ("dark", "-dark")):
                take(browser, work / page, figure, scheme, PICTURES / f"{name}{suffix}.png")
        browser.close()


if __name__ == "__main__":
    main()
