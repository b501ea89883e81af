"""What a request that does not say how to sample gets: what the model's makers recommend."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from deployments.openai_schema import GenerationRequest
from deployments.schema_values import MinP, RepetitionPenalty, Temperature, TopK, TopP

_log = logging.getLogger(__name__)

_FILE = "generation_config.json"

RequestT = TypeVar("RequestT", bound=GenerationRequest)


class SamplingDefaults(BaseModel):
    """Values of sampling fields that a request leaves out; None for OpenAI's own default.

    Makers of a model publish them in `generation_config.json`, and vLLM and SGLang go by them: served
    without, a model answers otherwise than its card says. `do_sample` and lengths say nothing, as there.
    """

    model_config = ConfigDict(frozen=True)

    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None

    @classmethod
    def of_model(cls, directory: Path) -> SamplingDefaults:
        """Those in the model's directory; what is no possible value is left out, with a warning."""
        try:
            found = json.loads((directory / _FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls()
        named = {name: found[name] for name in cls.model_fields if found.get(name) is not None}
        try:
            defaults = cls.model_validate(named)
        except ValidationError as error:
            for problem in error.errors():
                name = str(problem["loc"][0])
                _log.warning("%s in %s is left out: %s", name, directory / _FILE, problem["msg"])
                named.pop(name, None)
            defaults = cls.model_validate(named)
        if named:
            told = ", ".join(f"{name} {value}" for name, value in named.items())
            _log.info("requests that do not name them get, by %s: %s", directory / _FILE, told)
        return defaults

    def applied_to(self, request: RequestT) -> RequestT:
        """The request with its empty sampling fields filled."""
        filled = {name: value for name, value in self if value is not None and getattr(request, name) is None}
        return request.model_copy(update=filled) if filled else request


#: OpenAI's own, for any model.
OPENAI_SAMPLING = SamplingDefaults()
