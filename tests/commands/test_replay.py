"""manage.py rlaas replay: log formats, policies, verdicts, the suggested limit, keys that are left."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import re
import signal
import time
from dataclasses import replace

import pytest
import redis
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from rlaas_django import Policy, check
from rlaas_django.testing import frozen_clock

from tests.conftest import NOW
from tests.settings import REDIS
from tests.support.commands import process, rlaas
from tests.support.helpers import report
from tests.support.internals import (
    ALGORITHMS,
    FIXED_WINDOW,
    SLIDING_WINDOW,
    SLIDING_WINDOW_COMPACT,
    TOKEN_BUCKET,
    LineParser,
    Log,
    LogRequest,
    Replay,
    conf,
    flush_statistics,
    parse_policy,
    parse_time,
    replay_report,
)

COMBINED = (
    '203.0.113.9 - alice [14/Nov/2023:22:13:20 +0000] "GET /api/items?page=2 HTTP/1.1" 200 512 '
    '"https://example.com/" "Mozilla/5.0 (X11; Linux x86_64)"'
)
REQUEST = LogRequest(1_700_000_000_000, "203.0.113.9", "alice", "GET", "/api/items?page=2", 200)


def line(ms: int, ip: str = "203.0.113.9", path: str = "/", **more) -> str:
    """Return a request as a line of JSON."""
    return json.dumps({"time": ms, "ip": ip, "method": "GET", "path": path, "status": 200, **more})


@pytest.fixture
def write(tmp_path):
    """Write lines to a file, and return its path."""

    def write_lines(lines, name="access.log") -> str:
        path = tmp_path / name
        text = "".join(f"{each}\n" for each in lines).encode()
        path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
        return str(path)

    return write_lines


def our_keys(client) -> list[bytes]:
    return list(client.scan_iter("rlaas:*", count=1000))


# Lines


@pytest.mark.parametrize(
    "text",
    [
        COMBINED,
        COMBINED.partition(' "https')[0],  # the common format
        COMBINED + ' "198.51.100.7"',  # nginx' "main", with X-Forwarded-For
        COMBINED.replace("/api/items?page=2 HTTP/1.1", "/api/items?page=2"),  # HTTP/0.9
        COMBINED.replace("14/Nov/2023:22:13:20 +0000", "14/Nov/2023:23:13:20 +0100"),
        json.dumps({"time": 1_700_000_000, "ip": "203.0.113.9", "user": "alice", "method": "get",
                    "path": "/api/items?page=2", "status": 200}),
        json.dumps({"time_iso8601": "2023-11-14T22:13:20+00:00", "remote_addr": "203.0.113.9", "remote_user": "alice",
                    "request": "GET /api/items?page=2 HTTP/1.1", "status": "200"}),
    ],
)  # fmt: skip
def test_a_line_of_each_format_is_read(text):
    assert LineParser().parse(text) == REQUEST


def test_a_line_of_gunicorn_has_no_user():
    text = '127.0.0.1 - - [14/Nov/2023:22:13:20 +0000] "POST /login HTTP/1.1" 401 7 "-" "curl/8.5"'
    assert LineParser().parse(text) == LogRequest(1_700_000_000_000, "127.0.0.1", "", "POST", "/login", 401)


def test_fields_of_json_can_be_mapped():
    parser = LineParser({"ip": "client.addr", "time": "at", "header:X-Api-Key": "headers.key"})
    entry = {"at": "2023-11-14T22:13:20Z", "client": {"addr": "203.0.113.9"}, "headers": {"key": "k"}, "path": "/"}
    found = parser.parse(json.dumps(entry))
    assert (found.at, found.ip, found.more) == (1_700_000_000_000, "203.0.113.9", {"header:X-Api-Key": "k"})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        "{",
        "[]",
        "{}",
        '{"time": "yesterday", "ip": "203.0.113.9"}',
        '{"time": 12, "ip": "203.0.113.9"}',
        '{"time": 1700000000, "path": "/"}',
        '{"time": true, "ip": "203.0.113.9"}',
        '{"time": 1e300, "ip": "203.0.113.9"}',
        '{"time": 1700000000, "ip": "203.0.113.9", "status": "ok"}',
        "[" * 100_000,
        '{"a":' * 100_000,
        COMBINED.replace("Nov", "Now"),
        COMBINED.replace("14/Nov", "31/Feb"),
        COMBINED.replace("22:13", "25:13"),
        COMBINED.replace("GET /api/items?page=2 HTTP/1.1", "\\x16\\x03\\x01"),
        COMBINED.replace("GET /api/items?page=2 HTTP/1.1", "-"),
    ],
)
def test_a_line_that_cannot_be_read_is_none(text):
    assert LineParser().parse(text) is None


@given(st.text() | st.binary().map(lambda data: data.decode("utf-8", "backslashreplace")))
def test_no_line_is_an_error(text):
    LineParser().parse(text)


@pytest.mark.parametrize(
    ("value", "ms"),
    [
        (1_700_000_000, 1_700_000_000_000),
        ("1700000000.123", 1_700_000_000_123),
        (1_700_000_000_123, 1_700_000_000_123),
        (1_700_000_000_123_456, 1_700_000_000_123),
        (1_700_000_000_123_456_789, 1_700_000_000_123),
        ("2023-11-14T22:13:20.5Z", 1_700_000_000_500),
        ("2023-11-14 22:13:20", 1_700_000_000_000),
        ("14/Nov/2023:22:13:20 +0000", 1_700_000_000_000),
    ],
)
def test_a_time_is_read_in_every_unit_and_form(value, ms):
    assert parse_time(str(value)) == pytest.approx(ms, abs=1)


# Policies


@pytest.mark.parametrize(
    ("text", "rate", "key", "algo", "burst"),
    [
        ("100/m by ip", "100/m", "ip", None, None),
        ("20/10s by user, token bucket, burst 40", "20/10s", "user", TOKEN_BUCKET, 40),
        ("20/10s by user, burst 40", "20/10s", "user", TOKEN_BUCKET, 40),
        ("5/h", "5/h", "user_or_ip", None, None),
        ("10_000/day by ip", "10000/d", "ip", None, None),
        ("5 per minute", "5/m", "user_or_ip", None, None),
        ("5 per minute by ip", "5/m", "ip", None, None),
        ("5 per minute per ip", "5/m", "ip", None, None),
        ("30 per 10 seconds by get:q, fixed window", "30/10s", "get:q", FIXED_WINDOW, None),
        ("5/hour by user_or_ip, fixed window", "5/h", "user_or_ip", FIXED_WINDOW, None),
        ("5/h per get:q, sliding-window-algo", "5/h", "get:q", SLIDING_WINDOW, None),
        ("5/h by header:X-Api-Key, Sliding_Window Compact", "5/h", "header:X-Api-Key", SLIDING_WINDOW_COMPACT, None),
    ],
)
def test_policies_are_written_as_people_say_them(text, rate, key, algo, burst):
    policy = parse_policy(text, {})
    assert (str(policy.rate), policy.key, policy.algo, policy.burst) == (rate, key, algo, burst)


def test_a_policy_of_the_settings_is_known_by_its_name(configure):
    configure(POLICIES={"login": {"rate": "5/m", "key": "ip"}})
    assert parse_policy("login", conf.config().policies).name == "login"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("logn", "did you mean 'login'?"),
        ("100 by ip", "has no policy '100 by ip'"),
        ("100/month by ip", "is not a rate"),
        ("100 per month by ip", "is not a rate"),
        ("100/m by ipp", "did you mean 'ip'?"),
        ("100/m by ip, token buckt", "did you mean 'token-bucket-algo'?"),
        ("100/m by ip, fixed window, burst 5", "burst goes with"),
        ("", "has no policy ''"),
    ],
)
def test_a_policy_that_is_not_understood_is_an_error_that_says_what_to_write(configure, write, text, message):
    configure(POLICIES={"login": {"rate": "5/m", "key": "ip"}})
    result = rlaas("replay", write([]), "--policy", text)
    assert result.code == 1
    assert message in result.err


def test_a_policy_whose_key_is_a_function_is_an_error(configure, write):
    configure(POLICIES={"own": {"rate": "5/m", "key": "tests.commands.test_replay.our_keys"}})
    result = rlaas("replay", write([]), "--policy", "own")
    assert result.code == 1
    assert "a function of the request" in result.err


# Verdicts


def boundary_burst() -> list[str]:
    """Return 100 requests in the last second of a minute, and 100 in the first of the next."""
    start = NOW - NOW % 60_000 + 59_000
    return [line(start + i) for i in range(100)] + [line(start + 1000 + i) for i in range(100)]


def by_algorithm(policy: dict) -> dict[str, dict]:
    return {run["algorithm"]: run for run in policy["algorithms"]}


def test_a_burst_at_the_boundary_passes_a_fixed_window_twice(write):
    result = rlaas("replay", write(boundary_burst()), "--policy", "100/m by ip", "--json")
    assert result.code == 0
    runs = by_algorithm(result.json["policies"][0])
    assert set(runs) == set(ALGORITHMS)
    assert (runs[FIXED_WINDOW]["refused"], runs[FIXED_WINDOW]["most_admitted_in_a_window"]) == (0, 200)
    for algo in (SLIDING_WINDOW, SLIDING_WINDOW_COMPACT):
        assert (runs[algo]["refused"], runs[algo]["most_admitted_in_a_window"]) == (100, 100)
    assert runs[SLIDING_WINDOW]["identities_refused"] == 1
    assert runs[SLIDING_WINDOW]["worst"] == [{"identity": "203.0.113.9", "refused": 100}]
    assert runs[SLIDING_WINDOW]["longest_wait"] == 59.0
    assert runs[SLIDING_WINDOW]["peak_usage"] == {"p50": 200, "p90": 200, "p99": 200, "max": 200}
    assert runs[FIXED_WINDOW]["peak_usage"]["max"] == 100


def test_the_text_shows_both_beside_each_other(write):
    shown = rlaas("replay", write(boundary_burst()), "--policy", "100/m by ip").out
    fixed, sliding = [row.split() for row in shown.splitlines() if row.startswith(("fixed", "sliding-window-algo"))][:2]
    assert fixed == [FIXED_WINDOW, "0", "0", "%", "0", "0", "s", "200", "100"]
    assert sliding == [SLIDING_WINDOW, "100", "50.0", "%", "1", "59", "s", "100", "200"]
    assert '"per-ip": {"rate": "200/m", "key": "ip", "algo": "sliding-window-compact-algo"},' in shown


def replayed(policy: Policy, requests: list[LogRequest], algorithms=ALGORITHMS) -> Replay:
    replay = Replay({"text": policy}, algorithms, conf.config().cache)
    replay.run([sorted(requests)])
    return replay


def refused_by_check(policy: Policy, requests: list[LogRequest]) -> tuple[dict[str, int], float]:
    """Return how many requests of each address `check` refuses, and the longest wait."""
    refused, longest = {}, 0.0
    for request in sorted(requests):
        with frozen_clock(request.at):
            decision = check(request.ip, policy)
        if not decision.allowed:
            refused[request.ip] = refused.get(request.ip, 0) + 1
            longest = max(longest, decision.retry_after)
    return refused, longest


@st.composite
def traffic(draw) -> list[LogRequest]:
    gaps = draw(st.lists(st.integers(0, 40_000), min_size=1, max_size=60))
    names = draw(st.lists(st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3"]), min_size=60, max_size=60))
    now, requests = NOW, []
    for gap, name in zip(gaps, names, strict=False):
        now += gap if gap > 20_000 else gap % 50
        requests.append(LogRequest(now, name, "", "GET", "/", 200))
    return requests


@hypothesis_settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=traffic(), limit=st.integers(1, 8), burst=st.none() | st.integers(1, 12), run=st.integers(0, 10**9))
def test_verdicts_equal_check_on_a_frozen_clock(algo, client, requests, limit, burst, run):
    policy = Policy(f"own-{run}", (limit, 60), key="ip", algo=algo, burst=burst if algo == TOKEN_BUCKET else None)
    client.flushdb()
    refused, longest = refused_by_check(policy, requests)
    (found,) = replayed(policy, requests).candidates[0].runs
    assert {name: number for number, name in found.worst} == refused
    assert found.refused == sum(refused.values())
    assert found.longest_wait == longest
    if algo in (SLIDING_WINDOW, SLIDING_WINDOW_COMPACT):
        assert found.most_admitted <= limit


@hypothesis_settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=traffic(), limit=st.integers(1, 8))
def test_algorithms_beside_each_other_decide_as_each_does_alone(client, requests, limit):
    client.flushdb()
    policy = Policy("own", (limit, 60), key="ip")
    for run in replayed(policy, requests).candidates[0].runs:
        refused, longest = refused_by_check(replace(policy, algo=run.policy.algo), requests)
        assert {name: number for number, name in run.worst} == refused, run.policy.algo
        assert run.longest_wait == longest


@hypothesis_settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=traffic(), limit=st.integers(1, 8), burst=st.none() | st.integers(1, 12), share=st.floats(0, 0.5))
def test_the_suggested_limit_refuses_at_most_the_share(algo, write, requests, limit, burst, share):
    policy = Policy("own", (limit, 60), key="ip", algo=algo, burst=burst if algo == TOKEN_BUCKET else None)
    replay = replayed(policy, requests)
    with Log([write([])], LineParser(), lambda _: True) as log:
        suggestion = replay_report(replay, log, share)["policies"][0]["suggestion"]
    (found,) = replayed(Policy("suggested", **suggestion), requests).candidates[0].runs
    assert found.refused <= share * len(requests)


def test_a_limit_of_nobody_is_the_peak(write):
    lines = [line(NOW + 10 * i, f"10.0.0.{n}") for n in range(1, 21) for i in range(n)]
    runs = by_algorithm(
        rlaas("replay", write(lines), "--policy", "5/m by ip", "--share", "0", "--json").json["policies"][0]
    )
    assert runs[SLIDING_WINDOW]["limit_for_share"] == 20
    assert runs[SLIDING_WINDOW]["peak_usage"] == {"p50": 10, "p90": 18, "p99": 20, "max": 20}


# Which requests


def replay_json(*arguments: str) -> dict:
    result = rlaas("replay", *arguments, "--json")
    assert result.code == 0, result.err
    return result.json


def test_several_files_are_one_log_in_the_order_of_time(write):
    """Each has every second request; together they exceed the limit."""
    lines = [line(NOW + i) for i in range(20)]
    found = replay_json(
        write(lines[1::2], "b.log.gz"), write(lines[::2], "a.log"), "--policy", "10/m by ip, sliding window"
    )
    assert found["lines"] == 20
    assert found["policies"][0]["algorithms"][0]["refused"] == 10


def test_lines_a_little_out_of_order_are_sorted(write):
    lines = [line(NOW + i * 6_000) for i in range(20)]
    random.Random(1).shuffle(lines)
    (policy,) = replay_json(write(lines), "--policy", "10/m by ip, sliding window")["policies"]
    assert policy["algorithms"][0]["refused"] == 0


YEAR_2000 = 946_684_800_000
YEAR_9999 = 253_402_300_799_000  # its last second
NO_NUMBERS = [
    '{"time": NaN, "ip": "203.0.113.9", "path": "/", "status": 200}',
    '{"time": Infinity, "ip": "203.0.113.9", "path": "/", "status": 200}',
    '{"time": -Infinity, "ip": "203.0.113.9", "path": "/", "status": 200}',
    f'{{"time": {YEAR_2000}, "ip": "203.0.113.9", "path": "/", "status": NaN}}',
    f'{{"time": {YEAR_9999}, "ip": "203.0.113.9", "path": "/", "status": Infinity}}',
]


def years_apart(order: str) -> list[str]:
    """Return 5,000 requests of one client at the start of 2000, 1 ms apart, and as many at the end of 9999."""
    lines = [line(YEAR_2000 + n) for n in range(5_000)] + [line(YEAR_9999 - n) for n in reversed(range(5_000))]
    if order == "back":
        lines = lines[5_000:] + lines[:5_000]
    return lines


@pytest.mark.parametrize(("order", "parts"), [("forth", 2), ("back", 4)])  # batches that go back are counted anew
def test_the_years_2000_and_9999_and_what_is_no_number_are_in_one_log(write, order, parts):
    found = replay_json(write([*NO_NUMBERS, *years_apart(order)]), "--policy", "100/m by ip", "--policy", "100/365d")
    assert (found["replayed"], found["unreadable"]) == (10_000, 5)
    assert [sample["text"] for sample in found["unreadable_samples"]] == NO_NUMBERS
    assert (found["from"], found["until"]) == ("2000-01-01T00:00:00+00:00", "9999-12-31T23:59:59+00:00")
    for policy in found["policies"]:
        for run in policy["algorithms"]:
            refilled = 16 if run["algorithm"] == TOKEN_BUCKET else 0
            assert 10_000 - 100 * parts - refilled <= run["refused"] <= 10_000 - 100 * parts
            assert run["longest_wait"] <= 2 * policy["window"]


def test_a_wrong_time_refuses_nothing_before_and_after_it(write):
    """A request every minute, in several batches, of which one has a time in the year 9999."""
    lines = [line(NOW + 60_000 * n) for n in range(6_000)]
    lines[3_000] = line(YEAR_9999)
    result = rlaas("replay", write(lines), "--policy", "2/m by ip", "--json")
    assert {run["refused"] for run in result.json["policies"][0]["algorithms"]} == {0}
    assert "The log goes back in time by more than a window" in result.err


def test_a_log_in_the_order_of_time_has_no_warning(write):
    result = rlaas("replay", write(years_apart("forth")), "--policy", "100/m by ip, fixed window")
    assert "goes back" not in result.err


def test_a_log_that_goes_back_leaves_no_key(write, client):
    rlaas("replay", write(years_apart("back")), "--policy", "100/m by ip")
    assert our_keys(client) == []


some_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from([YEAR_2000, YEAR_9999, 10**400, "9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59"]),
        st.sampled_from(
            ["nan", "-inf", "9" * 400, "\ud800", "\0", "::1", "http://[", "//[x", "/?q=%ff", "203.0.113.9"]
        ),
    ),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["addr", "x"]), inner, max_size=2),
    max_leaves=4,
)
some_entries = st.fixed_dictionaries(
    {"time": st.sampled_from([YEAR_2000, YEAR_9999, NOW / 1000, "9999-12-31T23:59:59", float("nan")]) | some_values},
    optional=dict.fromkeys(["ip", "user", "method", "path", "status", "request", "client", "key"], some_values),
)
some_lines = st.one_of(
    some_entries.map(json.dumps),
    some_entries.map(lambda entry: json.dumps({"path": "/", "status": 200, "ip": "::1", **entry, "method": "GET"})),
    st.text(max_size=20).map(lambda text: text.encode("utf-8", "backslashreplace").decode()),
)


@hypothesis_settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(some_lines, max_size=8), as_json=st.booleans())
def test_whatever_a_log_has_it_is_replayed_or_said_to_be_left_out(client, write, lines, as_json):
    policies = [
        f"--policy={text}" for text in ("1/m by ip", "2/365d by user", "1/m by get:q", "2/m by header:X-Api-Key")
    ]
    options = ["--field", "header:X-Api-Key=key", *(["--json"] if as_json else [])]
    result = rlaas("replay", write(lines), *policies, *options)
    assert result.code in (0, 1)
    assert result.out.encode()
    if as_json:
        found = json.loads(result.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert found["lines"] == found["replayed"] + found["filtered"] + found["unreadable"]
        assert found["unreadable"] <= len("\n".join(lines).splitlines())


def test_lines_that_cannot_be_read_are_counted_and_shown(write):
    path = write(["garbage \x1b[31m", line(NOW), "", '{"time": 1}', COMBINED])
    found = replay_json(path, "--policy", "5/m by ip, fixed window")
    assert (found["lines"], found["unreadable"]) == (4, 2)
    assert found["unreadable_samples"][0] == {"file": path, "line": 1, "text": "garbage \x1b[31m"}
    assert found["policies"][0]["requests"] == 2
    shown = rlaas("replay", path, "--policy", "5/m by ip, fixed window").out
    assert "2 lines could not be read" in shown
    assert f"{path}:1: garbage \\x1b[31m" in shown


def test_a_compressed_file_that_is_cut_off_is_read_as_far_as_possible(tmp_path):
    path = tmp_path / "access.log.gz"
    noise = random.Random(1)
    text = "".join(f"{line(NOW, path=f'/{noise.random()}')}\n" for _ in range(20_000))
    path.write_bytes(gzip.compress(text.encode())[:-10_000])
    found = replay_json(str(path), "--policy", "5/m by ip, fixed window")
    assert found["unreadable"] == 1
    assert found["policies"][0]["requests"] > 1000


def test_a_very_long_line_is_bounded(write):
    found = replay_json(
        write(["x" * 5_000_000, line(NOW), line(NOW, path="/" + "y" * 3_000_000)]),
        "--policy",
        "1/m by ip, fixed window",
    )
    assert found["policies"][0]["requests"] >= 1
    assert all(len(sample["text"]) <= 200 for sample in found["unreadable_samples"])


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ((), 5),
        (("--path", "/api/"), 2),
        (("--path", "/api"), 3),
        (("--path", "/api", "--path", "/login"), 4),
        (("--method", "post"), 1),
        (("--method", "GET", "--path", "/api"), 3),
        (("--status", "4xx"), 2),
        (("--status", "401", "--status", "200"), 4),
    ],
)
def test_requests_are_chosen_by_path_method_and_status(write, options, number):
    lines = [
        line(NOW, path="/api/items?x=1"),
        line(NOW, path="/api/users", status=404),
        line(NOW, path="/api", method="HEAD"),
        line(NOW, path="/apis"),
        line(NOW, path="/login", method="POST", status=401),
    ]
    found = replay_json(write(lines), "--policy", "100/m by ip, fixed window", *options)
    assert (found["policies"][0]["requests"], found["filtered"]) == (number, 5 - number)


@pytest.mark.parametrize(
    ("key", "identities"),
    [("ip", 2), ("user", 3), ("user_or_ip", 3), ("global", 1), ("get:q", 3), ("header:X-Api-Key", 3)],
)
def test_identities_are_those_of_the_policy_s_key(write, key, identities):
    """Without one of the kind, the address counts; IPv6 addresses count by network."""
    lines = [
        line(NOW, "203.0.113.9", "/?q=a", user="alice", key="k1"),
        line(NOW, "203.0.113.9", "/?q=b", user="bob", key="k2"),
        line(NOW, "2001:db8::1", "/"),
        line(NOW, "2001:db8::2", "/?r=1"),
    ]
    found = replay_json(write(lines), "--policy", f"1/m by {key}", "--field", "header:X-Api-Key=key")
    assert found["policies"][0]["identities"] == identities


def test_a_request_without_an_identity_is_left_out(write):
    lines = [json.dumps({"time": NOW, "user": "alice", "path": "/"}), line(NOW)]
    (policy,) = replay_json(write(lines), "--policy", "1/m by ip")["policies"]
    assert (policy["requests"], policy["without_identity"]) == (1, 1)


def test_the_text_says_what_was_left_out(write):
    lines = [json.dumps({"time": NOW, "user": "alice", "path": "/"}), line(NOW, path="/"), line(NOW, path="/other")]
    printed = rlaas("replay", write(lines), "--policy", "1/m by ip").out
    assert "1 requests have no identity to count by." in printed
    printed = rlaas("replay", write(lines), "--policy", "1/m by ip", "--path", "/other").out
    assert "2 others do not match --path, --method or --status." in printed


def test_a_status_that_is_none_is_an_error(write, capsys):
    assert rlaas("replay", write([line(NOW)]), "--policy", "1/m by ip", "--status", "6xx").code == 2
    assert "'6xx' is not a status; write 401 or 4xx" in capsys.readouterr().err


def test_a_field_that_is_not_named_is_an_error(write, capsys):
    assert rlaas("replay", write([line(NOW)]), "--policy", "1/m by ip", "--field", "addr").code == 2
    assert "'addr' does not name a field" in capsys.readouterr().err


def test_a_file_that_does_not_exist_is_an_error():
    result = rlaas("replay", "/nowhere/access.log", "--policy", "5/m by ip")
    assert result.code == 1
    assert "/nowhere/access.log: No such file" in result.err


def test_a_log_without_any_request_exits_with_an_error(write):
    assert rlaas("replay", write(["garbage"]), "--policy", "5/m by ip").code == 1


def test_a_policy_is_required(write, capsys):
    assert rlaas("replay", write([line(NOW)])).code == 2
    assert "required: --policy" in capsys.readouterr().err


@pytest.mark.parametrize("share", ["1.5", "-1", "many", "200%"])
def test_a_share_is_at_most_all(write, share, capsys):
    assert rlaas("replay", write([]), "--policy", "5/m by ip", f"--share={share}").code == 2
    assert "write 0.1% or 0.001" in capsys.readouterr().err


# What is left in Redis


def test_nothing_is_left_in_redis_and_no_override_applies(write, client):
    """Also of several windows of the fixed window."""
    client.hset("rlaas:override:ip=203.0.113.9", "*", f"block:{10**15}:")
    client.expire("rlaas:override:ip=203.0.113.9", 60)
    lines = [line(NOW + 30_000 * i, f"203.0.113.{n}") for i in range(20) for n in (9, 10)]
    (policy,) = replay_json(write(lines), "--policy", "3/m by ip")["policies"]
    assert {run["refused"] for run in policy["algorithms"]} == {0}
    assert our_keys(client) == [b"rlaas:override:ip=203.0.113.9"]


def test_a_replay_is_not_in_the_statistics_and_needs_no_enabled_limits(write, client, configure):
    configure(ENABLED=False, TIMEOUT=0.05, CACHE="default")
    before = conf.config()
    (policy,) = replay_json(write(boundary_burst()), "--policy", "100/m by ip, sliding window")["policies"]
    assert policy["algorithms"][0]["refused"] == 100
    assert conf.config() == before
    flush_statistics()
    assert our_keys(client) == []


def test_the_scripts_run_on_the_redis_of_another_cache(write, client, settings, start):
    server = start()
    settings.CACHES = {**settings.CACHES, "other": {**settings.CACHES["default"], "LOCATION": server.url}}
    client.config_resetstat()
    (policy,) = replay_json(write(boundary_burst()), "--policy", "100/m by ip", "--cache", "other")["policies"]
    assert {run["refused"] for run in policy["algorithms"]} != {0}
    assert "cmdstat_evalsha" not in client.info("commandstats")
    with redis.Redis.from_url(server.url) as other:
        assert other.info("commandstats")["cmdstat_evalsha"]["calls"] > 0
        assert our_keys(other) == []


def test_a_replay_that_is_slower_than_its_log_says_so(write, monkeypatch):
    """Counters expire by the server's clock, and not by the log's."""
    path = write([line(NOW + 400 * i) for i in range(5)])
    assert "expired too early" not in rlaas("replay", path, "--policy", "1/m by ip").err
    clock = itertools.count(0, 0.3)
    monkeypatch.setattr("rlaas_django.replay.running.time.monotonic", lambda: next(clock))
    assert "expired too early" not in rlaas("replay", path, "--policy", "1/m by ip").err
    assert "expired too early" in rlaas("replay", path, "--policy", "1/s by ip").err


def test_an_unavailable_redis_is_an_error(write, redis_unavailable):
    result = rlaas("replay", write([line(NOW)]), "--policy", "1/m by ip")
    assert result.code == 1
    assert "Redis is unavailable" in result.err


def test_clients_beyond_the_bound_are_summed_up_and_their_keys_deleted(client, monkeypatch):
    monkeypatch.setattr("rlaas_django.replay.running.MAX_CLIENTS", 100)
    requests = [LogRequest(NOW + 500 * n, f"10.0.{n // 250}.{n % 250}", "", "GET", "/", 200) for n in range(2000)]
    requests += [requests[-1]] * 10
    keys = []

    def batches():
        for start in range(0, len(requests), 50):
            yield requests[start : start + 50]
            keys.append(client.dbsize())

    replay = Replay({"": Policy("own", "5/m", key="ip")}, ALGORITHMS, "default")
    replay.run(batches())
    (candidate,) = replay.candidates
    assert (candidate.identities, candidate.approximate) == (2000, True)
    assert {run.refused for run in candidate.runs} == {6}
    assert 0 < max(keys) < 100 * 5 * 3
    assert our_keys(client) == []


def test_an_error_leaves_no_key(client, monkeypatch, write):
    monkeypatch.setattr("rlaas_django.replay.running.Candidate.count", failing_after(3000))
    lines = [line(NOW + n, f"10.0.{n // 250}.{n % 250}") for n in range(5000)]
    with pytest.raises(ZeroDivisionError):
        rlaas("replay", write(lines), "--policy", "5/m by ip")
    assert our_keys(client) == []


def failing_after(calls: int):
    left = iter(range(calls))

    def count(*_: object) -> None:
        if next(left, None) is None:
            raise ZeroDivisionError

    return count


def wait_for_keys(client) -> None:
    deadline = time.monotonic() + 60
    while not any(b"/replay=" in key for key in our_keys(client)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def long_log(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("replay") / "long.log"
    with path.open("w") as file:
        for n in range(300_000):
            file.write(f"{line(NOW + n, f'10.{n % 7}.{n // 250 % 250}.{n % 250}')}\n")
    return str(path)


@pytest.mark.parametrize("interrupts", [1, 3])
def test_ctrl_c_leaves_no_key(client, long_log, interrupts, tmp_path):
    with (tmp_path / "output").open("wb") as output:
        running = process("replay", long_log, "--policy", "5/m by ip", redis_url=REDIS, stdout=output, stderr=output)
        wait_for_keys(client)
        for _ in range(interrupts):
            running.send_signal(signal.SIGINT)
            time.sleep(0.05)
        code = running.wait(120)
    assert our_keys(client) == []
    if interrupts == 1:
        assert code == 130
        assert "Traceback" not in (tmp_path / "output").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.3, 0.6, 0.9, 1.2, 1.5, 2.0, 3.0])
def test_ctrl_c_at_any_time_leaves_no_key(client, write, delay):
    path = write([line(NOW + n, f"10.0.{n // 250}.{n % 250}") for n in range(20_000)])
    running = process("replay", path, "--policy", "5/m by ip", redis_url=REDIS, stdout=-1, stderr=-1)
    time.sleep(delay)
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=120)
    assert our_keys(client) == []


def test_the_progress_is_shown_in_plain_lines(long_log):
    running = process("replay", long_log, "--policy", "5/m by ip", redis_url=REDIS, stdout=-1, stderr=-1)
    first = running.stderr.readline()
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=120)
    assert re.fullmatch(rb"[\d,]+ lines, [\d,]+/s, \d+%\n", first)
    assert not {b"\x1b", b"\r"} & {bytes([byte]) for byte in first + err + out}


def test_standard_input_is_read(client):
    running = process("replay", "-", "--policy", "5/m by ip", "--json", redis_url=REDIS, stdin=-1, stdout=-1, stderr=-1)
    text = "".join(f"{line(NOW + n)}\n" for n in range(10)).encode()
    out, _ = running.communicate(gzip.compress(text), timeout=60)
    assert running.returncode == 0
    assert by_algorithm(json.loads(out)["policies"][0])[SLIDING_WINDOW]["refused"] == 5


DANGEROUS = '\x1b]0;owned\x07\x1b[31m<script>alert("x")</script>\x9b2J\u202e\x7f\r'


def test_nothing_of_a_log_line_reaches_the_terminal_unescaped(write):
    lines = [line(NOW + n, DANGEROUS, DANGEROUS, user=DANGEROUS) for n in range(10)] + [DANGEROUS]
    for options in ((), ("--json",)):
        shown = rlaas("replay", write(lines), "--policy", "1/m by user", "--policy", "1/m by ip", *options).out
        assert "owned" in shown
        assert not set(shown) & set("\x1b\x07\x9b\u202e\x7f\r")


# Bounds


@pytest.mark.slow
def test_a_million_lines_take_bounded_memory(tmp_path, capsys):
    path = tmp_path / "access.log"
    chance = random.Random(1)
    with path.open("w") as file:
        for n in range(1_000_000):
            ip = f"10.{chance.randrange(4)}.{chance.randrange(250)}.{chance.randrange(250)}"
            stamp = time.strftime("%d/%b/%Y:%H:%M:%S +0000", time.gmtime(1_700_000_000 + n // 100))
            file.write(COMBINED.replace("203.0.113.9", ip).replace("14/Nov/2023:22:13:20 +0000", stamp) + "\n")
    started = time.monotonic()
    running = process(
        "replay", str(path), "--policy", "100/m by ip, sliding window", "--json", redis_url=REDIS, stdout=-1, stderr=-1
    )
    status = f"/proc/{running.pid}/status"
    memory = 0
    while running.poll() is None:
        with open(status) as file:
            memory = max(memory, *(int(row.split()[1]) for row in file if row.startswith("VmRSS")), 0)
        time.sleep(0.2)
    seconds = time.monotonic() - started
    found = json.loads(running.communicate()[0])
    assert found["policies"][0]["requests"] == 1_000_000
    report(capsys, f"{1_000_000 / seconds:,.0f} lines/s, {memory // 1024} MB")
    assert memory < 400 * 1024
