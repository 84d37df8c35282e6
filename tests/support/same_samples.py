"""What it means that a sample came back as it was."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch


def is_same(one: Any, other: Any) -> bool:
    """Equal in type, structure and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(is_same(a, b) and is_same(one[a], other[b]) for a, b in pairs)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return not one.numel() or bool((_bits(one) == _bits(other)).all())
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    return one == other


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
