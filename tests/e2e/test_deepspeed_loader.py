"""PipelineDataLoader with a plain object for an engine: the scenario's own block, micro-batches, epochs, state."""

from __future__ import annotations

import subprocess
import sys
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import Dataset

from penstock.errors import ConfigError
from penstock.integrations.deepspeed import PipelineDataLoader, Ranks, split

VERIFICATION = """
import torch
from torch.utils.data import Dataset
from penstock.integrations import deepspeed as dataset_util

class TinyDataset(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, idx):
        return {'x': torch.zeros((4, 3, 256, 256), dtype=torch.float16), 'mask': None}

# 模拟模型接口
class DummyModel:
    name = 'dummy'
    def prepare_inputs(self, batch, timestep_quantile=None):
        return (batch, (torch.zeros(1), None))

    @property
    def grid(self):
        class _G:
            def get_data_parallel_rank(self): return 0
            def get_data_parallel_world_size(self): return 1
            def get_model_parallel_rank(self): return 0
            def get_model_parallel_world_size(self): return 1
            def get_pipe_parallel_rank(self): return 0
            def get_pipe_parallel_world_size(self): return 1
            @property
            def pp_group(self): return [0]
        return _G()
    def gradient_accumulation_steps(self): return 1
    def is_pipe_parallel(self): return False

model = DummyModel()
ds = TinyDataset()

# 默认 DataLoader，预取 2*workers 批次
loader_default = dataset_util.PipelineDataLoader(ds, model, 1, model, num_dataloader_workers=2, prefetch_batches_per_worker=2)
print('default prefetch_factor =', loader_default.dataloader.prefetch_factor)

# 受控预取 DataLoader
loader_limited = dataset_util.PipelineDataLoader(ds, model, 1, model, num_dataloader_workers=2, prefetch_batches_per_worker=1)
print('limited prefetch_factor =', loader_limited.dataloader.prefetch_factor)
"""  # noqa: E501

ITERATING = """
for loader in (loader_default, loader_limited):
    for _ in range(20):
        features, (target, mask) = next(loader)
        assert features['x'].shape == (4, 3, 256, 256) and features['mask'] is None and mask is None
    assert loader.epoch == 2
print('iterated', {'deepspeed', 'diffusers'} & set(__import__('sys').modules))
"""


def test_the_scenarios_own_block_runs_with_only_its_import_line_changed_and_iterates() -> None:
    done = subprocess.run([sys.executable, "-c", VERIFICATION + ITERATING], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["default prefetch_factor = 2", "limited prefetch_factor = 1", "iterated set()"]
    assert done.stderr == ""


class Batches(Dataset):
    """Batch n holds the number n, and a random one."""

    def __init__(self, count: int = 6, size: int = 4) -> None:
        self.count, self.size = count, size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "x": torch.full((self.size, 2), index),
            "noise": torch.rand(self.size),
            "prompts": [f"{index}.{row}" for row in range(self.size)],
            "mask": None,
        }


class Model:
    def __init__(self) -> None:
        self.quantiles: list[float | None] = []

    def prepare_inputs(self, batch: dict[str, Any], timestep_quantile: float | None = None) -> Any:
        self.quantiles.append(timestep_quantile)
        return (batch["x"], {"prompts": batch["prompts"], "scale": torch.tensor(3.0)}), (batch["noise"], batch["mask"])


class Grid:
    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def get_data_parallel_rank(self) -> int:
        return self.rank

    def get_data_parallel_world_size(self) -> int:
        return self.size


class Engine:
    is_pipe_parallel = False

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.grid = Grid(rank, size)


@pytest.fixture
def made() -> Iterator[Any]:
    loaders = []

    def make(dataset: Any = None, engine: Any = None, steps: int = 1, model: Any = None, **more: Any) -> Any:
        dataset = Batches() if dataset is None else dataset
        loader = PipelineDataLoader(dataset, engine or Engine(), steps, model or Model(), **more)
        loaders.append(loader)
        return loader

    yield make
    for loader in loaders:
        loader.close()


def plain(micro_batch: Any) -> Any:
    (x, texts), (noise, mask) = micro_batch
    return x.tolist(), texts["prompts"], float(texts["scale"]), noise.tolist(), mask


def test_batches_are_cut_for_gradient_accumulation_and_nothing_is_lost(made: Any) -> None:
    whole, cut = made(steps=1), made(steps=2)
    assert len(whole) == 6 and len(cut) == 12
    for _ in range(12):
        x, prompts, scale, noise, mask = plain(next(whole))
        parts = [plain(next(cut)) for _ in range(2)]
        assert [len(part[0]) for part in parts] == [2, 2]
        assert parts[0][0] + parts[1][0] == x and parts[0][1] + parts[1][1] == prompts
        assert parts[0][3] + parts[1][3] == noise and {scale} == {parts[0][2], parts[1][2]} and mask is None
    assert whole.epoch == cut.epoch == 3


def test_a_batch_that_cannot_be_cut_evenly_says_so(made: Any) -> None:
    with pytest.raises(ConfigError, match="a batch of 4 cannot be cut into 3"):
        next(made(steps=3))
    with pytest.raises(ConfigError, match="a batch of 0"):
        split({"text": "no tensor"}, None, 2)


def test_mappings_and_named_tuples_are_cut_too() -> None:
    class Pair(NamedTuple):
        x: Any
        y: Any

    first, second = split(UserDict(x=torch.arange(4), y=Pair(torch.arange(4), None)), Pair(torch.arange(4), [3]), 2)
    assert type(second[0]) is UserDict and second[0]["x"].tolist() == [2, 3]
    assert second[0]["y"].x.tolist() == [2, 3] and second[1].x.tolist() == [2, 3] and second[1].y == [3]
    assert first[1].x.tolist() == [0, 1]


def test_epochs_differ_in_randomness_and_a_new_loader_repeats_them(made: Any) -> None:
    one, other = made(num_dataloader_workers=2), made(num_dataloader_workers=0)
    came = [plain(next(one)) for _ in range(12)]
    assert [plain(next(other)) for _ in range(12)] == came
    assert came[0][3] != came[6][3] and came[0][0] == came[6][0]
    assert plain(next(made(seed=1)))[3] != came[0][3]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 1, 5, 6, 11, 12, 17])
def test_a_state_goes_on_where_it_was_taken_whatever_the_workers(made: Any, at: int, workers: int) -> None:
    first = made(steps=2, num_dataloader_workers=2)
    for _ in range(at):
        next(first)
    state = first.state_dict()
    rest = [plain(next(first)) for _ in range(9)]
    again = made(steps=2, num_dataloader_workers=workers)
    again.load_state_dict(state)
    assert again.epoch == 1 + at // 12
    assert [plain(next(again)) for _ in range(9)] == rest and again.epoch == first.epoch


def test_a_state_of_something_else_is_refused(made: Any) -> None:
    with pytest.raises(ConfigError, match="not the state of a PipelineDataLoader"):
        made().load_state_dict({})
    with pytest.raises(ConfigError, match="at batch 5 of an epoch that has 2"):
        made(Batches(2)).load_state_dict({"version": 1, "epoch": 1, "batches": 5, "micro_batches": 0})


def test_ranks_get_different_batches_of_the_same_number(made: Any) -> None:
    loaders = [made(Batches(7), Engine(rank, 2)) for rank in range(2)]
    assert [len(loader) for loader in loaders] == [3, 3]
    came = [[plain(next(loader))[0][0][0] for _ in range(6)] for loader in loaders]
    assert came == [[0, 2, 4, 0, 2, 4], [1, 3, 5, 1, 3, 5]]

    class Sharded(Batches):
        def post_init(self) -> None:
            """Datasets that have this were told their rank."""

    assert len(made(Sharded(7), Engine(1, 2))) == 7


def test_a_settings_file_gives_the_batches_ahead(made: Any, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("dataloader_prefetch_per_worker = 4\n")
    assert made(config=file).dataloader.prefetch_factor == 4
    assert made(config=str(file)).dataloader.prefetch_factor == 4


def test_settings_come_from_the_argument_the_configuration_or_the_default(made: Any) -> None:
    config = {"dataloader_prefetch_per_worker": 3}
    assert made(config=config).dataloader.prefetch_factor == 3
    assert made(config=config, prefetch_batches_per_worker=2).dataloader.prefetch_factor == 2
    assert made(config={"train": config}).dataloader.prefetch_factor == 3
    with pytest.raises(ConfigError, match="dataloader_prefetch_per_worker was probably meant"):
        made(config={"dataloader_prefetch_per_wroker": 3})
    with pytest.raises(ConfigError, match="at least 1 is needed"):
        made(config={"dataloader_prefetch_per_worker": 0})
    assert made().dataloader.prefetch_factor == 1
    assert made(num_dataloader_workers=0).dataloader.prefetch_factor is None
    with pytest.raises(ConfigError, match="empty"):
        made(Batches(0))
    with pytest.raises(ConfigError, match="at least 1"):
        made(steps=0)


def test_reset_begins_anew_and_the_quantile_reaches_the_model(made: Any) -> None:
    model = Model()
    loader = made(model=model)
    first = [plain(next(loader)) for _ in range(8)]
    assert loader.epoch == 2
    loader.reset()
    loader.set_eval_quantile(0.5)
    assert [plain(next(loader)) for _ in range(8)] == first and loader.epoch == 2
    assert model.quantiles == [None] * 8 + [0.5] * 8
    loader.sync_epoch()
    assert loader.epoch == 2
    assert iter(loader) is loader


def test_what_an_engine_does_not_say_is_that_of_one_process() -> None:
    ranks = Ranks.of(object())
    assert (ranks.data_parallel_world_size, ranks.is_pipe_parallel) == (1, False)
    assert ranks.is_first_stage and ranks.is_last_stage
