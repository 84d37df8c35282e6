"""The verdict follows from its numbers, whichever way they fall."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from penstock.lab.comparison import LoaderComparison, LoaderResult, Round

MIB = 1 << 20


def make_round(samples_per_s: float, first_batch_s: float = 0.5, growth_mib: int | None = 100) -> Round:
    return Round(
        samples=int(samples_per_s * 4),
        delivered_bytes=int(samples_per_s * 4) * MIB,
        elapsed_s=4.0,
        first_batch_s=first_batch_s,
        peak_growth_bytes=None if growth_mib is None else growth_mib * MIB,
        order=tuple((index, index % 256) for index in range(int(samples_per_s * 4))),
    )


def compare(ours: list[Round], theirs: list[Round]) -> LoaderComparison:
    return LoaderComparison(
        torch=LoaderResult(name="torch", rounds=tuple(theirs)),
        penstock=LoaderResult(name="penstock", rounds=tuple(ours)),
    )


def test_a_faster_loader_is_called_faster() -> None:
    verdict = compare(
        [make_round(200, 0.1, 50), make_round(220, 0.1, 60)],
        [make_round(100, 0.4, 500), make_round(110, 0.4, 400)],
    ).verdict()
    assert "the same samples" in verdict
    assert "2 times the samples per second" in verdict
    assert "a first batch 4 times as soon" in verdict
    assert "memory growth of 60.0 MiB against 500 MiB" in verdict


def test_a_slower_loader_is_called_slower() -> None:
    verdict = compare([make_round(50, 0.8)] * 2, [make_round(100, 0.4)] * 2).verdict()
    assert "0.5 times the samples per second" in verdict
    assert "a first batch 2 times as late" in verdict


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [([100, 100], [98, 98]), ([90, 120], [80, 100]), ([100], [100])],
    ids=["within the noise", "rounds overlap", "equal"],
)
def test_loaders_without_a_measurable_difference_are_called_alike(ours: list[float], theirs: list[float]) -> None:
    verdict = compare([make_round(each) for each in ours], [make_round(each) for each in theirs]).verdict()
    assert "about as many samples per second" in verdict
    assert "a first batch about as soon" in verdict


def test_rounds_that_overlap_far_from_each_other_give_no_verdict_and_say_what_would() -> None:
    verdict = compare([make_round(5), make_round(9)], [make_round(8), make_round(20)]).verdict()
    assert "no clear difference in samples per second" in verdict
    assert verdict.endswith(
        "The rounds of one loader differ by up to 150%: make the rounds longer, or run more rounds."
    )


def test_growth_that_could_not_be_read_is_left_out() -> None:
    comparison = compare([make_round(100, growth_mib=None)], [make_round(100, growth_mib=None)])
    assert "memory" not in comparison.verdict()
    assert comparison.torch.peak_growth_bytes is None


def test_the_verdict_stresses_different_samples() -> None:
    other = Round(
        samples=2, delivered_bytes=2, elapsed_s=1.0, first_batch_s=0.5, peak_growth_bytes=MIB, order=((1, 1), (0, 0))
    )
    comparison = compare([other], [make_round(100)])
    assert not comparison.same_samples
    assert "DIFFERENT samples" in comparison.verdict()


def test_samples_are_compared_as_far_as_both_loaders_got() -> None:
    assert compare([make_round(50)], [make_round(100)]).same_samples


def test_a_loader_that_delivered_nothing_is_not_called_the_same() -> None:
    nothing = Round(samples=0, delivered_bytes=0, elapsed_s=1.0, first_batch_s=0.5, peak_growth_bytes=MIB, order=())
    assert not compare([nothing], [make_round(100)]).same_samples


def test_json_has_every_number_and_no_list_of_samples() -> None:
    answer = json.loads(json.dumps(compare([make_round(200)], [make_round(100)]).as_json()))
    assert set(answer) == {"loaders", "same_samples", "verdict"}
    for result in answer["loaders"].values():
        assert set(result) == {"samples_per_s", "bytes_per_s", "first_batch_s", "peak_growth_bytes", "rounds"}
        assert set(result["rounds"][0]) == {
            "samples", "delivered_bytes", "elapsed_s", "first_batch_s", "peak_growth_bytes", "samples_per_s",
        }  # fmt: skip


def test_if_samples_cannot_be_told_apart_the_verdict_does_not_mention_them() -> None:
    def blind(rate: float) -> Round:
        return replace(make_round(rate), order=None)

    comparison = compare([blind(200)], [blind(100)])
    assert comparison.same_samples is None
    assert comparison.verdict().startswith(
        "Compared with torch's DataLoader, penstock delivered 2 times the samples per second"
    )
    assert comparison.penstock.bytes_per_s == 200 * MIB
