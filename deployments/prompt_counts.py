"""How many tokens a request's prompt has, without an answer to it."""

from __future__ import annotations

from starlette.requests import Request

from deployments.api_service import ApiService
from deployments.key_gate import seen_by
from deployments.openai_schema import GenerationRequest
from deployments.prompt_preparation import prompts_of


async def count_prompt(service: ApiService, request: Request, asked: GenerationRequest) -> int:
    """Tokens of the one prompt of `asked`; raises `ApiError` where it could not be answered either."""
    info = await service.info()
    seen_by(request.scope, info).adapter_of(asked.model)
    use = service.tool_use(asked)
    (prompt,), _ = await prompts_of(asked, service.codec, info, use, service.tool_parser)
    return len(prompt.tokens)
