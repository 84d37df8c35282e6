"""A machine made of files, for tests that read it through ``Roots``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.meter import Roots

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class FakeFilesystem:
    """A tmpfs of a given size, in blocks of one page."""

    size_bytes: int
    used_bytes: int
    f_frsize: int = 4096

    @property
    def f_blocks(self) -> int:
        return self.size_bytes // self.f_frsize

    @property
    def f_bfree(self) -> int:
        return (self.size_bytes - self.used_bytes) // self.f_frsize


class FakeMachine:
    """A healthy machine with 64 GiB and 16 cores, its process in the v2 cgroup /box, no limits set."""

    def __init__(self, directory: Path) -> None:
        self.proc = directory / "proc"
        self.cgroup = directory / "cgroup"
        self.cpu = directory / "cpu"
        self.shm = FakeFilesystem(size_bytes=32 * GIB, used_bytes=0)
        self.has_shm = True
        self.meminfo_kb = {
            "MemTotal": 64 << 20,
            "MemFree": 40 << 20,
            "MemAvailable": 48 << 20,
            "SwapTotal": 8 << 20,
            "SwapFree": 8 << 20,
        }
        self.set_meminfo()
        self.write(self.proc / "self" / "cgroup", "0::/box\n")
        self.write(self.proc / "self" / "mountinfo", "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n")
        self.write(self.proc / "self" / "status", "Name:\tpython\nCpus_allowed_list:\t0-15\n")
        self.set_open_files("65536", "1048576")
        (self.proc / "self" / "fd").mkdir()
        self.write(self.proc / "vmstat", "pswpin 0\npswpout 0\noom_kill 0\n")
        self.set_stalls(0.0)
        self.write(self.cpu / "online", "0-15\n")
        self.write(self.cgroup / "cgroup.controllers", "cpu memory\n")
        self.in_box("cgroup.controllers", "cpu memory\n")
        self.in_box("memory.max", "max\n")
        self.in_box("memory.high", "max\n")
        self.in_box("memory.current", f"{2 * GIB}\n")
        self.in_box("memory.stat", f"anon {GIB}\ninactive_file {GIB}\n")
        self.in_box("memory.swap.max", "max\n")
        self.in_box("memory.swap.current", "0\n")
        self.in_box("memory.events", "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n")
        self.in_box("cpu.max", "max 100000\n")

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def in_box(self, name: str, text: str) -> None:
        self.write(self.cgroup / "box" / name, text)

    def set_meminfo(self, **kilobytes: int) -> None:
        self.meminfo_kb |= kilobytes
        lines = [f"{name}:{size:>16} kB\n" for name, size in self.meminfo_kb.items()]
        self.write(self.proc / "meminfo", "".join(lines))

    def set_open_files(self, soft: str, hard: str) -> None:
        self.write(self.proc / "self" / "limits", f"Max open files            {soft:<20} {hard:<20} files\n")

    def set_stalls(self, full_percent: float) -> None:
        text = "".join(f"{kind} avg10={full_percent:.2f} avg60=0.00 avg300=0.00 total=0\n" for kind in ("some", "full"))
        self.write(self.proc / "pressure" / "memory", text)
        self.in_box("memory.pressure", text)

    @property
    def roots(self) -> Roots:
        def statvfs(path: Path) -> FakeFilesystem:
            if not self.has_shm:
                raise FileNotFoundError(path)
            return self.shm

        return Roots(
            proc=self.proc,
            cgroup=self.cgroup,
            cpu=self.cpu,
            dev_shm=Path("/dev/shm"),
            platform="linux",
            statvfs=statvfs,
        )
