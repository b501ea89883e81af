"""What a LoRA adapter of a real server answers."""

from __future__ import annotations

import asyncio

from openai import OpenAI

from benchmarks.lossless import LosslessOptions, run
from tests.system.conftest import Server
from tests.system.scraping import value
from zoo.registry import ADAPTER


def check_adapter(server: Server) -> None:
    """A model of its own, beside the target and by its drafters: the text of the merged weights."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="unused")
    assert [model.id for model in client.models.list()] == [server.model, "terse"]
    options = LosslessOptions(
        server.url,
        "terse",
        adapter=f"zoo:{ADAPTER}",
        num_prompts=3,
        max_tokens=20,
        drafters=(),
        sampling=False,
    )
    report = asyncio.run(run(options))
    assert report["num_unproven"] == 0
    assert sum(result["receipts"]["num_verified"] for result in report["results"]) > 0
    texts = {}
    for model in (server.model, "terse"):
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What does `os.path.join(a, *p)` do?"}],
            temperature=0,
            max_tokens=48,
        )
        assert answer.model == model
        texts[model] = answer.choices[0].message.content
    assert texts[server.model] != texts["terse"]
    assert value(server, "flotilla_adapter_requests_total", adapter="terse") >= 7
