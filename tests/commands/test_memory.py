"""manage.py rlaas memory: what is measured, and what is estimated."""

from __future__ import annotations

import pytest
from rlaas_django import Policy, check

from tests.support.commands import rlaas
from tests.support.internals import ALGORITHMS, FIXED_WINDOW, SLIDING_WINDOW, SLIDING_WINDOW_COMPACT, TOKEN_BUCKET

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_views")]


@pytest.fixture
def policies(configure):
    configure(POLICIES={algo: {"rate": "200/h", "algo": algo} for algo in ALGORITHMS})


def use_up(policy, *identities: str, cost: int = 100) -> None:
    for identity in identities:
        check(identity, policy, cost=cost)


def measured(*options: str) -> dict:
    result = rlaas("memory", *options, "--json")
    assert result.code == 0, result.err
    return result.json


@pytest.mark.usefixtures("policies")
def test_every_policy_has_its_algorithm_bytes_and_estimate(client):
    for algo in ALGORITHMS:
        use_up(algo, "alice", "bob")
    found = measured("--identities", "1000")
    assert found["sampled"] == 2 * len(ALGORITHMS)
    rows = {row["policy"]: row for row in found["policies"]}
    assert {name: row["algorithm"] for name, row in rows.items()} == {algo: algo for algo in ALGORITHMS}
    assert {row["keys"] for row in rows.values()} == {2}
    for row in rows.values():
        assert row["estimate"] == 1000 * row["bytes_per_identity"]
    sizes = {name: row["bytes_per_identity"] for name, row in rows.items()}
    (key,) = client.keys(f"rlaas:rate_limit:{TOKEN_BUCKET}/alice:*")
    assert sizes[TOKEN_BUCKET] == pytest.approx(client.memory_usage(key), abs=8)
    assert sizes[FIXED_WINDOW] < sizes[SLIDING_WINDOW_COMPACT] < sizes[SLIDING_WINDOW]


@pytest.mark.usefixtures("policies")
def test_the_largest_key_is_that_of_the_identity_with_most_usage():
    use_up(SLIDING_WINDOW, "alice", cost=1)
    use_up(SLIDING_WINDOW, "bob", cost=100)
    (row,) = measured()["policies"]
    assert row["largest"] > 5 * (2 * row["bytes_per_identity"] - row["largest"])


def test_the_windows_of_an_identity_are_one_identity(client):
    for window in (1, 2):
        client.set(f"rlaas:rate_limit:fixed/alice:{window}", 1, ex=60)
    (row,) = measured()["policies"]
    assert (row["policy"], row["algorithm"], row["keys"]) == ("fixed", "", 2)
    assert row["bytes_per_identity"] == 2 * row["largest"]


def test_the_sample_is_bounded():
    use_up(Policy("site", "5/h"), *(f"user-{number}" for number in range(30)), cost=1)
    found = measured("--sample", "10")
    assert found["sampled"] == 10
    assert [row["keys"] for row in found["policies"]] == [10]


@pytest.mark.usefixtures("policies")
def test_the_text_is_a_table():
    use_up(FIXED_WINDOW, "alice")
    heading, row, empty, last = rlaas("memory").out.splitlines()
    assert heading.split("  ")[0] == "policy"
    assert heading.endswith("1,000,000 identities")
    assert row.split()[:3] == [FIXED_WINDOW, FIXED_WINDOW, "1"]
    assert row.endswith(" MB")
    assert empty == ""
    assert last == "Measured 1 key by MEMORY USAGE, with the usage that identities have now."


def test_without_counters_it_says_so(client):
    client.set("rlaas:other", 1, ex=60)
    assert rlaas("memory").out == "There are no counters in Redis.\n"
    assert measured()["policies"] == []


@pytest.mark.usefixtures("redis_unavailable")
def test_an_unavailable_redis_is_an_error():
    result = rlaas("memory")
    assert result.code == 1
    assert "Redis is unavailable" in result.err
