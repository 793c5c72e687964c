"""The model's chat template determines the parsers, unless an option names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.config import EngineArgs
from dovetail.engine.choice import explain_choice
from dovetail.engine.messages.parsers import choose_parser
from dovetail.engine.plugin_choices import make_registry
from dovetail.errors import PluginNotFoundError
from dovetail_devkit.contexts import write_fake_config
from dovetail_devkit.fakes.tokenizer import ByteTokenizer


class TemplateTokenizer(ByteTokenizer):
    """A tokenizer with chat templates."""

    def __init__(self, **templates: str) -> None:
        super().__init__()
        self._templates = templates

    @property
    def chat_templates(self) -> dict[str, str]:
        return self._templates


def chosen(kind: str, folder: Path, tokenizer: ByteTokenizer | None, **options: str) -> str:
    """Return the name of the parser that an engine chooses, or "" for none."""
    args = EngineArgs.from_kwargs(model=write_fake_config(folder), **options)
    config = args.create_engine_config()
    resolution = choose_parser(kind, config, make_registry(config), tokenizer)
    return "" if resolution is None else resolution.name


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>\\n<function=example>\\n<parameter=a>", "qwen3_xml"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("<|tool_call_begin|><|tool_call_argument_begin|>", "kimi_k2"),
        ("<|start_of_role|>assistant<|tool_call|>", "granite"),
        ("<|system|> <|tool|>{tools}<|/tool|>", "phi4_mini"),
        ("<|CHATBOT_TOKEN|> tool_name", "command_r"),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
        ("[func_name1(params_name1=value)]", "pythonic"),
        ("<|im_start|>user", ""),
    ],
)
def test_a_chat_template_determines_the_tool_parser(
    template: str, name: str, tmp_path: Path
) -> None:
    assert chosen("tool_parser", tmp_path, TemplateTokenizer(default=template)) == name


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<think>\\n\\n</think>", "think"),
        ("{{'<｜Assistant｜><think>'}} </think>", "deepseek_r1"),
        ("<|channel|>analysis<|message|>", "harmony"),
        ("no marker", ""),
    ],
)
def test_a_chat_template_determines_the_reasoning_parser(
    template: str, name: str, tmp_path: Path
) -> None:
    assert chosen("reasoning_parser", tmp_path, TemplateTokenizer(default=template)) == name


def test_the_template_for_tools_determines_the_tool_parser(tmp_path: Path) -> None:
    tokenizer = TemplateTokenizer(default="[TOOL_CALLS]", tool_use="<|tool_call_begin|>")
    assert chosen("tool_parser", tmp_path, tokenizer) == "kimi_k2"


def test_an_option_selects_or_disables_a_parser(tmp_path: Path) -> None:
    tokenizer = TemplateTokenizer(default="[TOOL_CALLS]")
    assert chosen("tool_parser", tmp_path, tokenizer, tool_parser="hermes") == "hermes"
    assert chosen("tool_parser", tmp_path, tokenizer, tool_parser="none") == ""
    assert chosen("tool_parser", tmp_path, None) == ""
    with pytest.raises(PluginNotFoundError, match="hermes"):
        chosen("tool_parser", tmp_path, tokenizer, tool_parser="hermess")


def test_explain_names_the_markers_in_the_template(tmp_path: Path) -> None:
    from dovetail_devkit.kit_subjects import write_byte_tokenizer

    write_fake_config(tmp_path)
    write_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("<think></think>[TOOL_CALLS]", encoding="utf-8")
    args = EngineArgs.from_kwargs(model=tmp_path)
    tools = explain_choice("tool_parser", args)
    assert [item.name for item in tools.chosen] == ["mistral"]
    assert tools.criteria.why == "the chat template contains [TOOL_CALLS]"
    assert [item.name for item in explain_choice("reasoning_parser", args).chosen] == ["think"]
    assert explain_choice("tool_parser").chosen == ()
