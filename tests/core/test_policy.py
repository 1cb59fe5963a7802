"""Rate, Policy, Outcome and Decision: values without Redis."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from rlaas_django import Decision, Outcome, Policy, PolicyError, Rate, rate_limit

from tests.support.internals import ALGORITHMS, TOKEN_BUCKET, strictest


@pytest.mark.parametrize(
    ("text", "limit", "window"),
    [
        ("5/m", 5, 60),
        ("30/10s", 30, 10),
        ("1000/h", 1000, 3600),
        ("5/60", 5, 60),
        ("1/s", 1, 1),
        ("2/7d", 2, 604_800),
        ("1/365d", 1, 31_536_000),
        *((f"5/{unit}", 5, 1) for unit in ("sec", "secs", "second", "seconds")),
        *((f"5/{unit}", 5, 60) for unit in ("min", "mins", "minute", "minutes")),
        *((f"100/{unit}", 100, 3600) for unit in ("hour", "hours")),
        *((f"100/{unit}", 100, 86_400) for unit in ("day", "days")),
        ("30/10seconds", 30, 10),
        ("7/2days", 7, 172_800),
        ("10_000/day", 10_000, 86_400),
        ("1_0/1_0s", 10, 10),
        ("5 per minute", 5, 60),
        ("100 per hour", 100, 3600),
        ("30 per 10 seconds", 30, 10),
        ("30 per 10s", 30, 10),
        ("10_000 per 2 days", 10_000, 172_800),
        ((5, 60), 5, 60),
        ([5, 60], 5, 60),
        (Rate(5, 60), 5, 60),
    ],
)
def test_a_rate_is_parsed(text, limit, window):
    assert Rate.parse(text) == Rate(limit, window)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "5/month",
            "5/months",
            "5/mo",
            "5/ms",
            "5/M",
            "5/Minute",
            "5/minutess",
            "5/ minute",
            "5/year",
            "5",
            "5/",
            "/m",
            "m",
            "",
            " 5/m",
            "5/m ",
            "5 / m",
            "5/m\n",
            "-5/m",
            "5/-1s",
            "5.5/m",
        ),
        *("_5/m", "5_/m", "1__0/m", "5/_1s", "5/1_s", "5/1__0s", "1,000/m", "_/m"),
        *("5 per", "5 per ", "per minute", "5per minute", "5 perminute", "5  per minute", "5 per  minute"),
        *("5 per 60", "5 per 60 ", "5 per minute ", "5 Per minute", "5 per Minute", "5 per\tminute", "5\nper minute"),
        *("5 per month", "5 per 1.5 seconds", "5 per 10  seconds", "5 / minute", "5/10 seconds", "5 in a minute"),
        *("five per minute", "5 requests per minute", "5 per minute per hour"),
        *("5/1.5s", "5/m/h", "5/1m30s", "\u0665/m", "5e3/h", "0x5/m", "9" * 5000 + "/m", "5/" + "9" * 5000),
        *(None, 5, 5.0, b"5/m", (5,), (5, 60, 1), ("5", 60), (5, "m"), (5.0, 60), (True, 60), {"rate": 5}, object()),
    ],
)
def test_anything_else_is_an_error_that_shows_the_accepted_form(text):
    with pytest.raises(PolicyError) as caught:
        Rate.parse(text)
    assert repr(text) in str(caught.value)
    assert '"5/m"' in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0/m", "limit 0 is below 1"),
        ("5/0s", "window 0 is below 1"),
        ("0 per minute", "limit 0 is below 1"),
        ("5 per 0 seconds", "window 0 is below 1"),
        ("1 per 366 days", "over a year"),
        ((-1, 60), "limit -1 is below 1"),
        ((5, -60), "window -60 is below 1"),
        ("5/366d", "over a year"),
        ("5/31536001", "over a year"),
        ("142809/365d", "at most 142808 is accepted"),
        ("5000000000000/s", "at most 4503599627370 is accepted"),
    ],
)
def test_an_impossible_rate_is_an_error_with_the_reason(text, reason):
    with pytest.raises(PolicyError) as caught:
        Rate.parse(text)
    assert reason in str(caught.value)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["5/m", "30/10s", "1000/h", "7/90s", "1/d", "3/36h"])
def test_a_rate_is_written_as_it_is_parsed(text):
    assert str(Rate.parse(text)) == text


def test_a_policy_equals_its_name():
    policy = Policy("login", "5/m", key="ip")
    assert policy != "login"
    assert str(policy) == "login"
    assert policy == Policy("login", (5, 60), key="ip")
    assert policy != Policy("login", "6/m", key="ip")
    assert policy != 5


@dataclass
class Unhashable:
    """As every dataclass that is not frozen."""

    header: str

    def __call__(self, request):
        return request.headers.get(self.header)


@dataclass(frozen=True)
class Hashable:
    """Unless its value is not."""

    header: str | list

    def __call__(self, request):
        return request.headers.get(self.header)


async def later(request):
    return "5/m"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"name": ""}, "is not a policy name"),
        ({"name": "a/b"}, "is not a policy name"),
        ({"name": "a:b"}, "is not a policy name"),
        ({"name": "ä"}, "is not a policy name"),
        ({"name": "a\n"}, "is not a policy name"),
        ({"name": "a" * 101}, "is not a policy name"),
        ({"name": None}, "is not a policy name"),
        ({"rate": "5/month"}, "'5/month' is not a rate"),
        ({"key": "usr"}, "key 'usr' is not known; did you mean 'user'?"),
        ({"key": "header:"}, "key 'header:' is not known"),
        ({"key": "cookie:x"}, "key 'cookie:x' is not known"),
        ({"key": None}, "key None is not known"),
        ({"key": later}, "is an async function; write a plain one"),
        ({"key": Unhashable("X-Tenant")}, "cannot be hashed; write a function, or give its class a __hash__"),
        ({"key": Hashable(["X-Tenant"])}, "cannot be hashed"),
        ({"key": []}, "key [] is not known"),
        ({"rate": later}, "is an async function; write a plain one"),
        ({"algo": "sliding-windw-algo"}, "did you mean 'sliding-window-algo'?"),
        ({"algo": "leaky"}, "Write one of fixed-window-algo"),
        ({"burst": 0, "algo": TOKEN_BUCKET}, "burst 0 is not a whole number of at least 1"),
        ({"burst": -1, "algo": TOKEN_BUCKET}, "burst -1"),
        ({"burst": 1.5, "algo": TOKEN_BUCKET}, "burst 1.5"),
        ({"burst": True, "algo": TOKEN_BUCKET}, "burst True"),
        ({"burst": 10**14, "algo": TOKEN_BUCKET}, "too large to be counted exactly"),
        ({"burst": 5, "algo": "fixed-window-algo"}, "burst goes with 'token-bucket-algo'"),
        ({"on_failure": "ignore"}, "on_failure 'ignore' is not one of open, closed, local"),
        ({"shadow": "yes"}, "shadow 'yes' is not True or False"),
    ],
)
def test_an_invalid_policy_is_an_error_with_the_reason(arguments, reason):
    with pytest.raises(PolicyError) as caught:
        Policy(**{"name": "p", "rate": "5/m", **arguments})
    assert reason in str(caught.value)


def test_a_key_that_cannot_be_hashed_is_an_error_when_the_view_is_decorated():
    """Not at its first request."""
    with pytest.raises(PolicyError, match="cannot be hashed"):
        rate_limit("5/m", key=Unhashable("X-Tenant"))(lambda request: None)


def test_every_documented_key_is_accepted():
    for key in (
        "user",
        "ip",
        "user_or_ip",
        "token",
        "global",
        "header:X-Api-Key",
        "get:q",
        "post:q",
        "site.keys.tenant",
    ):
        assert Policy("p", "5/m", key=key).key == key
    assert Policy("p", lambda request: "5/m", key=lambda request: "x")
    assert Policy("p", "5/m", key=Hashable("X-Tenant"))


def test_the_label_of_a_policy_is_its_name_unless_it_has_one():
    assert Policy("p", "5/m").label == "p"
    assert Policy("p", "5/m", label="Log-ins").label == "Log-ins"


def test_a_policy_cannot_be_changed():
    with pytest.raises(AttributeError):
        Policy("p", "5/m").name = "other"


def outcome(name, *, allowed=True, remaining=1, retry_after=0.0, shadow=False):
    policy = Policy(name, "5/m", shadow=shadow)
    return Outcome(policy, "alice", allowed, 5, 5 - remaining, remaining, retry_after, 60.0, 60)


def test_the_strictest_is_the_refusal_with_the_longest_wait_else_the_least_remaining():
    short, long = outcome("a", allowed=False, retry_after=1.0), outcome("b", allowed=False, retry_after=9.0)
    never = outcome("c", allowed=False, retry_after=math.inf)
    few, many = outcome("d", remaining=1), outcome("e", remaining=3)
    assert strictest([many, short, long, few]).policy.name == "b"
    assert strictest([short, never, long]).policy.name == "c"
    assert strictest([many, few]).policy.name == "d"


def test_a_shadow_policy_is_the_strictest_only_among_shadow_policies():
    shadow = outcome("s", allowed=False, retry_after=9.0, shadow=True)
    assert strictest([shadow, outcome("a")]).policy.name == "a"
    assert strictest([shadow]).policy.name == "s"
    assert Decision(True, (shadow,)).retry_after == 0.0


def test_a_decision_shows_the_strictest_outcome():
    decision = Decision(False, (outcome("a"), outcome("b", allowed=False, remaining=0, retry_after=2.5)))
    assert (decision.policy.name, decision.limit, decision.current_count, decision.remaining) == ("b", 5, 5, 0)
    assert (decision.retry_after, decision.reset_after, decision.ttl, decision.degraded) == (2.5, 60.0, 60, False)


def test_there_are_five_algorithms():
    assert len(set(ALGORITHMS)) == 5
