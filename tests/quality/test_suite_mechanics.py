"""The whole suite on a tiny random model: every figure is there, and those that are known are right."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from h3kv.bench.results import Results
from h3kv.core.errors import ConfigError
from h3kv.core.types import DType, Encoding
from h3kv.models import load_model
from h3kv.models.loader import LoadedModel
from h3kv.quality.calibration import calibrate
from h3kv.quality.choice import LossLimit
from h3kv.quality.documents import Portion, read_documents, take_portion
from h3kv.quality.measuring import Measurement, Sizes, TaskSizes, measure
from h3kv.quality.suite import choose_variants, put
from h3kv.quality.tables import show
from h3kv.quality.variants import REFERENCE, Variant, exact, retrieval
from h3kv.quality.windows import WindowSizes
from h3kv.testing.engines import one_thread
from h3kv.testing.tiny_models import write_tiny_model

TEXT = Path(__file__).parents[2] / "examples/demo/document.txt"
CONTEXT = 64 + 2 * 1024
SIZES = Sizes(
    windows=1,
    window=WindowSizes(context_tokens=CONTEXT, scored_tokens=128),
    tasks=TaskSizes(
        passkey_tokens=(64 + 1024,),
        passkey_depths=2,
        needle_tokens=64 + 1024,
        needle_contexts=1,
        needle_keys=2,
        line_tokens=64 + 1024,
        line_contexts=1,
        lines_asked=1,
        fact_tokens=64 + 1024,
        fact_contexts=1,
        facts_asked=1,
    ),
    window_tokens=128,
    task_window_tokens=64,
)
EVERYTHING = 2048
"""A budget that holds all clusters."""

VARIANTS = (
    exact(Encoding.INT8),
    exact(Encoding.K8V4),
    exact(Encoding.INT4),
    retrieval(Encoding.K8V4, 0, name="budget0"),
    retrieval(Encoding.K8V4, 256, name="bytes20"),
    retrieval(Encoding.K8V4, EVERYTHING, name="everything"),
    retrieval(Encoding.K8V4, 0, dense_layers=(0, 1), name="default"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, "llama", max_position_embeddings=4096, num_hidden_layers=2)
    return load_model(folder, dtype=DType.BF16)


@pytest.fixture(scope="module")
def measurement(model: LoadedModel) -> Iterator[Measurement]:
    text = take_portion(model.tokenizer, read_documents([TEXT]), Portion.UNSEEN)
    with one_thread():
        yield measure(model, VARIANTS, text, sizes=SIZES, seed=0, progress=lambda _: None)


@pytest.mark.slow
def test_every_figure_is_there(measurement: Measurement) -> None:
    results = Results()
    put(results, measurement)
    figures = ("perplexity_change", "perplexity_se", "mean_kl", "top1", "bytes_share", "page_bytes_share")
    for variant in VARIANTS:
        assert {f"quality.{variant.name}.{figure}" for figure in figures} <= set(results.metrics)
    assert all(math.isfinite(value) for value in results.metrics.values())
    assert results.metrics["quality.scored_tokens"] == 128
    assert results.metrics["quality.reference.passkey_trials"] == 2
    assert "quality.default.bytes_fraction" in results.metrics


@pytest.mark.slow
def test_fewer_bits_cost_more(measurement: Measurement) -> None:
    int8, k8v4, int4, *_ = (point.fidelity.mean_kl for point in measurement.points)
    assert int8 <= 1e-3
    assert int8 < k8v4 < int4


@pytest.mark.slow
def test_exact_encodings_read_their_codes(measurement: Measurement) -> None:
    shares = [point.bytes_share for point in measurement.points[:3]]
    assert shares == pytest.approx([136 / 256, 104 / 256, 72 / 256])


@pytest.mark.slow
def test_larger_budgets_read_more_and_lose_less(measurement: Measurement) -> None:
    points = {point.variant.name: point for point in measurement.points}
    nothing, some, everything = (points[name] for name in ("budget0", "bytes20", "everything"))
    assert nothing.bytes_share < some.bytes_share < everything.bytes_share
    assert nothing.fidelity.mean_kl > some.fidelity.mean_kl > everything.fidelity.mean_kl
    # Not equal: tokens that retrieval chose are read without the residues of their values.
    assert everything.fidelity.mean_kl > points["k8v4"].fidelity.mean_kl


@pytest.mark.slow
def test_a_model_that_is_dense_in_all_layers_reads_everything(measurement: Measurement) -> None:
    points = {point.variant.name: point for point in measurement.points}
    assert points["default"].bytes_share == pytest.approx(points["k8v4"].bytes_share)
    assert points["default"].fidelity == points["k8v4"].fidelity


@pytest.mark.slow
def test_tables_and_plot_are_shown(measurement: Measurement) -> None:
    text = io.StringIO()
    show(Console(file=text, width=160), measurement)
    for variant in VARIANTS:
        assert variant.name in text.getvalue()
    assert "mean KL" in text.getvalue()


@pytest.mark.slow
def test_calibration_takes_exact_attention_where_nothing_cheaper_holds(model: LoadedModel) -> None:
    limit = LossLimit(perplexity_change=-1.0, top1=1.0)
    with one_thread():
        found = calibrate(model, read_documents([TEXT]), limit=limit, sizes=SIZES, progress=lambda _: None)
    assert found.chosen == REFERENCE
    assert found.verified == ()
    assert all(verdict.misses for verdict in found.calibrated)


@pytest.mark.slow
def test_calibration_takes_the_fewest_bytes_where_any_loss_is_allowed(model: LoadedModel) -> None:
    limit = LossLimit(perplexity_change=1e6, top1=0.0, passkey=0.0)
    with one_thread():
        found = calibrate(model, read_documents([TEXT]), limit=limit, sizes=SIZES, progress=lambda _: None)
    least = min(found.verified, key=lambda verdict: verdict.candidate.bytes_share)
    assert found.chosen == least.variant
    assert found.chosen != REFERENCE


def test_variants_are_chosen_by_name() -> None:
    assert choose_variants(VARIANTS, []) == list(VARIANTS)
    assert [variant.name for variant in choose_variants(VARIANTS, ["default", "k8v4"])] == ["k8v4", "default"]
    with pytest.raises(ConfigError, match="int8, k8v4"):
        choose_variants(VARIANTS, ["k4v8"])


def test_too_many_variants_of_one_encoding_are_refused(model: LoadedModel) -> None:
    variants = [Variant(f"raw{number}", Encoding.RAW) for number in range(8)]
    with pytest.raises(ConfigError, match="9 variants in raw"):
        measure(model, variants, [[0] * 10_000], sizes=SIZES, seed=0, progress=lambda _: None)


def test_a_text_that_is_too_short_is_refused_before_anything_is_read(model: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="--text"):
        measure(model, [exact(Encoding.INT8)], [[0] * 100], sizes=SIZES, seed=0, progress=lambda _: None)
