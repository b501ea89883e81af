"""What requests get that do not say how to sample."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.api_service import ApiService
from deployments.openai_api import create_app
from deployments.sampling_defaults import OPENAI_SAMPLING, SamplingDefaults
from engine.sampling_params import SamplingParams
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import codec

QWEN = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
}


def of(tmp_path: Path, recommended: dict[str, Any]) -> SamplingDefaults:
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    return SamplingDefaults.of_model(tmp_path)


async def sampled(
    cell: CellStandIn, defaults: SamplingDefaults, path: str = "chat/completions", **body: Any
) -> SamplingParams:
    """What the cell is asked for."""
    service = ApiService(cell, codec(), give_up_after_s=0.5, sampling=defaults)
    prompt: dict[str, Any] = {"prompt": "the"}
    if path == "chat/completions":
        prompt = {"messages": [{"role": "user", "content": "the"}]}
    elif path == "responses":
        prompt = {"input": "the"}
    transport = httpx.ASGITransport(app=create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://cell") as client:
        answer = await client.post(f"/v1/{path}", json={**prompt, **body})
    await service.close()
    assert answer.status_code == 200, answer.text
    return cell.submissions[-1].sampling


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
async def test_a_model_s_recommendations_are_what_a_silent_request_gets(
    path: str, cell: CellStandIn, tmp_path: Path
) -> None:
    got = await sampled(cell, of(tmp_path, QWEN), path)
    assert (got.temperature, got.top_p, got.top_k, got.min_p) == (0.7, 0.8, 20, 0.0)
    assert got.repetition_penalty == 1.05


async def test_what_a_request_says_counts_field_by_field(cell: CellStandIn, tmp_path: Path) -> None:
    defaults = of(tmp_path, {**QWEN, "min_p": 0.1})
    got = await sampled(
        cell, defaults, temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=1, max_tokens=4
    )
    assert (got.temperature, got.top_p, got.top_k, got.min_p) == (0.0, 1.0, 0, 0.0)
    assert got.repetition_penalty == 1.0
    got = await sampled(cell, defaults, top_p=0.5, temperature=None)
    assert (got.temperature, got.top_p, got.top_k, got.min_p) == (0.7, 0.5, 20, 0.1)


async def test_openai_s_defaults_cut_nothing_off(cell: CellStandIn, tmp_path: Path) -> None:
    for defaults in (OPENAI_SAMPLING, SamplingDefaults.of_model(tmp_path), of(tmp_path, {"eos_token_id": 2})):
        got = await sampled(cell, defaults)
        assert (got.temperature, got.top_p, got.top_k, got.min_p) == (1.0, 1.0, 0, 0.0)
        assert got.repetition_penalty == 1.0


async def test_impossible_recommendations_are_left_out_and_told(
    cell: CellStandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        defaults = of(tmp_path, {"temperature": -1, "top_p": 0.9, "top_k": "many", "min_p": None})
    assert defaults == SamplingDefaults(top_p=0.9)
    assert "temperature in" in caplog.text
    assert "top_k in" in caplog.text
    assert (await sampled(cell, defaults)).top_p == 0.9
