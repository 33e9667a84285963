"""Gradients added to `parameter.grad` in place, where autograd would make a tensor first and add it then.

Both functions fire the hooks that autograd would fire after accumulating (`register_post_accumulate_grad_hook`).
"""

from __future__ import annotations

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


def _fire_hooks(parameter: Tensor) -> None:
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        hook(parameter)
