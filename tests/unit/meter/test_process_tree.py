"""Memory of a process tree, from files; the real processes are in tests/fault."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from penstock.meter import memory
from penstock.meter.processes.process import ProcessSnapshot, read_process
from penstock.meter.processes.tree import Children
from support.machines.layouts import GIB, MIB, Files, build, process


def family(*, listed: bool) -> Files:
    """Process 100 with children 101 and 102, 102 with child 103, and a stranger, 200."""

    def children(text: str) -> str | None:
        return text if listed else None

    return {
        **process(100, 1, anon=GIB, pss=GIB // 2, uss=100 * MIB, children=children("101 102 ")),
        **process(101, 100, anon=GIB, pss=GIB // 4, uss=20 * MIB, children=children("")),
        **process(102, 100, anon=GIB, pss=GIB // 4, uss=30 * MIB, children=children("103 ")),
        **process(103, 102, anon=MIB, pss=MIB, uss=MIB, children=children("")),
        **process(200, 1, anon=GIB, pss=GIB, uss=GIB, children=children("")),
    }


@pytest.mark.parametrize("listed", [True, False], ids=["kernel lists children", "kernel keeps no lists"])
def test_the_tree_contains_the_process_and_its_descendants_only(listed: bool, tmp_path: Path) -> None:
    report = memory(100, roots=build(tmp_path, family(listed=listed)))
    assert {one.pid: one.parent_pid for one in report.processes} == {100: 1, 101: 100, 102: 100, 103: 102}
    assert report.processes[0].pid == 100
    assert report.rss_bytes == 3 * GIB + MIB
    assert report.pss_bytes == GIB + MIB
    assert report.uss_bytes == 151 * MIB
    assert report.exact
    assert report.skipped == ()


def test_the_cheap_report_has_rss_alone(tmp_path: Path) -> None:
    report = memory(100, exact=False, roots=build(tmp_path, family(listed=True)))
    assert report.rss_bytes == 3 * GIB + MIB
    assert (report.pss_bytes, report.uss_bytes, report.exact) == (None, None, False)


def test_a_root_that_is_gone_gives_an_empty_report(tmp_path: Path) -> None:
    report = memory(999, roots=build(tmp_path, family(listed=True)))
    assert report.processes == ()
    assert (report.rss_bytes, report.pss_bytes, report.exact, report.skipped) == (0, None, False, (999,))


def test_a_child_that_ends_before_it_is_read_is_skipped(tmp_path: Path) -> None:
    roots = build(tmp_path, family(listed=True))
    shutil.rmtree(roots.proc / "101")
    report = memory(100, roots=roots)
    assert report.skipped == (101,)
    assert report.pss_bytes == 3 * GIB // 4 + MIB


def test_a_number_taken_over_by_a_stranger_is_not_counted(tmp_path: Path) -> None:
    stranger = process(101, 1, anon=7 * GIB, pss=7 * GIB, uss=7 * GIB, started=9000, children="")
    report = memory(100, roots=build(tmp_path, family(listed=True) | stranger))
    assert report.skipped == (101,)
    assert report.pss_bytes == 3 * GIB // 4 + MIB


def test_a_zombie_or_kernel_thread_has_no_memory_to_count(tmp_path: Path) -> None:
    files = family(listed=True) | {"proc/101/statm": "0 0 0 0 0 0 0\n"}
    for exact in (True, False):
        assert memory(100, exact=exact, roots=build(tmp_path, files)).skipped == (101,)


def test_a_process_that_ends_before_its_pages_are_walked_is_skipped(tmp_path: Path) -> None:
    files = family(listed=True)
    del files["proc/101/smaps_rollup"], files["proc/101/statm"]
    assert memory(100, roots=build(tmp_path, files)).skipped == (101,)


def test_a_process_whose_pages_are_not_ours_to_walk_counts_in_rss_alone(tmp_path: Path) -> None:
    files = family(listed=True)
    del files["proc/101/smaps_rollup"]
    report = memory(100, roots=build(tmp_path, files))
    assert report.skipped == (101,)
    assert report.rss_bytes == 3 * GIB + MIB
    assert report.pss_bytes == 3 * GIB // 4 + MIB
    assert [one.pss_bytes for one in report.processes if one.pid == 101] == [None]


def test_a_ring_of_parents_ends(tmp_path: Path) -> None:
    files = process(100, 101, anon=MIB, pss=MIB, uss=0, children="101")
    files |= process(101, 100, anon=MIB, pss=MIB, uss=0, children="100 101")
    assert len(memory(100, roots=build(tmp_path, files)).processes) == 2


def test_children_of_every_thread_are_found(tmp_path: Path) -> None:
    files = family(listed=True) | {"proc/103/task/777/children": "104", "proc/103/task/777/stat": "x"}
    files |= process(104, 103, anon=MIB, pss=MIB, uss=MIB, children="")
    assert 104 in {one.pid for one in memory(100, roots=build(tmp_path, files)).processes}


@pytest.mark.parametrize("name", ["a b", "x) S 1 (y", "((", "))", "", "tmux: server", "\u2028"])
def test_any_command_name_is_read(name: str, tmp_path: Path) -> None:
    files = process(100, 1, anon=MIB, pss=MIB, uss=MIB, name=name, children="")
    assert memory(100, roots=build(tmp_path, files)).processes[0].name == name


def test_files_of_a_process_read_through_its_directory_do_not_follow_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number is given to a stranger once the directory is open: the stranger's memory must not show."""
    roots = build(tmp_path, process(100, 1, anon=MIB, pss=MIB, uss=MIB))
    real_open = os.open

    def open_then_swap(path, flags, mode=0o777, *, dir_fd=None):
        fd = real_open(path, flags, mode, dir_fd=dir_fd)
        if str(path) == f"{roots.proc}/100":
            (roots.proc / "100").rename(roots.proc / "was 100")
            build(tmp_path, process(100, 1, anon=GIB, pss=GIB, uss=GIB))
        return fd

    monkeypatch.setattr(os, "open", open_then_swap)
    reading = read_process(100, parent=1, exact=True, roots=roots)
    assert isinstance(reading, ProcessSnapshot)
    assert reading.rollup is not None
    assert reading.rollup.pss_bytes == MIB


def test_children_of_a_process_that_is_gone_are_none(tmp_path: Path) -> None:
    assert Children(build(tmp_path, family(listed=True))).of(4711) == []


def test_the_meter_leaves_no_descriptor_open(tmp_path: Path) -> None:
    roots = build(tmp_path, family(listed=True))
    before = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    for pid in (100, 999):
        memory(pid, roots=roots)
    after = len(list(Path("/proc/self/fd").iterdir())) if before else 0
    assert after == before
