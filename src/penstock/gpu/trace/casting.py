"""Automatic mixed precision as CUDA applies it, for meta tensors.

In:  a torch function and its arguments, inside ``torch.autocast("cuda")``.
Out: the arguments after the casts.
Runs in: the tracing thread.

torch's own autocast acts on CUDA tensors only. Its lists are repeated here by name: functions that run in the lower
precision, functions that run in float32, and functions that run in the widest type of their arguments. Autocast keeps
weights that it has cast to the lower precision until the outermost autocast ends, so there is a copy of every matrix
during the forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

_nn: Any = torch._C._nn  # type: ignore[attr-defined]

_LOWER = """
    _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution prelu
    addmm addmv addr matmul __matmul__ __rmatmul__ einsum mm mv vecdot linear addbmm baddbmm bmm chain_matmul multi_dot
    lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell scaled_dot_product_attention
"""
_FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ softplus
    layer_norm native_layer_norm rms_norm group_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss
    soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
    upsample_trilinear3d upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
"""
_FLOAT32_RESULT = "prod softmax log_softmax cumprod cumsum vector_norm matrix_norm norm sum"
"""Functions that get ``dtype=torch.float32``: their kernel converts while it reads, without a copy of the input."""
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"

LOWER, FLOAT32, FLOAT32_RESULT, WIDEST = "lower", "float32", "float32 result", "widest"

_HOMES: tuple[Any, ...] = (torch, torch.Tensor, _nn, F, torch.linalg, torch.special, torch._VF)


def _policies() -> dict[Any, str]:
    found: dict[Any, str] = {}
    for names, policy in ((_LOWER, LOWER), (_FLOAT32, FLOAT32), (_FLOAT32_RESULT, FLOAT32_RESULT), (_WIDEST, WIDEST)):
        for name in names.split():
            for home in _HOMES:
                function = getattr(home, name, None)
                # Functions of torch.nn.functional that are written in Python need no policy, because the functions that
                # they call have one.
                if function is not None and not hasattr(function, "__code__"):
                    found[function] = policy
    return found


POLICIES = _policies()
"""Function, in the form in which a torch function mode receives it -> policy."""


class Casts:
    """Casts arguments, and holds autocast's cache of weights."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def clear(self) -> None:
        """Empty the cache of weights. This must be called when the outermost autocast ends."""
        self._kept.clear()

    def apply(self, policy: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments after the casts that the policy requires."""
        if policy == FLOAT32_RESULT:
            return self._float32_result(args, kwargs)
        if policy == WIDEST:
            tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
            wide = any(_is_castable(tensor) and tensor.dtype == torch.float32 for tensor in tensors)
            to = torch.float32 if wide else torch.get_autocast_dtype("cuda")
        else:
            to = torch.float32 if policy == FLOAT32 else torch.get_autocast_dtype("cuda")
        return self._cast(args, to), {name: self._cast(value, to) for name, value in kwargs.items()}

    def _cast(self, value: Any, to: torch.dtype) -> Any:
        if isinstance(value, torch.Tensor):
            return self._one(value, to) if _is_castable(value) and value.dtype != to else value
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(self._cast(part, to) for part in value)
        return value

    def _one(self, tensor: torch.Tensor, to: torch.dtype) -> torch.Tensor:
        keeps = (
            to == torch.get_autocast_dtype("cuda")
            and tensor.dtype == torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and tensor._base is None
            and torch.is_autocast_cache_enabled()
        )
        if not keeps:
            return tensor.to(to)
        known = self._kept.get(id(tensor))
        if known is None:
            with torch.enable_grad():
                known = self._kept[id(tensor)] = (tensor, tensor.to(to))
        return known[1]

    @staticmethod
    def _float32_result(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        first = args[0] if args else kwargs.get("input")
        if not isinstance(first, torch.Tensor) or not _is_castable(first) or kwargs.get("dtype") is not None:
            return args, kwargs
        if any(isinstance(arg, torch.dtype) for arg in args):
            return args, kwargs
        return args, {**kwargs, "dtype": torch.float32}


def _is_castable(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta" and tensor.is_floating_point() and tensor.dtype != torch.float64
