"""manage.py rlaas plan: what is measured, predicted and recommended, and what is left in Redis."""

from __future__ import annotations

import random
import signal
import time
from argparse import Namespace

import pytest
import redis
from rlaas_django import Policy, backend
from rlaas_django.testing import frozen_clock

from tests.settings import REDIS
from tests.support.commands import OnTerminal, process, rlaas
from tests.support.helpers import report
from tests.support.internals import (
    ALGORITHMS,
    FIXED_WINDOW,
    SLIDING_WINDOW,
    SLIDING_WINDOW_COMPACT,
    SLIDING_WINDOW_COUNTER,
    TOKEN_BUCKET,
    Rate,
    check_plan,
    compile_policies,
    predict_memory,
)

GB = 10**9


@pytest.fixture
def quick(monkeypatch):
    """Measure with few identities."""
    monkeypatch.setattr("rlaas_django.management.commands._rlaas.measuring.CALLS", 2_000)


@pytest.mark.usefixtures("quick")
def test_every_algorithm_is_measured_and_one_is_chosen(client):
    found = rlaas("plan", "--users", "1,000,000", "--rate", "100/m", "--json").json
    rows = {row["algorithm"]: row for row in found["algorithms"]}
    assert set(rows) == set(ALGORITHMS)
    assert 60 < rows[FIXED_WINDOW]["bytes_per_identity"] < 300
    assert 3_000 < rows[SLIDING_WINDOW]["bytes_per_identity"] < 10_000
    assert rows[SLIDING_WINDOW_COMPACT]["bytes_per_identity"] < rows[SLIDING_WINDOW]["bytes_per_identity"] / 5
    for row in rows.values():
        assert row["bytes"] == 1_000_000 * row["bytes_per_identity"]
        assert row["decisions_per_second"] > 100
    assert (found["users"], found["rate"], found["choose"]) == (1_000_000, "100/m", SLIDING_WINDOW_COMPACT)
    assert client.dbsize() == 0


@pytest.mark.usefixtures("quick")
def test_the_text_says_what_to_choose_and_why(client):
    result = rlaas("plan", "--users", "1000", "--rate", "10/s", "--algo", "token bucket", "--algo", "fixed-window")
    assert result.code == 0
    assert "1,000 users at 10/s, each of whom uses the whole limit." in result.out
    assert [line.split()[0] for line in result.out.splitlines() if "-algo" in line][:2] == [TOKEN_BUCKET, FIXED_WINDOW]
    assert f"Choose {TOKEN_BUCKET}: its memory does not grow with the limit" in result.out
    assert "One server is enough." in result.out
    assert "maxmemory is not set" in result.out
    assert client.dbsize() == 0


def predicted(users=1_000_000, rate="1000/m", load=None, memory=GB, **measured: tuple[int, int]) -> dict:
    rows = [(name.replace("_", "-") + "-algo", *figures) for name, figures in measured.items()]
    options = Namespace(users=users, rate=Rate.parse(rate), load=load)
    return predict_memory(rows, options, (memory, "maxmemory"))


class TestPrediction:
    EXACT, COUNTER = {"sliding_window_compact": (1_600, 40_000)}, {"sliding_window_counter": (100, 50_000)}

    def test_the_exact_log_is_chosen_where_it_fits(self):
        assert predicted(users=100_000, **self.EXACT, **self.COUNTER)["choose"] == SLIDING_WINDOW_COMPACT

    def test_the_counter_is_chosen_where_the_exact_log_does_not_fit(self):
        found = predicted(**self.EXACT, **self.COUNTER)
        assert (found["choose"], found["servers"]) == (SLIDING_WINDOW_COUNTER, 1)

    def test_memory_beyond_three_quarters_takes_another_server(self):
        assert predicted(**self.EXACT)["servers"] == 3
        assert predicted(users=450_000, **self.EXACT)["servers"] == 1
        assert predicted(users=470_000, **self.EXACT)["servers"] == 2

    def test_load_beyond_half_of_the_decisions_takes_another_server(self):
        assert predicted(load=25_000, **self.COUNTER)["servers"] == 1
        assert predicted(load=26_000, **self.COUNTER)["servers"] == 2

    def test_the_users_that_a_server_sustains_are_those_at_the_full_rate(self):
        (row,) = predicted(rate="100/10s", **self.COUNTER)["algorithms"]
        assert row["users_per_server_at_full_rate"] == 2_500

    def test_without_a_known_memory_nothing_is_said_of_it(self):
        (row,) = predicted(memory=0, **self.COUNTER)["algorithms"]
        assert (row["share_of_memory"], row["servers_for_memory"]) == (None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--users", "0", "--rate", "5/m"), "no number from 1 on"),
        (("--users", "many", "--rate", "5/m"), "no number from 1 on"),
        (("--users", "5", "--rate", "5/month"), "is not a rate"),
        (("--rate", "5/m"), "--users"),
    ],
)
def test_wrong_options_are_errors(options, message, capsys):
    assert rlaas("plan", *options).code == 2
    assert message in capsys.readouterr().err


def test_an_unknown_algorithm_names_the_nearest():
    result = rlaas("plan", "--users", "5", "--rate", "5/m", "--algo", "tokn bucket")
    assert result.code == 1
    assert "did you mean 'token bucket'?" in result.err


def test_a_server_that_is_nearly_full_is_not_measured(start, use):
    server = start("--maxmemory-policy", "noeviction")
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"])
    use(server.url)
    result = rlaas("plan", "--users", "5", "--rate", "5/m")
    assert result.code == 1
    assert "no room for a sample" in result.err


@pytest.mark.usefixtures("redis_unavailable")
def test_an_unavailable_redis_is_an_error():
    assert rlaas("plan", "--users", "5", "--rate", "5/m").code == 1


def keys(client) -> list[bytes]:
    return list(client.scan_iter("rlaas:rate_limit:plan-*", count=1000))


def test_ctrl_c_leaves_no_key(client):
    arguments = "plan", "--users", "1000", "--rate", "100/m"
    with OnTerminal(*arguments, redis_url=REDIS) as terminal:
        terminal.read_until("decisions, ")
        assert keys(client)
        terminal.process.send_signal(signal.SIGINT)
        shown = terminal.read_until("")
        assert terminal.process.wait(60) == 130
    assert "\r\x1b[K[" in shown
    assert "Traceback" not in shown
    assert keys(client) == []


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.5, 1, 1.5, 2, 2.5])
def test_ctrl_c_at_any_time_leaves_no_key(client, delay):
    running = process("plan", "--users", "1000", "--rate", "20/m", redis_url=REDIS, stdout=-1, stderr=-1)
    time.sleep(delay)
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=60)
    assert keys(client) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "limit", "identities"),
    [
        *((algo, 5, 100_000) for algo in ALGORITHMS),
        # A thousand requests each of 100,000 would take an hour.
        *(
            (algo, limit, 500_000 // limit)
            for algo in (SLIDING_WINDOW, SLIDING_WINDOW_COMPACT)
            for limit in (100, 1000)
        ),
    ],
)
def test_the_prediction_is_within_a_tenth_of_real_identities(own, capsys, algo, limit, identities):
    """Real requests come at any time of a window."""
    found = rlaas("plan", "--users", "1", "--rate", f"{limit}/m", "--algo", algo, "--json").json
    predicted = found["algorithms"][0]["bytes_per_identity"]
    policies = compile_policies(Policy("api-requests", f"{limit}/m", key="user", algo=algo))
    chance, client = random.Random(1), redis.Redis.from_url(own.url)
    before = client.info("memory")["used_memory"]
    start = time.time_ns() // 1_000_000 // 60_000 * 60_000
    calls = []
    with frozen_clock(start) as clock:
        for number in range(identities):
            for after in sorted(chance.randrange(60_000) for _ in range(limit)):
                clock.ms = start + after
                calls.append(check_plan(f"user-{number:09}", policies, 1).pack())
            if len(calls) >= 1000 or number == identities - 1:
                assert not [
                    each for each in backend.execute_each(backend.topology(), calls) if isinstance(each, Exception)
                ]
                calls.clear()
    backend.topology().close()
    time.sleep(1)
    real = (client.info("memory")["used_memory"] - before) / identities
    report(capsys, f"{algo} at {limit}/m: predicted {predicted} B, real {real:.0f} B per identity")
    assert predicted == pytest.approx(real, rel=0.1)
