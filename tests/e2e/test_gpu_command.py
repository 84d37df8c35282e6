"""`penstock gpu` on models in files of their own, and `penstock explain --model`."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from support.commands import RunHere

MODELS = """
import torch
from torch import nn

print("imported")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(3))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()

def make_batch(n):
    return torch.zeros(n, 1024)

def wide(n):
    return torch.zeros(n, 8, 1024)

class Own(Net):
    make_batch = staticmethod(wide)

class Raises(Net):
    def forward(self, x):
        raise KeyError("no such layer")

def elsewhere(n):
    return torch.zeros(n, 1024, device="mps")

ready = Net()
number = 7
"""

DATA = """
import torch

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 200
    def __getitem__(self, index):
        return torch.zeros(1024)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # A unique name, because modules stay imported from test to test.
    (tmp_path / "nets_here.py").write_text(MODELS)
    (tmp_path / "bare_nets.py").write_text(MODELS.replace("def make_batch(n)", "def batches(n)"))
    (tmp_path / "rows_here.py").write_text(DATA)
    return tmp_path


def test_the_page_has_components_totals_choices_and_the_picture(folder: Path, run_here: RunHere) -> None:
    ended = run_here(
        "gpu",
        "nets_here.py:Net",
        "--batch-size",
        "8192,1024",
        "--memory",
        "1200MB",
        "--find",
        folder=folder,
        columns=100,
    )
    assert ended.returncode == 0, ended.stderr
    for words in (
        "parameters", "optimizer state", "activations", "cuda context", "allocated", "reserved", "nvidia-smi shows",
        "peak is in", "fits 1.12 GiB", "per sample", "checkpointing", "precision=bf16", "optimizer=sgd",
        "accumulation=2 of 4096", "not measured", "Largest batch: ", "10% must stay free", "| the limit, 1.12 GiB",
    ):  # fmt: skip
        assert words in ended.stdout, words
    # Sizes are in ascending order, and text that the user's module prints is not in the page.
    assert ended.stdout.index("1024") < ended.stdout.index("8192")
    assert "imported" not in ended.stdout and "imported" in ended.stderr


def test_the_page_fits_80_columns(folder: Path, run_here: RunHere) -> None:
    ended = run_here("gpu", "nets_here.py:Net", "--batch-size", "8,16,24", "--memory", "20GB", folder=folder)
    assert ended.returncode == 0
    assert max(len(line) for line in ended.stdout.splitlines()) <= 80


def test_the_json_equals_the_estimate(folder: Path, run_here: RunHere) -> None:
    ended = run_here(
        "gpu", "nets_here.py:Net", "--batch-size", "256,512", "--memory", "2GB", "--optimizer", "sgd", "--precision",
        "bf16", "--checkpointing", "--accumulate-to", "100000", "--json", folder=folder,
    )  # fmt: skip
    said = json.loads(ended.stdout)
    assert said["training"] == {"optimizer": "sgd", "precision": "bf16", "checkpointing": True}
    assert [each["batch_size"] for each in said["estimates"]] == [256, 512]
    first = said["estimates"][0]
    assert sum(first["components"].values()) == first["device_bytes"]
    assert first["components"]["optimizer_state"] == 0 and first["fits"] is True
    assert first["correction"] is None and first["uncalibrated"] is None
    assert {"name", "saved_bytes", "saved_allocated_bytes", "time_cost"} <= set(said["what_ifs"][0])
    found = said["found"]
    assert found["accumulation_steps"] > 1 and found["batch_size"] * found["accumulation_steps"] == 100_000


def test_batches_come_from_the_model_its_module_or_an_option(folder: Path, run_here: RunHere) -> None:
    def inputs(*arguments: str) -> int:
        ended = run_here("gpu", *arguments, "--batch-size", "1024", "--json", folder=folder)
        return json.loads(ended.stdout)["estimates"][0]["components"]["inputs"]

    assert inputs("nets_here.py:Net") == 1024 * 4096
    assert inputs("nets_here.py:Own") == inputs("nets_here:Net", "--batch", "nets_here.py:wide") == 8 * 1024 * 4096


def test_the_picture_is_stacked_and_has_the_limit(folder: Path, run_here: RunHere) -> None:
    ended = run_here(
        "gpu", "nets_here.py:Net", "--batch-size", "8192,12288,16384", "--memory", "1200MB", "--plot", "out.svg",
        folder=folder,
    )  # fmt: skip
    assert ended.returncode == 0 and "Drawn: out.svg" in ended.stdout
    root = ElementTree.parse(folder / "out.svg").getroot()
    drawn = [each for each in root.iter() if each.get("class") == "activations"]
    heights = [float(each.get("height", "0")) for each in drawn]
    assert len(heights) == 3 and heights == sorted(heights) and heights[0] < heights[-1]
    assert any(each.get("class") == "limit" for each in root.iter())
    # The parts of a column are stacked without gaps.
    column = [each for each in root.iter() if each.get("class") and each.get("x") == drawn[-1].get("x")]
    for lower, upper in itertools.pairwise(column):
        assert float(upper.get("y", 0)) + float(upper.get("height", 0)) == pytest.approx(
            float(lower.get("y", 0)), abs=0.3
        )


def test_examples_are_listed_and_one_runs(run_here: RunHere) -> None:
    listed = run_here("gpu")
    assert listed.returncode == 0
    assert all(name in listed.stdout for name in ("transformer", "cnn", "unet"))
    assert set(json.loads(run_here("gpu", "--json").stdout)["examples"]) == {"transformer", "cnn", "unet"}
    ended = run_here("gpu", "cnn", "--batch-size", "4", "--precision", "bf16")
    assert ended.returncode == 0 and "cnn, adamw, bf16" in ended.stdout


@pytest.mark.parametrize("name", ["transformer", "cnn", "unet"])
def test_every_example_can_be_traced(name: str) -> None:
    from penstock import gpu
    from penstock.gpu.examples import EXAMPLES

    example = EXAMPLES[name]
    found = gpu.estimate(example.make_model, example.make_batch, [16], environment={})[0]
    assert found.components["activations"] > 0 and not found.assumptions


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["nets_here.py:Raises"], 1, "KeyError: 'no such layer'"),
        (["nets_here.py:Net", "--batch", "nets_here.py:elsewhere"], 1, "make_batch(8) "),
        (["nets_here.py:Net", "--batch-size", "0"], 2, "0 is not a batch size"),
        (["nets_here.py:Net", "--batch-size", "8,x"], 2, "write 8,16,24"),
        (["nets_here.py:Net", "--optimizer", "adam9"], 1, "optimizer='adam9' is not known"),
        (["nets_here.py:Net", "--precision", "fp8"], 1, "precision='fp8' is not known"),
        (["nets_here.py:Net", "--memory", "lots"], 2, "memory"),
        (["resnet"], 2, "'resnet' is not an example"),
        (["cnn", "--batch", "nets_here.py:make_batch"], 2, "has its own batches"),
        (["nets_here.py:number"], 2, "cannot be called"),
        (["nets_here.py:ready"], 1, "make_model must be a function"),
        (["nets_here.py:nothing"], 2, "has no 'nothing'"),
        (["missing.py:Net"], 2, "no file missing.py"),
        (["bare_nets.py:Net"], 2, "has no batches"),
        (["nets_here.py:Net", "--plot", "a.png"], 2, "does not end in .svg"),
        (["nets_here.py:Net", "--plot", "nowhere/a.svg"], 2, "there is no folder"),
    ],
)
def test_every_error_is_one_line(arguments: list[str], status: int, said: str, folder: Path, run_here: RunHere) -> None:
    ended = run_here("gpu", *arguments, folder=folder, columns=1000)
    assert (ended.returncode, ended.stdout) == (status, ""), ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert said in last


def test_a_model_that_does_not_fit_at_any_size_is_exit_status_1(folder: Path, run_here: RunHere) -> None:
    ended = run_here("gpu", "nets_here.py:Net", "--memory", "900MB", "--find", folder=folder)
    assert ended.returncode == 1 and "not even one sample fits" in ended.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_calibration_needs_a_gpu(folder: Path, run_here: RunHere) -> None:
    ended = run_here("gpu", "nets_here.py:Net", "--calibrate", folder=folder)
    assert ended.returncode == 1 and "finds no GPU here" in ended.stderr


def test_help_does_not_import_torch() -> None:
    code = "import sys\nfrom penstock.cli.app import run\nrun(['gpu', '--help'])\nassert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_explain_shows_gpu_memory_beside_the_hosts(folder: Path, run_here: RunHere) -> None:
    options = ["--workers", "1", "--seconds", "0.2", "--batch-size", "64"]
    model = ["--model", "nets_here.py:Net", "--precision", "bf16", "--gpu-memory", "20GB", "--plot", "both.svg"]
    ended = run_here("explain", "rows_here.py:Rows", *options, *model, folder=folder)
    assert ended.returncode == 0, ended.stderr
    for words in ("loader buffers", "optimizer state", "fits 18.6 GiB", "GPU memory by batch size"):
        assert words in ended.stdout, words
    texts = [each.text or "" for each in ElementTree.parse(folder / "both.svg").getroot().iter()]
    assert any("Host memory" in text for text in texts) and any("GPU memory" in text for text in texts)
    wrong = run_here("explain", "rows_here.py:Rows", "--precision", "bf16", folder=folder)
    assert wrong.returncode == 2 and "need --model" in wrong.stderr
