import pytest

from h3kv.core.errors import ModelCorruptError, RequestError
from h3kv.models.chat_template import ChatTemplate, Messages, Tools

MESSAGES = [{"role": "user", "content": "Is 1 < 2 & \u00e9?"}, {"role": "assistant", "content": "Yes."}]


CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Z\u00fcrich"}}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says how it is <outside>.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
TOOL_MESSAGES = [
    {"role": "user", "content": "How is it?", "name": "ann"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
]

TOOL_TEMPLATE = """
{%- if tools %}{{ "<tools>" }}
{%- for tool in tools %}{{ "\n" }}{{ tool | tojson }}{% endfor %}{{ "\n</tools>\n" }}
{%- endif %}
{%- for message in messages %}
{{- message.role }}{% if message.name %} {{ message.name }}{% endif %}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>
{%- endfor %}
{%- if message.role == "tool" %} of {{ message.tool_call_id }}{% endif %}{{ eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}assistant:{% endif %}
"""


def render(source: str, messages: Messages = MESSAGES, tools: Tools | None = None, *, asks: bool = False) -> str:
    return ChatTemplate(source, special_tokens={"eos_token": "</s>"}, path="m").render(
        messages, add_generation_prompt=asks, tools=tools
    )


def theirs(source: str, messages: Messages = MESSAGES, tools: Tools | None = None, *, asks: bool = False) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, _ = render_jinja_template(
        conversations=[messages], tools=tools, chat_template=source, add_generation_prompt=asks, eos_token="</s>"
    )
    return str(texts[0])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson }}",
        "{{ messages | tojson(indent=2) }}",
        "{{ messages[0] | tojson(separators=(',', ':'), sort_keys=true) }}",
        "{{ messages[0].content | tojson(ensure_ascii=true) }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endfor %}",
        "{%- generation -%} a {%- endgeneration -%} b",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "{% if tools is not none %}tools{% endif %}{{ tools is defined }}{{ documents is defined }}",
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}\n{% endfor %}",
    ],
)
def test_templates_give_what_transformers_makes_of_them(source: str) -> None:
    assert render(source) == theirs(source)


def test_templates_see_no_clock() -> None:
    assert render("{{ strftime_now('%d') if strftime_now is defined else '26 Jul 2024' }}") == "26 Jul 2024"


def test_generation_that_is_not_closed_is_refused() -> None:
    with pytest.raises(ModelCorruptError, match="not valid Jinja"):
        render("{% generation %}{{ eos_token }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages | tojson(indent=messages) }}",
        "{{ 1 // (messages | length - 2) }}",
        "{{ '%d' | format('x') }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_operations_that_python_refuses_are_the_requests_error(source: str) -> None:
    with pytest.raises(RequestError, match="chat template refuses these messages"):
        render(source)


@pytest.mark.parametrize("tools", [TOOLS, TOOLS * 2, None])
@pytest.mark.parametrize("messages", [MESSAGES, TOOL_MESSAGES, TOOL_MESSAGES[1:]])
def test_tools_and_calls_stand_where_transformers_puts_them(messages: Messages, tools: Tools | None) -> None:
    text = render(TOOL_TEMPLATE, messages, tools, asks=True)
    assert text == theirs(TOOL_TEMPLATE, messages, tools, asks=True)
    assert ("<tools>" in text) is (tools is not None)


@pytest.mark.parametrize(
    "source", ["{{ messages | tojson }}", "{# tools #}x", "{% set tools = [1] %}{{ tools }}", "{{ messages[0].tools }}"]
)
def test_tools_are_refused_by_templates_that_do_not_look_at_them(source: str) -> None:
    assert render(source, tools=[]) == render(source)
    with pytest.raises(RequestError, match=r"^tools: the model's chat template has no place for them"):
        render(source, tools=TOOLS)


def test_calls_are_refused_by_templates_that_do_not_look_at_them() -> None:
    with pytest.raises(RequestError, match=r"^messages\[1\].tool_calls: the model's chat template has no place"):
        render("{{ messages[0].content }}", TOOL_MESSAGES)
