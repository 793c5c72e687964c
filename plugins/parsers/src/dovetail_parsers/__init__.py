"""Tool parsers and reasoning parsers for the published formats of chat models.

cursor         reads a text that arrives in pieces
base           the base classes of all tool parsers
json_formats   formats with JSON arguments
other_formats  formats with other arguments, and harmony
reasoning      reasoning parsers
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dovetail.interfaces import ReasoningParser, ToolParser
from dovetail_parsers.json_formats import (
    CommandRToolParser,
    DeepSeekToolParser,
    GraniteToolParser,
    HermesToolParser,
    KimiK2ToolParser,
    Llama3ToolParser,
    MistralToolParser,
    Phi4MiniToolParser,
)
from dovetail_parsers.other_formats import (
    GLM45ToolParser,
    HarmonyToolParser,
    PythonicToolParser,
    Qwen3XMLToolParser,
)
from dovetail_parsers.reasoning import (
    CommandReasoningParser,
    DeepSeekR1ReasoningParser,
    GraniteReasoningParser,
    HarmonyReasoningParser,
    KimiReasoningParser,
    MistralReasoningParser,
    SeedReasoningParser,
    ThinkReasoningParser,
)

TOOL_PARSERS: Mapping[str, type[ToolParser]] = MappingProxyType(
    {
        "command_r": CommandRToolParser,
        "deepseek_v3": DeepSeekToolParser,
        "glm45": GLM45ToolParser,
        "granite": GraniteToolParser,
        "harmony": HarmonyToolParser,
        "hermes": HermesToolParser,
        "kimi_k2": KimiK2ToolParser,
        "llama3_json": Llama3ToolParser,
        "mistral": MistralToolParser,
        "phi4_mini": Phi4MiniToolParser,
        "pythonic": PythonicToolParser,
        "qwen3_xml": Qwen3XMLToolParser,
    }
)
"""The tool parsers by the name of their format."""

REASONING_PARSERS: Mapping[str, type[ReasoningParser]] = MappingProxyType(
    {
        "command": CommandReasoningParser,
        "deepseek_r1": DeepSeekR1ReasoningParser,
        "granite": GraniteReasoningParser,
        "harmony": HarmonyReasoningParser,
        "kimi": KimiReasoningParser,
        "mistral": MistralReasoningParser,
        "seed": SeedReasoningParser,
        "think": ThinkReasoningParser,
    }
)
"""The reasoning parsers by the name of their format."""
