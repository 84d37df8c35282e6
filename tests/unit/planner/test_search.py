"""The search as a table: machines that exist as a formula, and what the search does on them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.planner.search import Expected, SearchEnd, SearchSpace, Setting, Trial, Try, next_move, stop, worker_limit

MIB = 1 << 20
Rate = Callable[[Setting], float]


def space(
    rate: Rate,
    *,
    most_workers: int = 16,
    budget_mib: int = 10_000,
    per_worker_mib: int = 10,
    also: tuple[Setting, ...] = (),
) -> SearchSpace:
    def expected(setting: Setting) -> Expected:
        memory = (setting.workers * per_worker_mib + (setting.depth + 1) * 20) * MIB
        return Expected(samples_per_s=rate(setting), memory_bytes=memory)

    return SearchSpace(
        most_workers=most_workers, budget_bytes=budget_mib * MIB, usual_depth=lambda workers: 2, expected=expected,
        also=also,
    )  # fmt: skip


def trial(setting: Setting, samples_per_s: float, **given: float | bool | int | None) -> Trial:
    memory = (setting.workers * 10 + (setting.depth + 1) * 20) * MIB
    return Trial(**{"setting": setting, "samples_per_s": samples_per_s, "noise": 0.01, "memory_bytes": memory, **given})


def search(room: SearchSpace, rate: Rate, *, step_limit: float | None = None) -> tuple[list[Setting], SearchEnd]:
    """Search to the end; ``step_limit``: samples per second that the training step takes at most."""
    trials: list[Trial] = []
    for _ in range(60):
        move = next_move(trials, room)
        if isinstance(move, SearchEnd):
            return [each.setting for each in trials], move
        found = rate(move.setting)
        waited = None
        if step_limit is not None:
            waited = max(0.0, 1 - found / step_limit)
            found = min(found, step_limit)
        trials.append(trial(move.setting, found, wait_fraction=waited))
    raise AssertionError("the search does not end")


def saturating(most: int) -> Rate:
    return lambda setting: 100.0 * min(setting.workers, most)


def test_the_search_begins_with_one_worker() -> None:
    move = next_move([], space(saturating(4)))
    assert move == Try(setting=Setting(1, 2), why="safe start")


@pytest.mark.parametrize(
    ("most", "winner"),
    [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (8, 8), (16, 16)],
)
def test_the_fewest_workers_that_are_as_fast_as_any_win(most: int, winner: int) -> None:
    rate = saturating(most)
    _, done = search(space(rate), rate)
    assert done.winner == Setting(winner, 2)


def test_two_steps_that_gain_nothing_end_the_climb() -> None:
    rate = saturating(2)
    tried, done = search(space(rate), rate)
    assert max(setting.workers for setting in tried) == 6
    assert done.why == "two steps beyond 2 workers, 2 ahead gained nothing"


def test_one_step_that_gains_nothing_does_not() -> None:
    def rate(setting: Setting) -> float:
        return {1: 100.0, 2: 200.0, 4: 199.0}.get(setting.workers, 400.0)

    _, done = search(space(rate), rate)
    assert done.winner is not None and done.winner.workers > 4


def test_a_gain_within_the_noise_does_not_count() -> None:
    steps = {1: 100.0, 2: 102.0, 4: 101.0}

    def rate(setting: Setting) -> float:
        return steps.get(setting.workers, 500.0)

    tried, _ = search(space(rate), rate)
    assert max(setting.workers for setting in tried) == 4


def test_a_setting_that_would_not_fit_is_never_tried() -> None:
    rate = saturating(16)
    room = space(rate, budget_mib=115)
    tried, done = search(room, rate)
    assert all(room.expected(setting).memory_bytes <= room.budget_bytes for setting in tried)
    assert done.winner == Setting(5, 2)
    assert "6 workers, 2 ahead would take 120 MiB, but the budget is 115 MiB" in done.why


def test_a_setting_that_went_over_the_budget_ends_the_climb_and_never_wins() -> None:
    room = space(saturating(16))
    trials = [
        trial(Setting(1, 2), 100.0),
        trial(Setting(2, 2), 200.0),
        trial(Setting(4, 2), 0.0, is_over=True, memory_bytes=20_000 * MIB),
    ]
    move = next_move(trials, room)
    assert isinstance(move, Try) and move.setting.workers <= 3
    assert stop(trials, "time").winner == Setting(2, 2)


def test_a_search_in_which_nothing_fits_gives_the_reason_and_no_winner() -> None:
    room = space(saturating(4), budget_mib=10)
    move = next_move([], room)
    assert isinstance(move, SearchEnd)
    assert move.winner is None
    assert "1 worker, 1 ahead would take 50.0 MiB, but the budget is 10.0 MiB" in move.why


def test_if_two_batches_ahead_do_not_fit_one_is_tried() -> None:
    move = next_move([], space(saturating(4), budget_mib=60))
    assert isinstance(move, Try) and move.setting == Setting(1, 1)


def test_the_search_ends_when_the_training_loop_hardly_waits() -> None:
    rate = saturating(16)
    tried, done = search(space(rate), rate, step_limit=200.0)
    assert max(setting.workers for setting in tried) == 2
    assert done.winner == Setting(2, 2)
    assert "faster loading gains nothing" in done.why


def test_more_batches_ahead_are_tried_with_the_best_workers_and_kept_if_they_gain() -> None:
    def rate(setting: Setting) -> float:
        return 100.0 * min(setting.workers, 4) * (1.0 if setting.depth < 4 else 1.3)

    tried, done = search(space(rate), rate)
    assert done.winner == Setting(4, 4)
    assert Setting(4, 3) in tried


def test_a_deeper_setting_that_is_not_faster_does_not_win_by_luck() -> None:
    def rate(setting: Setting) -> float:
        return 100.0 * min(setting.workers, 4) * (1.0 + 0.004 * setting.depth)

    _, done = search(space(rate), rate)
    assert done.winner == Setting(4, 2)


def test_settings_close_to_the_best_are_measured_once_more_and_only_once() -> None:
    rate = saturating(4)
    tried, _ = search(space(rate), rate)
    counts = {setting: tried.count(setting) for setting in tried}
    assert counts[Setting(4, 2)] == 2
    assert counts[Setting(1, 2)] == 1
    assert max(counts.values()) == 2


def test_a_lucky_measurement_does_not_win_after_the_second_measurement() -> None:
    lucky = Setting(8, 2)
    looks: dict[Setting, int] = {}

    def rate(setting: Setting) -> float:
        looks[setting] = looks.get(setting, 0) + 1
        return 440.0 if setting == lucky and looks[setting] == 1 else 390.0 if setting == lucky else (
            100.0 * min(setting.workers, 4)
        )  # fmt: skip

    room = space(saturating(4))
    _, done = search(room, rate)
    assert done.winner == Setting(4, 2)


def test_the_users_own_setting_is_measured_too() -> None:
    rate = saturating(2)
    tried, _ = search(space(rate, also=(Setting(12, 4),)), rate)
    assert tried.count(Setting(12, 4)) >= 1


def test_the_users_own_setting_is_left_out_where_it_would_not_fit() -> None:
    rate = saturating(2)
    tried, _ = search(space(rate, also=(Setting(12, 4),), budget_mib=200), rate)
    assert Setting(12, 4) not in tried


@pytest.mark.parametrize(
    ("cores", "wait_s", "cpu_s", "most"),
    [(8, 0.0, 0.01, 8), (8, 0.01, 0.01, 16), (8, 1.0, 0.0, 32), (0.5, 0.0, 0.01, 1), (2, 0.02, 0.0001, 8)],
)
def test_workers_beyond_the_cores_are_for_samples_that_wait(
    cores: float, wait_s: float, cpu_s: float, most: int
) -> None:
    assert worker_limit(cores, wait_s, cpu_s) == most


def test_a_search_that_runs_out_of_time_gives_the_best_so_far() -> None:
    done = stop([trial(Setting(1, 2), 100.0), trial(Setting(2, 2), 180.0)], "its 60 s were over")
    assert done == SearchEnd(winner=Setting(2, 2), why="its 60 s were over")
