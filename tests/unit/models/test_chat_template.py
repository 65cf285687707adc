import pytest

from h3kv.core.errors import ModelCorruptError, RequestError
from h3kv.models.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "Is 1 < 2 & \u00e9?"}, {"role": "assistant", "content": "Yes."}]


def render(source: str) -> str:
    return ChatTemplate(source, special_tokens={"eos_token": "</s>"}, path="m").render(
        MESSAGES, add_generation_prompt=False
    )


def theirs(source: str) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, _ = render_jinja_template(
        conversations=[MESSAGES], chat_template=source, add_generation_prompt=False, eos_token="</s>"
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
