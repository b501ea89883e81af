"""A cell whose places are all taken by requests that give way to others."""

from __future__ import annotations

from typing import Any

from cluster.stream_messages import Submit, Tenant
from engine.sampling_params import SamplingParams
from tests.cluster.test_core import World

PLACES = 4


class Full(World):
    """All places are taken, by requests of other tenants in the background, which have a while to go."""

    long = SamplingParams(temperature=0.0, max_tokens=90)

    def __init__(self) -> None:
        super().__init__(1, "autoregressive", max_running=PLACES)
        for number in range(PLACES):
            self.ask(f"background {number}", priority=5, tenant=Tenant("batch"))
        for _ in range(12):
            self.answer_one()
        assert self.core.verify_calls.outstanding is not None
        assert len(self.core.running) == PLACES

    def ask(self, name: str, **asked: Any) -> None:
        self.send(Submit(request_id=name, prompt=[1, 2, 3], sampling=self.long, **asked))
