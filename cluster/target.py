"""Loading the target model of a configuration, in an actor or in this process."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from cluster.config import TargetConfig
from cluster.cost_model import StepPoint
from cluster.events import VerifierReady
from cluster.model_paths import model_directory
from cluster.rank import Rank
from engine.devices import resolve_device
from engine.grammar import Grammars
from engine.heads import DecodingHeads, load_heads
from engine.loading import load_runner
from engine.runner import ModelRunner
from engine.tensor_parallel import end_loading, join
from engine.triton_sampling import prepare_sampling
from engine.triton_support import runs_triton
from verifier.profile import measure_head_costs, measure_step_costs
from verifier.verifier import Verifier


@dataclass(slots=True)
class Target:
    """A loaded target: its runner and decoding heads for profiling, and the verifier that serves."""

    runner: ModelRunner
    verifier: Verifier
    heads: DecodingHeads | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    num_ranks: int = 1

    def forget_all(self) -> None:
        """Drop all requests: those of a scheduler that is gone.

        Their KV stays findable as shared prefixes, unless there are further ranks: these may have got one
        call more or less before the scheduler died, and must hold the same.
        """
        self.verifier.forget_all(with_prefixes=self.num_ranks > 1)

    def ready(self) -> VerifierReady:
        """What the scheduler must know of it."""
        return VerifierReady(
            num_slots=self.verifier.free_slots,
            max_tokens=self.runner.shape.max_tokens,
            vocab_size=self.runner.shape.vocab_size,
        )


def build_target(config: TargetConfig, rank: Rank | None = None) -> Target:
    """Load the target model (one rank of it), and its decoding heads if it has some.

    Raises:
        UnsuitableHeads: if they are another model's.
        DeviceUnavailable, NotEnoughMemory, UnsupportedModel: if the model cannot run where it is to.
    """
    sharded = rank is not None and rank.world_size > 1
    device = resolve_device(config.device)
    if rank is not None and sharded:
        join(
            rank.rank,
            rank.world_size,
            rank.master_addr,
            rank.master_port,
            device=device,
        )
    runner = load_runner(
        model_directory(config.path),
        dtype=config.dtype,
        num_slots=config.num_slots,
        runner=config.runner,
        attention=config.attention,
        tensor_parallel=(rank.rank, rank.world_size) if rank is not None and sharded else None,
        device=device,
        memory_fraction=config.memory_fraction,
        device_share=config.device_share,
        graphs=config.cuda_graphs,
        quantization=config.quantization,
        trust_remote_code=config.trust_remote_code,
    )
    if runs_triton(device):
        prepare_sampling(runner.shape.vocab_size, device)
    heads = None
    if config.heads is not None:
        heads = load_heads(model_directory(config.heads), runner, model_directory(config.path))
    end_loading()
    grammars = Grammars.of_model(model_directory(config.path), runner.shape.vocab_size)
    verifier = Verifier(
        runner, prefix_sharing=config.prefix_sharing, heads=heads, grammars=grammars, device=device
    )
    return Target(runner, verifier, heads, device, num_ranks=rank.world_size if rank is not None else 1)


# The start-up profile of the target: seconds, not minutes, for the demo.
TOKEN_COUNTS = (1, 2, 4, 8, 16, 32, 48)
REQUEST_COUNTS = (1, 4, 16)
CONTEXTS = (48, 320)


def profile_target(target: Target, repeats: int = 5) -> list[StepPoint]:
    """Measure verify forwards; takes a few seconds for the demo target, before the first request."""
    measured = measure_step_costs(
        target.runner, TOKEN_COUNTS, CONTEXTS, repeats, request_counts=REQUEST_COUNTS
    )
    return [
        StepPoint(num_requests, num_tokens, num_requests * context, seconds)
        for num_requests, num_tokens, context, seconds in measured
    ]


def profile_heads(target: Target, *, cpu_time: bool = False) -> list[StepPoint]:
    """Measure the decoding heads, which is what their drafter costs; none without heads. On all ranks."""
    if target.heads is None:
        return []
    measured = measure_head_costs(target.runner, target.heads, cpu_time=cpu_time)
    return [StepPoint(*point) for point in measured]
