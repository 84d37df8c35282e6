"""The tree meter: cheap samples corrected by rare exact ones."""

from __future__ import annotations

import shutil
from pathlib import Path

from penstock.meter import MemoryReport, Roots, TreeMeter
from support.machines.layouts import GIB, MIB, Files, build, process


class Clock:
    """Time advances only when a test sets it, and by a fixed step at every call."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.step_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def tree(*, root_anon: int = GIB, worker_anon: int = 100 * MIB, worker_file: int = GIB, started: int = 5000) -> Files:
    """A trainer and a worker that map 1 GiB of segments together."""
    return {
        **process(10, 1, anon=root_anon, file=GIB, pss=1536 * MIB, uss=GIB, children="11", started=started),
        **process(11, 10, anon=worker_anon, file=worker_file, pss=612 * MIB, uss=100 * MIB, children=""),
    }


def totals(report: MemoryReport) -> tuple[int | None, int | None, bool]:
    return report.pss_bytes, report.uss_bytes, report.exact


def meter(roots: Roots, clock: Clock) -> TreeMeter:
    return TreeMeter(10, exact_every_s=30, clock=clock, roots=roots)


def test_the_first_sample_is_exact_and_the_next_ones_agree_with_it(tmp_path: Path) -> None:
    clock = Clock()
    watch = meter(build(tmp_path, tree()), clock)
    assert totals(watch.poll()) == (2148 * MIB, 1124 * MIB, True)
    clock.now_s += 1
    assert totals(watch.poll()) == (2148 * MIB, 1124 * MIB, False)


def test_private_growth_counts_in_full_between_exact_samples(tmp_path: Path) -> None:
    clock = Clock()
    watch = meter(build(tmp_path, tree()), clock)
    watch.poll()
    build(tmp_path, tree(worker_anon=600 * MIB))
    assert totals(watch.poll()) == (2648 * MIB, 1624 * MIB, False)


def test_shared_growth_counts_at_the_last_exact_ratio(tmp_path: Path) -> None:
    watch = meter(build(tmp_path, tree()), Clock())
    watch.poll()
    build(tmp_path, tree(worker_file=GIB + 200 * MIB))
    pss, uss, _ = totals(watch.poll())
    assert pss is not None
    assert abs(pss - (2148 * MIB + 200 * MIB * 612 / 1124)) < MIB
    assert uss == 1124 * MIB


def test_an_exact_sample_is_taken_again_when_due(tmp_path: Path) -> None:
    clock = Clock()
    watch = meter(build(tmp_path, tree()), clock)
    seen = []
    for _ in range(61):
        seen.append(watch.poll().exact)
        clock.now_s += 1
    assert [second for second, exact in enumerate(seen) if exact] == [0, 30, 60]


def test_exact_samples_that_take_long_are_rare(tmp_path: Path) -> None:
    clock = Clock()
    watch = meter(build(tmp_path, tree()), clock)
    clock.step_s = 2.0
    assert watch.poll().exact
    clock.step_s = 0.0
    clock.now_s += 199
    assert not watch.poll().exact
    clock.now_s += 1
    assert watch.poll().exact


def test_a_worker_with_a_reused_process_id_does_not_inherit_figures(tmp_path: Path) -> None:
    watch = meter(build(tmp_path, tree()), Clock())
    watch.poll()
    build(tmp_path, process(11, 10, anon=10 * MIB, pss=MIB, uss=MIB, children="", started=6000))
    (found,) = (one for one in watch.poll().processes if one.pid == 11)
    assert found.pss_bytes is not None
    assert found.pss_bytes < 10 * MIB


def test_a_worker_that_crashed_leaves_the_sums(tmp_path: Path) -> None:
    roots = build(tmp_path, tree())
    watch = meter(roots, Clock())
    watch.poll()
    shutil.rmtree(roots.proc / "11")
    report = watch.poll()
    assert report.skipped == (11,)
    assert report.pss_bytes == 1536 * MIB


def test_a_process_that_may_not_be_read_exactly_is_left_out_the_same_way_in_cheap_samples(
    tmp_path: Path,
) -> None:
    files = tree()
    del files["proc/11/smaps_rollup"]
    watch = meter(build(tmp_path, files), Clock())
    exact, cheap = watch.poll(), watch.poll()
    assert exact.pss_bytes == cheap.pss_bytes == 1536 * MIB
    assert exact.skipped == cheap.skipped == (11,)


def test_a_root_whose_process_id_was_reused_ends_the_tree(tmp_path: Path) -> None:
    watch = meter(build(tmp_path, tree()), Clock())
    watch.poll()
    build(tmp_path, tree(started=9999))
    report = watch.poll()
    assert report.processes == ()
    assert report.skipped == (10,)


def test_a_new_process_that_may_not_be_read_exactly_is_skipped(tmp_path: Path) -> None:
    watch = meter(build(tmp_path, tree()), Clock())
    watch.poll()
    new = process(12, 10, anon=100 * MIB, pss=MIB, uss=MIB, children="")
    del new["proc/12/smaps_rollup"]
    build(tmp_path, tree() | new | {"proc/10/task/10/children": "11 12"})
    report = watch.poll()
    assert report.skipped == (12,)
    assert report.pss_bytes == 2148 * MIB


def test_a_tree_above_the_limit_is_never_read_exactly(tmp_path: Path) -> None:
    roots = build(tmp_path, tree())
    watch = TreeMeter(10, exact_up_to_bytes=3 * GIB, clock=Clock(), roots=roots)
    report = watch.poll()
    assert (report.rss_bytes > 3 * GIB, report.pss_bytes, report.exact, report.skipped) == (True, None, False, ())
    assert sum(one.rss_file_bytes or 0 for one in report.processes) == 2 * GIB
    build(tmp_path, tree(worker_file=500 * MIB))
    assert watch.poll().pss_bytes is None, "the limit applies to the size at the last poll"
    assert watch.poll().exact


def test_memory_that_shrank_never_goes_below_zero_or_above_rss(tmp_path: Path) -> None:
    watch = meter(build(tmp_path, tree(worker_anon=GIB)), Clock())
    watch.poll()
    build(tmp_path, tree(worker_anon=0, worker_file=0))
    for one in watch.poll().processes:
        assert one.pss_bytes is not None
        assert one.uss_bytes is not None
        assert 0 <= one.uss_bytes <= one.pss_bytes <= one.rss_bytes


def test_the_meter_works_where_there_is_no_proc() -> None:
    watch = TreeMeter(clock=Clock(), roots=Roots(platform="darwin"))
    exact, cheap = watch.poll(), watch.poll()
    assert exact.uss_bytes is not None
    assert cheap.uss_bytes is None
    assert cheap.rss_bytes > 0


def test_a_new_process_is_sampled_at_once_and_pages_it_shares_count_as_its_parents(tmp_path: Path) -> None:
    alone = process(10, 1, anon=GIB, file=GIB, pss=1536 * MIB, uss=GIB, children="", started=5000)
    watch = meter(build(tmp_path, alone), Clock())
    watch.poll()
    # Forked just now: it maps all that its parent maps, and 100 MiB are its own.
    build(tmp_path, tree(worker_anon=GIB + 100 * MIB))
    assert totals(watch.poll()) == ((1536 + 100) * MIB, (1024 + 100) * MIB, False)
    build(tmp_path, tree(worker_anon=GIB + 300 * MIB))
    assert totals(watch.poll()) == ((1536 + 300) * MIB, (1024 + 300) * MIB, False)


def test_shared_memory_that_only_a_new_process_maps_counts_once(tmp_path: Path) -> None:
    alone = process(10, 1, anon=GIB, file=GIB, pss=1536 * MIB, uss=GIB, children="", started=5000)
    watch = meter(build(tmp_path, alone), Clock())
    watch.poll()
    # Of its own 100 MiB, 60 MiB are rows of a batch; it shares another 40 MiB of batches with one more process.
    worker = process(11, 10, anon=GIB, file=GIB, pss=612 * MIB, uss=100 * MIB, children="")
    worker["proc/11/smaps_rollup"] += f"Pss_Shmem: {80 << 10} kB\n"
    worker["proc/11/status"] = f"Name: python\nRssShmem: {100 << 10} kB\n"
    build(tmp_path, alone | worker | {"proc/10/task/10/children": "11"})
    assert totals(watch.poll()) == ((1536 + 100 + 20) * MIB, (1024 + 100) * MIB, False)


def test_after_new_processes_all_are_sampled_soon_but_not_too_often(tmp_path: Path) -> None:
    clock = Clock()
    roots = build(tmp_path, process(10, 1, anon=GIB, file=GIB, pss=1536 * MIB, uss=GIB, children="", started=5000))
    watch = TreeMeter(10, clock=clock, roots=roots)
    clock.step_s = 0.05  # an exact sample takes 50 ms: at 1% of the time, one in 5 s
    watch.poll()
    clock.step_s = 0.0
    build(tmp_path, tree())
    seen: list[bool] = []
    for _ in range(12):
        clock.now_s += 1
        seen.append(watch.poll().exact)
    assert seen == [False] * 4 + [True] + [False] * 7
    calm = TreeMeter(10, clock=clock, roots=roots)
    calm.poll()
    build(tmp_path, tree(started=5000))
    clock.now_s += 3
    assert not calm.poll().exact, "there is no new process"
