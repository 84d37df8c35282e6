"""What the user's code warns of while it is measured, by every worker of every short run."""

from __future__ import annotations

from support.ready_python import ReadyPython

WARNS = """
import warnings
import torch
from penstock.lab.dataset.sample_probe import probe
from penstock.lab.timed_run import without_warnings
from torch.utils.data import DataLoader, default_collate

class Warning_(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        warnings.warn("this library is old")
        return index

dataset = Warning_()
probe(dataset, 2, default_collate, seconds=0.01, on_progress=lambda done: None, tries_threads=False)
for workers in (0, 1, 1):
    with without_warnings():
        assert len(list(DataLoader(dataset, num_workers=workers))) == 8
list(DataLoader(dataset))
warnings.warn("this one is new")
"""


def test_a_warning_is_shown_once_by_all_processes_of_a_measurement(python: ReadyPython) -> None:
    ran = python.run(WARNS)
    assert ran.returncode == 0, ran.stderr
    lines = [line for line in ran.stderr.splitlines() if "Warning: " in line]
    assert [line.partition("Warning: ")[2] for line in lines] == ["this library is old"] * 2 + ["this one is new"], (
        "once while it is measured, and once by the user's own loop afterwards"
    )
