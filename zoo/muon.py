"""Muon for matrices of few shapes, all of one shape in one batched product.

The arithmetic is that of ``torch.optim.Muon`` with ``adjust_lr_fn="match_rms_adamw"`` (Jordan et al. 2024;
Liu et al. 2025, arXiv:2502.16982), whose loop over matrices launches some thirty kernels for each: for 224
of them, those of 32 layers, some seven thousand launches a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

#: Of the quintic Newton-Schulz iteration.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_EPS = 1e-7


def orthogonalised(stack: Tensor) -> Tensor:
    """Each matrix of a stack [matrices, rows, columns] with its singular values near 1, in bfloat16."""
    is_tall = stack.shape[1] > stack.shape[2]
    x = stack.bfloat16()
    if is_tall:
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=_EPS)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if is_tall else x


class StackedMuon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay, its state that of ``torch.optim.Muon``.

    Args:
        params: matrices.
        lr: an update's root mean square is 0.2 of it, about AdamW's.
        momentum, weight_decay: as there.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of all that have a gradient; ``closure`` is not called."""
        for group in self.param_groups:
            shapes: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    shapes[min(p.shape), max(p.shape)].append(p)
            for alike in shapes.values():
                self._step(alike, group["lr"], group["momentum"], group["weight_decay"])

    def _step(self, alike: list[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        for p in alike:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in alike]
        gradients = [p.grad for p in alike if p.grad is not None]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        updates = torch._foreach_lerp(gradients, buffers, momentum)
        # A matrix and its transpose are orthogonalised alike.
        wide = [u.mT if u.shape[0] > u.shape[1] else u for u in updates]
        found = orthogonalised(torch.stack([u.bfloat16() for u in wide]))
        torch._foreach_mul_(alike, 1 - lr * weight_decay)
        for p, update in zip(alike, found, strict=True):
            scale = 0.2 * max(p.shape) ** 0.5
            p.add_(update.mT if p.shape[0] > p.shape[1] else update, alpha=-lr * scale)
