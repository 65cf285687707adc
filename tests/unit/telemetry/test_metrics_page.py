import math
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from h3kv import __version__
from h3kv.telemetry import names
from h3kv.telemetry.metric import EVERY_SERVICE, Kind, Metric, Service
from h3kv.telemetry.metrics_page import MetricsPage
from h3kv.telemetry.names import METRICS


def families(page: MetricsPage) -> dict[str, tuple[str, str]]:
    """Kind and sentence by name."""
    text = page.render()[0].decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    return {
        f"{name}_total" if family.type == "counter" else name: (family.type, family.documentation)
        for name, family in found.items()
    }


@pytest.mark.parametrize("service", Service)
def test_a_page_has_the_metrics_of_its_service_and_no_other(service: Service) -> None:
    found = families(MetricsPage(service))
    expected = [metric for metric in METRICS.values() if service in metric.services]
    assert set(found) == {metric.name for metric in expected}
    for metric in expected:
        assert found[metric.name][0] == metric.kind
        if not metric.name.startswith("h3_process_"):
            assert found[metric.name][1] == metric.sentence


def test_every_metric_is_on_some_page() -> None:
    assert set().union(*(families(MetricsPage(service)) for service in Service)) == set(METRICS)


def test_measurements_are_on_the_page() -> None:
    page = MetricsPage(Service.GPU_WORKER)
    page.count(names.MOVES, source="host", target="nvme", reason="cap")
    page.count(names.MOVES, 2, source="host", target="nvme", reason="cap")
    page.gauge(names.REQUESTS_WAITING, 3)
    page.observe(names.ITL, 0.02)
    text = page.render()[0].decode()
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    labels = {"source": "host", "target": "nvme", "reason": "cap"}
    assert samples[names.MOVES, tuple(sorted(labels.items()))] == 3
    assert samples[names.REQUESTS_WAITING, ()] == 3
    assert samples[f"{names.ITL}_bucket", (("le", "0.015"),)] == 0
    assert samples[f"{names.ITL}_bucket", (("le", "0.02"),)] == 1
    assert samples[names.PROCESS_INFO, (("service", "gpu_worker"), ("version", __version__))] == 1
    assert page.value(names.MOVES, **labels) == 3
    assert page.value(names.MOVED_BYTES, source="host", target="nvme") == 0


def test_a_gauge_that_was_not_set_is_no_number() -> None:
    assert math.isnan(MetricsPage(Service.GPU_WORKER).value(names.COLD_KV_RATIO))


def test_numbers_of_the_process_are_the_systems() -> None:
    page = MetricsPage(Service.GATEWAY)
    text = page.render()[0].decode()
    values = {family.name: family.samples[0].value for family in text_string_to_metric_families(text) if family.samples}
    assert values[names.PROCESS_RESIDENT] > 1 << 20
    assert 3 <= values[names.PROCESS_DESCRIPTORS] <= values[names.PROCESS_DESCRIPTORS_MAX]
    assert values[names.PROCESS_START] > 1e9
    assert Path("/proc/self/stat").exists()


def test_a_scraper_that_asks_for_openmetrics_gets_it() -> None:
    body, content_type = MetricsPage(Service.NVME_IO).render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    found = {family.name for family in parse_openmetrics(body.decode())}
    assert names.REGION_SIZE in found


def test_metrics_of_another_service_are_refused() -> None:
    with pytest.raises(AssertionError, match="gateway does not emit h3_moves_total"):
        MetricsPage(Service.GATEWAY).count(names.MOVES, source="host", target="nvme", reason="cap")


def test_undeclared_names_kinds_and_labels_are_refused() -> None:
    page = MetricsPage(Service.GPU_WORKER)
    with pytest.raises(AssertionError, match="not declared"):
        page.gauge("h3_surprise", 1)
    with pytest.raises(AssertionError, match="is a gauge"):
        page.observe(names.REQUESTS_WAITING, 1)
    with pytest.raises(AssertionError, match="has labels"):
        page.count(names.MOVES, source="host")
    with pytest.raises(AssertionError, match="cannot go down"):
        page.count(names.DECODE_TOKENS, -1)
    with pytest.raises(AssertionError, match="no one value"):
        page.value(names.ITL)


def test_a_declaration_that_is_not_whole_is_refused() -> None:
    with pytest.raises(AssertionError, match="nobody emits"):
        Metric("h3_x", Kind.GAUGE, "x", (), "X.", services=())
    with pytest.raises(AssertionError, match="histograms alone"):
        Metric("h3_x", Kind.HISTOGRAM, "x", (), "X.", services=EVERY_SERVICE)
    with pytest.raises(AssertionError, match="do not ascend"):
        Metric("h3_x", Kind.HISTOGRAM, "x", (), "X.", services=EVERY_SERVICE, buckets=(2.0, 1.0))
