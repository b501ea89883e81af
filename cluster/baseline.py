"""What a cell takes for a request by itself without speculation: relative objectives are multiples of it."""

from __future__ import annotations

import msgspec

from cluster.cost_model import CostProfile
from cluster.linear_cost import LinearCost


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies of one request alone, from the cell's cost profile; in milliseconds.

    Attributes:
        target: cost of a forward of the target.
        overhead_s: seconds of a step outside it.
        chunk_tokens: most prompt tokens of a step.
    """

    target: LinearCost
    overhead_s: float = 0.0
    chunk_tokens: int = 128

    @classmethod
    def of(cls, profile: CostProfile, chunk_tokens: int) -> Baseline:
        """Of a cell with this profile."""
        return cls(target=profile.target, overhead_s=profile.overhead_s, chunk_tokens=chunk_tokens)

    def tpot_ms(self, num_prompt: int = 0) -> float:
        """One decode step after a prompt of so many tokens."""
        return 1e3 * (self.target.seconds(1, 1, num_prompt) + self.overhead_s)

    def ttft_ms(self, num_prompt: int) -> float:
        """The prefill of this prompt, chunk by chunk, and a decode step."""
        num_full, rest = divmod(max(0, num_prompt), self.chunk_tokens)
        done = num_full * self.chunk_tokens
        # A chunk's time is linear in what its tokens attend to, so all full ones take the mean one's.
        mean = self.target.seconds(1, self.chunk_tokens, 0, self.chunk_tokens * done / 2)
        seconds = num_full * (mean + self.overhead_s)
        if rest:
            seconds += self.target.seconds(1, rest, 0, rest * (done + rest / 2)) + self.overhead_s
        return 1e3 * seconds + self.tpot_ms(num_prompt)

    def e2e_ms(self, num_prompt: int, num_output: int) -> float:
        """The first token, and a decode step for each of the others."""
        return self.ttft_ms(num_prompt) + max(0, num_output - 1) * self.tpot_ms(num_prompt)
