"""What logins count of a user: the name, and the name at each address."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

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

MAX_WATCHED = 300  # per policy


class Name(NamedTuple):
    """A name, as it is encoded where a user has it and where nobody does."""

    user_id: str
    digest: str

    @property
    def unknown(self) -> EncodedIdentity:
        return EncodedIdentity(f"{UNKNOWN_NAME}={self.digest}")

    def is_in(self, identity: str) -> bool:
        """Return whether an encoded identity is this name at an address."""
        kind, text = decode(identity)
        name = text.rpartition("@")[0]
        return (kind, name) in ((LOGIN, self.user_id), (UNKNOWN_NAME, self.digest))


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


def of_user(identity: EncodedIdentity) -> Iterator[EncodedIdentity]:
    """Yield the identities that logins count of a user.

    Of addresses, those that came near a limit.
    """
    name = _name_of(identity)
    if name is None:
        return
    yield name.unknown
    for policy in policies(NAME_AND_ADDRESS):
        for _policy, watched in reader.watched(policy.name, limit=MAX_WATCHED):
            if name.is_in(watched):
                yield EncodedIdentity(watched)


def reset(identity: EncodedIdentity, scope: str) -> None:
    """Delete what logins count of a user at all addresses, under one policy or all.

    Every key of these policies is looked at: the watched ones may not be all.
    """
    name = _name_of(identity)
    if name is None:
        return
    for policy in policies(NAME_AND_ADDRESS):
        if scope not in ("", policy.name):
            continue
        for keys in backend.scan(f"{COUNTER_PREFIX}{policy.name}/*"):
            pairs = filter(None, map(parse_counter_key, keys))
            for found in {found for _, found in pairs if name.is_in(found)}:
                limiter.reset(found, policy)
    for policy in policies(NAME):
        if scope in ("", policy.name):
            limiter.reset(name.unknown, policy)


def _name_of(identity: str) -> Name | None:
    kind, text = decode(identity)
    if kind != "user":
        return None
    return Name(text, credential_digest(fold(text), conf.secret()))
