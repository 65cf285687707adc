"""Turns a conversation into the text that the model was trained on, with the model's own Jinja template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from h3kv.core.errors import ModelCorruptError, RequestError

Messages = Sequence[Mapping[str, str]]
"""Each with a `role` and its `content`."""


class ChatTemplate:
    """A compiled chat template.

    It sees what transformers' templates see, but for the date: the same conversation always gives the same text, so
    that its prefix can be found in the cache.
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
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        try:
            self._template = environment.from_string(source, {**special_tokens, "raise_exception": _refuse})
        except jinja2.TemplateSyntaxError as error:
            message = f"the chat template in {path} is not valid Jinja ({error}); fetch the model again"
            raise ModelCorruptError(message, path=path) from error

    def render(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        """The conversation as text, ending where the model's answer begins if `add_generation_prompt`.

        Raises:
            RequestError: the template refuses these messages.
        """
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt)
        except jinja2.TemplateError as error:
            message = f"the model's chat template refuses these messages ({error}); change their roles or order"
            raise RequestError(message) from error


def _refuse(reason: str) -> NoReturn:
    raise jinja2.TemplateError(reason)
