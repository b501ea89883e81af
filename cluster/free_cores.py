"""How many drafters may draft ahead on the hardware at hand."""

from __future__ import annotations

from cluster.config import FlotillaConfig
from cluster.sharing import drafters_elsewhere


def settle_draft_ahead(config: FlotillaConfig, num_cores: int) -> FlotillaConfig:
    """The configuration with `scheduler.draft_ahead` decided, if it was left open.

    A drafter that works while the target verifies needs a processor core of its own, or it slows the target
    down: those that the target's ranks leave over are counted, and drafters placed on other processors than
    the target's cores. With the target on GPUs, drafters have devices or shares of their own.

    Args:
        config: as given by the user.
        num_cores: processor cores of the machine.
    """
    if config.scheduler.draft_ahead is not None:
        return config
    if config.target.placement.num_gpus > 0:
        allowed = sum(drafter.replicas for drafter in config.drafters)
    else:
        allowed = max(0, num_cores - config.target.tensor_parallel) + drafters_elsewhere(config)
    scheduler = config.scheduler.model_copy(update={"draft_ahead": allowed})
    return config.model_copy(update={"scheduler": scheduler})
