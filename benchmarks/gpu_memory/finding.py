"""Finds the largest batch under a limit with one library, and counts how often memory ran out.

In:  a request: finder, case, limit in GiB.
Out: the batch found, trials, how many of them ran out of memory, seconds, and whether 15% more still fits, as JSON.
Runs in: its own child per finder and case; needs a GPU.
"""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import penstock.gpu
from child import Harness
from gpu_memory.cases import CASES, Case
from penstock.gpu import real_steps
from penstock.gpu.optimizers import maker_of
from penstock.gpu.training import call, loss_of
from penstock.units import GIB

MARGIN = 0.1
_FIRST = {"accelerate": 1024}
"""accelerate starts at a size that its user guesses and goes down; Lightning starts at 2 and goes up."""
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Counted:
    """Real steps with any batch size; records the sizes that ran and those that ran out of memory."""

    def __init__(self, case: Case) -> None:
        self.training = case.setup()
        self.ran: list[int] = []
        self.full: list[int] = []

    def step(self, size: int) -> None:
        try:
            real_steps.train(self.training, size, "cuda")
        except RuntimeError as error:
            if real_steps.is_out_of_memory(error):
                self.full.append(size)
            raise
        self.ran.append(size)


def ours(case: Case) -> dict[str, Any]:
    counted = Counted(case)
    training = counted.training
    found = penstock.gpu.find_batch_size(
        training.make_model,
        training.make_batch,
        margin=MARGIN,
        optimizer=training.optimizer,
        precision=training.precision,
        checkpointing=training.checkpointing,
    )
    line = int(found.memory_bytes * (1 - MARGIN)) - penstock.gpu.Card().context_bytes
    ran = real_steps.measure(training, found.batch_size)
    more = real_steps.measure(training, -(-found.batch_size * 115 // 100))
    return {
        "batch_size": found.batch_size,
        "trials": len(found.trials),
        "out_of_memory": sum(not trial.fits for trial in found.trials),
        "reason": found.reason,
        "trains": ran.fits,
        "is_largest": not more.fits or more.reserved_bytes > line,
    }


def accelerate(case: Case) -> dict[str, Any]:
    """``find_executable_batch_size`` as its documentation uses it."""
    find: Any = importlib.import_module("accelerate.utils").find_executable_batch_size
    counted = Counted(case)

    @find(starting_batch_size=_FIRST["accelerate"])
    def run(batch_size: int) -> int:
        counted.step(batch_size)
        return batch_size

    return _result(run(), counted)


def lightning(case: Case, mode: str) -> dict[str, Any]:
    """``Tuner.scale_batch_size`` as its documentation uses it."""
    pl: Any = _lightning()
    tuner_module: Any = importlib.import_module(f"{pl.__name__}.tuner")
    counted = Counted(case)
    training = counted.training

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            self.model = training.make_model()

        def training_step(self, batch: Any, number: int) -> Any:
            try:
                kind = _TYPES.get(case.precision)
                with torch.autocast("cuda", kind or torch.bfloat16, enabled=kind is not None):
                    loss = loss_of(call(self.model, batch))
            except RuntimeError as error:
                if real_steps.is_out_of_memory(error):
                    counted.full.append(self.batch_size)
                raise
            counted.ran.append(self.batch_size)
            return loss

        def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
            try:
                loss.backward()
            except RuntimeError as error:
                if real_steps.is_out_of_memory(error):
                    counted.full.append(self.batch_size)
                raise

        def configure_optimizers(self) -> Any:
            return maker_of(case.optimizer)(self.model.parameters())

        def train_dataloader(self) -> Any:
            batches = _Batches(training.make_batch, self.batch_size)
            return torch.utils.data.DataLoader(batches, batch_size=None)

    trainer = pl.Trainer(
        accelerator="gpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    found = tuner_module.Tuner(trainer).scale_batch_size(Module(), mode=mode, steps_per_trial=3, max_trials=25)
    return _result(found, counted)


class _Batches(torch.utils.data.Dataset[Any]):
    def __init__(self, make_batch: Callable[[int], Any], size: int) -> None:
        self._make_batch, self._size = make_batch, size

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Any:
        return self._make_batch(self._size)


def _lightning() -> Any:
    try:
        return importlib.import_module("lightning.pytorch")
    except ImportError:
        return importlib.import_module("pytorch_lightning")


def _result(found: Any, counted: Counted) -> dict[str, Any]:
    return {
        "batch_size": found,
        "trials": len(set(counted.ran) | set(counted.full)),
        "out_of_memory": len(counted.full),
    }


FINDERS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "penstock": ours,
    "accelerate": accelerate,
    "lightning, power": lambda case: lightning(case, "power"),
    "lightning, binsearch": lambda case: lightning(case, "binsearch"),
}


def main() -> None:
    warnings.filterwarnings("ignore")
    harness = Harness()
    request = harness.request
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(request["limit_gib"] * GIB / total)
    began_s = time.perf_counter()
    try:
        said = FINDERS[request["finder"]](CASES[request["case"]])
    except ImportError as missing:
        harness.result(missing=str(missing))
        return
    harness.result(**said, seconds=time.perf_counter() - began_s)


if __name__ == "__main__":
    main()
