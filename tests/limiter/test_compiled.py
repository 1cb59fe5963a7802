"""A policy set compiled once: what is sent is what packing it word by word gives."""

from __future__ import annotations

import random
import string
from types import SimpleNamespace

import pytest
from rlaas_django import Decision, Policy, check

from tests.support.internals import (
    ALGORITHMS,
    YEAR,
    EncodedIdentity,
    PolicySet,
    compile_policies,
    conf,
    pack_words,
    passes,
    plan_encoded,
    read_reply,
    unique_id,
)
from tests.support.parallel import in_processes, in_threads

CHARACTERS = string.ascii_letters + string.digits + ".@+-_"


def policies(number: int, **options):
    return tuple(Policy(f"p{n}", (5 + n, YEAR), algo=ALGORITHMS[n], **options) for n in range(number))


def words(policy_set, identities, unique, cost, operation):
    """What the driver's header asks for."""
    keys = policy_set.keys(identities)
    keys += [f"rlaas:override:{identity}" for identity in (identities[:1] if len({*identities}) == 1 else identities)]
    arguments = [
        word
        for policy, each in zip(policy_set.policies, policy_set.arguments, strict=True)
        for word in (each.algo, each.limit, each.window, each.capacity, each.ttl, int(policy.shadow), policy.name)
    ]
    return ("EVALSHA", policy_set.script.sha, len(keys), *keys, "", operation, unique, cost, *arguments)


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("options", [{}, {"key": "user"}, {"shadow": True}], ids=str)
def test_the_command_is_what_packing_it_word_by_word_gives(number, options):
    rng, policy_set = random.Random(number), compile_policies(policies(number, **options))
    for length in (1, 2, 5, 9, 10, 99, 100, 128, *range(3, 60)):
        name = "".join(rng.choices(CHARACTERS, k=length))
        identities, cost = policy_set.identify(name), rng.choice([0, 1, 1, 1, 7, 10**6])
        assert identities == (name,) * number
        operation = "check" if cost else "peek"
        check = plan_encoded(policy_set, identities, cost)
        assert check.pack().packed == pack_words(words(policy_set, identities, check.unique, cost, operation))


def test_identities_that_differ_have_an_override_key_each():
    policy_set = compile_policies((Policy("u", "5/m", key="user"), Policy("i", "5/m", key="ip")))
    identities = policy_set.identify({"user": "alice", "ip": "203.0.113.9"})
    assert identities == ("alice", "ip=203.0.113.9")
    check = plan_encoded(policy_set, identities, 1)
    assert check.pack().packed == pack_words(words(policy_set, identities, check.unique, 1, "check"))


def test_a_part_of_a_set_has_the_counters_of_the_set():
    """Also where the set is not of RATE_LIMITER['CACHE']: the adapter of django-ratelimit has a cache of its own."""
    clustered = SimpleNamespace(clustered=True, timeout=1, group_by_slot=lambda keys: [[0], [1]])
    whole = PolicySet(policies(2), conf.config(), clustered)
    check = plan_encoded(whole, ("alice", "bob"), 1)
    for i in (0, 1):
        assert check.part([i], charge=True).pack().key == whole.keys(check.identities)[i]
        assert check.part([i], charge=True).policy_set is whole.part([i])
    assert check.part([0, 1], charge=False).policy_set is whole


@pytest.mark.parametrize("key", ["user", "ip", "token", "global"])
def test_an_encoded_identity_stands_for_every_policy(key):
    policy_set = compile_policies(policies(3, key=key))
    for identity in ("ip=2001:db8::/64", "alice", "global", "token=" + 32 * "0"):
        assert policy_set.identify(EncodedIdentity(identity)) == (identity,) * 3


FIGURES = ("allowed", "policy", "limit", "current_count", "remaining", "retry_after", "reset_after", "ttl", "degraded")


@pytest.mark.parametrize("number", [1, 2, 5])
def test_the_figures_of_a_decision_are_those_of_the_strictest_outcome(number):
    rng = random.Random(number)
    for _ in range(300):
        policy_set = compile_policies(tuple(Policy(f"p{n}", "9/m", shadow=rng.random() < 0.3) for n in range(number)))
        reply = [1_700_000_000_000]
        for _ in range(number):
            passed = rng.randrange(2)
            wait = 0 if passed else rng.choice([-1, 1, 1, 2, 60_000])
            reply += (passed, rng.randrange(9), rng.randrange(3) * passed, wait, rng.randrange(60_000), 9, -1)
        found = read_reply(plan_encoded(policy_set, ("alice",) * number, 1), reply)
        expected = Decision(passes(found.outcomes), found.outcomes)
        assert [getattr(found, name) for name in FIGURES] == [getattr(expected, name) for name in FIGURES]


@pytest.mark.parametrize("number", [1, 3])
def test_an_identity_that_is_not_ascii_is_not_packed(number):
    """A length in characters would be short of one in bytes, and the rest of the key be read as a command."""
    policy_set = compile_policies(policies(number))
    with pytest.raises(UnicodeEncodeError):
        plan_encoded(policy_set, (*["alice"] * (number - 1), "jos\u00e9"), 1).pack()


@pytest.mark.parametrize("run", [in_threads, in_processes])
def test_each_request_has_an_id_of_its_own(run):
    """Whichever thread or fork makes it, and whether or not there is a GIL."""
    ids = [each for part in run(lambda n: [unique_id() for _ in range(200)]) for each in part]
    assert len(set(ids)) == len(ids)
    assert {len(each) for each in ids} == {20}


def test_a_policy_is_not_taken_for_its_name(configure):
    """It may be defined otherwise in the settings."""
    configure(POLICIES={"p": {"rate": "3/m"}})
    for _ in range(2):
        assert check("alice", "p").limit == 3
        assert check("alice", Policy("p", "7/m")).limit == 7
        assert check("alice", [Policy("p", "9/m")]).limit == 9
        assert check("alice", ["p"]).limit == 3


def test_policies_made_for_each_call_fill_no_memory(configure):
    from rlaas_django.limiter import policy_set as compiled

    for n in range(compiled.MAX_COMPILED + 10):
        compile_policies(Policy(f"p{n}", "5/m"))
    assert len(compiled.conf.config().derived.policy_sets) <= compiled.MAX_COMPILED
