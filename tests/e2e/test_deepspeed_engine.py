"""PipelineDataLoader driven by a real DeepSpeed pipeline: two stages, two processes, on the CPU."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install deepspeed"
)

TRAINING = """
import os, sys
import torch
import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule
from torch.utils.data import Dataset
from penstock.integrations.deepspeed import PipelineDataLoader

deepspeed.init_distributed(dist_backend="gloo")

class Latents(Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return {"latents": torch.randn(4, 8) + index, "mask": torch.ones(4)}

class Model:
    prepared = 0
    def prepare_inputs(self, batch, timestep_quantile=None):
        # The target depends on noise that only this process has drawn.
        Model.prepared += 1
        noise = torch.randn(4, 8)
        return batch["latents"] + noise, (noise, batch["mask"])

def loss(output, label):
    noise, mask = label
    return (((output - noise) ** 2).mean(1) * mask).mean()

torch.manual_seed(0)
layers = [LayerSpec(torch.nn.Linear, 8, 32), LayerSpec(torch.nn.ReLU), LayerSpec(torch.nn.Linear, 32, 8)]
module = PipelineModule(layers, num_stages=2, loss_fn=loss, partition_method="uniform")
config = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "steps_per_print": 10**9,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
}
engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)
torch.manual_seed(100 + engine.global_rank)
loader = PipelineDataLoader(Latents(), engine, 2, Model(), num_dataloader_workers=1)
losses = [engine.train_batch(data_iter=loader).item() for _ in range(120)]
children = len(__import__("psutil").Process().children())
with open(f"{sys.argv[1]}/stage{engine.stage_id}", "w") as said:
    print(f"epoch {loader.epoch}, {losses[0]:.3f} to {losses[-1]:.3f}, prepared {Model.prepared},"
          f" children {children}, position {loader.state_dict()['batches']}", file=said)
loader.sync_epoch()
assert loader.epoch == 21
loader.close()
"""


def test_a_real_pipeline_of_two_stages_trains_on_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", str(script), str(tmp_path)]
    there = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=there)
    assert done.returncode == 0, done.stderr[-4000:]
    first, last = ((tmp_path / f"stage{number}").read_text() for number in range(2))
    # The loss falls only if the last stage has the targets of the noise the first one drew.
    began, ended = map(float, re.findall(r"(\d+\.\d+) to (\d+\.\d+)", last)[0])
    assert ended < 0.75 * began, last
    assert "epoch 21" in first and "prepared 120, children 1, position 0" in first, first
    assert "epoch 21" in last and "prepared 0, children 0, position 0" in last, last
