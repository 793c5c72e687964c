import json
from datetime import datetime

import pytest
from tokenizers import Tokenizer as Core
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from dovetail.errors import RequestError
from dovetail.tokenizers.chat_template import ChatTemplateEnvironment, render_chat_template

LLAMA_LIKE = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
        + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN_LIKE = """{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- macro render(message) %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' }}
    {%- generation %}{{ message.content }}{% endgeneration %}
    {{- '<|im_end|>' + '\\n' }}
{%- endmacro %}
{%- for message in messages %}
    {%- if message.role == "assistant" and '</think>' in message.content %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
        {%- continue %}
    {%- endif %}
    {{- render(message) }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

MISTRAL_LIKE = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("roles must alternate user and assistant") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"] + eos_token}}
    {%- endif %}
{%- endfor %}
"""

TALK = [
    {"role": "user", "content": "  Is 1 < 2 & 'true'? é你 "},
    {"role": "assistant", "content": "<think>hm</think>\n\nYes."},
    {"role": "user", "content": "Thanks."},
]
SYSTEM = {"role": "system", "content": " Be brief. "}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "<a> & b"}}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source, messages=TALK, **variables):
    environment = ChatTemplateEnvironment(now=lambda: datetime(2026, 2, 3))
    return render_chat_template(environment.compile_template(source), messages, variables)


@pytest.mark.parametrize("template", [LLAMA_LIKE, QWEN_LIKE, MISTRAL_LIKE])
@pytest.mark.parametrize("with_system", [True, False])
@pytest.mark.parametrize("variables", [{}, {"tools": TOOLS}, {"enable_thinking": False}])
def test_rendered_prompts_equal_those_of_transformers(template, with_system, variables):
    messages = [SYSTEM, *TALK] if with_system else TALK
    core = Core(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    oracle = PreTrainedTokenizerFast(tokenizer_object=core, **TOKENS)
    for prompt in (True, False):
        expected = oracle.apply_chat_template(
            messages,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=prompt,
            **variables,
        )
        kwargs = {**TOKENS, "add_generation_prompt": prompt, **variables}
        assert render(template, messages, **kwargs) == expected


def test_json_in_a_prompt_is_not_escaped_for_html():
    assert json.loads(render("{{ messages | tojson }}")) == TALK
    assert "<" in render("{{ messages | tojson }}")


def test_the_date_is_read_from_the_given_clock():
    assert render("{{ strftime_now('%d %b %Y') }}") == "03 Feb 2026"


@pytest.mark.costly
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ messages[0].content.missing.more }}", "no attribute"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "steps"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ range(1000000) | list }}", "range"),
        ("{{ 'a' * 100000000000 }}", "too large"),
        ("{{ 'a' * 100000 * 100000 * 100000 }}", "too"),
        ("{{ 9 ** 9999999 }}", "power"),
        ("{{ '%999999999d' % 1 }}", "format"),
        ("{{ '{:>999999999}'.format(1) }}", "wide"),
        ("{{ 'a'.ljust(999999999) }}", "ljust"),
        ("{{ 'a' | center(999999999) }}", "center"),
        ("{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}"
         "{% endfor %}", "longer"),
        ("{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}"
         "{% endfor %}", "longer"),
        ("{% set a = 'a' * 100000 %}{{ a.replace('a', a) }}", "too large"),
        ("{% set a = 'a' * 100000 %}{{ a | replace('a', a) }}", "too large"),
        ("{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}", "longer"),
    ],
)  # fmt: skip
def test_a_template_that_fails_or_runs_too_long_raises_a_request_error(source, reason):
    with pytest.raises(RequestError, match=reason) as rejection:
        render(source)
    assert rejection.value.parameter == "messages"


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ 'a' | nothing }}", "{% endfor %}", "x" * 300_000]
)
def test_an_invalid_chat_template_is_rejected(source):
    with pytest.raises(RequestError, match="not valid") as rejection:
        render(source)
    assert rejection.value.parameter == "chat_template"


@pytest.mark.parametrize(
    "messages", [[], "hello", {"role": "user"}, [{"content": "x"}], ["hello"], [{"role": 1}], None]
)
def test_invalid_chat_messages_are_rejected(messages):
    with pytest.raises(RequestError, match="messages") as rejection:
        render("x", messages)
    assert rejection.value.parameter == "messages"


def test_a_chat_message_can_contain_a_large_number():
    messages = [{"role": "tool", "content": 3_000_000_000}]
    assert render("{{ messages[0].content | string }}", messages) == "3000000000"
