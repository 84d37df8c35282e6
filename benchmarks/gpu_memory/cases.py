"""The cases: a model, a batch size, the settings of its training, and figures measured earlier.

In:  nothing.
Out: ``CASES``: name -> case.
Runs in: harness and children.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.gpu import TrainingSetup


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training."""

    model: str
    """Name in ``models``."""
    batch: str
    """Name in ``models``."""
    batch_size: int
    precision: str = "fp32"
    checkpointing: bool = False
    optimizer: str = "adamw"
    accumulation: int = 1
    known: tuple[float, float] | None = None
    """GiB allocated and reserved on an H200, measured before penstock could estimate them."""

    def makers(self) -> tuple[Callable[[], Any], Callable[[int], Any]]:
        from gpu_memory import models

        return getattr(models, self.model), getattr(models, self.batch)

    def setup(self) -> TrainingSetup:
        make_model, make_batch = self.makers()
        return TrainingSetup(
            make_model=make_model, make_batch=make_batch, optimizer=self.optimizer, precision=self.precision,
            checkpointing=self.checkpointing, accumulation=self.accumulation,
        )  # fmt: skip


CASES = {
    "T5-base, 8 × 512, bf16": Case(
        model="t5", batch="t5_batch", batch_size=8, precision="bf16", known=(14.54, 15.01)
    ),
    "T5-base, 24 × 512, bf16": Case(
        model="t5", batch="t5_batch", batch_size=24, precision="bf16", known=(37.17, 39.79)
    ),
    "T5-base, 24 × 512, fp32": Case(model="t5", batch="t5_batch", batch_size=24, known=(41.94, 43.85)),
    "GPT-2, 8 × 512, bf16": Case(
        model="gpt2", batch="text_batch", batch_size=8, precision="bf16", known=(7.05, 7.41)
    ),
    "GPT-2, 32 × 512, bf16, checkpointing": Case(
        model="gpt2", batch="text_batch", batch_size=32, precision="bf16", checkpointing=True, known=(11.38, 12.90)
    ),
    "ResNet-50, 64, fp32": Case(model="resnet", batch="image_batch", batch_size=64, known=(5.55, 6.58)),
    "ResNet-50, 256, bf16": Case(
        model="resnet", batch="image_batch", batch_size=256, precision="bf16", known=(11.00, 13.46)
    ),
    "ViT-B/16, 64, bf16": Case(
        model="vit", batch="image_batch", batch_size=64, precision="bf16", known=(5.35, 5.82)
    ),
    "U-Net, 16 × 256², bf16": Case(model="unet", batch="picture_batch", batch_size=16, precision="bf16"),
    "BERT-base, 32 × 256, bf16": Case(model="bert", batch="masked_batch", batch_size=32, precision="bf16"),
    "Llama-like, 4 × 1024, bf16": Case(model="llama", batch="long_batch", batch_size=4, precision="bf16"),
    "Llama-like, 4 × 1024, all bf16": Case(
        model="llama", batch="long_batch", batch_size=4, precision="bf16-true", optimizer="adamw-fused"
    ),
    "LSTM, 64 × 256, fp32": Case(model="Lstm", batch="ids_batch", batch_size=64),
    "GPT-2, 8 × 512, fp16, scaler": Case(model="gpt2", batch="text_batch", batch_size=8, precision="fp16"),
    "ResNet-50, 64, SGD with momentum": Case(
        model="resnet", batch="image_batch", batch_size=64, optimizer="sgd-momentum"
    ),
    "torch encoder, 32 × 256, bf16": Case(model="Encoder", batch="vectors_batch", batch_size=32, precision="bf16"),
    "GPT-2, 4 × 512 twice, bf16": Case(
        model="gpt2", batch="text_batch", batch_size=4, precision="bf16", accumulation=2
    ),
}  # fmt: skip
"""The memory of the first eight was known before."""
