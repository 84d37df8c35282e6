"""Where runs are kept, and how their sockets get a path that fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import PenstockError
from penstock.monitor.runs import home
from penstock.monitor.runs.writer import shares_memory


def test_a_path_too_long_for_a_socket_is_replaced_by_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert home.socket_path(Path("/tmp") / tmp_path.name, "id") == Path("/tmp") / tmp_path.name / "sockets" / "id"
    runtime = Path(f"/tmp/ps-{tmp_path.name}")
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    try:
        found = home.socket_path(tmp_path / ("x" * 120), "id")
        assert found == runtime / "penstock-runs" / "id" and found.parent.stat().st_mode & 0o077 == 0
        found.parent.chmod(0o755)
        home.socket_path(tmp_path / ("x" * 120), "id")
        assert found.parent.stat().st_mode & 0o077 == 0, "closed to others again"
        found.parent.chmod(0o777)
        with pytest.raises(PenstockError, match=r"no other user can enter.*can be written by other users"):
            home.socket_path(tmp_path / ("x" * 120), "id")
    finally:
        (runtime / "penstock-runs").rmdir()
        runtime.rmdir()
        (Path("/tmp") / tmp_path.name / "sockets").rmdir()
        (Path("/tmp") / tmp_path.name).rmdir()


@pytest.mark.parametrize(("kind", "shared"), [("ext4", True), ("tmpfs", True), ("nfs4", False), ("fuse.sshfs", False)])
def test_a_network_file_system_gets_no_write_ahead_log(tmp_path: Path, kind: str, shared: bool) -> None:
    import os

    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"36 35 {os.major(device)}:{os.minor(device)} / /home rw - {kind} server:/home rw\n")
    assert shares_memory(tmp_path, mounts=mounts) is shared
