"""Metrics: Prometheus and OpenTelemetry, and the dashboard and alerts that name them."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import re
import socket
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from django.http import HttpResponse
from django.test import RequestFactory
from opentelemetry import metrics as otel_metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rest_framework.response import Response
from rest_framework.views import APIView
from rlaas_django import Policy, acheck, check, rate_limit
from rlaas_django.integrations import opentelemetry, prometheus
from rlaas_django.integrations.drf import AnonRateThrottle, PolicyThrottle
from rlaas_django.runtime.observers import ALLOWED, DEGRADED, OTHER, OVER, REFUSED

from tests.support.internals import acheck_each, check_each, check_plan, flush_statistics, observers, recorder
from tests.support.observation import assert_soon

ROOT = Path(__file__).parents[2]
SMALL = Policy("small", "2/h")


@pytest.fixture
def prometheus_registry():
    """A registry with our metrics, as the app installs them in the default one."""
    registry = CollectorRegistry()
    observer = prometheus.Recorder(registry)
    observers.add(observer, latency=True)
    registry.register(prometheus.SharedState())
    yield registry
    observers.remove(observer)


def samples(text: str) -> dict[tuple, float]:
    """Return the samples of an exposition, by name and labels."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, *sorted(sample.labels.items())] = sample.value
    return found


def scraped(registry) -> dict[tuple, float]:
    flush_statistics()
    return samples(generate_latest(registry).decode())


def decisions(policy: str, result: str) -> tuple:
    return "rlaas_decisions_total", ("policy", policy), ("result", result)


async def test_decisions_are_counted_by_policy_and_result(prometheus_registry, client):
    shadow = Policy("shadow", "1/h", shadow=True)
    for _ in range(2):
        check("alice", [SMALL, shadow])
    check("alice", [SMALL, shadow])
    await acheck("bob", SMALL)
    found = scraped(prometheus_registry)
    assert found[decisions("small", "allowed")] == 3
    assert found[decisions("small", "refused")] == 1
    assert found[decisions("shadow", "allowed")] == 1
    assert found[decisions("shadow", "over")] == 2
    assert found["rlaas_redis_seconds_count",] == 4


def test_a_request_is_counted_once_under_each_policy(prometheus_registry):
    limited = rate_limit("2/h", key="ip", group="page")(lambda request: HttpResponse())
    for _ in range(3):
        limited(RequestFactory().get("/"))
    found = scraped(prometheus_registry)
    assert (found[decisions("page", "allowed")], found[decisions("page", "refused")]) == (2, 1)


def test_refusals_from_memory_are_counted(prometheus_registry):
    for _ in range(5):
        check("alice", SMALL)
    found = scraped(prometheus_registry)
    assert found["rlaas_refusal_cache_hits_total",] == 2
    assert found["rlaas_redis_seconds_count",] == 3
    assert found[decisions("small", "refused")] == 3


def hits_and_calls(registry) -> tuple[float, float]:
    found = samples(generate_latest(registry).decode())
    return found["rlaas_refusal_cache_hits_total",], found["rlaas_redis_seconds_count",]


class OncePerHour(AnonRateThrottle):
    rate = "1/hour"


class TwoPolicies(PolicyThrottle):
    policies = (Policy("key", "9/h", key="header:X-Key"), Policy("all", "9/h", key="global"))


@pytest.mark.parametrize(
    ("throttles", "cached", "expected"),
    [
        ([OncePerHour], False, (0, 3)),
        ([OncePerHour], True, (1, 2)),
        ([OncePerHour, TwoPolicies], False, (0, 6)),  # two checks per request, in one round trip
        ([OncePerHour, TwoPolicies], True, (1, 5)),
    ],
)
def test_calls_of_throttles_are_counted(prometheus_registry, configure, throttles, cached, expected):
    configure(LOCAL_REFUSALS=cached)
    view = type("View", (APIView,), {"throttle_classes": throttles, "get": lambda self, request: Response()}).as_view()
    requests = [RequestFactory().get("/", headers={"X-Key": "k"}) for _ in range(3)]
    assert [view(request).status_code for request in requests] == [200, 429, 429]
    assert hits_and_calls(prometheus_registry) == expected


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_calls_of_a_batch_are_measured(prometheus_registry, kind):
    checks = [check_plan("alice", SMALL, 1), check_plan("bob", SMALL, 1)]
    decisions = check_each(checks) if kind == "sync" else asyncio.run(acheck_each(checks))
    assert all(0 < each.latency < 60 for each in decisions)


def test_a_refusal_without_redis_is_no_hit_of_the_cache(prometheus_registry, redis_unavailable):
    local = rate_limit("1/h", key="ip", group="page", on_failure="local")(lambda request: HttpResponse())
    assert [local(RequestFactory().get("/")).status_code for _ in range(3)] == [200, 429, 429]
    assert hits_and_calls(prometheus_registry) == (0, 0)


def test_labels_hold_no_identity_and_no_path(prometheus_registry):
    limited = rate_limit("1/h", key="header:X-Key", group="page")(lambda request: HttpResponse())
    for _ in range(2):
        limited(RequestFactory().get("/secret-path", headers={"X-Key": "secret-key"}))
    scraped(prometheus_registry)
    text = generate_latest(prometheus_registry).decode()
    assert "secret" not in text
    assert set(re.findall(r"[{,](\w+)=", text)) == {"policy", "result", "server", "le"}


def test_an_open_circuit_breaker_is_seen(prometheus_registry, redis_unavailable):
    check("alice", SMALL)
    check("alice", SMALL)
    found = samples(generate_latest(prometheus_registry).decode())
    assert [value for key, value in found.items() if key[0] == "rlaas_circuit_breaker_open"] == [1]
    # No decisions rather than fewer than before, which would be taken for a restart.
    assert not [key for key in found if key[0] == "rlaas_decisions_total"]


def test_dropped_statistics_are_counted(prometheus_registry, monkeypatch):
    for queue in ("pending", "uneventful"):
        monkeypatch.setattr(recorder, queue, deque(maxlen=2))
    for _ in range(5):
        check("alice", Policy("roomy", "99/h"))
        check("alice", Policy("tight", "1/h"))
    assert samples(generate_latest(prometheus_registry).decode())["rlaas_statistics_dropped_total",] == 6


def test_the_dashboard_and_the_alerts_name_metrics_that_exist(prometheus_registry, client):
    check("alice", SMALL)
    flush_statistics()
    known = {sample[0] for sample in samples(generate_latest(prometheus_registry).decode())}
    texts = [(ROOT / "docs/monitoring" / name).read_text() for name in ("dashboard.json", "alerts.yml")]
    named = set(re.findall(r"rlaas_\w+", "\n".join(texts))) - {"rlaas_django"}
    assert named
    assert named <= known
    panels = json.loads(texts[0])["panels"]
    assert all(
        target["expr"].count("(") == target["expr"].count(")") for panel in panels for target in panel["targets"]
    )


def test_every_metric_is_documented(prometheus_registry, client):
    check("alice", SMALL)
    flush_statistics()
    families = text_string_to_metric_families(generate_latest(prometheus_registry).decode())
    names = {f"{each.name}_total" if each.type == "counter" else each.name for each in families}
    names -= {name for name in names if name.endswith("_created")}  # the times that prometheus_client adds
    page = (ROOT / "docs/monitoring.md").read_text()
    assert names == set(re.findall(r"^\| `(rlaas_\w+)`", page, re.MULTILINE))


# Several workers


@contextlib.contextmanager
def gunicorn(url: str, **environment: str):
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        command = [
            sys.executable,
            "-m",
            "gunicorn",
            "tests.support.metrics_project:wsgi()",
            "--bind",
            f"fd://{listener.fileno()}",
        ]
        server = subprocess.Popen(
            [*command, "--workers", "4", "--worker-class", "gthread", "--threads", "2", "--log-level", "error"],
            cwd=ROOT,
            env={
                **os.environ,
                "DJANGO_SETTINGS_MODULE": "tests.support.metrics_project",
                "RLAAS_TEST_REDIS": url,
                **environment,
            },
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.terminate()
            server.wait(30)


@pytest.mark.slow
@pytest.mark.parametrize("multiprocess", [False, True])
def test_the_sums_of_four_workers_are_right(own, tmp_path, multiprocess):
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)} if multiprocess else {}
    with gunicorn(own.url, **environment) as url, httpx.Client(timeout=60) as client:

        def request(_: int) -> int:
            return client.get(f"{url}/limited").status_code

        with ThreadPoolExecutor(16) as threads:
            statuses = list(threads.map(request, range(1000)))
        assert statuses.count(200) == 100

        def sums() -> tuple[float, float]:
            found = samples(client.get(f"{url}/metrics").text)
            return found.get(decisions("shared", "allowed"), 0), found.get(decisions("shared", "refused"), 0)

        assert_soon(lambda: sums() == (100, 900))


# OpenTelemetry


def test_opentelemetry_has_the_same_instruments_and_a_span_attribute(client, monkeypatch):
    reader, spans = InMemoryMetricReader(), InMemorySpanExporter()
    provider, tracing = MeterProvider([reader]), TracerProvider()
    tracing.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(otel_metrics, "get_meter", provider.get_meter)
    observers.add(observer := opentelemetry.Recorder(), latency=True)
    try:
        with tracing.get_tracer("tests").start_as_current_span("request"):
            for _ in range(4):
                check("alice", SMALL)
    finally:
        observers.remove(observer)
    (scope,) = reader.get_metrics_data().resource_metrics[0].scope_metrics
    found = {metric.name: metric.data.data_points for metric in scope.metrics}
    counted = {
        (point.attributes["policy"], point.attributes["result"]): point.value for point in found["rlaas.decisions"]
    }
    assert counted == {("small", "allowed"): 2, ("small", "refused"): 2}
    assert found["rlaas.redis.duration"][0].count == 3
    assert found["rlaas.refusal_cache.hits"][0].value == 1
    assert found["rlaas.circuit_breaker.open"][0].value == 0
    assert found["rlaas.statistics.dropped"][0].value == 0
    (span,) = spans.get_finished_spans()
    assert span.attributes == {"rlaas.result": "refused", "rlaas.policy": "small", "rlaas.remaining": 0}


def test_every_instrument_and_result_is_documented():
    page = (ROOT / "docs/monitoring.md").read_text()
    source = inspect.getsource(opentelemetry)
    assert set(re.findall(r"`(rlaas\.[a-z_.]+)`", page)) == set(re.findall(r'"(rlaas\.[a-z_.]+)"', source))
    (row,) = re.findall(r"^\| `rlaas_decisions_total` .*`result` is (.*) \|$", page, re.MULTILINE)
    assert set(re.findall(r"`([a-z]+)`", row)) == {ALLOWED, REFUSED, OVER, DEGRADED, OTHER}


@pytest.mark.parametrize(
    ("integration", "measured"), [(None, "False 1"), ("prometheus", "True 2"), ("opentelemetry", "True 2")]
)
def test_an_integration_is_installed_as_an_app_and_without_one_nothing_is_measured(integration, measured):
    apps = ["rlaas_django", *([f"rlaas_django.integrations.{integration}.Metrics"] if integration else [])]
    code = f"""
import django
from django.conf import settings
settings.configure(INSTALLED_APPS={apps})
django.setup()
from rlaas_django.runtime import observers
print(bool(observers.timed), len(observers.observers))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == measured  # the statistics observe, too
