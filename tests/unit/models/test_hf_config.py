import math

import pytest

from h3kv.core.errors import ConfigError, ModelCorruptError, ModelUnsupportedError
from h3kv.models.config import Family, ModelConfig
from h3kv.models.hf_config import config_from_hf
from h3kv.models.rope import RopeKind, RopeScaling

LLAMA3 = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
PLAIN = {key: value for key, value in LLAMA3.items() if key != "rope_scaling"}


def parse(**changes: object) -> ModelConfig:
    return config_from_hf(PLAIN | changes, "model/config.json")


def test_llama3_config_is_read() -> None:
    config = config_from_hf(LLAMA3, "config.json")
    assert config == ModelConfig(
        family=Family.LLAMA,
        vocabulary_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
        rope_theta=500000.0,
        rope=RopeScaling(kind=RopeKind.LLAMA3, factor=8.0, original_context=8192),
        max_context=131072,
        tied_embeddings=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
    )


def test_both_spellings_of_rope_mean_the_same() -> None:
    parameters = LLAMA3["rope_scaling"] | {"rope_theta": LLAMA3["rope_theta"]}
    newer = {key: value for key, value in PLAIN.items() if key != "rope_theta"} | {"rope_parameters": parameters}
    assert config_from_hf(newer, "config.json") == config_from_hf(LLAMA3, "config.json")


def test_old_key_type_names_the_rope_type() -> None:
    assert parse(rope_scaling={"type": "linear", "factor": 2.0}).rope.kind is RopeKind.LINEAR


def test_families_differ_in_biases_and_norms() -> None:
    mistral = parse(model_type="mistral", attention_bias=True, sliding_window=None)
    qwen2, qwen3 = parse(model_type="qwen2"), parse(model_type="qwen3", head_dim=64)
    assert (mistral.qkv_bias, mistral.output_bias, mistral.qk_norm) == (False, False, False)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 64)


def test_absent_kv_heads_mean_one_for_each_query_head() -> None:
    assert parse(num_key_value_heads=None).kv_heads == 32


def test_unused_sliding_window_is_accepted() -> None:
    layers = ["full_attention"] * 32
    parse(model_type="qwen2", use_sliding_window=False, sliding_window=4096, layer_types=layers)


def test_yarn_reaches_what_its_factor_says() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = parse(model_type="qwen2", max_position_embeddings=32768, rope_scaling=scaling)
    assert config.max_context == 131072
    assert config.rope == RopeScaling(kind=RopeKind.YARN, factor=4.0, original_context=32768)


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"model_type": "gemma2"}, "gemma2"),
        ({"model_type": "mixtral"}, "mixtral"),
        ({"model_type": None}, "None"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"num_experts": 128}, "mixture of experts"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial rotary"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised weights"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "static type 'ntk'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"type": "mrope"}}, "mrope"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differs between layers"),
        ({"head_dim": 512}, "512"),
        ({"head_dim": 65}, "65"),
        ({"head_dim": 2}, "dimension 2 "),
    ],
)
def test_unsupported_features_are_refused_by_name(changes: dict[str, object], feature: str) -> None:
    with pytest.raises(ModelUnsupportedError, match=feature) as caught:
        parse(**changes)
    assert "choose another model" in str(caught.value)
    assert caught.value.path == "model/config.json"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers"),
        ({"max_position_embeddings": 10**400}, "max_position_embeddings"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rope_theta": 1}, "rope_theta"),
        ({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_theta"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e305}}, "rope factor"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"num_key_value_heads": 5}, "5 KV heads"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope factor"),
        ({"rope_scaling": {"type": "linear"}}, "'factor'"),
    ],
)
def test_bad_values_are_refused_by_key(changes: dict[str, object], key: str) -> None:
    with pytest.raises(ModelCorruptError, match=key) as caught:
        parse(**changes)
    assert "again" in str(caught.value)


def test_scaling_at_load_stretches_the_trained_context() -> None:
    config = parse(max_position_embeddings=8192)
    scaled = config.with_context(RopeScaling(kind=RopeKind.YARN, factor=4.0), None)
    assert (scaled.max_context, scaled.rope.original_context) == (32768, 8192)
    assert config.with_context(RopeScaling(kind=RopeKind.NTK, factor=2.0), 10000).max_context == 10000


@pytest.mark.parametrize(
    ("rope", "max_context"),
    [
        (RopeScaling(kind=RopeKind.NTK, factor=2.0), None),
        (RopeScaling(kind=RopeKind.NTK, factor=32.0), 200_000),
        (RopeScaling(), 1024),
        (None, 131_073),
        (None, 0),
    ],
)
def test_model_with_a_scaling_of_its_own_gets_no_other(rope: RopeScaling | None, max_context: int | None) -> None:
    config = config_from_hf(LLAMA3, "config.json")
    with pytest.raises(ConfigError, match=r"brings its own rope scaling 'llama3' to 131,072 tokens") as caught:
        config.with_context(rope, max_context)
    assert caught.value.field == ("max_context" if rope is None else "rope")
    assert "ntk" not in str(caught.value)


def test_model_with_a_scaling_of_its_own_may_use_less_of_it() -> None:
    config = config_from_hf(LLAMA3, "config.json").with_context(None, 20_000)
    assert config.max_context == 20_000
    assert config.rope.kind is RopeKind.LLAMA3


@pytest.mark.parametrize("max_context", [0, 8193, 20000])
def test_contexts_out_of_reach_are_refused_with_the_scaling_that_would_reach(max_context: int) -> None:
    with pytest.raises(ConfigError, match="static scaling") as caught:
        parse(max_position_embeddings=8192).with_context(None, max_context)
    assert caught.value.field == "max_context"
    if max_context == 20000:
        assert "factor >= 2.441" in str(caught.value)
