"""The subcommands of manage.py rlaas that look at every server, on a Redis Cluster."""

from __future__ import annotations

import json

import pytest
from django.test import override_settings
from rlaas_django import check

from tests.conftest import NOW
from tests.support.commands import rlaas
from tests.support.deployments import Cluster
from tests.support.helpers import wait_for_servers
from tests.support.internals import ALGORITHMS, SCRIPTS, flush_statistics
from tests.support.on_cluster import entry

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]


@pytest.fixture(scope="module")
def _cluster():
    with Cluster(node_timeout=5000) as cluster:
        yield cluster


@pytest.fixture
def cluster(_cluster, settings):
    _cluster.flush()
    with override_settings(CACHES={**settings.CACHES, "default": entry(_cluster.urls)}):
        wait_for_servers()
        yield _cluster


def run(*arguments: str):
    result = rlaas(*arguments, "--json")
    assert result.code == 0, result.err
    return result.json


def test_replay_counts_on_every_server_and_leaves_no_key(cluster, tmp_path):
    log = tmp_path / "access.log"
    lines = [{"time": NOW + i, "ip": f"10.0.0.{n}", "path": "/"} for i in range(10) for n in range(60)]
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (policy,) = run("replay", str(log), "--policy", "4/m by ip")["policies"]
    assert {run["algorithm"]: run["refused"] for run in policy["algorithms"]} == dict.fromkeys(ALGORITHMS, 360)
    assert cluster.scan("rlaas:*") == []


@pytest.mark.usefixtures("no_views")
def test_memory_measures_keys_of_every_server(cluster):
    for n in range(60):
        check(f"user-{n}")
    found = run("memory")
    assert found["sampled"] == 60
    assert [row["keys"] for row in found["policies"]] == [60]


def test_scripts_are_loaded_on_every_server(cluster):
    found = run("scripts", "--load")
    assert len(found) == len(SCRIPTS)
    assert {len(row["loaded"]) for row in found} == {3}
    assert all(loaded for row in found for loaded in row["loaded"].values())


@pytest.mark.usefixtures("no_views")
def test_doctor_looks_at_every_server_and_at_keys_of_all(cluster):
    for n in range(60):
        check(f"user-{n}")
    found = run("doctor")
    subjects = [finding["subject"] for finding in found]
    assert subjects.count("version") == 3
    assert [each["text"] for each in found if each["subject"] == "keys"] == ["All of 60 sampled keys have a TTL."]


def test_show_top_status_and_reset(cluster):
    for _ in range(6):
        check("alice")
    flush_statistics()
    assert rlaas("status").code == 0
    assert "alice" in rlaas("show", "alice").out
    assert "alice" in rlaas("top").out
    assert rlaas("reset", "alice").code == 0
    assert check("alice").allowed
