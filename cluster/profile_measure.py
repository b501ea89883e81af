"""Measures the models of a configuration in this process, one after the other (`flotilla profile`)."""

from __future__ import annotations

import gc
import multiprocessing
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from cluster.config import FlotillaConfig, TargetConfig
from cluster.drafter_config import DrafterConfig, ModelDrafterConfig
from cluster.linear_cost import StepPoint
from cluster.pool_drafter import build_pool_drafter
from cluster.profile_file import (
    TARGET,
    ModelIdentity,
    ModelProfile,
    ProfileFile,
    identify_drafter,
    identify_target,
    new_profile,
)
from cluster.profile_fit import fit_held_out
from cluster.rank import Rank
from cluster.target import Target, build_target, profile_heads
from drafters.profile import measure_draft_costs
from drafters.protocol import Drafter
from engine.devices import resolve_device, see_only_gpu
from engine.runner import ModelShape
from engine.tensor_parallel import leave
from verifier.profile import measure_step_costs

# The grid: batched tokens x requests x context per request. What does not fit a model is left out.
TOKEN_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
# On a GPU the knee lies beyond what a CPU computes in reasonable time.
GPU_TOKEN_COUNTS = (192, 256, 384, 512, 768, 1024, 1536, 2048)
REQUEST_COUNTS = (1, 4, 16, 32)
CONTEXTS = (32, 160, 480)
DRAFT_REQUEST_COUNTS = (1, 2, 4, 8, 16, 32)
DRAFT_WIDTHS = (1, 2, 4)
DRAFT_CONTEXTS = (32, 160, 480)
# Every shape is timed so often, or until that many seconds are spent, though three times at least.
REPEATS = 9
TARGET_SECONDS, DRAFTER_SECONDS = 6.0, 2.0

#: Called with a model's name, how much of it is measured, and how much there is at most.
Report = Callable[[str, int, int], None]


def measure_profile(config: FlotillaConfig, report: Report = lambda name, done, total: None) -> ProfileFile:
    """Load and measure the target, then each drafter; seconds for the demo family.

    On a CPU with one thread per forward, processor time is counted: other work on the machine disturbs it
    little. Else it is wall time, and the machine should do nothing else.

    Raises:
        FileNotFoundError, KeyError: if a model is not there.
        ValueError: if a drafter's vocabulary is not the target's, or a model holds too few shapes to fit.
    """
    with _other_ranks(config.target) as rank:
        points, heads, shape = _measured(config.target, rank, lambda *progress: report(TARGET, *progress))
    ranks, cpu_time = config.target.tensor_parallel, _is_on_one_core(config.target)
    measured = _fitted(TARGET, identify_target(config.target), points, shape.expert_share)
    drafters = {}
    for drafter in config.drafters:
        if drafter.runs_beside_target:
            drafters[drafter.name] = _fitted(drafter.name, identify_drafter(drafter), heads)
            continue
        gc.collect()  # one model's memory at a time
        drafters[drafter.name] = _drafter_profile(
            drafter,
            shape.vocab_size,
            shape.max_tokens,
            config.target.path,
            cpu_time and not _is_on_gpu(drafter),
            report,
        )
    return new_profile("cpu" if cpu_time and ranks == 1 else "wall", measured, drafters)


def measure_target(
    target: Target, *, ranks: int = 1, report: Callable[[int, int], None] = lambda done, total: None
) -> list[StepPoint]:
    """Measure verify forwards of a loaded target; every rank must do so at the same time.

    Args:
        target: one rank of it, otherwise idle.
        ranks: how many there are.
        report: called with forwards done and forwards at most.
    """
    has_gpu = target.device.type == "cuda"
    measured = measure_step_costs(
        target.runner,
        TOKEN_COUNTS + (GPU_TOKEN_COUNTS if has_gpu else ()),
        CONTEXTS,
        REPEATS,
        request_counts=REQUEST_COUNTS,
        # Ranks wait for each other, which is time too, and must all repeat alike.
        cpu_time=ranks == 1 and not has_gpu and torch.get_num_threads() == 1,
        max_seconds=TARGET_SECONDS if ranks == 1 else float("inf"),
        report=report,
        then=target.read_rows,
    )
    return [
        StepPoint(num_requests, num_tokens, num_requests * context, seconds)
        for num_requests, num_tokens, context, seconds in measured
    ]


def measure_drafter(
    drafter: Drafter, *, cpu_time: bool, report: Callable[[int, int], None] = lambda done, total: None
) -> list[StepPoint]:
    """Measure draft calls of a loaded drafter, which is otherwise idle."""
    measured = measure_draft_costs(
        drafter,
        DRAFT_REQUEST_COUNTS,
        DRAFT_WIDTHS,
        DRAFT_CONTEXTS,
        REPEATS,
        cpu_time=cpu_time,
        max_seconds=DRAFTER_SECONDS,
        report=report,
    )
    return [StepPoint(*point) for point in measured]


def _is_on_one_core(config: TargetConfig) -> bool:
    """Whether forwards of the target, which is loaded, take the time of one thread on a CPU."""
    return resolve_device(config.device).type == "cpu" and torch.get_num_threads() == 1


def _is_on_gpu(config: DrafterConfig) -> bool:
    """Whether its forwards run on a GPU here, so that the processor's time says nothing of them."""
    return isinstance(config, ModelDrafterConfig) and resolve_device(config.device).type == "cuda"


def _drafter_profile(
    config: DrafterConfig,
    vocab_size: int,
    max_tokens: int,
    target_path: str,
    cpu_time: bool,
    report: Report,
) -> ModelProfile:
    drafter = build_pool_drafter(config, vocab_size, max_tokens, target_path)
    points = measure_drafter(
        drafter, cpu_time=cpu_time, report=lambda *progress: report(config.name, *progress)
    )
    return _fitted(config.name, identify_drafter(config), points)


def _fitted(
    name: str, model: ModelIdentity, points: list[StepPoint], expert_share: float = 0.0
) -> ModelProfile:
    try:
        return ModelProfile.of(model, points, fit_held_out(points, expert_share=expert_share))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


@contextmanager
def _other_ranks(config: TargetConfig) -> Iterator[Rank | None]:
    """The rank of the target that is to be in this process; further ones live in processes of their own
    meanwhile."""
    if config.tensor_parallel == 1:
        yield None
        return
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    context = multiprocessing.get_context("spawn")
    ranks = [Rank(rank, config.tensor_parallel, "127.0.0.1", port) for rank in range(config.tensor_parallel)]
    others = [context.Process(target=_measure_rank, args=(config, rank), daemon=True) for rank in ranks[1:]]
    for process in others:
        process.start()
    try:
        yield ranks[0]
        for process in others:
            process.join(timeout=60)
    finally:
        _leave()
        for process in others:
            process.kill()


def _measured(
    config: TargetConfig,
    rank: Rank | None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[StepPoint], list[StepPoint], ModelShape]:
    """Forwards of the target, or one rank of it, and of what drafts beside it; its shape. It is gone then."""
    target = build_target(config, rank)
    points = measure_target(target, ranks=config.tensor_parallel, report=report)
    heads = profile_heads(target, cpu_time=rank is None and _is_on_one_core(config))
    return points, heads, target.runner.shape


def _measure_rank(config: TargetConfig, rank: Rank) -> None:
    """A rank after rank 0: runs what rank 0 runs."""
    if config.device != "cpu":
        see_only_gpu(rank.rank)  # as Ray does for its actors; rank 0 takes the first
    _measured(config, rank)
    _leave()


def _leave() -> None:
    """Leave the group, for which NCCL waits until no captured forward is left that sums over it."""
    gc.collect()
    leave()
