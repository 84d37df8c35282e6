"""Sums on CUDA: the memory of their partial results."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock import gpu
from penstock.gpu.trace.reductions import reduction


@pytest.mark.parametrize(
    ("shape", "kind", "scratch_bytes"),
    [
        ((32768, 512), torch.float32, 134_217_728),
        ((16384, 10_000), torch.float32, 138_240_000),
        ((8192, 768), torch.bfloat16, 50_331_648),
        ((8192, 3072), torch.bfloat16, 138_412_032),
        ((12608, 2304), torch.bfloat16, 139_198_464),
        ((12608, 768), torch.bfloat16, 77_463_552),
        ((64, 512), torch.float32, 0),
    ],
)
def test_a_bias_gradient_takes_what_its_sum_was_seen_to_take(
    shape: tuple[int, int], kind: torch.dtype, scratch_bytes: int
) -> None:
    """All but the last: seen in trainings on an H200, which has 132 multiprocessors."""
    assert reduction(torch.empty(shape, dtype=kind, device="meta"), [0], 132).scratch_bytes == scratch_bytes


def test_a_sum_of_everything_needs_next_to_nothing() -> None:
    assert reduction(torch.empty(64, 512, 512, device="meta"), None, 132).scratch_bytes < 64 << 10


def test_sums_along_rows_need_next_to_nothing() -> None:
    assert reduction(torch.empty(4096, 65_536, device="meta"), [-1], 132).scratch_bytes < 1 << 20


@pytest.mark.parametrize("shape", [(), (0,), (1,), (5, 0), (1, 1, 7), (3, 1, 2)])
def test_odd_shapes_have_sums_too(shape: tuple[int, ...]) -> None:
    tensor = torch.empty(shape, device="meta")
    for dims in (None, [], list(range(len(shape))), [0][: len(shape)]):
        assert reduction(tensor, dims, 132).scratch_bytes == 0


@pytest.mark.parametrize(("shape", "dims"), [((1, 600_000_000), [0]), ((600_000_000, 4), [1]), ((4, 600_000_000), [0])])
def test_sums_too_large_for_32_bits_are_made_in_halves(shape: tuple[int, int], dims: list[int]) -> None:
    assert reduction(torch.empty(shape, device="meta"), dims, 132).scratch_bytes == 0


def test_a_sum_in_another_type_copies_what_it_sums() -> None:
    class Counted(nn.Module):
        def __init__(self, kind: torch.dtype | None) -> None:
            super().__init__()
            self.layer, self.kind = nn.Linear(512, 512, bias=False), kind

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).sum(dtype=self.kind)

    def allocated_bytes(kind: torch.dtype | None) -> int:
        found = gpu.estimate(lambda: Counted(kind), lambda n: torch.zeros(n, 512), [65_536], environment={})[0]
        return found.allocated_bytes

    assert allocated_bytes(torch.float64) - allocated_bytes(None) >= 65_536 * 512 * 8 / 2


def test_partial_sums_are_known_for_batch_sizes_that_were_not_traced() -> None:
    """They level off, where all else goes on growing: a line through two batch sizes would be far off."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))

    def batch(n: int) -> torch.Tensor:
        return torch.zeros(n, 512)

    swept = gpu.estimate(model, batch, [4096, 65_536, 1_048_576], environment={})
    for found in swept:
        assert (
            found.allocated_bytes == gpu.estimate(model, batch, [found.batch_size], environment={})[0].allocated_bytes
        )
