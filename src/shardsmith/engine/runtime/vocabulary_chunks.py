"""Head and loss together, a chunk of tokens at a time: the logits of a whole microbatch never exist.

Forward keeps, per token, the logarithm of the sum of exponentials; backward makes each chunk's logits again and
turns them into gradients where they lie. The price is one more product with the head. Legend: N tokens,
D hidden, V local vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardsmith.engine.runtime.group import Group
from shardsmith.engine.runtime.linear import Seam, WeightQueue, entered, entered_backward
from shardsmith.engine.runtime.vocabulary import IGNORED


class Head(nn.Module):
    """What `chunked_loss_sum` needs of a head table: `weight` [V, D], its `first` row in the full table, `split`."""

    weight: nn.Parameter
    first: int
    split: bool
    shared: bool


def chunked_loss_sum(
    x_SBD: Tensor, head: Any, labels_SB: Tensor, *, seam: Seam, queue: WeightQueue, chunk: int, stays: bool
) -> Tensor:
    """Sum of the cross-entropies of all tokens, `chunk` tokens at a time; see `vocabulary.token_losses`.

    A split backward puts the weight gradient off only where the head `stays` whole: to make the logits once more it
    would have to be gathered once more.
    """
    out: Tensor = _Chunked.apply(x_SBD, head.weight, head, labels_SB.flatten(), seam, queue, chunk, stays)
    return out


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        head: Head,
        labels: Tensor,
        seam: Seam,
        queue: WeightQueue,
        chunk: int,
        stays: bool,
    ) -> Tensor:
        full = _rows(entered(x, seam, "forward"))
        group = seam.group if head.split else None
        total = torch.zeros((), dtype=_wide(x.dtype), device=x.device)
        logs = torch.empty(len(full), dtype=total.dtype, device=x.device)
        for part in _parts(len(full), chunk):
            logits, local, here = _logits(full[part], weight, labels[part], head.first)
            target = torch.zeros_like(logs[part])
            if logits.shape[1]:
                target = torch.where(here, logits.gather(1, local[:, None])[:, 0], target)
            logs[part] = _log_sums(logits, group)
            del logits  # before the next chunk has its own
            if group is not None:
                group.all_reduce(target, "loss_sums")
            total += torch.where(labels[part] != IGNORED, logs[part] - target, torch.zeros_like(target)).sum()
        ctx.save_for_backward(x, weight, labels, logs)
        ctx.head, ctx.seam, ctx.queue, ctx.chunk, ctx.stays = head, seam, queue, chunk, stays
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, labels, logs = ctx.saved_tensors
        deferring = ctx.queue.deferring and ctx.stays
        first, chunk = ctx.head.first, ctx.chunk  # what is put off must not hold `ctx`, and with it the graph
        full = _rows(entered(x, ctx.seam, "backward"))
        grad_full = torch.empty_like(full)
        grad_w = None if deferring else torch.zeros_like(weight)

        def by_logits(rows: Tensor, part: slice) -> Tensor:
            logits, local, here = _logits(rows[part], weight, labels[part], first)
            scale = grad * (labels[part] != IGNORED)
            found = logits.sub_(logs[part, None]).exp_().mul_(scale[:, None])
            if found.shape[1]:
                found.scatter_add_(1, local[:, None], (-scale * here)[:, None])
            return found.to(weight.dtype)

        def each(rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
            return ((part, by_logits(rows, part)) for part in _parts(len(labels), chunk))

        for part, grad_logits in each(full):
            torch.matmul(grad_logits, weight, out=grad_full[part])
            if grad_w is not None:
                grad_w.addmm_(grad_logits.t(), full[part])
            del grad_logits  # before the next chunk has its own
        if deferring:
            ctx.queue.pending.append(_deferred(ctx.head.weight, x.detach(), ctx.seam, each))
        grad_x = entered_backward(grad_full.view(-1, *x.shape[1:]), ctx.seam)
        return grad_x, grad_w, None, None, None, None, None, None


def _deferred(
    parameter: nn.Parameter, x: Tensor, seam: Seam, each: Callable[[Tensor], Iterator[tuple[slice, Tensor]]]
) -> Callable[[], None]:
    """The weight gradient put off by a split backward: it makes the logits a third time instead of keeping them."""

    @torch.no_grad()
    def compute() -> None:
        full = _rows(entered(x, seam, "backward"))
        grad = torch.zeros_like(parameter)
        for part, grad_logits in each(full):
            grad.addmm_(grad_logits.t(), full[part])
            del grad_logits
        parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            hook(parameter)

    return compute


def _logits(rows: Tensor, weight: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [n, V] in float32 or wider, the local row of each label, and whether it is here at all."""
    logits = rows.matmul(weight.t()).to(_wide(rows.dtype))
    local = labels - first
    here = (local >= 0) & (local < weight.shape[0]) & (labels != IGNORED)
    return logits, local.masked_fill(~here, 0), here


def _log_sums(logits: Tensor, group: Group | None) -> Tensor:
    """Logarithm of the sum of exponentials over the full vocabulary, [n]; may overwrite `logits`."""
    if group is None:
        return logits.logsumexp(-1)
    peak = logits.amax(-1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)
    group.all_reduce(peak, "loss_max", dist.ReduceOp.MAX)
    total = logits.sub_(peak[:, None]).exp_().sum(-1)
    return group.all_reduce(total, "loss_sums").log_().add_(peak)


def _parts(tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
