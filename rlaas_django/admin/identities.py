"""Identities as operators know them: users by name, IP addresses, and what to search for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.db.models import Q
from django.utils.translation import gettext

from .. import conf
from ..core.keys import EncodedIdentity, counted_address, decode, encode, parse_address
from .formats import printable

MAX_USERS = 20  # that a search returns

# What `encode` returns: printable ASCII without : / = { }, after the kind and a = if it is not a user.
_ENCODED = re.compile(r"[!-.0-9;<>-z|~]+(=[!-.0-9;<>-z|~]+)?")


class IdentityLabel(NamedTuple):
    """An identity with the text to show for it, and the user that it is, if any."""

    encoded: EncodedIdentity
    kind: str
    text: str
    user: Any = None

    @property
    def name(self) -> str:
        """The username, the IP address or another text."""
        if self.kind == "global":
            return gettext("all clients")
        return printable(self.text if self.user is None else self.user.get_username())

    @property
    def kind_name(self) -> str:
        """The kind of identity, translated."""
        names = {
            "user": gettext("user"),
            "ip": gettext("IP address"),
            "token": gettext("token"),
            "header": gettext("header"),
            "global": gettext("global"),
        }
        return names.get(self.kind, self.kind)

    @property
    def is_digest(self) -> bool:
        """Whether the text is a digest, which may be shortened."""
        return self.kind in ("token", "header") or self.text.startswith("blake2=")


def is_encoded(text: str) -> bool:
    """Return whether text has the form of an encoded identity."""
    return len(text) <= 200 and _ENCODED.fullmatch(text) is not None


def describe(identities: Iterable[str]) -> dict[str, IdentityLabel]:
    """Return a label for each encoded identity, with all users fetched in one query."""
    decoded = {each: decode(each) for each in identities}
    keys = {each: key for each, (kind, text) in decoded.items() if kind == "user" and (key := _primary_key(text))}
    users = get_user_model()._default_manager.in_bulk([*keys.values()]) if keys else {}
    return {
        each: IdentityLabel(EncodedIdentity(each), kind, text, users.get(keys.get(each)))
        for each, (kind, text) in decoded.items()
    }


def describe_one(identity: str) -> IdentityLabel:
    """Return the label of one encoded identity."""
    return describe([identity])[identity]


def search(text: str) -> list[EncodedIdentity]:
    """Return the identities that match: users by name, ID or e-mail address, an IP address, or an encoded identity."""
    text = text.strip()
    if not text:
        return []
    found = [EncodedIdentity(encode(str(user.pk))) for user in _users(text)]
    if parse_address(text) is not None:
        found.append(EncodedIdentity(f"ip={encode(counted_address(text, conf.config().encoding.ipv6_prefix))}"))
    found.append(EncodedIdentity(text if ("=" in text or "%" in text) and is_encoded(text) else encode(text)))
    return list(dict.fromkeys(found))


def _users(text: str) -> Iterable[Any]:
    model: Any = get_user_model()
    email = getattr(model, "EMAIL_FIELD", "email")
    query = Q(**{f"{model.USERNAME_FIELD}__icontains": text})
    if any(field.name == email for field in model._meta.fields):
        query |= Q(**{f"{email}__icontains": text})
    if (key := _primary_key(text)) is not None:
        query |= Q(pk=key)
    users: Iterable[Any] = model._default_manager.filter(query)[:MAX_USERS]
    return users


def _primary_key(text: str) -> Any:
    """Return text as a primary key of the user model, or None unless the key is written exactly like this."""
    field: Any = get_user_model()._meta.pk
    try:
        value = field.to_python(text)
        field.run_validators(value)
    except (ValidationError, ValueError, AttributeError, OverflowError):
        return None
    return value if str(value) == text else None
