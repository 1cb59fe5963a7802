"""Identities as operators know them: their labels, and the search for them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from django.contrib.auth import get_permission_codename, get_user_model
from django.core.exceptions import ValidationError
from django.db.models import Q
from django.utils.translation import gettext

from .. import conf
from ..core.keys import (
    UNKNOWN_NAME,
    EncodedIdentity,
    decode,
    encode,
    encode_name,
    encode_network,
    parse_address,
    split_login,
)
from ..core.text import printable

MAX_USERS = 20  # that a search returns
MAX_COMPARED = 1_000  # users whose names are compared with a misspelled one
MAX_SEARCH = 1000  # characters; SQLite raises an error for a pattern of 50,000
MAX_ENCODED = 200  # characters of an encoded identity, as in the database

# What `encode` returns: printable ASCII without : / = { }, after the kind and a = if
# it is not a user. A login has another identity in it.
ENCODED = re.compile(r"\A[!-.0-9;<>-z|~]+(=[!-.0-9;<>-z|~]+){0,2}\Z")


class IdentityLabel(NamedTuple):
    """An identity with the text to show for it, and the user that it is, if any."""

    encoded: EncodedIdentity
    kind: str
    text: str
    user: Any = None
    address: str = ""  # of a login, which is that of a user or a name

    @property
    def name(self) -> str:
        """The username, the IP address or another text."""
        if self.kind == "global":
            return gettext("all clients")
        name = printable(self.text)
        if self.user is not None:
            name = printable(self.user.get_username())
        if not self.address:
            return name
        words = {"user": name, "address": printable(self.address)}
        return gettext("%(user)s at %(address)s") % words

    @property
    def argument(self) -> str:
        """The identity as `resolve` takes it, for the commands."""
        if self.kind in ("user", "ip", "net"):
            return self.name
        return self.encoded

    @property
    def kind_name(self) -> str:
        """The kind of identity, translated."""
        names = {
            "user": gettext("user"),
            "ip": gettext("IP address"),
            "net": gettext("network"),
            "token": gettext("token"),
            "header": gettext("header"),
            "login": gettext("login"),
            "name": gettext("unknown name"),
            "global": gettext("global"),
        }

        return names.get(self.kind, self.kind)

    @property
    def is_digest(self) -> bool:
        """Whether the text is a digest, which may be shortened."""
        kinds = ("token", "header", UNKNOWN_NAME)
        return self.kind in kinds or self.text.startswith("blake2=")

    @property
    def is_unknown_user(self) -> bool:
        """Whether it is written like a user, and no user is."""
        return self.kind == "user" and self.user is None and not self.is_digest


def describe(identities: Iterable[str]) -> dict[str, IdentityLabel]:
    """Return a label for each encoded identity; one query fetches all users."""
    logins = {identity: split_login(identity) for identity in identities}
    named = {identity: decode(name) for identity, (name, _) in logins.items()}
    users = _users_by_key(text for kind, text in named.values() if kind == "user")

    labels = {}
    for identity, (_, address) in logins.items():
        labels[identity] = IdentityLabel(
            EncodedIdentity(identity),
            decode(identity)[0],
            named[identity][1],
            users.get(named[identity]),
            address,
        )
    return labels


def describe_one(identity: str) -> IdentityLabel:
    """Return the label of an encoded identity."""
    return describe([identity])[identity]


def is_encoded(text: str) -> bool:
    """Return whether text has the form of an encoded identity."""
    return len(text) <= MAX_ENCODED and ENCODED.search(text) is not None


def encode_address(text: str) -> EncodedIdentity | None:
    """Return the encoded identity of an address or a network; None for other text."""
    encoding = conf.config().encoding
    if parse_address(text) is not None:
        return EncodedIdentity(encode_name("ip", text, encoding))
    if "/" not in text:
        return None

    try:
        return EncodedIdentity(encode_network(text, encoding))
    except ValueError:
        return None


def resolve(text: str) -> EncodedIdentity:
    """Return the identity that an argument of a command names.

    A username or user ID, an address, a network, or an encoded identity; ValueError
    if it is none of them.
    """
    text = text.strip()
    if not text:
        raise ValueError(
            "An identity is empty; name a user, an IP address or a network."
        )

    address = encode_address(text)
    if address is not None:
        return address
    if "/" in text:
        raise ValueError(f"{text!r} is not a network.")
    if "=" in text and is_encoded(text):
        return EncodedIdentity(text)

    model: Any = get_user_model()
    user = model._default_manager.filter(**{model.USERNAME_FIELD: text}).first()
    if user is not None:
        text = str(user.pk)

    return EncodedIdentity(encode(text))


def is_unknown_user(identity: str) -> bool:
    """Return whether an encoded identity is that of a user whom nobody is."""
    return describe_one(identity).is_unknown_user


def nearest_users(text: str) -> list[str]:
    """Return the usernames that are spelled most like a text, the nearest first."""
    text = text[:MAX_SEARCH]
    model: Any = get_user_model()
    field = model.USERNAME_FIELD
    # One wrong letter leaves one half of the name as it is.
    half = len(text) // 2
    query = Q(**{f"{field}__istartswith": text[:half]})
    query |= Q(**{f"{field}__iendswith": text[half:]})
    users = model._default_manager.filter(query)

    names = map(str, users.values_list(field, flat=True)[:MAX_COMPARED])
    return difflib.get_close_matches(text, names)


def search(text: str, operator: Any) -> list[EncodedIdentity]:
    """Return the identities that match a text, for an operator to choose from.

    Users by name, ID or e-mail, an IP address or network, an encoded identity.
    """
    text = text.strip()
    if not text or len(text) > MAX_SEARCH:
        return []

    users = _find_users(text, by_email=sees_users(operator))
    identities = [EncodedIdentity(encode(str(user.pk))) for user in users]
    address = encode_address(text)
    if address is not None:
        identities.append(address)
    if ("=" in text or "%" in text) and is_encoded(text):
        identities.append(EncodedIdentity(text))
    else:
        identities.append(EncodedIdentity(encode(text)))

    return list(dict.fromkeys(identities))


def sees_users(operator: Any) -> bool:
    """Return whether an operator may see names and e-mail addresses of users."""
    options = get_user_model()._meta
    codenames = [get_permission_codename(verb, options) for verb in ("view", "change")]
    return any(operator.has_perm(f"{options.app_label}.{name}") for name in codenames)


def _users_by_key(texts: Iterable[str]) -> dict[tuple[str, str], Any]:
    """Return the users whose primary keys are written like this, as decoded."""
    keys = [_primary_key(text) for text in texts]
    users = get_user_model()._default_manager.in_bulk(
        [key for key in keys if key is not None]
    )
    return {("user", str(key)): user for key, user in users.items()}


def _find_users(text: str, *, by_email: bool) -> Any:
    model: Any = get_user_model()
    query = Q(**{f"{model.USERNAME_FIELD}__icontains": text})

    email = getattr(model, "EMAIL_FIELD", "email")
    has_email = any(field.name == email for field in model._meta.fields)
    if by_email and has_email:
        query |= Q(**{f"{email}__icontains": text})

    key = _primary_key(text)
    if key is not None:
        query |= Q(pk=key)

    users = model._default_manager.filter(query)
    return users.order_by(model.USERNAME_FIELD)[:MAX_USERS]


def _primary_key(text: str) -> Any:
    """Return text as a primary key of the user model; None if it is not one.

    Text that only means the same key, such as `007`, is not one.
    """
    field: Any = get_user_model()._meta.pk
    try:
        key = field.to_python(text)
        field.run_validators(key)
    except (ValidationError, ValueError, AttributeError, OverflowError):
        return None

    if str(key) != text:
        return None

    return key
