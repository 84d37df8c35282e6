"""GPU memory of a training: estimated before it runs, by component, to the bytes torch reserves.

In:  functions that make a model and a batch.
Out: estimates, the largest batch that fits, what-ifs, a comparison with what was measured.
Runs in: trainer, command line. Works without a GPU and with a CPU-only torch.

A step or two of the training are traced on meta tensors, with torch's functions behaving as they do on CUDA
(``functions``), every allocation and free is recorded in order (``recorder``), fitted over batch sizes (``script``) and
played through a model of torch's caching allocator (``playing``, ``planner.caching_allocator``). Where there is a GPU,
real steps (``real_steps``) may correct what tracing says (``correction``).
"""

from penstock.gpu.batch_size import BatchSize, find_batch_size
from penstock.gpu.card import Card
from penstock.gpu.comparison import Comparison, compare
from penstock.gpu.correction import Correction, Trial
from penstock.gpu.estimates import COMPONENTS, Estimate, Growth, Profile, estimate
from penstock.gpu.trace.training import Training
from penstock.gpu.what_ifs import WhatIf, what_if

__all__ = [
    "COMPONENTS",
    "BatchSize",
    "Card",
    "Comparison",
    "Correction",
    "Estimate",
    "Growth",
    "Profile",
    "Training",
    "Trial",
    "WhatIf",
    "compare",
    "estimate",
    "find_batch_size",
    "what_if",
]
