"""Building the workers named in a configuration, wherever they will run: an actor, or this process."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from cluster.config import DrafterConfig, ModelDrafterConfig, TargetConfig
from cluster.cost_model import StepPoint
from cluster.events import VerifierReady
from drafters.factory import build_drafter
from drafters.protocol import Drafter
from engine.loading import load_runner
from engine.runner import ModelRunner
from engine.tensor_parallel import join
from verifier.profile import measure_step_costs
from verifier.verifier import Verifier
from zoo.registry import weights_dir

ZOO_PREFIX = "zoo:"


def model_path(path: str) -> str:
    """A directory as given, or that of an embedded demo model for `zoo:NAME`.

    Raises:
        ValueError: for a name the zoo does not have.
    """
    if not path.startswith(ZOO_PREFIX):
        return path
    try:
        return str(weights_dir(path.removeprefix(ZOO_PREFIX)))
    except KeyError as error:
        raise ValueError(str(error.args[0])) from None


class Rank(msgspec.Struct, frozen=True):
    """One tensor-parallel rank and where its group meets."""

    rank: int = 0
    world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0


@dataclass(slots=True)
class Target:
    """A loaded target: its runner for profiling and the verifier that serves."""

    runner: ModelRunner
    verifier: Verifier

    def ready(self) -> VerifierReady:
        """What the scheduler must know of it."""
        return VerifierReady(
            num_slots=self.verifier.free_slots,
            max_tokens=self.runner.shape.max_tokens,
            vocab_size=self.runner.shape.vocab_size,
        )


def build_target(config: TargetConfig, rank: Rank | None = None) -> Target:
    """Load the target model (one rank of it)."""
    sharded = rank is not None and rank.world_size > 1
    if rank is not None and sharded:
        join(rank.rank, rank.world_size, rank.master_addr, rank.master_port)
    runner = load_runner(
        model_path(config.path),
        dtype=config.dtype,
        num_slots=config.num_slots,
        runner=config.runner,
        tensor_parallel=(rank.rank, rank.world_size) if rank is not None and sharded else None,
    )
    return Target(runner, Verifier(runner))


def build_pool_drafter(config: DrafterConfig, vocab_size: int, max_tokens: int) -> Drafter:
    """Load or make one drafter.

    Raises:
        ValueError: if its vocabulary is not the target's.
    """
    if isinstance(config, ModelDrafterConfig):
        drafter = build_drafter(
            "model",
            path=model_path(config.path),
            dtype=config.dtype,
            num_slots=config.num_slots,
            runner=config.runner,
        )
    else:
        drafter = build_drafter(
            "prompt_lookup",
            max_ngram=config.max_ngram,
            min_ngram=config.min_ngram,
            vocab_size=vocab_size,
            max_tokens=max_tokens,
        )
    drafted = drafter.capabilities.vocab_size
    if drafted != vocab_size:
        raise ValueError(
            f"drafter `{config.name}` has a vocabulary of {drafted} tokens and the target one of "
            f"{vocab_size}; drafters must share the target's tokenizer"
        )
    return drafter


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
