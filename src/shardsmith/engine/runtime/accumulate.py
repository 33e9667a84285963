"""Gradients added to `parameter.grad` in place, where autograd would make a tensor first and add it then.

All functions fire the hooks that autograd would fire after accumulating (`register_post_accumulate_grad_hook`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def add_product(parameter: Tensor, grad_NO: Tensor, input_NI: Tensor) -> None:
    """Add grad^T input to `parameter.grad` [O, I]."""
    if parameter.grad is None:
        parameter.grad = grad_NO.t().matmul(input_NI)
    else:
        parameter.grad.addmm_(grad_NO.t(), input_NI)
    _fire_hooks(parameter)


def add_rows(parameter: Tensor, index_N: Tensor, grad_ND: Tensor) -> None:
    """Add each row of `grad_ND` to the row of `parameter.grad` [V, D] that `index_N` names."""
    if parameter.grad is None:
        parameter.grad = parameter.new_zeros(parameter.shape)
    parameter.grad.index_add_(0, index_N, grad_ND)
    _fire_hooks(parameter)


def add_stack(parameter: Tensor, grad_EOI: Tensor) -> None:
    """Add `grad_EOI`, made for all experts at once, to `parameter.grad` [E, O, I]."""
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter).copy_(grad_EOI)
    else:
        parameter.grad.add_(grad_EOI)
    _fire_hooks(parameter)


def add_products(parameter: Tensor, grad_TO: Tensor, input_TI: Tensor, bounds: Sequence[int]) -> None:
    """Add grad^T input of the rows [bounds[e], bounds[e + 1]) to `parameter.grad[e]` [O, I], for each expert e."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    for e, gradient in enumerate(parameter.grad):
        own = slice(bounds[e], bounds[e + 1])
        gradient.addmm_(grad_TO[own].t(), input_TI[own])
    _fire_hooks(parameter)


def _fire_hooks(parameter: Tensor) -> None:
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        hook(parameter)
