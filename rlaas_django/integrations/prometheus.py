"""Prometheus metrics: add `rlaas_django.integrations.prometheus.Metrics` to INSTALLED_APPS.

They are in prometheus_client's default registry, beside those of the site (django-prometheus, for one). Decisions are
right with any number of workers: in prometheus_client's multiprocess mode each worker counts its own, and otherwise
they are read from the statistics in Redis, which all workers write. What else there is belongs to one process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from django.apps import AppConfig
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from .. import backend
from ..runtime import observers
from ..runtime.observers import DEGRADED, REFUSED, Observation
from ..stats import reader, recorder

__all__ = ["Metrics", "exposition"]

DECISIONS = "rlaas_decisions", "Decisions by policy and result", ("policy", "result")
BREAKER = (
    "rlaas_circuit_breaker_open",
    "Whether the circuit breaker of a Redis server is open (1)",
    ("server",),
)
DROPPED = "rlaas_statistics_dropped", "Observations that are missing in the statistics"
BUCKETS = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
)  # seconds


def multiprocess() -> bool:
    """Return whether prometheus_client runs in multiprocess mode."""
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ


class Metrics(AppConfig):
    """Installs the metrics."""

    name = "rlaas_django.integrations.prometheus"
    label = "rlaas_prometheus"

    def ready(self) -> None:
        observers.add(Recorder(REGISTRY), latency=True)
        if not multiprocess():
            REGISTRY.register(SharedState())


class Recorder:
    """Counts what this process decides."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.latency = Histogram(
            "rlaas_redis_seconds",
            "Latency of calls to Redis",
            buckets=BUCKETS,
            registry=registry,
        )
        self.cached = Counter(
            "rlaas_refusal_cache_hits",
            "Refusals repeated from memory",
            registry=registry,
        )
        self.decisions: dict[tuple[str, str], Any] | None = (
            {} if multiprocess() else None
        )  # children of the counter
        if self.decisions is not None:
            self._counter = Counter(*DECISIONS, registry=registry)
            self._breaker = Gauge(
                *BREAKER, multiprocess_mode="livemax", registry=registry
            )
            self._unavailable = False

    def __call__(self, observation: Observation) -> None:
        for seconds in observation.latencies:
            self.latency.observe(seconds)
        result = observation.result
        if result == REFUSED and observation.is_cached:
            self.cached.inc()
        if self.decisions is None:
            return
        for outcome, each in observation.results():
            key = outcome.policy.name, each
            child = self.decisions.get(key)
            if child is None:
                child = self.decisions[key] = self._counter.labels(*key)
            child.inc()
        if result == DEGRADED or self._unavailable:
            self._unavailable = False
            for server in backend.topology().servers():
                is_open = server.breaker.error is not None
                self._unavailable |= is_open
                self._breaker.labels(server.name).set(int(is_open))


class SharedState(Collector):
    """Reads, when it is scraped, what all processes decided, and the state of the servers."""

    def describe(self) -> Iterable[Any]:
        """Return nothing, so that registering the collector does not call Redis."""
        return []

    def collect(self) -> Iterable[Any]:
        decisions = CounterMetricFamily(DECISIONS[0], DECISIONS[1], labels=DECISIONS[2])
        breaker = GaugeMetricFamily(BREAKER[0], BREAKER[1], labels=BREAKER[2])
        for server in backend.topology().servers():
            breaker.add_metric([server.name], int(server.breaker.error is not None))
        try:
            for labels, number in reader.totals().items():
                decisions.add_metric(labels, number)
            yield decisions
        except backend.UnavailableError:
            pass  # left out of this scrape: a counter that falls to 0 would be taken for a restart
        yield breaker
        yield CounterMetricFamily(*DROPPED, value=recorder.dropped)


def exposition() -> tuple[bytes, str]:
    """Return the metrics of all workers as text, with its media type; for a view of the site's own."""
    registry = REGISTRY
    if multiprocess():
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
    return generate_latest(registry), CONTENT_TYPE_LATEST
