"""Names of the ways in which models write calls of tools, and mark what they think."""

from __future__ import annotations

from typing import Literal

ToolParserName = Literal[
    "auto",
    "none",
    "cohere",
    "deepseek_v3",
    "functionary_v3",
    "gemma4",
    "gigachat3",
    "glm",
    "granite",
    "harmony",
    "hermes",
    "hunyuan_a13b",
    "json",
    "kimi_k2",
    "minimax_m2",
    "mistral",
    "nemotron",
    "olmo3",
    "phi4_mini",
    "pythonic",
    "qwen3_coder",
    "seed_oss",
]
ReasoningParserName = Literal["auto", "none", "think", "mistral", "cohere", "gemma4", "harmony", "seed_oss"]
