"""What is said of a configuration that is wrong."""

from __future__ import annotations

from typing import Annotated

import pytest
import yaml
from pydantic import BaseModel, Field, ValidationError

from cluster.config import FlotillaConfig
from cluster.config_errors import wrong_fields
from deployments.errors import from_validation


def told(text: str) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        FlotillaConfig.model_validate(yaml.safe_load(text))
    return wrong_fields(caught.value, model=FlotillaConfig)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            "target: {path: x, chat_template_kwargs: {tokenize: true, enable_thinking: false}}",
            ["target.chat_template_kwargs: may not set tokenize: requests or the server do"],
        ),
        (
            "target: {path: x, max_len: 3}",
            ["target.max_len: there is no such field; did you mean `max_model_len`?"],
        ),
        (
            f"{{target: {{path: x}}, tiers: {{1: {{}}, {'t' * 65}: {{}}}}}}",
            [
                "tiers.1: the name must be a string",
                f"tiers.{'t' * 65}: the name must have at most 64 characters",
            ],
        ),
        (
            "tagret: {path: x}",
            ["target: is required", "tagret: there is no such field; did you mean `target`?"],
        ),
        (
            "target: {path: x}\ntiers: {a: {tpotms: 3}}",
            ["tiers.a.tpotms: there is no such field; did you mean `tpot_ms`?"],
        ),
        (
            "target: {path: x}\ndrafters: [{kind: model, name: a, path: x, repliacs: 2}]",
            ["drafters.0.model.repliacs: there is no such field; did you mean `replicas`?"],
        ),
        (
            "target: {path: x, max_model_len: 2}",
            ["target.max_model_len: must be greater than or equal to 15"],
        ),
        ("target: {path: x, zzz: 3}", ["target.zzz: there is no such field"]),
        (
            "target: {path: x, placement: {num_cpus: .inf, num_gpus: .inf, resources: {rack: .inf}}}\n"
            "scaling: {cells: {placement: {num_cpus: .inf}}}",
            [
                "target.placement.num_cpus: must be a finite number",
                "target.placement.num_gpus: must be a finite number",
                "target.placement.resources.rack: must be a finite number",
                "scaling.cells.placement.num_cpus: must be a finite number",
            ],
        ),
        (
            "target: {path: x}\nhttp: {host: ''}\ngrpc: {host: ''}\nmetrics: {host: ''}",
            [f"{section}.host: must have at least 1 character" for section in ("http", "metrics", "grpc")],
        ),
        (
            "target: {path: x, placement: {resources: {GPU: 1}}}\n"
            "scaling: {front_ends: {placement: {resources: {rack: 0.00001}}}}",
            [
                "target.placement.resources: `GPU` is not a custom resource: CPUs and GPUs are reserved with "
                "`num_cpus` and `num_gpus`, memory cannot be",
                "scaling.front_ends.placement.resources: the amount of `rack` must be a multiple of 0.0001, "
                "as finely as Ray counts",
            ],
        ),
        (
            "target: {path: x}\ndrafters: [{kind: ngram}]",
            [
                "drafters.0: `kind` must be one of 'model', 'prompt_lookup', 'suffix_automaton', 'heads', "
                "'eagle', 'own'"
            ],
        ),
        (
            "target: {path: x}\ndrafters: [{name: a}]",
            ["drafters.0: the field `kind`, which tells its kind, is required"],
        ),
        ("target: {path: x, num_slots: big}", ["target.num_slots: must be an integer, or 'auto'"]),
        ("target: {path: x}\npolicy: {expansion: []}", ["policy.expansion: must have at least 1 item"]),
        ("target: {path: x}\ndrafters: {}", ["drafters: must be a list, as in `[value, value]`"]),
        ("target: {path: x, prefix_sharing: maybe}", ["target.prefix_sharing: must be true or false"]),
        ("target: {path: 3}", ["target.path: must be a string"]),
    ],
)
def test_what_is_wrong_is_said_without_pydantic_s_terms(text: str, lines: list[str]) -> None:
    assert told(text) == lines


def test_the_api_says_it_in_the_same_words() -> None:
    class Body(BaseModel):
        messages: Annotated[list[str], Field(min_length=1)]

    with pytest.raises(ValidationError) as caught:
        Body.model_validate({"messages": []})
    assert from_validation(caught.value).message == "`messages`: must have at least 1 item."
