"""Prometheus metrics.

Add `rlaas_django.integrations.prometheus.Metrics` to INSTALLED_APPS. The metrics are in
prometheus_client's default registry, beside those of the site (django-prometheus, for
one). Decisions are right with any number of workers: in prometheus_client's
multiprocess mode each worker counts its own, and otherwise they are read from the
statistics in Redis, which all workers write. The other metrics belong to one process.
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
from ..runtime.observers import Observation
from ..stats import reader, recorder

__all__ = ["Metrics", "exposition"]

# A name, a description, and the names of the labels.
DECISIONS = (
    "rlaas_decisions",
    "Decisions by policy and result",
    ["policy", "result"],
)
BREAKER = (
    "rlaas_circuit_breaker_open",
    "Whether the circuit breaker of a Redis server is open (1)",
    ["server"],
)
DROPPED = "rlaas_statistics_dropped", "Observations that are missing in the statistics"
# In seconds.
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
)


def multiprocess() -> bool:
    """Return whether prometheus_client runs in multiprocess mode."""
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ


class Metrics(AppConfig):
    """Installs the metrics."""

    name = "rlaas_django.integrations.prometheus"
    label = "rlaas_prometheus"

    def ready(self) -> None:
        observers.add(Recorder(REGISTRY), latency=True)
        if multiprocess():
            observers.add(WorkerRecorder(REGISTRY))
        else:
            REGISTRY.register(SharedState())


class Recorder:
    """Counts what no statistics have: latencies, and cached refusals."""

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

    def __call__(self, observation: Observation) -> None:
        for seconds in observation.latencies:
            self.latency.observe(seconds)
        if observation.is_cached:
            self.cached.inc()


class WorkerRecorder:
    """Counts what this process decides, in multiprocess mode."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.decisions = Counter(*DECISIONS, registry=registry)
        self.breaker = Gauge(*BREAKER, multiprocess_mode="livemax", registry=registry)

    def __call__(self, observation: Observation) -> None:
        for outcome, result in observation.results():
            self.decisions.labels(outcome.policy.name, result).inc()

        for server, is_open in _breaker_states().items():
            self.breaker.labels(server).set(is_open)


class SharedState(Collector):
    """Reads what all processes decided, and the state of the servers, when scraped."""

    def describe(self) -> Iterable[Any]:
        """Return nothing, so that registering the collector does not call Redis."""
        return []

    def collect(self) -> Iterable[Any]:
        name, text, labels = DECISIONS
        decisions = CounterMetricFamily(name, text, labels=labels)
        try:
            for values, number in reader.totals().items():
                decisions.add_metric(values, number)
            yield decisions
        except backend.UnavailableError:
            # A counter that falls to 0 would be taken for a restart.
            pass

        name, text, labels = BREAKER
        breaker = GaugeMetricFamily(name, text, labels=labels)
        for server, is_open in _breaker_states().items():
            breaker.add_metric([server], is_open)
        yield breaker
        yield CounterMetricFamily(*DROPPED, value=recorder.dropped)


def _breaker_states() -> dict[str, bool]:
    """Return whether the circuit breaker of each server is open."""
    servers = backend.topology().servers()
    return {server.name: server.breaker.error is not None for server in servers}


def exposition() -> tuple[bytes, str]:
    """Return the metrics of all workers as text, with its media type.

    For a view of the site's own.
    """
    registry = REGISTRY
    if multiprocess():
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
    return generate_latest(registry), CONTENT_TYPE_LATEST
