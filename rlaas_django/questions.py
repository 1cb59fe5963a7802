"""A set of policies made ready to be asked: its command is packed once, with only what varies left to be filled in."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from functools import lru_cache

from .conf import Config
from .identity import Identity, identify, is_plain, key_parts, kind_of, override_parts
from .policy import FIXED_WINDOW, TOKEN_BUCKET, Policy, PolicyError, Terms
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
        self.script = CHECK[frozenset(term.algo for term in self.terms)]
        self.names = frozenset(policy.name for policy in policies)
        self.may_change = any(policy.shadow for policy in policies)  # a refusal may be told otherwise next time
        self._by_user = all(kind_of(policy.key) in ("user", "user_or_ip") for policy in policies)
        self._parts = [
            _sized(*key_parts(policy, term.algo, term.window // 1000, tagged=site.clustered))
            for policy, term in zip(policies, self.terms, strict=True)
        ]
        self._override = _sized(*override_parts(tagged=site.clustered))
        self.whole = range(len(policies))
        self.in_one_call = config.enabled and not site.clustered
        # By how many identities they count: one, or as many as there are policies.
        self._heads = {
            identities: f"*{7 + keys + 6 * len(policies)}\r\n{_words('EVALSHA', self.script.sha, keys)}"
            for identities in (1, len(policies))
            for keys in (len(policies) + identities,)
        }
        self._tail = "".join(
            _words(*term, int(policy.shadow), policy.name) for policy, term in zip(policies, self.terms, strict=True)
        )
        self._config = config
        self._subsets: dict[tuple[int, ...], PolicySet] = {}

    def identities(self, identity: Identity) -> tuple[str, ...]:
        if self._by_user and type(identity) is str and is_plain(identity):
            return (identity,) * len(self.policies)
        return tuple([identify(identity, policy) for policy in self.policies])

    def keys(self, identities: Sequence[str]) -> list[str]:
        """Where the policies count."""
        return [f"{before}{who}{after}" for (before, after, _), who in zip(self._parts, identities, strict=True)]

    def pack(self, identities: Sequence[str], now: str | int, unique: str, cost: int, charge: bool) -> bytes:
        """In Redis' protocol. Identities are ASCII (or this raises), so a length in characters is one in bytes."""
        time = _NO_TIME if now == "" else _words(now)
        price = _ONE if cost == 1 else _words(cost)
        rest = f"{time}${len(unique)}\r\n{unique}\r\n{price}{_ONE if charge else _ZERO}{self._tail}"
        first, last, size = self._override
        if len(identities) == 1:  # as it is nearly always
            ((before, after, length),), (who,) = self._parts, identities
            counter = f"${length + len(who)}\r\n{before}{who}{after}\r\n"
            return f"{self._heads[1]}{counter}${size + len(who)}\r\n{first}{who}{last}\r\n{rest}".encode("ascii")
        counted = identities[:1] if len(set(identities)) == 1 else identities
        words = [self._heads[len(counted)]]
        for (before, after, length), who in zip(self._parts, identities, strict=True):
            words.append(f"${length + len(who)}\r\n{before}{who}{after}\r\n")
        words += [f"${size + len(who)}\r\n{first}{who}{last}\r\n" for who in counted]
        return "".join([*words, rest]).encode("ascii")

    def subset(self, part: Sequence[int]) -> PolicySet:
        """Those that are in one slot of a cluster."""
        if len(part) == len(self.policies):
            return self
        chosen = tuple(part)
        if chosen not in self._subsets:
            self._subsets[chosen] = PolicySet(tuple(self.policies[i] for i in chosen), self._config, self.site)
        return self._subsets[chosen]


def _sized(before: str, after: str) -> tuple[str, str, int]:
    """What is around an identity in a key, and how long it is."""
    return before, after, len(before) + len(after)


def _words(*words: str | int) -> str:
    return "".join(f"${len(str(word))}\r\n{word}\r\n" for word in words)


_NO_TIME, _ZERO, _ONE = _words(""), _words(0), _words(1)


class _Names:
    """Tell a request from all others, of all processes."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self.process, self.number = os.urandom(6).hex(), itertools.count()

    def __call__(self) -> str:
        return f"{self.process}{next(self.number):x}"


unique = _Names()
