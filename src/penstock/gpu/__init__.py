"""Estimates the GPU memory of a training before the training runs: each component, and the bytes that torch reserves.

In:  functions that make a model and a batch.
Out: estimates, the largest batch that fits, the savings of other settings, a comparison with measured peaks.
Runs in: trainer, command line. Works without a GPU and with a CPU-only torch.

``trace`` runs two or three steps on meta tensors while torch's functions behave as on CUDA. It records every allocation
and free in order, and turns this record into a script for any batch size. ``allocator`` simulates the script on a model
of torch's caching allocator. If there is a GPU, ``real_steps`` and ``calibration`` correct the estimate.
"""

from penstock.gpu.batch_size import BatchSize, find_batch_size
from penstock.gpu.calibration import BatchTrial, Correction
from penstock.gpu.card import Card
from penstock.gpu.estimates import COMPONENTS, Estimate, EstimateComparison, Estimator, Growth, compare, estimate
from penstock.gpu.training import TrainingSetup
from penstock.gpu.what_ifs import WhatIf, what_if

__all__ = [
    "COMPONENTS",
    "BatchSize",
    "BatchTrial",
    "Card",
    "Correction",
    "Estimate",
    "EstimateComparison",
    "Estimator",
    "Growth",
    "TrainingSetup",
    "WhatIf",
    "compare",
    "estimate",
    "find_batch_size",
    "what_if",
]
