"""Commands in this process, where no process of their own is needed: torch is loaded once instead of every time."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from penstock.cli.app import run
from support.commands import RunHere


@pytest.fixture
def run_here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunHere:
    """Run a command as a shell would have it: in a folder, with lines on stdin and so many columns."""

    def here(
        *arguments: str, folder: Path | None = None, stdin: str = "", columns: int = 80, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", list(sys.path))
            patch.setattr(sys, "stdin", io.StringIO(stdin))
            for name in ("NO_COLOR", "TERM"):
                patch.delenv(name, raising=False)
            for name, value in ({"COLUMNS": str(columns)} | environment).items():
                patch.setenv(name, value)
            if folder is not None:
                patch.chdir(folder)
            before = set(psutil.Process().children(recursive=True))
            capfd.readouterr()
            status = run(arguments)
            out, err = capfd.readouterr()
        assert "Traceback" not in err
        left = set(psutil.Process().children(recursive=True)) - before
        assert not [each for each in left if "resource_tracker" not in " ".join(each.cmdline())]
        return subprocess.CompletedProcess(arguments, status, out, err)

    return here
