"""Scaled dot-product attention as CUDA runs it: the choice of the kernel, and the tensors that the kernel keeps.

In:  the arguments of ``scaled_dot_product_attention``, on meta tensors.
Out: the result of the operation that CUDA would choose, so that autograd saves the same tensors as on CUDA.
Runs in: the tracing thread.

On a device without a fused kernel, torch computes attention by plain arithmetic, which keeps every probability for the
backward pass. CUDA's fused kernels keep only one number per row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from penstock.gpu.card import Card

_HALF = (torch.float16, torch.bfloat16)


def attend(
    card: Card,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``F.scaled_dot_product_attention`` as the card runs it."""
    aten: Any = torch.ops.aten
    kernel = _chosen_kernel(card, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = _additive(attn_mask, query.dtype)
    if kernel == "math":
        return _plain(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    keeps = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    if kernel == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(
            query, key, value, attn_mask, keeps, dropout_p, is_causal, False, scale=scale
        )[0]
    if kernel == "flash":
        width = query.shape[-1]
        padded = [F.pad(tensor, (0, -width % 8)) if width % 8 else tensor for tensor in (query, key, value)]
        scale = width**-0.5 if scale is None else scale
        out = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :width] if width % 8 else out
    if attn_mask is not None:
        attn_mask = _aligned(attn_mask).expand(*query.shape[:3], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale
    )[0]


def _chosen_kernel(
    card: Card,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> str:
    """ "cudnn", "flash", "efficient" or "math": the first kernel in torch's order whose conditions are met."""
    if any(tensor.dim() != 4 or tensor.shape[-1] == 0 or tensor.stride(-1) != 1 for tensor in (query, key, value)):
        return "math"
    if mask is not None and mask.stride(-1) != 1:
        return "math"
    half = query.dtype in _HALF and card.capability >= (8, 0)
    width, same_width = query.shape[-1], query.shape[-1] == key.shape[-1] == value.shape[-1]
    same_heads = query.shape[1] == key.shape[1] == value.shape[1]
    heads_fit = same_heads or enable_gqa
    enabled = torch.backends.cuda
    if (
        _prefers_cudnn(card)
        and enabled.cudnn_sdp_enabled()
        and half
        and heads_fit
        and width % 8 == 0
        and value.shape[-1] % 8 == 0
        and width <= 256
        and not (mask is not None and (mask.requires_grad or mask.dim() not in (2, 4)))
        and (dropout_p * 16).is_integer()
        and key.shape[2] > 1
    ):
        return "cudnn"
    square = not is_causal or query.shape[2] == key.shape[2]
    if enabled.flash_sdp_enabled() and half and same_width and width <= 256 and mask is None and heads_fit and square:
        return "flash"
    step = 8 if half else 4
    aligned = width == key.shape[-1] and width % step == 0 and value.shape[-1] % step == 0
    known = query.dtype in (torch.float32, torch.float16) or half
    if enabled.mem_efficient_sdp_enabled() and known and aligned and same_heads:
        return "efficient"
    return "math"


def _prefers_cudnn(card: Card) -> bool:
    """torch 2.11 and later try cuDNN's kernel first on Hopper and on data-centre Blackwell."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return card.capability[0] in (9, 10) and (major, minor) >= (2, 11)


def _additive(mask: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    return torch.where(mask, 0.0, torch.full((), -torch.inf, dtype=kind, device=mask.device))


def _plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Attention without a fused kernel. It computes in float32 and keeps every probability and the mask of its
    dropout."""
    kind = query.dtype
    if kind in _HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
    root = (query.shape[-1] ** -0.5 if scale is None else abs(scale)) ** 0.5
    query = query * root
    if is_causal:
        square = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = _additive(square, query.dtype)
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    weights = torch.matmul(query, key.transpose(-2, -1) * root)
    if mask is not None:
        weights.add_(mask)
    weights = torch.ops.aten._safe_softmax(weights, -1)
    if dropout_p > 0:
        weights = torch.native_dropout(weights, dropout_p, True)[0]
    return torch.matmul(weights, value).to(kind)


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """The mask for the memory-efficient kernel, whose rows must start at multiples of 8; any other mask is copied with
    padding."""
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    length = mask.shape[-1]
    return F.pad(mask, (0, 8 - length % 8))[..., :length]
