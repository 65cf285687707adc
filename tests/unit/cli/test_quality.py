"""Which default `h3 quality` measures."""

from __future__ import annotations

from h3kv.cli.quality import variant_of
from h3kv.config import AttentionSettings, Settings
from h3kv.core.types import Encoding
from h3kv.quality.variants import Variant


def test_default_is_what_the_settings_say() -> None:
    def of(**keys: object) -> Variant | None:
        return variant_of(Settings(attention=AttentionSettings.model_validate(keys)))

    assert of() is None, "plain numbers are what all is compared with"
    assert of(encoding="k8v4") == Variant("default", Encoding.K8V4)
    found = of(encoding="k8v4", mode="retrieval", budget_tokens=64, dense_layers=[1], shortlist_share=0.5)
    assert found is not None and found.retrieval is not None
    assert (found.retrieval.budget_tokens, found.retrieval.dense_layers, found.name) == (64, (1,), "default")
