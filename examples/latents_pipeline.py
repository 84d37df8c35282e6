"""Diffusion training on precomputed latents: what prefetch costs in memory, under two settings.

    python examples/latents_pipeline.py

Encodes a small dataset once into a disk cache (latents and text embeddings), then feeds a training loop from it twice,
through ``PipelineDataLoader``: with 2 batches ahead per worker and with 1. Prints the measured memory of the whole
process tree for both.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import Dataset

import penstock
from penstock.integrations.deepspeed import PipelineDataLoader

MIB = 1 << 20


class Encoded(Dataset):
    """Whole batches of latents and text embeddings, as an encoder would give them."""

    def __init__(self, batches: int, batch_size: int, side: int) -> None:
        self.batches, self.batch_size, self.side = batches, batch_size, side

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(0.02)  # the encoder's time
        return {
            "latents": torch.full((self.batch_size, 16, self.side, self.side), float(index), dtype=torch.float16),
            "text": torch.full((self.batch_size, 77, 2048), float(index), dtype=torch.float16),
            "mask": None,
        }


class Diffusion:
    """The model's side: noise, and the target that depends on it."""

    def prepare_inputs(self, batch: dict[str, Any], timestep_quantile: float | None = None) -> Any:
        noise = torch.randn(len(batch["latents"]), 1, 1, 1)
        return (batch["latents"], batch["text"]), (noise, batch["mask"])

    def is_pipe_parallel(self) -> bool:
        return False


def train(folder: str, options: argparse.Namespace, prefetch: int) -> dict[str, float]:
    """One setting, in this process."""
    dataset = Encoded(options.batches, options.batch_size, options.side)
    model = Diffusion()
    with penstock.Cache(options.cache, disk=folder) as cache:
        encoded = cache.wrap(dataset, fingerprint="latents, version 1")
        model.prepare_inputs(encoded[0])  # what the first use of torch's kernels takes is nobody's prefetch
        before = tree_bytes()
        loader = PipelineDataLoader(
            encoded, model, 1, model, num_dataloader_workers=options.workers, prefetch_batches_per_worker=prefetch
        )
        peak, began_s = 0, time.monotonic()
        for number in range(options.batches):
            (latents, _), (_, mask) = next(loader)
            assert mask is None and latents[0, 0, 0, 0] == number, "another batch than was asked for"
            time.sleep(options.step_s)
            if number % 5 == 4:
                peak = max(peak, tree_bytes() - before)
        seconds = time.monotonic() - began_s
        stats = cache.stats()
        assert stats.misses == 0, "everything was on disk"
        loader.close()
    return {"prefetch": prefetch, "growth_bytes": peak, "batches_per_s": options.batches / seconds}


def tree_bytes() -> int:
    """Memory of this process and its workers, each shared page counted once. Files do not count: pages of torch's own
    libraries are shared with whoever else runs on the machine."""
    gc.collect()
    this = psutil.Process()
    found = 0
    for process in (this, *this.children(recursive=True)):
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                found += int(line.split()[1]) * 1024
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--side", type=int, default=128, help="latents of 16 x SIDE x SIDE")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--step-s", type=float, default=0.1, help="what a training step takes")
    parser.add_argument("--cache", default="1MiB", help="memory over the disk cache")
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(train(options.one[0], options, int(options.one[1]))))
        return
    results = []
    with tempfile.TemporaryDirectory(prefix="penstock-latents-") as folder:
        dataset = Encoded(options.batches, options.batch_size, options.side)
        with penstock.Cache(options.cache, disk=folder, disk_limit="4GiB") as cache:
            penstock.precompute(dataset, cache, fingerprint="latents, version 1")
        for prefetch in (2, 1):
            # Each in a process of its own: what one leaves behind is not the next one's.
            command = [sys.executable, *sys.argv, "--one", folder, str(prefetch)]
            results.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
    batch_bytes = options.batch_size * 2 * (16 * options.side**2 + 77 * 2048)
    if options.json:
        print(json.dumps({"batch_bytes": batch_bytes, "results": results}, indent=2))
        return
    print(f"batches of {batch_bytes / MIB:.1f} MiB, {options.workers} workers, a step of {options.step_s:g} s")
    for result in results:
        growth = result["growth_bytes"]
        print(
            f"  {result['prefetch']} ahead per worker: +{growth / MIB:.1f} MiB ({growth / batch_bytes:.1f} batches), "
            f"{result['batches_per_s']:.1f} batches/s"
        )


if __name__ == "__main__":
    main()
