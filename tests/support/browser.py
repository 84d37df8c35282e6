"""A browser for the tests of the web page: finding Chromium, starting it, and what a page did that it should not.

In:  Chromium of the machine (``PENSTOCK_CHROMIUM``, or on the path), Playwright for Python.
Out: ``browser_path``; ``started``; ``Witness``; ``faint_texts``, ``widest``.
Runs in: tests.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
HOW_TO_INSTALL = "no Chromium here; install it (Debian: apt-get install chromium) or name it in PENSTOCK_CHROMIUM"


def browser_path() -> str | None:
    """The program; None: there is none."""
    chosen = os.environ.get("PENSTOCK_CHROMIUM")
    return chosen or next((found for name in _NAMES if (found := shutil.which(name))), None)


@contextmanager
def started() -> Iterator[Browser]:
    """One browser without a window."""
    from playwright.sync_api import sync_playwright

    arguments = ["--disable-gpu", "--disable-dev-shm-usage", "--force-color-profile=srgb"]
    # Chromium refuses to run as root with its sandbox; the pages it opens here are our own.
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=arguments)
        try:
            yield browser
        finally:
            browser.close()


@dataclass(kw_only=True)
class Witness:
    """What a page did that no page of ours may do."""

    dialogs: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """Exceptions, violations of the content security policy, and what else the console calls an error."""
    tolerated: tuple[str, ...] = ()
    """Errors with one of these in them are expected."""

    def watch(self, page: Page) -> None:
        def on_dialog(dialog: object) -> None:
            self.dialogs.append(str(getattr(dialog, "message", "")))
            getattr(dialog, "dismiss", lambda: None)()

        page.on("dialog", on_dialog)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)

    @property
    def complaints(self) -> list[str]:
        """All of it, as far as it was not expected."""
        return self.dialogs + [each for each in self.errors if not any(known in each for known in self.tolerated)]


def faint_texts(page: Page, least: float = 4.5) -> list[dict[str, Any]]:
    """Visible texts whose contrast with what lies behind them is too low, and those there are to be on canvases."""
    return page.evaluate(_FAINT, least)


def widest(page: Page) -> int:
    """How wide the page is, in pixels; wider than its window, it scrolls sideways."""
    return page.evaluate("document.documentElement.scrollWidth")


_FAINT = """(least) => {
    const pen = Object.assign(document.createElement("canvas"), {width: 1, height: 1})
        .getContext("2d", {willReadFrequently: true});
    const over = (colours) => {
        pen.clearRect(0, 0, 1, 1);
        for (const colour of colours) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); }
        return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const light = (rgb) => {
        const [r, g, b] = rgb.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const contrast = (a, b) => {
        const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
        return (x + 0.05) / (y + 0.05);
    };
    const behind = (element) => {
        const colours = [];
        for (let at = element; at; at = at.parentElement) colours.unshift(getComputedStyle(at).backgroundColor);
        return ["white", ...colours];
    };
    const found = [];
    let seen = 0;
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const text = walk.currentNode.textContent.trim();
        const element = walk.currentNode.parentElement;
        if (!text || !element.checkVisibility() || element.closest(".unseen, .skip, noscript")) continue;
        seen += 1;
        const back = behind(element);
        const ratio = contrast(over([...back, getComputedStyle(element).color]), over(back));
        if (ratio < least) found.push({text: text.slice(0, 60), ratio, class: element.className});
    }
    const style = getComputedStyle(document.documentElement);
    const named = (name) => over(["white", style.getPropertyValue(name)]);
    for (const name of ["--muted", "--ink", "--limit", "--budget"]) {
        const ratio = contrast(named(name), named("--panel"));
        if (ratio < least) found.push({text: name, ratio, class: "on a canvas"});
    }
    if (seen < 10) found.push({text: "there is hardly any text to look at", ratio: 0, class: ""});
    return found;
}"""
