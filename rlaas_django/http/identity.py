"""From a request to the identity that a policy counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any
from uuid import UUID

from django.http import HttpRequest
from django.utils.module_loading import import_string

from .. import log
from ..core.keys import Name, key_kind
from ..core.policy import KeyFunction, Policy
from .proxies import client_address


class RequestIdentity(Mapping[Any, Any]):
    """The names of a request's client by kind: `user`, `ip`, `token`, `header:...`; read when they are asked for."""

    def __init__(self, request: HttpRequest) -> None:
        self.request = request
        self._results: dict[Any, Name | None] = {}  # of the site's key functions, which are called once

    def call_key_function(self, key: str | KeyFunction) -> None:
        """Call the site's key function, if the key is one."""
        if key_kind(key) == "key":
            self._results[key] = _call(key_function(key), self.request)

    def get(self, key: Any, default: Any = None) -> Any:
        """Not by way of `[]`, whose KeyError could be one of the site's own function."""
        if key == "ip":  # the most frequent, and the one that others fall back to
            return client_address(self.request)
        kind, _, argument = key.partition(":") if isinstance(key, str) else ("key", "", "")
        match kind:
            case "user":
                return _user(self.request)
            case "token":
                return _credential(self.request.headers.get("Authorization", ""))
            case "header" if argument:
                return self.request.headers.get(argument)
            case "get" if argument:
                return self.request.GET.get(argument)
            case "post" if argument:
                return self.request.POST.get(argument)
        if key != "key" and key_kind(key) == "key":
            if key not in self._results:
                self.call_key_function(key)
            return self._results[key]
        return default

    def __getitem__(self, key: Any) -> Any:
        if (found := self.get(key)) is None:
            raise KeyError(key)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(("user", "ip", "token"))

    def __len__(self) -> int:
        return 3


def calls_site_functions(policy: Policy) -> bool:
    """Return whether a function of the site's gives the key or the rate."""
    return key_kind(policy.key) == "key" or callable(policy.rate)


def needs_user(policy: Policy) -> bool:
    """Return whether the user matters: the policy counts users, or a function of the site's may read `request.user`."""
    return policy.key in ("user", "user_or_ip") or calls_site_functions(policy)


@lru_cache(maxsize=256)
def key_function(key: str | KeyFunction) -> KeyFunction:
    """Return a key function, importing its dotted path."""
    if not isinstance(key, str):
        return key
    found: KeyFunction = import_string(key)
    return found


def _call(function: KeyFunction, request: HttpRequest) -> Name | None:
    name = function(request)
    if name is None or (isinstance(name, (str, int, UUID)) and not isinstance(name, bool)):
        return name
    log.error("The key %r returned a %s, which is no identity; the address counts.", function, type(name).__name__)
    return None


def _user(request: HttpRequest) -> Name | None:
    user = getattr(request, "user", None)
    return str(user.pk) if user is not None and user.is_authenticated and user.pk is not None else None


def _credential(header: str) -> str:
    scheme, space, credential = header.strip().partition(" ")
    return credential.strip() if space else scheme
