"""OpenTelemetry metrics and span attributes.

Add `rlaas_django.integrations.opentelemetry.Metrics` to INSTALLED_APPS. Only the API of
OpenTelemetry is used; the site configures the SDK and its exporter.
"""

from __future__ import annotations

from collections.abc import Iterable

from django.apps import AppConfig
from opentelemetry import metrics, trace
from opentelemetry.metrics import CallbackOptions
from opentelemetry.metrics import Observation as Measurement

from .. import backend
from ..runtime import observers
from ..runtime.observers import Observation
from ..stats import recorder

__all__ = ["Metrics"]


class Metrics(AppConfig):
    """Installs the instruments."""

    name = "rlaas_django.integrations.opentelemetry"
    label = "rlaas_opentelemetry"

    def ready(self) -> None:
        observers.add(Recorder(), latency=True)


class Recorder:
    """Counts what this process decides, and describes it on the current span."""

    def __init__(self) -> None:
        meter = metrics.get_meter("rlaas_django")
        self.decisions = meter.create_counter(
            "rlaas.decisions", description="Decisions by policy and result"
        )
        self.cached = meter.create_counter(
            "rlaas.refusal_cache.hits", description="Refusals repeated from memory"
        )
        self.latency = meter.create_histogram(
            "rlaas.redis.duration", unit="s", description="Latency of calls to Redis"
        )
        meter.create_observable_gauge(
            "rlaas.circuit_breaker.open", [_open_breakers], description="1: open"
        )
        meter.create_observable_counter(
            "rlaas.statistics.dropped", [_dropped], description="Observations dropped"
        )

    def __call__(self, observation: Observation) -> None:
        for seconds in observation.latencies:
            self.latency.record(seconds)

        if observation.is_cached:
            self.cached.add(1)

        for outcome, result in observation.results():
            labels = {"policy": outcome.policy.name, "result": result}
            self.decisions.add(1, labels)

        span = trace.get_current_span()
        if span.is_recording():
            decision = observation.decision
            span.set_attribute("rlaas.result", observation.result)
            span.set_attribute("rlaas.policy", decision.policy.name)
            span.set_attribute("rlaas.remaining", decision.remaining)


def _open_breakers(_: CallbackOptions) -> Iterable[Measurement]:
    for server in backend.topology().servers():
        is_open = server.breaker.error is not None
        yield Measurement(int(is_open), {"server": server.name})


def _dropped(_: CallbackOptions) -> Iterable[Measurement]:
    yield Measurement(recorder.dropped)
