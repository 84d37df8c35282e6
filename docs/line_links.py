"""Keeps the line numbers of links such as [`Arena.lend`](src/penstock/arena/arena.py#L120) right.

In:  ARCHITECTURE.md and docs/*.md; the Python files they link to.
Out: `--write` rewrites the numbers (make format); without it, exit status 1 if one is wrong (make check).
Runs in: the command line.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import sys
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"\[`(?P<symbol>[\w.]+)`\]\((?P<path>[^)#\s]+\.py)#L(?P<line>\d+)\)")


@functools.cache
def symbols_of(path: Path) -> dict[str, int]:
    """Every class, function, method and assigned name of a file, and the line that defines it."""
    found: dict[str, int] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                found.setdefault(prefix + node.name, node.lineno)
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        found.setdefault(prefix + target.id, node.lineno)
            elif isinstance(node, (ast.If, ast.Try)):
                visit(node.body, prefix)

    visit(ast.parse(path.read_text()).body, "")
    return found


def corrected(page: Path, problems: list[str]) -> str:
    """The page's text with right line numbers; links that cannot be mended are added to ``problems``."""

    def mend(link: re.Match[str]) -> str:
        file = (page.parent / link["path"]).resolve()
        where = f"{page.relative_to(_ROOT)}: {link[0]}"
        if not file.is_file():
            problems.append(f"{where}: there is no such file")
            return link[0]
        line = symbols_of(file).get(link["symbol"])
        if line is None:
            problems.append(f"{where}: the file defines no {link['symbol']}")
            return link[0]
        return f"[`{link['symbol']}`]({link['path']}#L{line})"

    return _LINK.sub(mend, page.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description="Check or rewrite the line numbers of links to source files.")
    parser.add_argument("--write", action="store_true", help="rewrite wrong line numbers")
    options = parser.parse_args()
    problems: list[str] = []
    for page in [*sorted(_ROOT.glob("*.md")), *sorted(_ROOT.glob("docs/**/*.md"))]:
        text = corrected(page, problems)
        if text == page.read_text():
            continue
        if options.write:
            page.write_text(text)
        else:
            problems.append(f"{page.relative_to(_ROOT)}: line numbers of links are out of date; run `make format`")
    print(*problems, sep="\n", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
