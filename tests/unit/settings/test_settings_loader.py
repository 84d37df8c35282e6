"""``penstock.DataLoader.from_settings``: settings files configure the loader."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import penstock

FILES = Path(__file__).parent / "files"


def dataset(samples: int = 32) -> TensorDataset:
    return TensorDataset(torch.arange(samples))


def test_a_team_s_file_makes_a_loader_that_delivers_its_batches() -> None:
    with penstock.DataLoader.from_settings(
        dataset(), FILES / "s3_linux.yaml", num_workers=2, pin_memory=False
    ) as loader:
        assert (loader.batch_size, loader.num_workers, loader.prefetch_factor) == (8, 2, 4)
        assert loader.persistent_workers is True
        assert [batch.tolist() for (batch,) in loader] == [list(range(at, at + 8)) for at in range(0, 32, 8)]


@pytest.mark.parametrize(
    "name", sorted(path.name for path in FILES.iterdir() if path.name not in ("s3_24gb.yaml", "s1_gpu.yaml"))
)
@pytest.mark.parametrize("section", ["train", "eval"])
def test_the_loader_accepts_every_team_s_file(name: str, section: str) -> None:
    given = {} if sys.platform.startswith("linux") else {"cache": None}
    with warnings.catch_warnings():
        # torch warns about missing CPUs and GPUs.
        warnings.simplefilter("ignore")
        loader = penstock.DataLoader.from_settings(dataset(), FILES / name, section, **given)
    loader.close()
    if loader.cache is not None:
        loader.cache.close()


def test_the_evaluation_loader_prefetches_no_more_than_the_training_loader() -> None:
    source = {"num_workers": 2, "dataloader_prefetch_per_worker": 1, "eval": {"batch_size": 2}}
    train = penstock.DataLoader.from_settings(dataset(), source)
    evaluation = penstock.DataLoader.from_settings(dataset(), source, "eval")
    assert train.prefetch_factor == evaluation.prefetch_factor == 1
    assert (train.batch_size, evaluation.batch_size) == (1, 2)


def test_a_prefetch_without_num_workers_is_dropped_with_a_warning() -> None:
    source = {"dataloader_prefetch_per_worker": 1}
    assert penstock.settings.load(source).arguments == {"prefetch_factor": 1}
    with pytest.warns(UserWarning, match="does not set num_workers, so prefetch_factor=1 is dropped"):
        loader = penstock.DataLoader.from_settings(dataset(), source)
    assert loader.prefetch_factor is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert penstock.DataLoader.from_settings(dataset(), source, num_workers=2).prefetch_factor == 1


def test_the_loader_uses_the_cache_of_the_file() -> None:
    pytest.importorskip("fcntl")
    with penstock.DataLoader.from_settings(dataset(), {"DATA": {"CACHE_SIZE_GB": 0.0625}}) as loader:
        assert loader.cache is not None and loader.cache.stats().limit_bytes == 64 << 20
        loader.cache.close()


def test_objects_given_in_the_call_reach_the_loader() -> None:
    sampler = torch.utils.data.SequentialSampler(range(4))
    source = {"shuffle": True, "batch_size": 2}
    loader = penstock.DataLoader.from_settings(dataset(), source, sampler=sampler, name="mine")
    assert loader.sampler is sampler and loader.name == "mine" and loader.batch_size == 2


def test_reading_settings_does_not_import_torch() -> None:
    import subprocess

    code = "import penstock, sys; penstock.settings.load({'num_workers': 1}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
