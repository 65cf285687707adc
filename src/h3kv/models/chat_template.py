"""Turns a conversation into the text that the model was trained on, with the model's own Jinja template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from h3kv.core.errors import ModelCorruptError, RequestError

Messages = Sequence[Mapping[str, object]]
"""Each with a `role` and its `content`; perhaps with `name`, `tool_calls` or `tool_call_id`, as OpenAI writes them but
for the arguments of calls, which are objects."""

Tools = Sequence[Mapping[str, object]]
"""What a model may call, as OpenAI writes it: each with a `type` and a `function`."""

_RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError)
"""Jinja's own, and what Python raises for an operation in a template that its operands do not allow."""

_GENERATION_TAGS = {"generation"}


class _Generation(Extension):
    """The tags around what the model itself says. Training masks by them; here they only open a scope."""

    tags = _GENERATION_TAGS

    def parse(self, parser: Parser) -> nodes.Node:
        """The statements between the tags."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """A compiled chat template.

    It sees the variables, filters and tags that transformers gives a conversation without documents, but no clock:
    `strftime_now` is undefined and templates state a fixed date instead. So the same conversation always gives the same
    text, and its prefix can be found in the cache.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], path: str) -> None:
        """Compile.

        Args:
            source: Jinja.
            special_tokens: values of `bos_token`, `eos_token` and the like.
            path: the file it came from.

        Raises:
            ModelCorruptError: not a valid template.
        """
        self.source = source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        try:
            self._has_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source, {**special_tokens, "raise_exception": _refuse})
        except jinja2.TemplateSyntaxError as error:
            message = f"the chat template in {path} is not valid Jinja ({error}); fetch the model again"
            raise ModelCorruptError(message, path=path) from error

    def render(self, messages: Messages, *, add_generation_prompt: bool, tools: Tools | None = None) -> str:
        """The conversation as text, ending where the model's answer begins if `add_generation_prompt`.

        Raises:
            RequestError: the template refuses these messages, or has no place for tools or for calls of them.
        """
        self._check_tools(messages, tools)
        try:
            return self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt
            )
        except _RENDER_ERRORS as error:
            message = f"the model's chat template refuses these messages ({error}); change their roles or order"
            raise RequestError(message) from error

    def _check_tools(self, messages: Messages, tools: Tools | None) -> None:
        if tools and not self._has_tools:
            raise RequestError("tools: the model's chat template has no place for them; leave them out")
        calls = [place for place, message in enumerate(messages) if message.get("tool_calls")]
        if calls and "tool_calls" not in self.source:
            raise RequestError(
                f"messages[{calls[0]}].tool_calls: the model's chat template has no place for them; "
                "put what was called into the content"
            )


def _refuse(reason: str) -> NoReturn:
    raise jinja2.TemplateError(reason)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    *,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
