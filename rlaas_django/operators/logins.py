"""What logins count of a user: the name, and the name at each address."""

from __future__ import annotations

from collections.abc import Container, Iterator

from .. import backend, conf, limiter
from ..core.keys import (
    COUNTER_PREFIX,
    LOGIN,
    UNKNOWN_NAME,
    EncodedIdentity,
    credential_digest,
    decode,
    parse_counter_key,
)
from ..core.login import NAME, NAME_AND_ADDRESS
from ..core.policy import Policy
from ..core.text import fold
from ..stats import reader
from ..stats.policies import all_policies

MAX_WATCHED = 300  # per policy


def policies(counted: str) -> tuple[Policy, ...]:
    """Return the policies of logins that count this."""
    return conf.config().login.get(counted, ())


def counts(policy: Policy, identity: str) -> bool | None:
    """Return whether a policy of logins counts an identity; None for another policy."""
    kind, text = decode(identity)
    if policy in policies(NAME_AND_ADDRESS):
        return kind in (LOGIN, UNKNOWN_NAME) and "@" in text
    if policy in policies(NAME) and kind == UNKNOWN_NAME:
        return "@" not in text
    return False if kind in (LOGIN, UNKNOWN_NAME) else None


def of_user(
    identity: EncodedIdentity, known: Container[str]
) -> Iterator[EncodedIdentity]:
    """Yield the identities that logins count of a user, under known policies.

    Of addresses, those that came near a limit.
    """
    counting = _known_policies(known)
    if not counting or decode(identity)[0] != "user":
        return

    unknown = _unknown_name(identity)
    yield unknown
    for policy in counting:
        for _policy, watched in reader.watched(policy.name, limit=MAX_WATCHED):
            if _is_at_address(watched, identity, unknown):
                yield EncodedIdentity(watched)


def reset(identity: EncodedIdentity, scope: str) -> None:
    """Delete what logins count of a user at all addresses, under one policy or all.

    Every key of these policies is looked at: the watched ones may not be all.
    """
    counting = _known_policies(all_policies())
    if not counting or decode(identity)[0] != "user":
        return

    unknown = _unknown_name(identity)
    for policy in counting:
        if scope not in ("", policy.name):
            continue
        found = {unknown}
        for keys in backend.scan(f"{COUNTER_PREFIX}{policy.name}/*"):
            for _policy, counted in filter(None, map(parse_counter_key, keys)):
                if _is_at_address(counted, identity, unknown):
                    found.add(counted)
        for counted in found:
            limiter.reset(counted, policy)


def _known_policies(known: Container[str]) -> list[Policy]:
    """Return the policies that count users, of those that are in use."""
    counting = policies(NAME_AND_ADDRESS) + policies(NAME)
    return [policy for policy in counting if policy.name in known]


def _unknown_name(identity: str) -> EncodedIdentity:
    """Return what logins count where nobody has the name."""
    name = decode(identity)[1]
    digest = credential_digest(fold(name), conf.secret())
    return EncodedIdentity(f"{UNKNOWN_NAME}={digest}")


def _is_at_address(counted: str, identity: str, unknown: str) -> bool:
    """Return whether an identity is this user, or this name, at an address."""
    return counted.rpartition("@")[0] in (f"{LOGIN}={identity}", unknown)
