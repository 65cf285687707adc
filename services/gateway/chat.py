"""Bodies of chats: messages, tools, the form of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, StringConstraints

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.core.client_limits import CHAT_DOCUMENTS_MAX, LOGPROBS_MAX
from services.gateway.bodies import TOKENS_MAX, Body, DocumentId, Name, few
from services.gateway.json_text import read_json, write_json
from services.gateway.openai import CHAT, AnswerBody, AnswerKind, Asked
from services.gateway.problems import FieldError
from services.gateway.strict_schema import StrictSchema
from services.gateway.tool_calls import CallMode, ToolUse, arguments_schema, calls_schema

TOOLS_MAX: Final = 128
MESSAGES_MAX: Final = 4096
"""Of one chat, and parts of one message."""

Key = Annotated[str, StringConstraints(max_length=64)]
Text = Annotated[str, StringConstraints(max_length=512)]
CallId = Annotated[str, StringConstraints(min_length=1, max_length=100)]


DocumentIds = Annotated[list[DocumentId], Field(max_length=CHAT_DOCUMENTS_MAX, fail_fast=True)]


class TextPart(Body):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """What an assistant called."""

    name: Name
    arguments: str
    """A JSON object, as text."""


class MadeCall(Body):
    """A call that an earlier answer made."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Of a streamed call. Changes nothing."""


class Message(Body):
    """One message of a chat."""

    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]] = {"annotations": ([],)}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MESSAGES_MAX, fail_fast=True)] | None = None
    name: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = None
    tool_calls: Annotated[list[MadeCall], Field(max_length=TOOLS_MAX, fail_fast=True)] | None = None
    tool_call_id: CallId | None = None

    def message(self, place: str) -> pb.ChatMessage:
        """The same for gpu_worker.

        Args:
            place: of this message in the body, for errors.
        """
        if self.tool_calls is not None and self.role != "assistant":
            raise FieldError(f"{place}.tool_calls: only an assistant calls tools", param=f"{place}.tool_calls")
        if self.content is None and not self.tool_calls:
            raise FieldError(f"{place}.content is missing: give it", param=f"{place}.content")
        if (self.role == "tool") != (self.tool_call_id is not None):
            rule = "a message of role tool, and no other, names the call that it answers"
            raise FieldError(f"{place}.tool_call_id: {rule}", param=f"{place}.tool_call_id")
        parts = self.content if isinstance(self.content, list) else []
        return pb.ChatMessage(
            role="system" if self.role == "developer" else self.role,
            content=self.content if isinstance(self.content, str) else "\n".join(part.text for part in parts),
            name=self.name or "",
            tool_calls_json=self._calls_json(place),
            tool_call_id=self.tool_call_id or "",
        )

    def _calls_json(self, place: str) -> str:
        if not self.tool_calls:
            return ""
        calls = [
            {
                "id": call.id,
                "type": call.type,
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call, f"{place}.tool_calls[{index}].function.arguments"),
                },
            }
            for index, call in enumerate(self.tool_calls)
        ]
        return write_json(calls)


Messages = Annotated[list[Message], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)]


class FunctionSpec(Body):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of its arguments; left out: it has none."""
    strict: bool = False


class Tool(Body):
    """A tool that the model may use."""

    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Body):
    """Which function."""

    name: Name


class NamedChoice(Body):
    """That one function must be called."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    """What a JSON answer must look like. It always holds, with `strict` and without."""

    name: Name
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = Field(default_factory=dict)
    strict: bool = False


class ResponseFormat(Body):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatBody(AnswerBody):
    """Of `POST /v1/chat/completions`."""

    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **AnswerBody.NEUTRAL,
        "store": (False,),
        "service_tier": ("auto", "default"),
        "modalities": (["text"],),
        "tools": ([],),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "chat_template_kwargs": ({},),
    }
    kind: ClassVar[AnswerKind] = CHAT

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=TOKENS_MAX)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=TOOLS_MAX, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool = True
    document_ids: DocumentIds | None = None
    metadata: Annotated[dict[Key, Text], few(16)] | None = None
    """Changes nothing: no answers are stored."""
    safety_identifier: str | None = None
    """Changes nothing, as `user`."""
    prompt_cache_key: str | None = None
    """Changes nothing: every prompt that begins as an earlier one finds its KV."""

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer says how likely its tokens were."""
        return self.logprobs

    def tool_use(self) -> ToolUse | None:
        """What may be called, and whether something must be; None: nothing may. Raises FieldError."""
        if self.tools is None:
            if self.tool_choice is not None and self.tool_choice != "none":
                raise FieldError("tool_choice: there are no tools to choose from: give tools", param="tool_choice")
            return None
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise FieldError(f"tools: two of them are called {twice}: rename one", param="tools")
        limit = None if self.parallel_tool_calls else 1
        match self.tool_choice:
            case "none":
                return None
            case "required":
                return ToolUse(frozenset(names), CallMode.REQUIRED, calls_max=limit)
            case NamedChoice(function=NamedFunction(name=name)):
                if name not in names:
                    raise FieldError(f"tool_choice: no tool is called {name}: name one of tools", param="tool_choice")
                return ToolUse(frozenset({name}), CallMode.NAMED, calls_max=1)
            case _:
                return ToolUse(frozenset(names), CallMode.AUTO, limit, self._strict_schemas())

    def asked(self, tenant: pb.Tenant) -> Asked:
        """The same for gpu_worker, which applies the model's template to the one prompt."""
        self.check()
        use, chat = self.tool_use(), self._chat()
        if use is not None and self.tools is not None:
            chat.tools_json = _written([_tool_fields(tool) for tool in self.tools], "tools")
        sampling = self.sampling(max_tokens=self._length(), logprobs=self._logprobs())
        if use is not None:
            if self.skip_special_tokens:
                rule = "some models write calls of tools with special tokens: leave it out, or set tool_choice to none"
                raise FieldError(f"skip_special_tokens: {rule}", param="skip_special_tokens")
            sampling.skip_special_tokens = False
        grammar = self._grammar(use)
        if grammar is not None:
            sampling.grammar.CopyFrom(grammar)
        return Asked([pb.GenerateRequest(chat=chat, tenant=tenant)], sampling, choices=self.n)

    def _chat(self) -> pb.Chat:
        return chat_of(self.messages, self.document_ids or [])

    def _length(self) -> int | None:
        asked = {each for each in (self.max_tokens, self.max_completion_tokens) if each is not None}
        if len(asked) > 1:
            raise FieldError(
                "max_tokens and max_completion_tokens differ: give one of them", param="max_completion_tokens"
            )
        return next(iter(asked), None)

    def _logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs is not None:
            raise FieldError("top_logprobs: set logprobs to true as well", param="top_logprobs")
        return None

    def _grammar(self, use: ToolUse | None) -> pb.Grammar | None:
        wanted = self.response_format
        form = None if wanted is None or wanted.type == "text" else wanted
        if wanted is not None and (wanted.type == "json_schema") != (wanted.json_schema is not None):
            rule = "goes with type json_schema, and only with it"
            raise FieldError(f"response_format.json_schema: {rule}", param="response_format.json_schema")
        if use is not None and form is not None:
            rule = "an answer cannot be held to JSON where the model may call tools: set tool_choice to none"
            raise FieldError(f"response_format: {rule}", param="response_format")
        if use is not None and use.mode is not CallMode.AUTO:
            functions = [tool.function for tool in self.tools or [] if tool.function.name in use.names]
            if use.mode is CallMode.NAMED:
                return pb.Grammar(json_schema=_written(arguments_schema(functions[0].parameters), "tools"))
            schemas = {each.name: each.parameters for each in functions}
            return pb.Grammar(json_schema=_written(calls_schema(schemas, calls_max=use.calls_max), "tools"))
        if form is None:
            return None
        if form.json_schema is None:
            return pb.Grammar(json_object=True)
        return pb.Grammar(json_schema=_written(form.json_schema.schema_, "response_format"))

    def _strict_schemas(self) -> dict[str, StrictSchema]:
        """Of strict functions that the model may call as it likes."""
        schemas = {}
        for place, tool in enumerate(self.tools or []):
            if tool.function.strict:
                named = f"tools[{place}].function.parameters"
                schemas[tool.function.name] = StrictSchema(arguments_schema(tool.function.parameters), place=named)
        return schemas


def chat_of(messages: list[Message], document_ids: list[str]) -> pb.Chat:
    """A chat for gpu_worker. Raises FieldError."""
    return pb.Chat(
        messages=[message.message(f"messages[{place}]") for place, message in enumerate(messages)],
        document_ids=document_ids,
    )


def _written(value: object, param: str) -> str:
    """As JSON. Raises FieldError for a number that is none, which free-form parts of bodies may have."""
    try:
        return write_json(value)
    except ValueError as error:
        raise FieldError(f"{param}: a number in it is not finite: write another", param=param) from error


def _tool_fields(tool: Tool) -> dict[str, Any]:
    return tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})


def _arguments(call: MadeCall, place: str) -> dict[str, Any]:
    """The arguments of a call that was made, as templates expect them."""
    try:
        found = read_json(call.function.arguments or "{}")
    except ValueError as error:
        raise FieldError(f"{place}: no valid JSON: give an object, as text", param=place) from error
    if not isinstance(found, dict):
        raise FieldError(f"{place}: must be a JSON object, as text", param=place)
    return found
