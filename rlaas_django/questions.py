"""A set of policies made ready to be asked: its command is packed once, with only what varies left to be filled in."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from . import backend, conf
from .conf import Config
from .identity import GLOBAL, LONGEST, Id, Identity, identify, is_plain, key_parts, kind_of, override_parts
from .policy import DEFAULT, FIXED_WINDOW, TOKEN_BUCKET, Policies, Policy, PolicyError, Terms
from .scripts import CHECK
from .sites import Site


@lru_cache(maxsize=1024)
def terms_of(policy: Policy, default_algo: str) -> Terms:
    algo = policy.algo or default_algo
    if policy.burst is not None and algo != TOKEN_BUCKET:
        raise PolicyError(f"Policy {policy.name!r}: burst goes with {TOKEN_BUCKET!r}, not with {algo!r}.")
    return Terms(algo, policy.fixed_rate.limit, policy.window * 1000, policy.capacity)


class PolicySet:
    """Policies that one call decides, and the command that asks."""

    def __init__(self, policies: tuple[Policy, ...], config: Config, site: Site) -> None:
        self.policies, self.site, self.enabled = policies, site, config.enabled
        self.terms = tuple(terms_of(policy, config.algo) for policy in policies)
        # Whole seconds, as the source documents define it; of the fixed window only the time of asking tells.
        self.ttls = tuple(None if term.algo == FIXED_WINDOW else term.window // 1000 for term in self.terms)
        self.in_one_call = config.enabled and not site.clustered
        self.script = CHECK[frozenset(term.algo for term in self.terms)]
        self.names = frozenset(policy.name for policy in policies)
        self.may_change = any(policy.shadow for policy in policies)  # a refusal may be told otherwise next time
        self.remembers = config.local_refusals and self.in_one_call and not self.may_change
        self._by_user = all(kind_of(policy.key) in ("user", "user_or_ip") for policy in policies)
        self._parts = [
            key_parts(policy, term.algo, term.window // 1000, tagged=site.clustered)
            for policy, term in zip(policies, self.terms, strict=True)
        ]
        self._override = override_parts(tagged=site.clustered)
        self.whole = range(len(policies))
        self._words = [
            word
            for policy, term in zip(policies, self.terms, strict=True)
            for word in (*term, int(policy.shadow), policy.name)
        ]
        self._forms: dict[int, tuple[list[str], str]] = {}  # of the usual question, by the length of the name
        self._config = config
        self._subsets: dict[tuple[int, ...], PolicySet] = {}

    def identities(self, identity: Identity) -> tuple[str, ...]:
        if self._by_user and type(identity) is str and is_plain(identity):
            return (identity,) * len(self.policies)
        return tuple([identify(identity, policy) for policy in self.policies])

    def keys(self, identities: Sequence[str]) -> list[str]:
        """Where the policies count."""
        return [f"{before}{who}{after}" for (before, after), who in zip(self._parts, identities, strict=True)]

    def usual(self, identity: Identity) -> tuple[tuple[str, ...], str, bytes] | None:
        """The usual question, one unit of one who is called as in a key, in the least time: who is counted, what tells
        the request from all others, and what to send. None: it takes longer."""
        if type(identity) is not Id and not (
            self._by_user and type(identity) is str and identity.isalnum() and identity.isascii() and identity != GLOBAL
        ):
            return None
        form, name = self._forms.get(len(identity)), f"{_process}{next(_number)}"
        if form is None:
            if not 0 < len(identity) <= LONGEST:
                return None
            form = self._forms[len(identity)] = self._form(len(identity))
        if len(name) != LENGTH:
            return None
        before, after = form
        return (identity,) * len(self.policies), name, f"{identity.join(before)}{name}{after}".encode("ascii")

    def pack(self, identities: Sequence[str], now: str | int, unique: str, cost: int, charge: bool) -> bytes:
        """In Redis' protocol. Identities are ASCII (or this raises), so a length in characters is one in bytes."""
        before, after = self._override
        same = identities.count(identities[0]) == len(identities)  # as it is mostly
        others = [f"{before}{who}{after}" for who in (identities[:1] if same else identities)]
        keys = [*self.keys(identities), *others]
        words = ["EVALSHA", self.script.sha, len(keys), *keys, now, unique, cost, int(charge), *self._words]
        packed = [f"*{len(words)}\r\n", *(f"${len(str(word))}\r\n{word}\r\n" for word in words)]
        return "".join(packed).encode("ascii")

    def _form(self, length: int) -> tuple[list[str], str]:
        """What is around a name of so many letters in the usual question, and what follows the request's."""
        who, name = "\0" * length, "\1" * LENGTH
        before, after = self.pack([who] * len(self.policies), "", name, 1, True).decode().split(name)
        return before.split(who), after

    def subset(self, part: Sequence[int]) -> PolicySet:
        """Those that are in one slot of a cluster."""
        if len(part) == len(self.policies):
            return self
        chosen = tuple(part)
        if chosen not in self._subsets:
            self._subsets[chosen] = PolicySet(tuple(self.policies[i] for i in chosen), self._config, self.site)
        return self._subsets[chosen]


LENGTH = 20  # of what tells a request from all others; after 9,000,000,000 of a process it is one more


_process, _number = os.urandom(5).hex(), itertools.count(10**9)


def _renew_process() -> None:
    global _process
    _process = os.urandom(5).hex()


os.register_at_fork(after_in_child=_renew_process)


def unique() -> str:
    """Tells a request from all others, of all processes."""
    return f"{_process}{next(_number)}"


MOST_SETS = 1024


class _Sets:
    """Policy sets that were made ready, for as long as the settings stay.

    By the identity of what was asked for, as to compare policies takes long; it is kept with its set, so that no other
    has that identity.
    """

    def __init__(self, config: Config | None, caches: Any) -> None:
        self.config, self.caches = config, caches
        # Where there is none, `read_before` cannot tell whether there still is none.
        self.rate_limiter = conf.read_before.get("RATE_LIMITER") or self
        self.known: dict[Any, tuple[Any, PolicySet]] = {}


_sets = _Sets(None, None)


def policy_set(policy: Policies) -> PolicySet:
    """The policies that are meant."""
    sets, settings = _sets, conf.read_before
    if settings.get("RATE_LIMITER") is not sets.rate_limiter or settings.get("CACHES") is not sets.caches:
        sets = _present_sets()
    known = sets.known.get(policy if policy is None or type(policy) is str else id(policy))
    return _made_ready(policy, sets.known) if known is None else known[1]


def _made_ready(policy: Policies, known: dict[Any, tuple[Any, PolicySet]]) -> PolicySet:
    """A set that was asked for by another object: a list may have changed since, and a text may be the same."""
    every = listed(policy)
    key = tuple([id(each) if isinstance(each, Policy) else each for each in every])
    found = known.get(key)
    if len(known) >= MOST_SETS:
        known.clear()
    if found is None:
        config = conf.config()
        found = known[key] = every, PolicySet(chosen(every, config), config, backend.site())
    if policy is None or isinstance(policy, (str, Policy, tuple)):  # what is asked for so, is the same next time
        known[policy if policy is None or type(policy) is str else id(policy)] = policy, found[1]
    return found[1]


def _present_sets() -> _Sets:
    global _sets
    config, caches = conf.config(), conf.caches()
    if _sets.config is not config or _sets.caches is not caches:
        _sets = _Sets(config, caches)
    return _sets


def listed(policy: Policies) -> tuple[str | Policy | None, ...]:
    return (policy,) if policy is None or isinstance(policy, (str, Policy)) else tuple(policy)


def chosen(policies: Sequence[str | Policy | None], config: Config) -> tuple[Policy, ...]:
    """The policies that are meant, each once."""
    chosen: dict[str, Policy] = {}
    for each in policies:
        found = each if isinstance(each, Policy) else config.policy(each or DEFAULT)
        if chosen.setdefault(found.name, found) != found:
            raise PolicyError(f"Two different policies are named {found.name!r}; a policy's name is its counter.")
    if not chosen:
        raise ValueError("There is no policy to decide by; name one, or leave it out for the default.")
    return tuple(chosen.values())
