# Written by tools/genproto.py from proto/h3kv/api/gpu_worker/v1/gpu_worker_service.proto. Do not edit: run `make proto`.
from h3kv.api.common.v1 import commands_pb2 as _commands_pb2
from h3kv.api.common.v1 import statistics_pb2 as _statistics_pb2
from h3kv.api.common.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]

class DocumentState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DOCUMENT_STATE_UNSPECIFIED: _ClassVar[DocumentState]
    DOCUMENT_STATE_READING: _ClassVar[DocumentState]
    DOCUMENT_STATE_READY: _ClassVar[DocumentState]
    DOCUMENT_STATE_FAILED: _ClassVar[DocumentState]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
DOCUMENT_STATE_UNSPECIFIED: DocumentState
DOCUMENT_STATE_READING: DocumentState
DOCUMENT_STATE_READY: DocumentState
DOCUMENT_STATE_FAILED: DocumentState

class Tokens(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name", "tool_calls_json", "tool_call_id")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    tool_calls_json: str
    tool_call_id: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ..., tool_calls_json: _Optional[str] = ..., tool_call_id: _Optional[str] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "tools_json", "document_ids")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_IDS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools_json: str
    document_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools_json: _Optional[str] = ..., document_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Tenant(_message.Message):
    __slots__ = ("name", "salt", "tokens_per_minute", "document_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    salt: bytes
    tokens_per_minute: int
    document_bytes: int
    def __init__(self, name: _Optional[str] = ..., salt: _Optional[bytes] = ..., tokens_per_minute: _Optional[int] = ..., document_bytes: _Optional[int] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_object", "json_schema", "lark")
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    json_object: bool
    json_schema: str
    lark: str
    def __init__(self, json_object: _Optional[bool] = ..., json_schema: _Optional[str] = ..., lark: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "max_new_tokens", "stop", "stop_token_ids", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs", "grammar", "skip_special_tokens")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_new_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: int
    grammar: Grammar
    skip_special_tokens: bool
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class TierTokens(_message.Message):
    __slots__ = ("tier", "tokens")
    TIER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tier: _types_pb2.Tier
    tokens: int
    def __init__(self, tier: _Optional[_Union[_types_pb2.Tier, str]] = ..., tokens: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "generated_tokens", "waiting_ns", "prefill_ns", "time_to_first_token_ns", "inter_token_ns_mean", "inter_token_ns_max", "recall", "attended_fraction", "recomputed_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_NS_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_NS_MEAN_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_NS_MAX_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    ATTENDED_FRACTION_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: _containers.RepeatedCompositeFieldContainer[TierTokens]
    generated_tokens: int
    waiting_ns: int
    prefill_ns: int
    time_to_first_token_ns: int
    inter_token_ns_mean: int
    inter_token_ns_max: int
    recall: float
    attended_fraction: float
    recomputed_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[_Iterable[_Union[TierTokens, _Mapping]]] = ..., generated_tokens: _Optional[int] = ..., waiting_ns: _Optional[int] = ..., prefill_ns: _Optional[int] = ..., time_to_first_token_ns: _Optional[int] = ..., inter_token_ns_mean: _Optional[int] = ..., inter_token_ns_max: _Optional[int] = ..., recall: _Optional[float] = ..., attended_fraction: _Optional[float] = ..., recomputed_tokens: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("text", "tokens", "chat", "admitted", "sampling", "tenant")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    text: str
    tokens: Tokens
    chat: Chat
    admitted: AdmittedPrompt
    sampling: Sampling
    tenant: Tenant
    def __init__(self, text: _Optional[str] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., admitted: _Optional[_Union[AdmittedPrompt, _Mapping]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., tenant: _Optional[_Union[Tenant, _Mapping]] = ...) -> None: ...

class AdmittedPrompt(_message.Message):
    __slots__ = ("id", "prompt")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    prompt: int
    def __init__(self, id: _Optional[bytes] = ..., prompt: _Optional[int] = ...) -> None: ...

class AdmitRequest(_message.Message):
    __slots__ = ("prompts", "answers", "max_new_tokens", "tenant")
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[GenerateRequest]
    answers: int
    max_new_tokens: int
    tenant: Tenant
    def __init__(self, prompts: _Optional[_Iterable[_Union[GenerateRequest, _Mapping]]] = ..., answers: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., tenant: _Optional[_Union[Tenant, _Mapping]] = ...) -> None: ...

class AdmitResponse(_message.Message):
    __slots__ = ("id", "answers_at_a_time")
    ID_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_AT_A_TIME_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    answers_at_a_time: int
    def __init__(self, id: _Optional[bytes] = ..., answers_at_a_time: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("progress", "token", "finished")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    progress: PrefillProgress
    token: TokenGenerated
    finished: Finished
    def __init__(self, progress: _Optional[_Union[PrefillProgress, _Mapping]] = ..., token: _Optional[_Union[TokenGenerated, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class PrefillProgress(_message.Message):
    __slots__ = ("done_tokens", "cached_tokens", "prompt_tokens")
    DONE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    done_tokens: int
    cached_tokens: int
    prompt_tokens: int
    def __init__(self, done_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class TokenGenerated(_message.Message):
    __slots__ = ("id", "text", "logprobs")
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    id: int
    text: str
    logprobs: TokenLogprobs
    def __init__(self, id: _Optional[int] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Union[TokenLogprobs, _Mapping]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("chosen", "top")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    chosen: TokenLogprob
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, chosen: _Optional[_Union[TokenLogprob, _Mapping]] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("id", "logprob", "text")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    text: bytes
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ..., text: _Optional[bytes] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "usage")
    REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    usage: Usage
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "chat", "tenant", "is_bare")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    IS_BARE_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: Chat
    tenant: Tenant
    is_bare: bool
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., tenant: _Optional[_Union[Tenant, _Mapping]] = ..., is_bare: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("name", "fingerprint", "context_tokens", "vocabulary_size", "layers", "query_heads", "kv_heads", "head_dim", "dtype", "encoding", "attention", "token_bytes", "has_chat_template")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    QUERY_HEADS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: bytes
    context_tokens: int
    vocabulary_size: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    encoding: str
    attention: str
    token_bytes: int
    has_chat_template: bool
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., context_tokens: _Optional[int] = ..., vocabulary_size: _Optional[int] = ..., layers: _Optional[int] = ..., query_heads: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., encoding: _Optional[str] = ..., attention: _Optional[str] = ..., token_bytes: _Optional[int] = ..., has_chat_template: _Optional[bool] = ...) -> None: ...

class GetStatisticsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatisticsResponse(_message.Message):
    __slots__ = ("server", "tiers", "requests_running", "requests_waiting", "requests_total", "prefill_tokens_total", "cached_tokens_total", "decode_tokens_total", "segments_cached", "cold_kv_ratio", "recall", "units_taken_back_total")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_CACHED_FIELD_NUMBER: _ClassVar[int]
    COLD_KV_RATIO_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    UNITS_TAKEN_BACK_TOTAL_FIELD_NUMBER: _ClassVar[int]
    server: _types_pb2.ProcessIdentity
    tiers: _containers.RepeatedCompositeFieldContainer[_statistics_pb2.TierStatistics]
    requests_running: int
    requests_waiting: int
    requests_total: int
    prefill_tokens_total: int
    cached_tokens_total: _containers.RepeatedCompositeFieldContainer[TierTokens]
    decode_tokens_total: int
    segments_cached: int
    cold_kv_ratio: float
    recall: float
    units_taken_back_total: int
    def __init__(self, server: _Optional[_Union[_types_pb2.ProcessIdentity, _Mapping]] = ..., tiers: _Optional[_Iterable[_Union[_statistics_pb2.TierStatistics, _Mapping]]] = ..., requests_running: _Optional[int] = ..., requests_waiting: _Optional[int] = ..., requests_total: _Optional[int] = ..., prefill_tokens_total: _Optional[int] = ..., cached_tokens_total: _Optional[_Iterable[_Union[TierTokens, _Mapping]]] = ..., decode_tokens_total: _Optional[int] = ..., segments_cached: _Optional[int] = ..., cold_kv_ratio: _Optional[float] = ..., recall: _Optional[float] = ..., units_taken_back_total: _Optional[int] = ...) -> None: ...

class PromoteRequest(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[_commands_pb2.Command]
    def __init__(self, commands: _Optional[_Iterable[_Union[_commands_pb2.Command, _Mapping]]] = ...) -> None: ...

class PromoteResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[_commands_pb2.CommandOutcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[_commands_pb2.CommandOutcome, _Mapping]]] = ...) -> None: ...

class DemoteRequest(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[_commands_pb2.Command]
    def __init__(self, commands: _Optional[_Iterable[_Union[_commands_pb2.Command, _Mapping]]] = ...) -> None: ...

class DemoteResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[_commands_pb2.CommandOutcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[_commands_pb2.CommandOutcome, _Mapping]]] = ...) -> None: ...

class EvictColdRequest(_message.Message):
    __slots__ = ("idle_ns", "size_bytes")
    IDLE_NS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    idle_ns: int
    size_bytes: int
    def __init__(self, idle_ns: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class EvictColdResponse(_message.Message):
    __slots__ = ("segments", "size_bytes")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    segments: int
    size_bytes: int
    def __init__(self, segments: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class Document(_message.Message):
    __slots__ = ("id", "name", "state", "failure", "done_tokens", "tokens", "kv_bytes", "created_s", "expires_s", "is_pinned")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    DONE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATED_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    IS_PINNED_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    state: DocumentState
    failure: str
    done_tokens: int
    tokens: int
    kv_bytes: int
    created_s: int
    expires_s: int
    is_pinned: bool
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., state: _Optional[_Union[DocumentState, str]] = ..., failure: _Optional[str] = ..., done_tokens: _Optional[int] = ..., tokens: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., created_s: _Optional[int] = ..., expires_s: _Optional[int] = ..., is_pinned: _Optional[bool] = ...) -> None: ...

class CreateDocumentRequest(_message.Message):
    __slots__ = ("tenant", "text", "name", "ttl_s", "is_pinned")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    IS_PINNED_FIELD_NUMBER: _ClassVar[int]
    tenant: Tenant
    text: str
    name: str
    ttl_s: int
    is_pinned: bool
    def __init__(self, tenant: _Optional[_Union[Tenant, _Mapping]] = ..., text: _Optional[str] = ..., name: _Optional[str] = ..., ttl_s: _Optional[int] = ..., is_pinned: _Optional[bool] = ...) -> None: ...

class CreateDocumentResponse(_message.Message):
    __slots__ = ("document",)
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    document: Document
    def __init__(self, document: _Optional[_Union[Document, _Mapping]] = ...) -> None: ...

class GetDocumentRequest(_message.Message):
    __slots__ = ("tenant", "id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    tenant: Tenant
    id: str
    def __init__(self, tenant: _Optional[_Union[Tenant, _Mapping]] = ..., id: _Optional[str] = ...) -> None: ...

class GetDocumentResponse(_message.Message):
    __slots__ = ("document",)
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    document: Document
    def __init__(self, document: _Optional[_Union[Document, _Mapping]] = ...) -> None: ...

class ListDocumentsRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: Tenant
    def __init__(self, tenant: _Optional[_Union[Tenant, _Mapping]] = ...) -> None: ...

class ListDocumentsResponse(_message.Message):
    __slots__ = ("documents",)
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    documents: _containers.RepeatedCompositeFieldContainer[Document]
    def __init__(self, documents: _Optional[_Iterable[_Union[Document, _Mapping]]] = ...) -> None: ...

class UpdateDocumentRequest(_message.Message):
    __slots__ = ("tenant", "id", "ttl_s", "is_pinned")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    IS_PINNED_FIELD_NUMBER: _ClassVar[int]
    tenant: Tenant
    id: str
    ttl_s: int
    is_pinned: bool
    def __init__(self, tenant: _Optional[_Union[Tenant, _Mapping]] = ..., id: _Optional[str] = ..., ttl_s: _Optional[int] = ..., is_pinned: _Optional[bool] = ...) -> None: ...

class UpdateDocumentResponse(_message.Message):
    __slots__ = ("document",)
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    document: Document
    def __init__(self, document: _Optional[_Union[Document, _Mapping]] = ...) -> None: ...

class DeleteDocumentRequest(_message.Message):
    __slots__ = ("tenant", "id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    tenant: Tenant
    id: str
    def __init__(self, tenant: _Optional[_Union[Tenant, _Mapping]] = ..., id: _Optional[str] = ...) -> None: ...

class DeleteDocumentResponse(_message.Message):
    __slots__ = ("is_erased",)
    IS_ERASED_FIELD_NUMBER: _ClassVar[int]
    is_erased: bool
    def __init__(self, is_erased: _Optional[bool] = ...) -> None: ...
