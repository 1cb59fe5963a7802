"""Signals, and the lines of the logger `rlaas_django`."""

from __future__ import annotations

import asyncio
import logging
import re
from types import SimpleNamespace

import pytest
from django.http import HttpResponse
from rlaas_django import Policy, check, rate_limit
from rlaas_django.signals import backend_failed, rate_limited

from tests.support.http import OURS, Site, assert_refusal, both_ways, ok
from tests.support.internals import log, overrides

ADDRESS = "203.0.113.9"


def sync_receiver(heard):
    def receiver(sender, **facts):
        heard.append(facts)

    return receiver


def async_receiver(heard):
    async def receiver(sender, **facts):
        await asyncio.sleep(0)
        heard.append(facts)

    return receiver


@pytest.fixture(params=[sync_receiver, async_receiver])
def hear(request):
    """Connect a receiver, sync or async, to a signal; return the list of what it receives."""
    connected = []

    def connect(signal):
        heard = []
        receiver = request.param(heard)
        signal.connect(receiver, weak=False)
        connected.append((signal, receiver))
        return heard

    yield connect
    for signal, receiver in connected:
        signal.disconnect(receiver)


# rate_limited


@both_ways
def test_rate_limited_is_sent_with_request_and_decision(site, hear, clock):
    heard = hear(rate_limited)
    site.serve(rate_limit("1/m", key="ip", group="g")(site.view(ok)))
    site.get("/?n=1")
    assert heard == []
    assert_refusal(site.get("/?n=2"), policies=["g"])
    (facts,) = heard
    assert facts["request"].GET["n"] == "2"
    decision = facts["decision"]
    assert (decision.allowed, decision.policy.name, decision.retry_after) == (False, "g", 60.0)
    assert decision.outcomes[0].identity == f"ip={ADDRESS}"


def test_rate_limited_is_sent_for_a_shadow_policy_with_an_allowed_decision(site, hear, clock):
    heard = hear(rate_limited)
    site.serve(rate_limit("9/m", Policy("trial", "1/m", shadow=True), group="g")(site.view(ok)))
    assert site.statuses(2) == [200, 200]
    (facts,) = heard
    assert facts["decision"].allowed
    assert [(str(each.policy), each.allowed) for each in facts["decision"].outcomes] == [("g", True), ("trial", False)]


def test_rate_limited_is_sent_without_blocking_too(site, hear):
    heard = hear(rate_limited)
    site.serve(rate_limit("1/m", block=False)(site.view(ok)))
    assert site.statuses(3) == [200] * 3
    assert len(heard) == 2
    assert not heard[0]["decision"].allowed


@both_ways
def test_rate_limited_is_sent_once_for_several_limits(site, hear, configure):
    configure(POLICIES={"p": {"rate": "1/m", "key": "ip"}}, MIDDLEWARE=[{"policies": ["p"]}])
    heard = hear(rate_limited)
    site.serve(rate_limit("p", block=False)(rate_limit("p")(site.view(ok))), middleware=[])
    assert site.statuses(3) == [200, 429, 429]
    assert len(heard) == 2


@both_ways
def test_rate_limited_is_sent_by_the_middleware(site, hear):
    heard = hear(rate_limited)
    site.serve(site.view(ok), middleware=[OURS])
    site.statuses(7)
    assert [str(facts["decision"].policy) for facts in heard] == ["default", "default"]


def test_disabled_no_signal_is_sent(site, hear, configure):
    heard = [hear(rate_limited), hear(backend_failed)]
    configure(ENABLED=False)
    site.serve(rate_limit("1/m")(site.view(ok)))
    site.statuses(3)
    assert heard == [[], []]


def raising(sender, **facts):
    raise RuntimeError("a receiver's own")


async def araising(sender, **facts):
    raise RuntimeError("a receiver's own")


@both_ways
@pytest.mark.parametrize("receiver", [raising, araising])
def test_a_receiver_that_raises_affects_neither_the_refusal_nor_other_receivers(site, hear, receiver):
    rate_limited.connect(receiver)
    try:
        heard = hear(rate_limited)
        site.serve(rate_limit("1/m", group="g")(site.view(ok)))
        site.get()
        assert_refusal(site.get(), policies=["g"])
        assert len(heard) == 1
    finally:
        rate_limited.disconnect(receiver)


# backend_failed


@both_ways
@pytest.mark.parametrize(("on_failure", "status"), [("open", 200), ("closed", 503)])
def test_backend_failed_is_sent_with_error_and_decision(site, hear, redis_unavailable, on_failure, status):
    heard, refused = hear(backend_failed), hear(rate_limited)
    site.serve(rate_limit("5/m", on_failure=on_failure)(site.view(ok)))
    assert site.get().status_code == status
    (facts,) = heard
    assert isinstance(facts["error"], Exception)
    assert facts["decision"].degraded
    assert facts["decision"].allowed == (status == 200)
    assert refused == []


def test_backend_failed_is_sent_without_a_request_too(hear, redis_unavailable):
    heard = hear(backend_failed)
    assert check("alice").degraded
    assert len(heard) == 1


@both_ways
@pytest.mark.parametrize("receiver", [raising, araising])
def test_a_receiver_of_backend_failed_that_raises_does_not_affect_the_request(site, redis_unavailable, receiver):
    backend_failed.connect(receiver)
    try:
        site.serve(rate_limit("5/m")(site.view(ok)))
        assert site.get().status_code == 200
    finally:
        backend_failed.disconnect(receiver)


# The log


@pytest.fixture
def lines(caplog, configure):
    """Return the lines of our logger."""
    configure(LOG_LINES_PER_SECOND=1000)
    caplog.set_level(logging.DEBUG, logger="rlaas_django")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "rlaas_django"]


def test_a_refusal_is_logged_with_policy_identity_count_and_wait(site, lines, clock):
    site.serve(rate_limit("2/m", key="ip", group="g")(site.view(ok)))
    site.statuses(2)
    assert lines() == []
    clock.tick(1500)
    site.get("/?secret=1")
    (line,) = lines()
    for fact in ("policy=g", f"identity=ip={ADDRESS}", "count=2/2", "retry_after=58.500", "GET /"):
        assert fact in line
    assert "secret" not in line


@pytest.mark.parametrize("used", [0, 1, 2])
def test_the_line_of_a_blocked_client_names_the_override(site, lines, clock, used):
    site.serve(rate_limit("2/m", key="ip", group="g")(site.view(ok)))
    site.statuses(used)
    override = overrides.Override(f"ip={ADDRESS}", "*", overrides.BLOCK, clock.ms + 3_600_000)
    overrides.publish(override.identity, [override])
    site.get("/")
    (line,) = lines()
    assert line == f"refused policy=g identity=ip={ADDRESS} count={used}/2 retry_after=3600.000 override=block GET /"


@pytest.mark.parametrize("cost", [1, 2, 3])
def test_the_line_of_a_refusal_by_usage_names_no_override(site, lines, cost):
    site.serve(rate_limit("2/m", key="ip", cost=lambda request: cost)(site.view(ok)))
    site.statuses(3)
    assert lines()
    assert not [line for line in lines() if "override" in line]


def test_a_request_that_fails_closed_is_no_line_of_a_refusal(site, lines, redis_unavailable):
    site.serve(rate_limit("2/m", key="ip", on_failure="closed")(site.view(ok)))
    assert site.get().status_code == 503
    assert [line for line in lines() if "unavailable" in line]
    assert not [line for line in lines() if "refused policy" in line]


def test_a_refusal_by_two_policies_is_one_line(site, lines, clock):
    site.serve(rate_limit("1/m", "1/h", key="ip", group="g")(site.view(ok)))
    site.statuses(2)
    (line,) = lines()
    assert "g-3600s" in line


def test_a_shadow_policy_s_refusal_is_logged_as_would_be_refused(site, lines):
    site.serve(rate_limit("1/m", shadow=True, group="g")(site.view(ok)))
    site.statuses(2)
    (line,) = lines()
    assert "would be refused" in line


def test_an_infinite_wait_is_logged(site, lines):
    site.serve(rate_limit("1/m", cost=lambda request: 2)(site.view(ok)))
    site.get()
    (line,) = lines()
    assert "inf" in line


@pytest.mark.parametrize(
    "text", ["\n", "\r\n", "\x1b[2J", "\0", "\x7f", "\u2028", "\x85", "\u202e", "\ud800"], ids=lambda text: repr(text)
)
def test_control_characters_are_escaped_in_the_log(settings, configure, lines, text):
    """In what a client can write: a path, and a key."""
    by_name = {"rate": "1/m", "key": lambda request: f"ann{text}refused policy=x"}
    configure(POLICIES={"p": by_name}, MIDDLEWARE=[{"policies": ["p"]}])
    site = Site("wsgi, def", settings)
    site.serve(ok, middleware=[OURS])
    raw = f"/a{text}refused policy=x".encode("utf-8", "surrogatepass").decode("latin-1")
    for _ in range(2):
        site.get("/a", PATH_INFO=raw)
    (line,) = lines()
    assert line.isascii()
    assert line.isprintable()


def test_a_long_path_is_a_line_of_bounded_length(site, lines):
    site.serve({"<path:rest>": rate_limit("1/m", key=lambda request: "x" * 10_000)(site.view(ok))})
    for _ in range(2):
        site.get("/" + "x" * 10_000)
    (line,) = lines()
    assert len(line) < 1000


@pytest.fixture
def next_second(monkeypatch):
    """Stop the clock of the log; a call moves it on by a second."""
    now = 1_000_000_000.0
    monkeypatch.setattr(log, "time", SimpleNamespace(monotonic=lambda: now))

    def move_on():
        nonlocal now
        now += 1

    return move_on


def test_at_most_so_many_lines_a_second_with_a_count_of_what_was_left_out(site, lines, configure, next_second):
    configure(LOG_LINES_PER_SECOND=3)
    site.serve(rate_limit("1/m")(site.view(ok)))
    site.statuses(11)
    assert len(lines()) == 3
    next_second()
    site.get()
    following = lines()[3:]
    assert [line for line in following if re.search(r"Suppressed 7 log lines", line)]
    assert following[-1].startswith("refused")


def test_the_line_that_counts_is_one_of_the_lines(site, lines, configure, next_second):
    configure(LOG_LINES_PER_SECOND=3)
    site.serve(rate_limit("1/m")(site.view(ok)))
    for n in range(4):
        before = len(lines())
        site.statuses(9)
        assert len(lines()) - before <= 3, f"second {n}"
        next_second()


def test_a_limit_of_0_lines_logs_nothing(site, lines, configure):
    configure(LOG_LINES_PER_SECOND=0)
    site.serve(rate_limit("1/m")(site.view(ok)))
    site.statuses(3)
    assert lines() == []


def test_lines_below_the_logger_s_level_are_not_counted_as_left_out(site, lines, configure, next_second, caplog):
    configure(LOG_LINES_PER_SECOND=1)
    caplog.set_level(logging.CRITICAL, logger="rlaas_django")
    site.serve(rate_limit("1/m")(site.view(ok)))
    site.statuses(5)
    caplog.set_level(logging.DEBUG, logger="rlaas_django")
    next_second()
    site.get()
    assert [line.split()[0] for line in lines()] == ["refused"]


def test_an_unavailable_redis_is_logged_as_an_error(site, lines, redis_unavailable, caplog):
    site.serve(rate_limit("5/m")(site.view(lambda request: HttpResponse())))
    site.get()
    errors = [record for record in caplog.records if record.name == "rlaas_django" and record.levelname == "ERROR"]
    assert len(errors) == 1
    assert "unavailable" in errors[0].getMessage()
