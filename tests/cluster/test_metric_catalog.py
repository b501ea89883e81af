"""The catalog keeps Prometheus' rules, and nothing outside it can be exposed."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.health_config import HealthConfig
from cluster.http_config import HttpConfig
from cluster.metric_catalog import CATALOG, exposed_by
from cluster.metric_set import MetricSet, UndeclaredMetric, merge
from scripts.metric_reference import REFERENCE, reference

#: Front ends hold a request for so long while there is no cell.
LONGEST_WAIT_S = HealthConfig().cell_wait_s


def test_the_reference_is_up_to_date() -> None:
    assert REFERENCE.read_text() == reference(), "run `make docs`"


def test_names_follow_the_rules() -> None:
    for name, metric in CATALOG.items():
        assert re.fullmatch(r"flotilla(_[a-z0-9]+)+", name)
        assert name.endswith("_total") == (metric.kind == "counter"), name
        assert bool(metric.buckets) == (metric.kind == "histogram"), name
        assert list(metric.buckets) == sorted(set(metric.buckets)), name
        assert ("_seconds" in name) == (metric.unit == "seconds"), name
        assert metric.help.endswith("."), name
        assert not {"cell", "front_end", "le"} & set(metric.labels), f"{name}: added to every sample"


def test_buckets_reach_as_far_as_times_may() -> None:
    """A quantile beyond the last one is shown as that, however long it was: 160 s where 600 are allowed."""
    whole_s = HttpConfig().request_timeout_s
    assert whole_s is not None
    for name, longest_s in (
        ("flotilla_http_request_duration_seconds", whole_s),
        ("flotilla_grpc_call_duration_seconds", whole_s),
        ("flotilla_e2e_latency_seconds", whole_s),
        ("flotilla_decode_time_seconds", whole_s),
        ("flotilla_time_to_first_token_seconds", LONGEST_WAIT_S),
        ("flotilla_queue_time_seconds", LONGEST_WAIT_S),
    ):
        assert CATALOG[name].buckets[-1] >= longest_s, name


def test_no_label_is_one_that_prometheus_gives_to_what_it_scrapes() -> None:
    """It would keep its own, of targets as its operator finds them, and call ours `exported_...`."""
    taken = {"job", "instance", "namespace", "pod", "container", "endpoint", "service", "node"}
    assert {name: found for name, metric in CATALOG.items() if (found := taken & {*metric.labels})} == {}


def test_what_is_not_declared_cannot_be_counted() -> None:
    metrics = MetricSet("cell")
    with pytest.raises(UndeclaredMetric, match="metric_catalog"):
        metrics.counter("flotilla_made_up_total")
    with pytest.raises(UndeclaredMetric, match="it is a gauge"):
        metrics.counter("flotilla_requests_running", "default")
    with pytest.raises(UndeclaredMetric):
        metrics.counter("flotilla_http_requests_total", "/", "GET", "200")  # a front end's
    with pytest.raises(ValueError, match="label"):
        metrics.counter("flotilla_requests_total", "stop")


def touched(process: str, constant: dict[str, str]) -> str:
    """The exposition of a process with a sample of every metric."""
    metrics = MetricSet(process, constant)  # type: ignore[arg-type]
    for metric in exposed_by(process):  # type: ignore[arg-type]
        labels = ["x"] * len(metric.labels)
        if metric.kind == "counter":
            metrics.counter(metric.name, *labels).inc()
        elif metric.kind == "gauge":
            metrics.gauge(metric.name, *labels).set(2)
        else:
            metrics.histogram(metric.name, *labels).observe(0.5)
    return metrics.render()


def test_several_processes_are_one_exposition() -> None:
    texts = [touched("cell", {"cell": name}) for name in ("one", "two")]
    texts += [touched("front_end", {"front_end": "three"}), touched("gathered", {})]
    merged = merge(texts)
    headers = [line.split()[2] for line in merged.splitlines() if line.startswith("# TYPE")]
    assert sorted(headers) == sorted(CATALOG)
    samples = [line for text in texts for line in text.splitlines() if not line.startswith("#")]
    assert sorted(line for line in merged.splitlines() if not line.startswith("#")) == sorted(samples)
    of = {
        family.name: {tuple(sorted(s.labels.items())) for s in family.samples}
        for family in text_string_to_metric_families(merged)
    }
    assert {dict(labels)["cell"] for labels in of["flotilla_steps"]} == {"one", "two"}
    assert len(of["flotilla_build_info"]) > 2


def test_only_a_line_feed_ends_a_sample() -> None:
    """Names of tiers and drafters are people's, and may hold what Python takes for the end of a line, too."""
    metrics = MetricSet("cell", {"cell": "one"})
    metrics.gauge("flotilla_requests_running", "fast\u2028slow\x85\x1c").set(2)
    families = {one.name: one for one in text_string_to_metric_families(merge([metrics.render()]))}
    samples = families["flotilla_requests_running"].samples
    assert [(one.labels["tier"], one.value) for one in samples] == [("fast\u2028slow\x85\x1c", 2.0)]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_wrong() -> None:
    text = merge([touched("cell", {"cell": "one"}), touched("front_end", {"front_end": "two"})])
    found = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=30, check=False
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_totals_of_several_sources_add_up_and_never_fall() -> None:
    class Source:
        pass

    metrics, one, two = MetricSet("cell"), Source(), Source()
    for source, total in ((one, 5), (two, 3), (one, 7), (two, 3), (one, 6), (one, 8)):
        metrics.grow(source, "flotilla_steps_total", total)
    assert "flotilla_steps_total 11.0" in metrics.render()


def test_two_scrapes_at_once_count_once_what_was_added_since_the_last() -> None:
    """Each is answered in a thread of its own."""
    metrics, source = MetricSet("front_end"), threading.Lock()
    name = "flotilla_requests_resubmitted_total"
    other = threading.Thread(target=lambda: metrics.grow(source, name, 7))

    class Total(float):
        """While it is compared with the last one, the other scrape comes."""

        def __sub__(self, seen: float) -> float:
            other.start()
            other.join(0.1)
            return float(self) - seen

    metrics.grow(source, name, Total(7))
    other.join()
    assert f"{name} 7.0" in metrics.render()


def test_a_gauge_is_never_without_the_labels_that_stay() -> None:
    """A scrape reads in a thread of its own, while another brings the metrics up to date."""
    metrics, name = MetricSet("cell"), "flotilla_requests_running"

    def tiers() -> set[str]:
        lines = metrics.render().splitlines()
        return {line.split('"')[1] for line in lines if line.startswith(f"{name}{{")}

    def values() -> Iterator[tuple[tuple[str, ...], float]]:
        yield ("stays",), 1
        assert tiers() == {"stays", "goes"}  # a scrape now
        yield ("comes",), 2

    metrics.show(name, [(("stays",), 3), (("goes",), 4)])
    assert tiers() == {"stays", "goes"}
    metrics.show(name, values())
    assert tiers() == {"stays", "comes"}
    with pytest.raises(UndeclaredMetric):
        metrics.show("flotilla_requests_total", [(("stop", "default"), 1)])
