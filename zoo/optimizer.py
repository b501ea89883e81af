"""Muon for matrices and AdamW for the rest, each parameter stepped by one of the data-parallel ranks.

Muon's orthogonalisation costs about as much as a quarter of a backward pass at this size and batch, so the
ranks share it: every rank steps the parameters it owns, then sends them to the others.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zoo.muon import StackedMuon


class SharedOptimizer:
    """Averages gradients over the ranks, steps owned parameters, sends them round. Works without a process
    group.
    """

    def __init__(self, model: nn.Module, matrix_lr: float, other_lr: float) -> None:
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        matrices = {
            id(p)
            for module in model.modules()
            if isinstance(module, nn.Linear)
            for p in module.parameters()
            if p.ndim == 2
        } - {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        load = [0.0] * self._world
        self._owner: list[int] = []
        for p in self._parameters:
            least = load.index(min(load))
            load[least] += min(p.shape) * p.numel() if id(p) in matrices else p.numel()
            self._owner.append(least)
        own = [p for p, o in zip(self._parameters, self._owner, strict=True) if o == self._rank]
        muon = [p for p in own if id(p) in matrices]
        other = [p for p in own if id(p) not in matrices]
        self._stepped: list[tuple[torch.optim.Optimizer, float]] = []
        if muon:
            # Muon scaled to AdamW's typical update size, so that one learning rate means about the same in
            # both.
            optimizer: torch.optim.Optimizer
            if muon[0].is_cuda:  # where launching thousands of small kernels would take longer than they do
                optimizer = StackedMuon(muon, lr=matrix_lr, momentum=0.95, weight_decay=0.05)
            else:
                optimizer = torch.optim.Muon(
                    muon, lr=matrix_lr, momentum=0.95, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
                )
            self._stepped.append((optimizer, matrix_lr))
        if other:
            adam = torch.optim.AdamW(
                other, lr=other_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=other[0].is_cuda
            )
            self._stepped.append((adam, other_lr))

    @property
    def ranks(self) -> int:
        """How many share the parameters."""
        return self._world

    def average(self, extra: Tensor) -> Tensor:
        """Replace gradients by their mean over the ranks; ``extra`` (1-D, float32) rides along and is
        averaged too.
        """
        if self._world == 1:
            return extra
        flat = torch.cat([p.grad.reshape(-1) for p in self._parameters if p.grad is not None] + [extra])
        dist.all_reduce(flat)
        flat /= self._world
        at = 0
        for p in self._parameters:
            if p.grad is not None:
                p.grad.copy_(flat[at : at + p.numel()].view_as(p))
                at += p.numel()
        return flat[at:]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update at ``scale`` times the peak learning rates, then clear the gradients."""
        for optimizer, peak in self._stepped:
            for group in optimizer.param_groups:
                group["lr"] = peak * scale
            optimizer.step()
        self.forget_gradients()
        self.synchronise()

    def forget_gradients(self) -> None:
        """Clear the gradients, which `step` does itself; alone, a step is left out."""
        for p in self._parameters:
            p.grad = None

    @torch.no_grad()
    def synchronise(self) -> None:
        """Give every rank the owners' values of all parameters."""
        if self._world == 1:
            return
        for owner in range(self._world):
            theirs = [p for p, o in zip(self._parameters, self._owner, strict=True) if o == owner]
            flat = torch.cat([p.reshape(-1) for p in theirs])
            dist.broadcast(flat, owner)
            if owner != self._rank:
                at = 0
                for p in theirs:
                    p.copy_(flat[at : at + p.numel()].view_as(p))
                    at += p.numel()

    def state(self) -> list[dict[str, object]]:
        """Optimizer state of this rank, for a checkpoint."""
        return [optimizer.state_dict() for optimizer, _ in self._stepped]

    def restore(self, state: list[dict[str, object]]) -> None:
        """Take up what ``state`` gave on the same rank of as many ranks."""
        for (optimizer, _), saved in zip(self._stepped, state, strict=True):
            optimizer.load_state_dict(saved)
