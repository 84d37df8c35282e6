"""A worker's measure of its own memory, over a made-up /proc."""

from __future__ import annotations

from pathlib import Path

from penstock.arena.segment_sizes import PAGE_BYTES
from penstock.workers.child.private_memory import PrivateMemory

MIB = 1 << 20


class Proc:
    """/proc/self of an imaginary worker, and its clock."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now_s = 0.0
        self.walks = 0
        self.private = 10 * MIB
        self.arena = 100 * MIB
        self.inherited = 200 * MIB
        self.write()

    def write(self) -> None:
        kib = 1 << 10
        self.root.joinpath("smaps").write_text(
            "7f0000000000-7f0000100000 rw-p 00000000 00:00 0 \n"
            "Rss:             204800 kB\n"
            f"Private_Clean:   {5 * MIB // kib:8} kB\n"
            f"Private_Dirty:   {self.private // 2 // kib:8} kB\n"
            "VmFlags: rd wr mr mw me ac \n"
            "7f1000000000-7f1006400000 rw-s 00000000 00:01 1032   /memfd:penstock-3 (deleted)\n"
            f"Private_Dirty:   {self.arena // kib:8} kB\n"
            "VmFlags: rd wr sh mr mw me ms \n"
            "7f2000000000-7f2000100000 rw-p 00000000 08:01 77 /usr/lib/libtorch.so\n"
            f"Private_Dirty:   {self.private // 2 // kib:8} kB\n"
        )
        self.root.joinpath("smaps_rollup").write_text(
            "55d000000000-7ffd00000000 ---p 00000000 00:00 0    [rollup]\n"
            f"Private_Dirty:   {self.private // kib:8} kB\n"
        )
        anonymous = self.private + self.inherited
        pages = (anonymous + self.arena) // PAGE_BYTES
        self.root.joinpath("statm").write_text(f"999999 {pages} {self.arena // PAGE_BYTES} 1 0 5 0\n")

    def hold(self, private: int) -> None:
        self.private = private
        self.write()


def measure(tmp_path: Path) -> tuple[Proc, PrivateMemory]:
    proc = Proc(tmp_path)
    return proc, PrivateMemory(tmp_path, clock=lambda: proc.now_s)


def test_pages_of_the_arena_are_not_counted(tmp_path: Path) -> None:
    _, memory = measure(tmp_path)
    assert memory.read_bytes() == 10 * MIB


def test_a_sample_held_at_its_fullest_is_counted_after_it_is_gone(tmp_path: Path) -> None:
    proc, memory = measure(tmp_path)
    proc.now_s = 1.0
    proc.hold(60 * MIB)
    memory.note_fullest()
    proc.hold(10 * MIB)
    proc.now_s = 2.0
    memory.note_fullest()
    assert memory.read_bytes() == 60 * MIB


def test_growth_between_exact_walks_is_seen(tmp_path: Path) -> None:
    proc, memory = measure(tmp_path)
    memory.read_bytes()
    for step in range(1, 6):
        proc.now_s = 0.1 * step
        proc.hold((10 + step) * MIB)
        memory.note_fullest()
        assert memory.read_bytes() == (10 + step) * MIB


def test_samples_in_quick_succession_cost_one_measurement(tmp_path: Path) -> None:
    proc, memory = measure(tmp_path)
    memory.read_bytes()
    memory.note_fullest()
    proc.now_s += 0.001
    proc.hold(50 * MIB)
    memory.note_fullest()
    assert memory.read_bytes() == 10 * MIB
    proc.now_s += 0.05
    memory.note_fullest()
    assert memory.read_bytes() == 50 * MIB


def test_one_giant_sample_does_not_count_forever(tmp_path: Path) -> None:
    """«At its recent fullest»: a giant of an hour ago must not keep the arena small for the rest of the run."""
    proc, memory = measure(tmp_path)
    proc.now_s = 1.0
    proc.hold(500 * MIB)
    memory.note_fullest()
    proc.hold(12 * MIB)
    reported = 500 * MIB
    for minute in range(1, 61):
        proc.now_s = 60.0 * minute
        memory.note_fullest()
        reported = memory.read_bytes()
    assert reported < 50 * MIB


def test_memory_that_was_released_for_good_is_no_longer_counted(tmp_path: Path) -> None:
    proc, memory = measure(tmp_path)
    proc.hold(300 * MIB)
    proc.now_s = 20.0
    assert memory.read_bytes() == 300 * MIB
    proc.hold(20 * MIB)
    proc.now_s = 40.0
    assert memory.read_bytes() == 20 * MIB


def test_without_proc_the_answer_is_0(tmp_path: Path) -> None:
    memory = PrivateMemory(tmp_path / "missing")
    memory.note_fullest()
    assert memory.read_bytes() == 0


def test_exact_walks_take_a_small_share_of_the_time(tmp_path: Path) -> None:
    proc = Proc(tmp_path)
    looks = 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        # Every look costs a tenth of a second: a worker that has very much mapped.
        proc.now_s += 0.1
        return proc.now_s

    memory = PrivateMemory(tmp_path, clock=clock)
    walks = 0
    real = memory.measure_exactly

    def counted() -> None:
        nonlocal walks
        walks += 1
        real()

    memory.measure_exactly = counted  # type: ignore[method-assign]
    while proc.now_s < 1000.0:
        memory.read_bytes()
    assert walks * 0.1 <= 0.01 * 1000.0 + 0.2
