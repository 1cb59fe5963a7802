"""An algorithm is a record, a Lua file and a model; every file that names the algorithms has each one."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import rlaas_django
from rlaas_django import Algo, Policy, PolicyError, check, peek, refund, reset

from tests.support.internals import (
    ALGORITHM_RECORDS,
    ALGORITHMS,
    SLIDING_WINDOW,
    Algorithm,
    Counter,
    Usage,
    counter_key,
    parse_counter_key,
    redis_client,
)
from tests.support.models import MODELS

ROOT = Path(__file__).parents[2]
PACKAGE = Path(rlaas_django.__file__).parent  # where it is installed
FILES = (
    "README.md",
    "docs/algorithms.md",
    "docs/sizing.md",
    "docs/_static/recorded.js",
    "example_project/static/demo/playground.js",
    "example_project/views.py",
    "benchmarks/ours.py",
    "benchmarks/counted.py",
)


def test_every_algorithm_has_a_model():
    assert sorted(MODELS) == sorted(ALGORITHMS)


@pytest.mark.parametrize("algorithm", ALGORITHM_RECORDS.values(), ids=ALGORITHMS)
def test_a_record_names_itself_a_file_and_an_alternative(algorithm):
    assert ALGORITHM_RECORDS[algorithm.name] is algorithm
    assert (PACKAGE / "lua" / f"{algorithm.lua}.lua").is_file()
    assert algorithm.label
    assert algorithm.choose_when
    if algorithm.max_cost is not None:
        assert ALGORITHM_RECORDS[algorithm.alternative].max_cost is None


def test_type_checkers_know_every_algorithm():
    assert list(get_args(Algo)) == list(ALGORITHMS)


@pytest.mark.parametrize("path", FILES)
def test_a_file_names_every_algorithm(path):
    text = (ROOT / path).read_text("utf-8")
    assert [algo for algo in ALGORITHMS if algo not in text] == []


@pytest.mark.parametrize("hash_tag", [False, True])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_key_s_ending_leaves_policy_and_identity_to_be_read(algo, hash_tag):
    ending = ALGORITHM_RECORDS[algo].key_ending
    assert ending == "" or ending.startswith(":")
    assert "/" not in ending
    for policy in ("default", "search"):
        key = counter_key(policy, algo, 60, hash_tag=hash_tag).key("ip=192.0.2.1")
        assert parse_counter_key(key) == (policy, "ip=192.0.2.1")


# One more algorithm: a record and a Lua file are all that the package needs.

QUOTA = "quota-algo"
LUA = """--[[
  Quota: at most `limit` units from the first request until a window later.
  Version  1
]]
local function check(key, now, at, limit, window, ttl, cost)
  local left = math.max(0, redis.call("PTTL", key))
  return (redis.call("GET", key) or 0) + 0, left, left
end

local function charge(key, now, at, limit, window, ttl, cost)
  if redis.call("INCRBY", key, cost) == cost then
    redis.call("PEXPIRE", key, ttl)
  end
  return redis.call("PTTL", key), now
end

local function refund(key, now, at, limit, window, ttl, cost)
  local units = math.min(cost, (redis.call("GET", key) or 0) + 0)
  redis.call("DECRBY", key, units)
  return units
end

local function reset(key)
  return redis.call("DEL", key)
end

return check, charge, refund, reset
"""


class QuotaCounter(Counter):
    """The same in memory."""

    def __init__(self):
        self.ends = 0
        self.count = 0

    def check(self, arguments, now, cost):
        if now >= self.ends:
            return Usage(0, 0, 0)
        return Usage(self.count, self.ends - now, self.ends - now)

    def charge(self, arguments, now, cost):
        if now >= self.ends:
            self.ends = now + arguments.window
            self.count = 0
        self.count += cost
        return now

    def refund(self, arguments, now, cost, charged_at):
        refunded = min(cost, self.count)
        self.count -= refunded
        return refunded


class QuotaModel:
    """The same in Python, without the end of the window."""

    def __init__(self, limit: int) -> None:
        self.limit, self.count = limit, 0

    def check(self, cost: int) -> bool:
        allowed = self.count + cost <= self.limit
        self.count += cost * allowed
        return allowed


@pytest.fixture
def quota(monkeypatch, tmp_path):
    """Register the algorithm for the length of a test."""
    (tmp_path / "quota.lua").write_text(LUA)
    record = Algorithm(
        name=QUOTA,
        label="quota",
        choose_when="for a test",
        lua=str(tmp_path / "quota"),
        counter=QuotaCounter,
        key_ending=":quota-{window}",
        ttl_windows=1,
        max_cost=5,
        alternative=SLIDING_WINDOW,
    )
    monkeypatch.setitem(ALGORITHM_RECORDS, QUOTA, record)
    return Policy("quota", "7/h", algo=QUOTA)


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(PolicyError, match="'quota-algo' is not known"):
        Policy("quota", "7/h", algo=QUOTA)


def test_an_added_algorithm_decides_as_its_model(quota, store):
    model = QuotaModel(7)
    for cost in (1, 3, 2, 2, 1, 1):
        decision = check("alice", quota, cost=cost)
        assert decision.allowed == model.check(cost)
        assert peek("alice", quota).current_count == model.count
    assert 3590 < decision.retry_after <= 3600


def test_an_added_algorithm_has_a_key_of_its_own(quota):
    check("alice", quota)
    (key,) = redis_client("default").keys("rlaas:rate_limit:*")
    assert key == b"rlaas:rate_limit:quota/alice:quota-3600"
    with pytest.raises(ValueError, match="over 5, the most that 'quota-algo' accepts; use 'sliding-window-algo'"):
        check("bob", quota, cost=6)


def test_an_added_algorithm_is_refunded_and_reset(quota, store):
    decision = check("alice", quota, cost=3)
    assert refund(decision)
    assert peek("alice", quota).current_count == 0
    check("alice", quota, cost=2)
    assert reset("alice", quota) == 1
    assert peek("alice", quota).remaining == 7


def test_an_added_algorithm_is_decided_beside_all_others(quota, store):
    policies = [quota, *[Policy(algo, "9/h", algo=algo) for algo in ALGORITHMS]]
    assert [check("alice", policies).allowed for _ in range(8)] == [True] * 7 + [False]
    assert {peek("alice", policy).current_count for policy in policies} == {7}
    assert reset("alice", policies) == len(policies)


def test_an_added_algorithm_can_be_that_of_the_settings(quota, configure):
    configure(USE_ALGO=QUOTA, MAX_REQUESTS=2)
    assert [check("alice").allowed for _ in range(3)] == [True, True, False]
