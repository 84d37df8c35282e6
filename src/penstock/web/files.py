"""The files of the page, from the package: a fixed list, read once.

In:  ``static/`` beside this file.
Out: ``PageFile`` by name.
Runs in: command line.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
}
"""What else lies in the folder is not served. The types are our own: those of the machine may be anything."""


@dataclass(frozen=True, kw_only=True)
class PageFile:
    content: bytes
    type: str


def page_files() -> dict[str, PageFile]:
    """By name. A request can ask for one of these names and for nothing else: there is no path to lead astray."""
    found = {}
    for each in (resources.files("penstock.web") / "static").iterdir():
        ending = each.name[each.name.rfind(".") :]
        if ending in _TYPES and each.is_file():
            found[each.name] = PageFile(content=each.read_bytes(), type=_TYPES[ending])
    return found
