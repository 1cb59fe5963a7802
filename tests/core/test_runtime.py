"""State of the process: jobs of the background thread, and adapters for other frameworks."""

from __future__ import annotations

import pytest
from rlaas_django.integrations import drf
from rlaas_django.runtime import background, registry
from rlaas_django.runtime.background import AT_EXIT, AT_START, WHEN_STALLED

from tests.support.internals import UnavailableError


@pytest.fixture
def jobs(monkeypatch):
    monkeypatch.setattr(background, "jobs", {})
    return background.jobs


def test_a_job_that_is_registered_again_runs_once(jobs):
    runs = []

    def job():
        runs.append("job")

    background.register(job, AT_EXIT)
    background.register(job, AT_START, WHEN_STALLED)
    background.run(20)
    assert runs == ["job"]
    assert jobs == {job: (AT_START, WHEN_STALLED)}


@pytest.mark.parametrize(("error", "logged"), [(ValueError("odd"), True), (UnavailableError("closed"), False)])
def test_a_job_that_fails_stops_no_other_one(jobs, caplog, error, logged):
    runs = []

    def fail():
        raise error

    background.register(fail)
    background.register(lambda: runs.append("next"))
    background.run(20)
    assert runs == ["next"]
    assert ("Background job test_runtime.fail failed" in caplog.text) == logged


def test_the_jobs_of_the_package():
    names = [job.__name__ for job in background.jobs]
    assert names == ["refresh", "flush", "restore_lost_overrides"]


def test_an_adapter_is_found_by_the_class(monkeypatch):
    class Base:
        pass

    class View(Base):
        pass

    monkeypatch.setattr(registry, "_adapters", {})
    registry.register_adapter(lambda cls: issubclass(cls, Base), "rlaas_django.integrations.drf")
    assert registry.adapter_for(View) is drf
    assert registry.adapter_for(object) is None
