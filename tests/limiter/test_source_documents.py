"""What the source documents (000 to 004) ask for, and where to follow them to the letter would be a mistake.

A test of a mistake runs the document's own script first, to show that it would notice.
"""

from __future__ import annotations

import math
import random
import re

import pytest
from rlaas_django import Policy, acheck, check, peek, reset

from tests.conftest import NOW, fakeredis_is_slow
from tests.support.internals import (
    ALGORITHMS,
    FIXED_WINDOW,
    SCRIPTS,
    SLIDING_WINDOW,
    SLIDING_WINDOW_COMPACT,
    TOKEN_BUCKET,
    redis_client,
)

# 000, "Lua script"
DOCUMENT_000 = """
local key = KEYS[1]
local now = tonumber(ARGV[1])
local window = tonumber(ARGV[2]) * 1000
local limit = tonumber(ARGV[3])
redis.call("ZREMRANGEBYSCORE", key, 0, now - window)
local count = redis.call("ZCARD", key)
if count < limit then
    local member = tostring(now) .. "-" .. math.random()
    redis.call("ZADD", key, now, member)
    redis.call("PEXPIRE", key, window * 2)
    return {1, count, window/1000}
else
    redis.call("PEXPIRE", key, window * 2)
    return {0, count, window/1000}
end
"""
# 001, "Atomic Lua Script"; with a caller's unique word for math.random(), which repeats itself on Redis <= 6.2
DOCUMENT_001 = """
local key = KEYS[1]
local limit = tonumber(ARGV[1])
local window = tonumber(ARGV[2])
local now = tonumber(ARGV[3])
redis.call('ZREMRANGEBYSCORE', key, 0, now - window * 1000)
local count = redis.call('ZCARD', key)
if count < limit then
    redis.call('ZADD', key, now, now .. ':' .. ARGV[4])
    redis.call('EXPIRE', key, window)
    return {1, limit - count - 1, 0}
else
    local oldest = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
    local retry_after = 0
    if oldest[2] then
        retry_after = math.ceil((tonumber(oldest[2]) + window * 1000 - now) / 1000)
    end
    return {0, 0, retry_after}
end
"""
# 002, "Code example 1"
DOCUMENT_002 = """
local key = KEYS[1]
local now = tonumber(ARGV[1])
local window = tonumber(ARGV[2])
local limit = tonumber(ARGV[3])
redis.call("ZREMRANGEBYSCORE", key, 0, now - window)
local current = redis.call("ZCARD", key)
if current >= limit then
  return {0, current, 0}
end
redis.call("ZADD", key, now, tostring(now))
redis.call("PEXPIRE", key, window)
return {1, current + 1, 0}
"""


# ── what they ask for ──────────────────────────────────────────────────────────────────────────────────────────────


def test_000_the_defaults_the_key_the_members_and_the_expiry(client, clock):
    decision = check("alice")
    assert (decision.allowed, decision.current_count, decision.ttl, decision.limit) == (True, 0, 60, 5)
    ((member, score),) = client.zrange("rlaas:rate_limit:alice", 0, -1, withscores=True)
    assert score == NOW
    assert re.fullmatch(rb"1700000000000-\w+", member)
    assert 119_000 < client.pttl("rlaas:rate_limit:alice") <= 120_000


def test_000_every_request_extends_the_expiry_also_a_refused_one(client, clock):
    for _ in range(7):
        check("alice")
        assert client.pttl("rlaas:rate_limit:alice") > 119_000
        client.pexpire("rlaas:rate_limit:alice", 5_000)


@fakeredis_is_slow
def test_000_the_document_s_script_decides_alike(server, clock):
    rng = random.Random(0)
    for _ in range(400):
        clock.tick(rng.choice([1, 1, 500, 9_000, rng.randint(1, 70_000)]))
        ours = check("alice")
        theirs = server.eval(DOCUMENT_000, 1, "document", clock.ms, 60, 5)
        assert theirs == [int(ours.allowed), ours.current_count, ours.ttl]


async def test_001_acheck_returns_what_remains_and_the_wait(client, clock):
    rng = random.Random(1)
    for i in range(400):
        clock.tick(rng.choice([0, 1, 500, 9_000, rng.randint(1, 70_000)]))
        ours = await acheck("alice")
        theirs = client.eval(DOCUMENT_001, 1, "document", 5, 60, clock.ms, i)
        assert theirs == [int(ours.allowed), ours.remaining, math.ceil(ours.retry_after)]


def test_001_strict_quotas_and_bursts_are_both_offered(clock):
    strict, bursty = Policy("a", "10/m"), Policy("b", "10/m", algo=TOKEN_BUCKET, burst=30)
    assert not check("alice", strict, cost=30).allowed
    assert check("alice", bursty, cost=30).allowed


def test_002_policies_side_by_side_and_the_strictest_applies(clock):
    policies = [Policy("user", "5/m", key="user"), Policy("ip", "3/m", key="ip"), Policy("token", "9/m", key="token")]
    identity = {"user": "42", "ip": "203.0.113.9", "token": "secret"}
    assert [check(identity, policies).remaining for _ in range(3)] == [2, 1, 0]
    refused = check(identity, policies)
    assert (refused.policy.name, refused.limit, refused.remaining) == ("ip", 3, 0)


def test_002_an_outcome_says_which_key_was_refused_and_why(clock):
    policy = Policy("login", "1/m", key="ip")
    check("203.0.113.9", policy)
    (outcome,) = check("203.0.113.9", policy).outcomes
    assert (outcome.policy.name, outcome.identity, outcome.current_count, outcome.limit) == (
        "login",
        "ip=203.0.113.9",
        1,
        1,
    )
    assert (outcome.allowed, outcome.retry_after) == (False, 60.0)


def test_002_the_scripts_are_under_version_control():
    for script in SCRIPTS:
        assert re.fullmatch(r"\w+@\d+( \w+@\d+)*", script.version)


def test_003_the_fixed_window_is_one_integer_at_a_key_per_window(client, configure, clock):
    configure(USE_ALGO=FIXED_WINDOW)
    for _ in range(3):
        check("alice")
    (key,) = client.keys()
    assert key == f"rlaas:rate_limit:alice:{NOW // 60_000}".encode()
    assert client.get(key) == b"3"
    assert 0 < client.pttl(key) <= 60_000


def test_003_seconds_120_and_179_share_a_window_and_180_does_not(configure, clock):
    configure(USE_ALGO=FIXED_WINDOW)
    for second, count in ((120, 0), (179, 1), (180, 0)):
        clock.ms = second * 1000
        assert check("alice").current_count == count


def test_003_one_setting_chooses_and_switching_takes_effect_at_once(client, configure, clock):
    for algo, count in ((SLIDING_WINDOW, 0), (FIXED_WINDOW, 0), (SLIDING_WINDOW, 1), (FIXED_WINDOW, 1)):
        configure(USE_ALGO=algo)
        assert check("alice").current_count == count
    assert all(client.pttl(key) > 0 for key in client.keys())


@pytest.mark.parametrize("algo", [SLIDING_WINDOW, SLIDING_WINDOW_COMPACT])
def test_004_the_worked_example(server, configure, algo, clock):
    configure(USE_ALGO=algo)
    for second in (3650, 3680, 3695, 3710):
        clock.ms = second * 1000
        check("alice")
    clock.ms = 3720 * 1000
    decision = check("alice")
    assert (decision.allowed, decision.current_count, decision.remaining) == (True, 3, 1)
    if algo == SLIDING_WINDOW:
        entries = server.zrange("rlaas:rate_limit:alice", 0, -1, withscores=True)
        assert [score / 1000 for _, score in entries] == [3680, 3695, 3710, 3720]


def test_004_the_boundary_burst_is_gone(clock):
    clock.ms = 58_000
    assert all(check("alice").allowed for _ in range(5))
    clock.ms = 62_000
    assert not check("alice").allowed


def test_004_the_memory_problem_is_solved(client, clock):
    sizes = {}
    for algo in (SLIDING_WINDOW, SLIDING_WINDOW_COMPACT, "sliding-window-counter-algo"):
        policy = Policy(algo, "1000/m", algo=algo)
        for _ in range(1000):
            clock.tick(59)
            check("alice", policy)
        (key,) = client.keys(f"rlaas:rate_limit:{algo}/*")
        sizes[algo] = client.memory_usage(key)
    assert sizes[SLIDING_WINDOW] > 58_000
    assert sizes[SLIDING_WINDOW_COMPACT] <= sizes[SLIDING_WINDOW] / 50
    assert sizes["sliding-window-counter-algo"] < 200


# ── where they are wrong ───────────────────────────────────────────────────────────────────────────────────────────


def test_wrong_1_two_requests_in_one_millisecond_are_two_entries(server, algo, clock):
    theirs = [server.eval(DOCUMENT_002, 1, "document", NOW, 60_000, 5)[0] for _ in range(20)]
    assert sum(theirs) == 20
    assert sum(check("alice", Policy("p", "5/m", algo=algo)).allowed for _ in range(20)) == 5


def test_wrong_2_entries_are_unique_without_the_server_s_random_numbers(client, clock):
    """Redis <= 6.2 seeds them alike for every call: `make servers` runs this there."""
    assert not any("math.random" in script.text for script in SCRIPTS)
    policy = Policy("p", "500/m")
    for _ in range(600):
        check("alice", policy)
    assert client.zcard("rlaas:rate_limit:p/alice") == 500


@fakeredis_is_slow
def test_wrong_3_a_client_that_does_not_stop_is_admitted_again(server, algo, clock):
    """001's pipeline adds the entry before it knows the decision."""
    pipeline_allowed = 0
    ours_allowed = 0
    for second in range(180):
        clock.ms = NOW + second * 1000
        server.zremrangebyscore("document", 0, clock.ms - 60_000)
        pipeline_allowed += server.zcard("document") < 5
        server.zadd("document", {str(clock.ms): clock.ms})
        ours_allowed += check("alice", Policy("p", "5/m", algo=algo)).allowed
    assert pipeline_allowed == 5
    assert ours_allowed >= 15


def test_wrong_4_the_clock_is_the_server_s(monkeypatch):
    """Two web hosts an hour apart see one window."""
    for shift in (0, 3600, -3600):
        monkeypatch.setattr("time.time", lambda shift=shift: 1e9 + shift)
        monkeypatch.setattr("time.time_ns", lambda shift=shift: int((1e9 + shift) * 1e9))
        check("alice", [Policy(algo, "5/d", algo=algo) for algo in ALGORITHMS])
    seen = peek("alice", [Policy(algo, "5/d", algo=algo) for algo in ALGORITHMS])
    assert [outcome.current_count for outcome in seen.outcomes] == [3] * 5


def test_wrong_5_the_scripts_touch_only_their_keys_and_extensions_of_them(own, clock):
    """With the identity as a hash tag such a key is in the same slot. On a server of its own, which is monitored."""
    client = redis_client("default")
    policies = [Policy(algo, "5/m", algo=algo) for algo in ALGORITHMS]
    with client.monitor() as monitor:
        check("alice", policies)
        reset("alice", policies)
        client.ping()
        commands = []
        for seen in monitor.listen():
            if seen["command"] == "PING":
                break
            commands.append((seen["client_type"], seen["command"].split()))
    given = [key for kind, words in commands if words[0] == "EVALSHA" for key in words[3 : 3 + int(words[2])]]
    touched = [word for kind, words in commands if kind == "lua" for word in words[1:] if word.startswith("rlaas:")]
    assert len(touched) > 20
    assert all(any(key == known or key.startswith(f"{known}:") for known in given) for key in touched)


def test_wrong_6_the_fixed_windows_ttl_ends_with_the_window(configure, clock):
    """003 would say 60 at 20 seconds into the window."""
    configure(USE_ALGO=FIXED_WINDOW)
    assert [check("alice").ttl for _ in range(6)] == [40] * 6
    assert check("alice").retry_after == 40.0


def test_wrong_7_the_ttl_stays_the_window_and_the_wait_is_exact_beside_it(clock):
    for _ in range(5):
        check("alice")
        clock.tick(1_000)
    refused = check("alice")
    assert (refused.ttl, refused.retry_after) == (60, 55.0)
    clock.tick(54_999)
    assert not check("alice").allowed
    clock.tick(1)
    assert check("alice").allowed


def test_wrong_8_no_identity_has_the_key_of_another(configure, clock):
    intruder = f"alice:{NOW // 60_000}"
    check(intruder)
    configure(USE_ALGO=FIXED_WINDOW)
    assert check("alice").current_count == 0
    configure(USE_ALGO=SLIDING_WINDOW)
    assert check(intruder).current_count == 1


@pytest.mark.parametrize("identity", ["", None])
def test_wrong_9_an_empty_identity_is_an_error_and_never_a_shared_key(client, identity):
    with pytest.raises((ValueError, TypeError)):
        check(identity)
    assert client.dbsize() == 0
