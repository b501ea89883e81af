"""What is believed of the costs of a drafter that was added while the cell serves, until it is observed."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.linear_cost import LinearCost

# A drafter without a model, such as prompt lookup: tenths of a millisecond on any machine.
UNMODELLED = LinearCost(rho=2e-5, delta=2e-4)
# With no other model drafter to compare with: so much of a verify forward.
SHARE_OF_TARGET = 0.25


def estimated_cost(
    num_parameters: int, known: Mapping[str, tuple[int, LinearCost]], target: LinearCost
) -> LinearCost:
    """Cost of a drafter nobody has measured: that of the drafter nearest in size, scaled by parameters.

    A forward of few rows reads all weights once, so its time goes with them; observed forwards then correct
    it (`CostModel.observe`).

    Args:
        num_parameters: of its model; 0 if it has none.
        known: size and cost of other kinds, by name.
        target: cost of a verify forward.
    """
    if num_parameters == 0:
        return UNMODELLED
    models = [(size, cost) for size, cost in known.values() if size > 0]
    if not models:
        return target.scaled(SHARE_OF_TARGET)
    size, cost = min(models, key=lambda model: max(model[0] / num_parameters, num_parameters / model[0]))
    return cost.scaled(num_parameters / size)
