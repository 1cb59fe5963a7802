"""What logins count of a user: the name, and the name at each address."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .. import backend, conf, limiter
from ..core.keys import (
    COUNTER_PREFIX,
    EncodedIdentity,
    decode,
    encode_unknown_name,
    parse_counter_key,
    split_login,
)
from ..core.login import KINDS
from ..core.policy import Policy
from ..core.text import fold
from ..stats import reader
from ..stats.policies import all_policies

MAX_WATCHED = 300  # per policy


def kinds(policy: Policy) -> tuple[str, ...]:
    """Return the kinds of identities that a policy of logins counts."""
    for counted, policies in conf.config().login.items():
        if policy in policies:
            return KINDS[counted]
    return ()


def of_user(identity: EncodedIdentity) -> Iterator[EncodedIdentity]:
    """Yield the identities that logins count of a user.

    Of addresses, those that came near a limit.
    """
    policies = _policies()
    names = _names(identity, policies)
    yield from names
    if not names:
        return
    for policy in policies:
        for _policy, watched in reader.watched(policy, limit=MAX_WATCHED):
            if split_login(watched)[0] in names:
                yield EncodedIdentity(watched)


def reset(identity: EncodedIdentity, scope: str) -> int:
    """Delete what logins count of a user at all addresses, under one policy or all.

    Every key of these policies is looked at: the watched ones may not be all. Return
    the number of keys deleted.
    """
    policies = _policies()
    names = _names(identity, policies)
    if not names:
        return 0

    found = set()
    for keys in backend.scan(f"{COUNTER_PREFIX}login-*"):
        for policy, counted in filter(None, map(parse_counter_key, keys)):
            if scope in ("", policy) and split_login(counted)[0] in names:
                found.add((policy, counted))
    return sum(
        limiter.reset(counted, policies[policy])
        for policy, counted in found
        if policy in policies
    )


def _policies() -> dict[str, Policy]:
    """Return the policies of logins by name, where logins are limited."""
    return {name: policy for name, policy in all_policies().items() if kinds(policy)}


def _names(
    identity: EncodedIdentity, policies: Mapping[str, Policy]
) -> list[EncodedIdentity]:
    """Return how policies of logins count a user, or a name that nobody has."""
    kind, text = decode(identity)
    if kind != "user" or not policies:
        return []
    unknown = encode_unknown_name(fold(text), conf.secret())
    return [identity, EncodedIdentity(unknown)]
