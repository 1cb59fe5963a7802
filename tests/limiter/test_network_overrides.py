"""Overrides of networks, and of every client of an address: matched in the process, decided by the script."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta

import pytest
from django.http import HttpResponse
from django.test import AsyncRequestFactory, RequestFactory
from django.utils import timezone
from rlaas_django import Policy, check, rate_limit
from rlaas_django.core.keys import encode_network
from rlaas_django.limiter import networks, overrides
from rlaas_django.limiter.overrides import BLOCK, EVERY_POLICY, EXEMPT, FACTOR, LIMIT
from rlaas_django.models import Override
from rlaas_django.operators import actions
from rlaas_django.runtime import background

from tests.support.internals import check_plan, conf, set_override
from tests.support.observation import commands_sent, observer

HOUR = 3_600_000
BY_ADDRESS = Policy("a", "5/m", key="ip")
BY_USER = Policy("u", "5/m", key="user")
BY_EITHER = Policy("e", "5/m", key="user_or_ip")
ALICE = {"user": "alice", "ip": "203.0.113.9"}


def publish(*entries: tuple, now: int | None = None, ms: int = HOUR) -> None:
    """Publish overrides, each as (network, kind) with further fields by name."""
    until = (int(time.time() * 1000) if now is None else now) + ms
    made = []
    for network, kind, *rest in entries:
        fields = {"policy": EVERY_POLICY, "until": until, "amount": None, "every_client": False, **(rest or [{}])[0]}
        made.append(overrides.Override(network, kind=kind, **fields))
    networks.publish(made)


def networks_of(made: list[overrides.Override]) -> networks.Networks:
    return networks.Networks({"0": networks.Shard(made, "")})


class TestMatch:
    @pytest.mark.parametrize(
        ("network", "inside", "outside"),
        [
            ("203.0.113.0/24", "203.0.113.255", "203.0.114.0"),
            ("203.0.113.128/25", "203.0.113.128", "203.0.113.127"),
            ("203.0.113.9/32", "203.0.113.9", "203.0.113.8"),
            ("0.0.0.0/0", "198.51.100.7", "2001:db8::1"),
            ("2001:db8::/48", "2001:db8:0:ffff::1", "2001:db8:1::1"),
            ("2001:db8::1/128", "2001:db8::1", "2001:db8::2"),
            ("203.0.113.0/24", "::ffff:203.0.113.9", "::ffff:203.0.114.9"),
            ("203.0.113.0/24", "203.0.113.9:4711", "unknown"),
            ("::ffff:203.0.113.0/120", "203.0.113.9", "203.0.114.9"),
            ("::ffff:203.0.113.0/120", "::ffff:203.0.113.9", "2001:db8::1"),
            ("::ffff:0:0/96", "198.51.100.7", "2001:db8::1"),
        ],
    )
    def test_an_address_in_a_network_is_found(self, limiter, network, inside, outside):
        publish((network, BLOCK))
        assert not limiter.check({"ip": inside}, BY_ADDRESS).allowed
        assert limiter.check({"ip": outside}, BY_ADDRESS).allowed

    def test_the_wait_is_the_end_of_the_block(self, clock, limiter):
        publish(("203.0.113.0/24", BLOCK), now=clock.ms)
        assert limiter.check("203.0.113.9", BY_ADDRESS).retry_after == 3600.0
        clock.tick(HOUR)
        assert limiter.check("203.0.113.9", BY_ADDRESS).allowed

    def test_an_exempt_network_is_not_counted(self, limiter):
        publish(("203.0.113.0/24", EXEMPT))
        assert all(limiter.check("203.0.113.9", BY_ADDRESS).allowed for _ in range(9))
        assert limiter.peek("203.0.113.9", BY_ADDRESS).current_count == 0

    def test_a_factor_applies_to_each_address(self, limiter):
        publish(("203.0.113.0/24", FACTOR, {"amount": 2000}))
        assert limiter.check("203.0.113.9", BY_ADDRESS).limit == 10
        assert limiter.check("203.0.113.10", BY_ADDRESS).limit == 10
        assert limiter.check("203.0.114.9", BY_ADDRESS).limit == 5

    def test_one_of_one_policy_leaves_the_others(self, limiter):
        publish(("203.0.113.0/24", BLOCK, {"policy": "b"}))
        policies = [BY_ADDRESS, Policy("b", "5/m", key="ip")]
        decision = limiter.check("203.0.113.9", policies)
        assert [outcome.allowed for outcome in decision.outcomes] == [True, False]
        assert limiter.check("203.0.113.9", BY_ADDRESS).allowed

    def test_requests_are_refused(self, settings):
        publish(("127.0.0.0/8", BLOCK))
        view = rate_limit(BY_ADDRESS)(lambda request: HttpResponse())
        assert view(RequestFactory().get("/")).status_code == 429
        assert view(RequestFactory().get("/", REMOTE_ADDR="203.0.113.9")).status_code == 200

    async def test_requests_to_async_views_are_refused(self):
        publish(("127.0.0.0/8", BLOCK))

        @rate_limit(BY_ADDRESS)
        async def view(request):
            return HttpResponse()

        assert (await view(AsyncRequestFactory().get("/"))).status_code == 429

    def test_a_cached_refusal_is_not_that_of_another_network(self, limiter):
        """A user comes from a blocked network, and then from another one."""
        publish(("203.0.113.0/24", BLOCK, {"every_client": True}))
        for _ in range(3):
            assert not limiter.check({"user": "alice", "ip": "203.0.113.9"}, BY_USER).allowed
        assert limiter.check({"user": "alice", "ip": "198.51.100.7"}, BY_USER).allowed


class TestEveryClient:
    """A block of an address does not reach logged-in users, unless it says so."""

    @pytest.mark.parametrize("policy", [BY_USER, BY_EITHER], ids=str)
    def test_logged_in_users_are_reached_if_the_override_says_so(self, limiter, policy):
        publish(("203.0.113.0/24", BLOCK))
        assert limiter.check(ALICE, policy).allowed
        publish(("203.0.113.0/24", BLOCK, {"every_client": True}))
        assert not limiter.check(ALICE, policy).allowed
        assert limiter.check({"user": "alice", "ip": "198.51.100.7"}, policy).allowed
        assert limiter.check("alice", policy).allowed  # no address at hand

    def test_the_user_s_own_override_is_narrower(self, limiter):
        publish(("203.0.113.0/24", BLOCK, {"every_client": True}))
        until = int(time.time() * 1000) + HOUR
        overrides.publish("alice", [overrides.Override("alice", EVERY_POLICY, EXEMPT, until)])
        assert limiter.check(ALICE, BY_USER).allowed
        assert not limiter.check({**ALICE, "user": "bob"}, BY_USER).allowed


class TestPrecedence:
    """Each narrower override replaces the wider ones, but a custom limit never lifts a block."""

    WIDE, NARROW, OWN = "203.0.0.0/16", "203.0.113.0/24", "ip=203.0.113.9"

    @pytest.mark.parametrize(
        ("wide", "narrow", "own", "expected"),
        [
            (BLOCK, EXEMPT, None, "allowed"),
            (EXEMPT, BLOCK, None, "blocked"),
            (BLOCK, LIMIT, None, "blocked"),
            (LIMIT, BLOCK, None, "blocked"),
            (BLOCK, None, LIMIT, "blocked"),
            (BLOCK, EXEMPT, LIMIT, "limit"),
            (EXEMPT, None, LIMIT, "limit"),
            (BLOCK, None, EXEMPT, "allowed"),
            (None, EXEMPT, BLOCK, "blocked"),
        ],
    )
    def test_the_narrower_applies(self, server, wide, narrow, own, expected, clock):
        amount = {"amount": 1}
        entries = [(self.WIDE, wide, amount)] if wide else []
        entries += [(self.NARROW, narrow, amount)] if narrow else []
        publish(*entries, now=clock.ms)
        if own:
            overrides.publish(self.OWN, [overrides.Override(self.OWN, EVERY_POLICY, own, clock.ms + HOUR, 1)])
        decisions = [check("203.0.113.9", BY_ADDRESS) for _ in range(9)]
        allowed = sum(decision.allowed for decision in decisions)
        assert allowed == {"allowed": 9, "blocked": 0, "limit": 1}[expected]

    def test_one_policy_is_narrower_than_all_in_the_same_network(self, limiter):
        publish((self.NARROW, EXEMPT, {"policy": "a"}), (self.NARROW, BLOCK))
        assert limiter.check("203.0.113.9", BY_ADDRESS).allowed
        assert not limiter.check("203.0.113.9", Policy("b", "5/m", key="ip")).allowed

    def test_one_that_has_ended_hides_no_wider_one(self, limiter, clock):
        publish((self.WIDE, BLOCK), (self.NARROW, EXEMPT, {"until": clock.ms + 1000}), now=clock.ms)
        assert limiter.check("203.0.113.9", BY_ADDRESS).allowed
        clock.tick(1000)
        assert not limiter.check("203.0.113.9", BY_ADDRESS).allowed


class TestRefresh:
    def test_a_check_sends_one_command_with_and_without_overrides(self, own):
        check("203.0.113.9", BY_ADDRESS)
        for entries in ([], [("203.0.113.0/24", FACTOR, {"amount": 2000})]):
            publish(*entries)
            check("203.0.113.9", BY_ADDRESS)
            with commands_sent(own.url) as seen:
                check("203.0.113.9", BY_ADDRESS)
            assert seen == ["EVALSHA"]

    @pytest.mark.parametrize("entries", [[], [("203.0.113.0/24", BLOCK)]], ids=["none", "one"])
    def test_only_the_digest_is_read_while_nothing_changes(self, own, entries):
        publish(*entries)
        with commands_sent(own.url) as seen:
            networks.refresh()
        assert seen == ["HMGET"]

    def test_only_what_changed_is_read(self, own):
        until = int(time.time() * 1000) + HOUR
        many = [overrides.Override(f"10.{n // 256}.{n % 256}.0/24", "*", BLOCK, until) for n in range(5_000)]
        networks.publish(many)
        before = networks.current
        networks.publish([*many[1:], overrides.Override("192.0.2.0/24", "*", EXEMPT, until)])
        after, networks.current = networks.current, before
        with observer(own.url) as client:
            sent = client.info("stats")["total_net_output_bytes"]
            networks.refresh()
            read = client.info("stats")["total_net_output_bytes"] - sent
            assert read < client.memory_usage(networks.KEY, samples=0) / 10
        for address in ("10.0.0.1", "10.0.1.1", "10.19.135.1", "192.0.2.1"):
            assert networks.current.find(address) == after.find(address)
        assert [len(after.find(address)) for address in ("10.0.0.1", "10.0.1.1", "192.0.2.1")] == [0, 1, 1]
        assert [len(before.find(address)) for address in ("10.0.0.1", "10.0.1.1", "192.0.2.1")] == [1, 1, 0]

    def test_any_change_leads_to_what_redis_has(self):
        """Networks are added, changed and ended, those of one policy and of all."""
        rng, until = random.Random("changes"), int(time.time() * 1000) + HOUR
        every = [
            overrides.Override(f"10.{n}.0.0/{rng.choice([16, 18])}", policy, BLOCK, until)
            for n in range(60)
            for policy in ("*", "a")
        ]
        for _ in range(40):
            chosen = [
                override._replace(kind=rng.choice([BLOCK, EXEMPT]))
                for override in rng.sample(every, rng.choice([0, 1, 20, 60]))
            ]
            networks.publish(chosen)
            expected = networks_of(chosen)
            for n in range(60):
                found = networks.current.find(f"10.{n}.1.1") if networks.current else []
                assert found == expected.find(f"10.{n}.1.1")

    def test_a_block_never_lapses_while_others_change(self):
        until, lapsed, stop = int(time.time() * 1000) + HOUR, [], threading.Event()
        block = overrides.Override("203.0.113.0/24", "*", BLOCK, until)
        others = [overrides.Override(f"10.{n}.0.0/16", "*", BLOCK, until) for n in range(200)]
        networks.publish([block])

        def watch():
            while not stop.is_set():
                networks.refresh()
                lapsed.extend(["once"] * (networks.current is None or not networks.current.find("203.0.113.9")))

        threads = [threading.Thread(target=watch) for _ in range(2)]
        for thread in threads:
            thread.start()
        for n in range(100):
            networks.publish([block, *others[: n % 7 * 30]])
        stop.set()
        for thread in threads:
            thread.join()
        assert lapsed == []

    def test_what_an_older_version_of_the_package_wrote_is_no_error(self, client):
        client.set("rlaas:networks", "digest", px=60_000)
        publish(("203.0.113.0/24", BLOCK))
        assert not check("203.0.113.9", BY_ADDRESS).allowed

    def test_another_process_has_them_after_a_round(self):
        publish(("203.0.113.0/24", BLOCK))
        networks.reset()
        assert check("203.0.113.9", BY_ADDRESS).allowed
        background.run(20)
        assert not check("203.0.113.9", BY_ADDRESS).allowed

    def test_ended_ones_are_gone_after_a_round(self, client):
        publish(("203.0.113.0/24", BLOCK))
        client.delete(networks.KEY)
        background.run(20)
        assert check("203.0.113.9", BY_ADDRESS).allowed
        assert networks.current is None

    @pytest.mark.background
    def test_the_thread_reads_them_within_a_second(self):
        background.state.reset()
        check("198.51.100.7", BY_ADDRESS)  # starts the thread
        networks.publish([overrides.Override("203.0.113.0/24", "*", BLOCK, int(time.time() * 1000) + HOUR)])
        networks.reset()
        deadline = time.monotonic() + 20  # a busy machine
        while networks.current is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not check("203.0.113.9", BY_ADDRESS).allowed

    def test_they_stay_while_redis_is_unavailable(self, settings):
        publish(("203.0.113.0/24", BLOCK))
        before = networks.current
        gone = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}
        settings.CACHES = {**settings.CACHES, "default": gone}
        background.run(20)
        assert networks.current is before

    def test_the_key_expires_soon_after_the_last(self, client):
        publish(("203.0.113.0/24", BLOCK))
        assert HOUR < client.pttl(networks.KEY) <= HOUR + networks.SPARE_TTL
        publish()
        assert not client.exists(networks.KEY)

    def test_thousands_of_networks_are_searched_by_prefix(self):
        until = int(time.time() * 1000) + HOUR
        many = [overrides.Override(f"10.{i // 256}.{i % 256}.0/24", "*", BLOCK, until) for i in range(20_000)]
        found = networks_of(many)
        started = time.perf_counter()
        for i in range(1_000):
            assert len(found.find(f"10.0.{i % 256}.{i % 250}")) == 1
        assert time.perf_counter() - started < 2  # 2 ms on an idle machine


@pytest.mark.django_db(transaction=True)
class TestModel:
    def set(self, identity="net=203.0.113.0%2F24", kind=BLOCK, policy="", **rest):
        until = timezone.now() + timedelta(hours=1)
        return set_override(identity, policy, kind, until, by="operator", reason="spam", **rest)

    def test_a_network_is_blocked_until_it_is_ended(self):
        made = self.set()
        assert not check("203.0.113.9", BY_ADDRESS).allowed
        made.end(by="operator")
        assert check("203.0.113.9", BY_ADDRESS).allowed

    def test_an_address_is_blocked_for_every_client(self, client):
        self.set("ip=203.0.113.9")
        assert not check("203.0.113.9", BY_ADDRESS).allowed
        assert check(ALICE, BY_USER).allowed
        self.set("ip=203.0.113.9", every_client=True)
        assert not check(ALICE, BY_USER).allowed
        assert not check("203.0.113.9", BY_ADDRESS).allowed

    def test_an_ipv6_address_as_it_is_counted_is_blocked_for_every_client(self):
        self.set("ip=2001%3Adb8%3A%3A%2F64", every_client=True)
        assert not check({"user": "alice", "ip": "2001:db8::7"}, BY_USER).allowed

    def test_one_that_was_stored_as_ipv4_mapped_is_of_ipv4_clients(self):
        mapped = self.set("net=%3A%3Affff%3A203.0.113.0%2F120")
        assert not check("203.0.113.9", BY_ADDRESS).allowed
        assert Override.objects.matching(["ip=203.0.113.9", "net=203.0.113.0%2F25"]) == {
            "ip=203.0.113.9": [mapped],
            "net=203.0.113.0%2F25": [mapped],
        }

    def test_networks_are_restored_after_redis_lost_them(self, client, monkeypatch):
        self.set()
        Override.restore()
        client.delete(networks.KEY)
        networks.refresh()
        assert check("203.0.113.9", BY_ADDRESS).allowed
        monkeypatch.setattr(actions.state, "next_comparison", 0.0)
        background.run(20)
        assert not check("203.0.113.9", BY_ADDRESS).allowed
        client.flushdb()
        background.run(20)
        assert client.hlen(networks.KEY) == 2

    @pytest.mark.parametrize(
        ("text", "identity"),
        [
            ("203.0.113.0/24", "net=203.0.113.0%2F24"),
            ("203.0.113.77/24", "net=203.0.113.0%2F24"),
            ("203.0.113.9/32", "ip=203.0.113.9"),
            ("203.0.113.9", "ip=203.0.113.9"),
            ("2001:db8::/48", "net=2001%3Adb8%3A%3A%2F48"),
            ("2001:db8::7/64", "ip=2001%3Adb8%3A%3A%2F64"),
            ("2001:db8::7/128", "net=2001%3Adb8%3A%3A7%2F128"),
            ("::ffff:203.0.113.0/120", "net=203.0.113.0%2F24"),
        ],
    )
    def test_a_network_as_large_as_an_address_is_counted_is_that_address(self, text, identity):
        assert encode_network(text, conf.config().encoding) == identity

    def test_what_is_no_network_is_an_error(self):
        with pytest.raises(ValueError, match="alice"):
            encode_network("alice/24", conf.config().encoding)


def test_each_part_of_a_check_has_the_overrides_of_its_policies():
    """On a Cluster, a check across slots is split."""
    publish(("203.0.113.0/24", BLOCK, {"policy": "a"}))
    planned = check_plan(ALICE, [BY_USER, BY_ADDRESS], 1)
    assert [bool(text) for text in planned.network_overrides] == [False, True]
    assert planned.part([1], charge=True).network_overrides == planned.network_overrides[1:]
