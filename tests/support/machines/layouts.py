"""Machines as files: each layout of control groups, written in the form real kernels give it.

In:  a directory of the test's own.
Out: ``Roots`` for the meter to read. A layout is a plain dict, so a test can change one file of it.
Runs in: tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.meter import Roots

Files = dict[str, str]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
NO_LIMIT_V1 = "9223372036854771712\n"


@dataclass(frozen=True)
class Filesystem:
    """A file system of a chosen size, in blocks of 4 KiB."""

    f_blocks: int
    f_bfree: int
    f_frsize: int = 4096


def build(directory: Path, files: Files, *, platform: str = "linux", shm: Filesystem | None = None) -> Roots:
    """Write the files and return the roots they are read through."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8", errors="surrogateescape")
    size = shm or Filesystem(f_blocks=16 * GIB // 4096, f_bfree=15 * GIB // 4096)
    return Roots(
        proc=directory / "proc",
        cgroup=directory / "cgroup",
        cpu=directory / "cpu",
        dev_shm=directory / "shm",
        platform=platform,
        statvfs=lambda _: size,
    )


def host(*, total: int = 64 * GIB, available: int = 48 * GIB, membership: str, mounts: list[str]) -> Files:
    """A host of 8 processors without cgroup directories."""
    return {
        "proc/meminfo": (
            f"MemTotal:       {total // KIB} kB\nMemFree:        {GIB // KIB} kB\n"
            f"MemAvailable:   {available // KIB} kB\nBuffers:           44912 kB\n"
            f"Inactive(file):   {2 * GIB // KIB} kB\nSwapTotal:       {8 * GIB // KIB} kB\n"
            f"SwapFree:        {7 * GIB // KIB} kB\nHugePages_Total:       0\n"
        ),
        "proc/vmstat": "nr_free_pages 6020212\npswpin 1000\npswpout 2000\noom_kill 3\n",
        "proc/pressure/memory": (
            "some avg10=1.50 avg60=0.80 avg300=0.10 total=84412\nfull avg10=0.25 avg60=0.10 avg300=0.00 total=9120\n"
        ),
        "proc/self/cgroup": membership,
        "proc/self/mountinfo": "".join(line + "\n" for line in [*_OTHER_MOUNTS, *mounts]),
        "proc/self/status": "Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t0-7\n",
        "proc/self/limits": (
            "Limit                     Soft Limit           Hard Limit           Units     \n"
            "Max processes             96413                96413                processes \n"
            "Max open files            1024                 1048576              files     \n"
        ),
        "proc/self/fd/0": "",
        "proc/self/fd/1": "",
        "proc/self/fd/2": "",
        "cpu/online": "0-7\n",
    }


def memory_v1(limit: int | None, usage: int, inactive: int, *, hierarchical: int | None = None) -> Files:
    """The memory controller's files in a v1 group."""
    smallest = hierarchical if hierarchical is not None else limit
    return {
        "memory.limit_in_bytes": NO_LIMIT_V1 if limit is None else f"{limit}\n",
        "memory.soft_limit_in_bytes": "1048576\n",
        "memory.usage_in_bytes": f"{usage}\n",
        "memory.failcnt": "7\n",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
        "memory.stat": (
            f"cache 13758464\nrss 5156864\nswap 0\ninactive_file 4096\n"
            f"hierarchical_memory_limit {NO_LIMIT_V1.strip() if smallest is None else smallest}\n"
            f"total_cache 418635776\ntotal_swap {3 * MIB}\ntotal_inactive_file {inactive}\n"
        ),
    }


def memory_v2(limit: int | None, usage: int, inactive: int, *, high: int | None = None) -> Files:
    """The memory controller's files in a v2 group below the root."""
    return {
        "memory.max": "max\n" if limit is None else f"{limit}\n",
        "memory.high": "max\n" if high is None else f"{high}\n",
        "memory.current": f"{usage}\n",
        "memory.stat": f"anon 5156864\nshmem 13078528\ninactive_file {inactive}\nactive_file 1\n",
        "memory.events": "low 0\nhigh 11\nmax 5\noom 1\noom_kill 4\noom_group_kill 0\n",
        "memory.pressure": (
            "some avg10=12.34 avg60=5.00 avg300=1.00 total=1\nfull avg10=6.00 avg60=2.00 avg300=0.50 total=1\n"
        ),
        "memory.swap.max": f"{GIB}\n",
        "memory.swap.current": f"{64 * MIB}\n",
    }


def cpu_v1(quota_us: int, period_us: int = 100_000) -> Files:
    return {
        "cpu.cfs_quota_us": f"{quota_us}\n",
        "cpu.cfs_period_us": f"{period_us}\n",
        "cpu.shares": "1024\n",
    }


def group(path: str, *parts: Files) -> Files:
    """Put files of a group under its directory."""
    return {f"cgroup/{path}/{name}".replace("//", "/"): text for part in parts for name, text in part.items()}


_OTHER_MOUNTS = [
    "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw,errors=remount-ro",
    "23 22 0:21 / /proc rw,nosuid,nodev,noexec,relatime shared:12 - proc proc rw",
    "25 24 0:23 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,size=24684100k",
]


def v1_mount(controllers: str, root: str = "/", *, line: int = 32) -> str:
    return (
        f"{line} 31 0:{line} {root} /sys/fs/cgroup/{controllers} rw,nosuid,relatime shared:{line}"
        f" - cgroup cgroup rw,{controllers}"
    )


def v2_mount(root: str = "/", point: str = "/sys/fs/cgroup") -> str:
    return f"41 31 0:38 {root} {point} rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"


def no_cgroups() -> Files:
    return host(membership="", mounts=[])


def v1_host() -> Files:
    """A v1 machine, user session limited to 4 GiB and 2 processors."""
    session = "user.slice/user-1000.slice"
    return {
        **host(
            membership=f"4:memory:/{session}\n3:cpu,cpuacct:/{session}\n1:name=systemd:/{session}\n",
            mounts=[v1_mount("memory"), v1_mount("cpu,cpuacct", line=33), v1_mount("name=systemd", line=34)],
        ),
        **group("memory", memory_v1(None, 9 * GIB, 2 * GIB)),
        **group("memory/user.slice", memory_v1(None, 5 * GIB, GIB)),
        **group(f"memory/{session}", memory_v1(4 * GIB, 3 * GIB, GIB)),
        **group("cpu,cpuacct", cpu_v1(-1)),
        **group("cpu,cpuacct/user.slice", cpu_v1(-1)),
        **group(f"cpu,cpuacct/{session}", cpu_v1(200_000)),
    }


def v2_host() -> Files:
    """A v2 machine, user session limited to 4 GiB (throttled from 3 GiB on) and 1.5 processors."""
    session = "user.slice/user-1000.slice/session-2.scope"
    return {
        **host(membership=f"0::/{session}\n", mounts=[v2_mount()]),
        "cgroup/cgroup.controllers": "cpuset cpu io memory pids\n",
        **group("user.slice", memory_v2(None, 5 * GIB, GIB), {"cpu.max": "max 100000\n"}),
        **group("user.slice/user-1000.slice", memory_v2(None, 4 * GIB, GIB), {"cpu.max": "max 100000\n"}),
        **group(session, memory_v2(4 * GIB, 2 * GIB, GIB, high=3 * GIB), {"cpu.max": "150000 100000\n"}),
    }


def hybrid_host() -> Files:
    """v1 controllers beside a v2 tree that has none."""
    return {
        **host(
            membership="9:name=systemd:/\n4:memory:/job/7\n1:cpu:/\n0::/job\n",
            mounts=[
                "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755",
                v1_mount("cpu"),
                v1_mount("memory", line=35),
                v1_mount("name=systemd", line=40),
                v2_mount(point="/sys/fs/cgroup/unified"),
            ],
        ),
        **group("memory", memory_v1(None, 9 * GIB, GIB)),
        **group("memory/job", memory_v1(None, 2 * GIB, GIB)),
        **group("memory/job/7", memory_v1(2 * GIB, GIB, 512 * MIB)),
        **group("cpu", cpu_v1(50_000)),
        **group("unified/job", {"memory.pressure": "some avg10=3.00 avg60=0 avg300=0 total=1\n"}),
    }


def nested_v2() -> Files:
    """The group's own limit is wide; its parent's is tight and nearly used up by a sibling."""
    return {
        **host(membership="0::/batch/team/run\n", mounts=[v2_mount()]),
        **group("batch", memory_v2(32 * GIB, 20 * GIB, 0), {"cpu.max": "400000 100000\n"}),
        **group("batch/team", memory_v2(6 * GIB, 5 * GIB, 256 * MIB), {"cpu.max": "100000 200000\n"}),
        **group("batch/team/run", memory_v2(16 * GIB, GIB, 128 * MIB), {"cpu.max": "max 100000\n"}),
    }


def docker_v1() -> Files:
    """A container that sees its own group at the top of the mount while /proc names the host's path."""
    container = "/docker/1fe2"
    return {
        **host(
            membership=f"4:memory:{container}\n3:cpu,cpuacct:{container}\n",
            mounts=[v1_mount("memory", container), v1_mount("cpu,cpuacct", container, line=33)],
        ),
        **group("memory", memory_v1(2 * GIB, GIB, 256 * MIB)),
        **group("cpu,cpuacct", cpu_v1(50_000)),
    }


def docker_v2_in_namespace() -> Files:
    """A container with a cgroup namespace: its own group is "/" in /proc and in the mount."""
    return {
        **host(membership="0::/\n", mounts=[v2_mount()]),
        **group("", memory_v2(2 * GIB, GIB, 256 * MIB), {"cpu.max": "50000 100000\n"}),
    }


def kubernetes_burstable_v1() -> Files:
    """Container limit 8 GiB; the pod's 4 GiB lies above what the container can see."""
    container = "/kubepods/burstable/pod8c1f/41d0"
    return {
        **host(
            membership=f"11:memory:{container}\n4:cpu,cpuacct:{container}\n",
            mounts=[v1_mount("memory", container), v1_mount("cpu,cpuacct", container, line=33)],
        ),
        **group("memory", memory_v1(8 * GIB, 3 * GIB, GIB, hierarchical=4 * GIB)),
        **group("cpu,cpuacct", cpu_v1(150_000)),
    }


def kubernetes_burstable_v2() -> Files:
    """Seen from the node: the pod's limit is tighter than the container's, which has none."""
    pod = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod8c1f.slice"
    container = f"{pod}/cri-containerd-41d0.scope"
    return {
        **host(membership=f"0::/{container}\n", mounts=[v2_mount()]),
        **group("kubepods.slice", memory_v2(60 * GIB, 30 * GIB, 4 * GIB), {"cpu.max": "max 100000\n"}),
        **group("kubepods.slice/kubepods-burstable.slice", memory_v2(None, 20 * GIB, GIB)),
        **group(pod, memory_v2(4 * GIB, 3 * GIB, GIB), {"cpu.max": "200000 100000\n"}),
        **group(container, memory_v2(None, 2 * GIB, GIB), {"cpu.max": "max 100000\n"}),
    }


def process(
    pid: int,
    parent: int,
    *,
    anon: int,
    file: int = 0,
    pss: int | None = None,
    uss: int | None = None,
    started: int = 5000,
    name: str = "python",
    children: str | None = None,
) -> Files:
    """A living process; without ``pss`` its pages cannot be walked, without ``children`` no list is kept."""
    stat = f"{pid} ({name}) S {parent} {pid} {pid} 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 {started} 0 0 0\n"
    resident, shared = (anon + file) // 4096, file // 4096
    files = {
        f"proc/{pid}/stat": stat,
        f"proc/{pid}/statm": f"{resident + 1000} {resident} {shared} 600 0 900 0\n",
        f"proc/{pid}/task/{pid}/stat": stat,
    }
    if pss is not None:
        files[f"proc/{pid}/smaps_rollup"] = (
            f"55a9f5479000-7ffde5327000 ---p 00000000 00:00 0                          [rollup]\n"
            f"Rss:            {(anon + file) // KIB} kB\nPss:            {pss // KIB} kB\n"
            f"Shared_Clean:       1584 kB\nPrivate_Clean:         0 kB\n"
            f"Private_Dirty:       {(uss or 0) // KIB} kB\nSwap:                  0 kB\n"
        )
    if children is not None:
        files[f"proc/{pid}/task/{pid}/children"] = children
    return files
