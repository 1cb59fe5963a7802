"""Labels for people: identities as operators know them, the search for them, and durations."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.db.models import Q
from django.utils.translation import gettext, pgettext

from .. import conf
from ..core.keys import (
    EncodedIdentity,
    counted_address,
    decode,
    encode,
    encode_network,
    parse_address,
)
from ..core.text import printable

MAX_USERS = 20  # that a search returns
MAX_SEARCH = (
    1000  # characters of a search text; SQLite raises an error for a pattern of 50,000
)

# What `encode` returns: printable ASCII without : / = { }, after the kind and a = if it is not a user.
ENCODED = re.compile(r"\A[!-.0-9;<>-z|~]+(=[!-.0-9;<>-z|~]+)?\Z")


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
    def argument(self) -> str:
        """The identity as `resolve` takes it, for the commands: a name, or encoded where a name is not enough."""
        return self.name if self.kind in ("user", "ip", "net") else self.encoded

    @property
    def kind_name(self) -> str:
        """The kind of identity, translated."""
        names = {
            "user": gettext("user"),
            "ip": gettext("IP address"),
            "net": gettext("network"),
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
    return len(text) <= 200 and ENCODED.search(text) is not None


def describe(identities: Iterable[str]) -> dict[str, IdentityLabel]:
    """Return a label for each encoded identity, with all users fetched in one query."""
    decoded = {each: decode(each) for each in identities}
    keys = {
        each: key
        for each, (kind, text) in decoded.items()
        if kind == "user" and (key := _primary_key(text))
    }
    users = get_user_model()._default_manager.in_bulk([*keys.values()]) if keys else {}
    return {
        each: IdentityLabel(
            EncodedIdentity(each), kind, text, users.get(keys.get(each))
        )
        for each, (kind, text) in decoded.items()
    }


def search(text: str, *, by_email: bool) -> list[EncodedIdentity]:
    """Return the identities that match: users by name, ID or e-mail, an IP address or network, an encoded identity."""
    text = text.strip()
    if not text or len(text) > MAX_SEARCH:
        return []
    found = [EncodedIdentity(encode(str(user.pk))) for user in _users(text, by_email)]
    if address := address_identity(text):
        found.append(address)
    elif "/" in text:
        with suppress(ValueError):  # it is no network
            found.append(EncodedIdentity(encode_network(text, conf.config().encoding)))
    found.append(
        EncodedIdentity(
            text if ("=" in text or "%" in text) and is_encoded(text) else encode(text)
        )
    )
    return list(dict.fromkeys(found))


def address_identity(text: str) -> EncodedIdentity:
    """Return the encoded identity of an IP address; an empty one if text is none."""
    if parse_address(text) is None:
        return EncodedIdentity("")
    return EncodedIdentity(
        f"ip={encode(counted_address(text, conf.config().encoding.ipv6_prefix))}"
    )


def _users(text: str, by_email: bool) -> Iterable[Any]:
    model: Any = get_user_model()
    email = getattr(model, "EMAIL_FIELD", "email")
    query = Q(**{f"{model.USERNAME_FIELD}__icontains": text})
    if by_email and any(field.name == email for field in model._meta.fields):
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


def resolve(text: str) -> EncodedIdentity:
    """Return the one identity that text names: a username or user ID, an address, a network, or an encoded identity."""
    text, encoding = text.strip(), conf.config().encoding
    if not text:
        raise ValueError(
            "An identity is empty; name a user, an IP address or a network."
        )
    if parse_address(text) is not None:
        return EncodedIdentity(
            f"ip={encode(counted_address(text, encoding.ipv6_prefix))}"
        )
    if "/" in text:
        return EncodedIdentity(encode_network(text, encoding))
    if "=" in text and is_encoded(text):
        return EncodedIdentity(text)
    model: Any = get_user_model()
    user = model._default_manager.filter(**{model.USERNAME_FIELD: text}).first()
    return EncodedIdentity(encode(text if user is None else str(user.pk)))


def duration(seconds: float) -> str:
    """Return seconds as `38 s`, `4 min 10 s`, `2 h 5 min` or `3 d 4 h`, rounded up; no line breaks before a unit."""
    if math.isinf(seconds):
        return gettext("never")
    left = math.ceil(seconds)
    parts = [
        (left // 86_400, pgettext("unit of time", "d")),
        (left // 3_600 % 24, pgettext("unit of time", "h")),
        (left // 60 % 60, pgettext("unit of time", "min")),
        (left % 60, pgettext("unit of time", "s")),
    ]
    first = next(
        (i for i, (number, _unit) in enumerate(parts) if number), len(parts) - 1
    )
    shown = parts[first : first + 2]
    return " ".join(
        f"{number}\u00a0{unit}" for number, unit in shown if number or len(shown) == 1
    )
