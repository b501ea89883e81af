"""Loading the target model of a configuration, in an actor or in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from cluster.config import TargetConfig
from cluster.events import VerifierReady
from cluster.linear_cost import StepPoint, TargetForwards
from cluster.model_paths import adapter_directory, model_directory
from cluster.rank import Rank
from engine.devices import resolve_device
from engine.eagle_config import is_eagle
from engine.eagle_loading import EagleFiles
from engine.grammar import Grammars
from engine.heads import DecodingHeads, load_heads
from engine.kv_budget import NOTHING_BESIDE
from engine.loading import load_runner
from engine.runner import ModelRunner, Segment
from engine.tensor_parallel import end_loading, join
from engine.triton_sampling import prepare_sampling
from engine.triton_support import runs_triton
from verifier.eagle_drafts import DRAFT_SLOTS, EagleDrafts
from verifier.eagle_profile import measure_eagle_costs, read_after
from verifier.overlapped import OverlappedCalls
from verifier.profile import measure_head_costs, measure_step_costs
from verifier.proposing import HeadProposer, Proposer
from verifier.verifier import Verifier


@dataclass(slots=True)
class Target:
    """A loaded target: the verifier that serves; for profiling, its runner and what drafts beside it.

    Attributes:
        calls: gives the verifier its calls, whoever has several.
    """

    runner: ModelRunner
    verifier: Verifier
    heads: DecodingHeads | None = None
    eagle: EagleDrafts | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    num_ranks: int = 1
    calls: OverlappedCalls = field(init=False)

    def __post_init__(self) -> None:
        """No call is begun."""
        self.calls = OverlappedCalls(self.verifier)

    def forget_all(self) -> None:
        """Drop all requests: those of a scheduler that is gone.

        Their KV stays findable as shared prefixes, unless there are further ranks: these may have got one
        call more or less before the scheduler died, and must hold the same.
        """
        self.calls.forget_all(with_prefixes=self.num_ranks > 1)

    def read_rows(self, segments: Sequence[Segment]) -> None:
        """What a forward of these segments is followed by when it serves, if something reads its rows."""
        if self.eagle is not None:
            read_after(self.eagle, segments)

    def ready(self) -> VerifierReady:
        """What the scheduler must know of it."""
        return VerifierReady(
            num_slots=self.verifier.free_slots,
            max_tokens=self.runner.shape.max_tokens,
            vocab_size=self.runner.shape.vocab_size,
        )


def build_target(config: TargetConfig, rank: Rank | None = None) -> Target:
    """Load the target model (one rank of it), and what drafts beside it: decoding heads or EAGLE's layer.

    Raises:
        UnsuitableHeads: if that is another model's.
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
    eagle: EagleFiles | None = None
    if config.heads is not None and is_eagle(model_directory(config.heads)):
        eagle = EagleFiles.of(model_directory(config.heads), model_directory(config.path))
    runner = load_runner(
        model_directory(config.path),
        dtype=config.dtype,
        num_slots=config.num_slots,
        max_tokens=config.max_model_len,
        runner=config.runner,
        attention=config.attention,
        tensor_parallel=(rank.rank, rank.world_size) if rank is not None and sharded else None,
        device=device,
        memory_fraction=config.memory_fraction,
        device_share=config.device_share,
        graphs=config.cuda_graphs,
        quantization=config.quantization,
        trust_remote_code=config.trust_remote_code,
        feature_layers=() if eagle is None else eagle.layers,
        adapters=[(adapter.name, adapter_directory(adapter.path)) for adapter in config.adapters],
        beside=NOTHING_BESIDE if eagle is None else eagle.beside(config.dtype, DRAFT_SLOTS),
    )
    if runs_triton(device):
        prepare_sampling(runner.shape.vocab_size, device)
    heads, drafts = None, None
    proposer: Proposer | None = None
    if eagle is not None:
        layer, reading = eagle.load(runner, DRAFT_SLOTS)
        proposer = drafts = EagleDrafts(layer, reading, runner.shape.max_tokens, graphs=config.cuda_graphs)
        drafts.warm_up()
    elif config.heads is not None:
        heads = load_heads(model_directory(config.heads), runner, model_directory(config.path))
        proposer = HeadProposer(heads)
    end_loading()
    grammars = Grammars.of_model(model_directory(config.path), runner.shape.vocab_size)
    num_ranks = rank.world_size if rank is not None else 1
    verifier = Verifier(
        runner,
        prefix_sharing=config.prefix_sharing,
        proposer=proposer,
        grammars=grammars,
        adapters=[adapter.name for adapter in config.adapters],
        device=device,
        overlaps=device.type == "cuda",
        num_ranks=num_ranks,
    )
    return Target(runner, verifier, heads, drafts, device, num_ranks=num_ranks)


# The start-up profile of the target: seconds, not minutes, for the demo.
TOKEN_COUNTS = (1, 2, 4, 8, 16, 32, 48)
REQUEST_COUNTS = (1, 4, 16)
CONTEXTS = (48, 320)


def profile_target(target: Target, repeats: int = 5) -> TargetForwards:
    """Measure verify forwards; takes a few seconds for the demo target, before the first request."""
    measured = measure_step_costs(
        target.runner,
        TOKEN_COUNTS,
        CONTEXTS,
        repeats,
        request_counts=REQUEST_COUNTS,
        then=target.read_rows,
    )
    points = [
        StepPoint(num_requests, num_tokens, num_requests * context, seconds)
        for num_requests, num_tokens, context, seconds in measured
    ]
    return TargetForwards(points=points, expert_share=target.runner.shape.expert_share)


def profile_heads(target: Target, *, cpu_time: bool = False) -> list[StepPoint]:
    """Measure what drafts beside the target: what its drafter costs; nothing without one. On all ranks."""
    if target.eagle is not None:
        return [
            StepPoint(*one) for one in measure_eagle_costs(target.runner, target.eagle, cpu_time=cpu_time)
        ]
    if target.heads is None:
        return []
    measured = measure_head_costs(target.runner, target.heads, cpu_time=cpu_time)
    return [StepPoint(*point) for point in measured]
