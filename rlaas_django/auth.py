"""Authentication backends that limit wrong passwords.

Whatever view, form or framework calls `authenticate()`, by RATE_LIMITER['LOGIN'].
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

from django.contrib.auth import backends, get_user_model
from django.core.exceptions import (
    FieldError,
    MultipleObjectsReturned,
    ObjectDoesNotExist,
)
from django.views.decorators.debug import sensitive_variables

from . import conf
from .http.attempts import acharge, asettle, begin, charge, name_in, settle
from .runtime import registry
from .runtime.registry import LimitedView

__all__ = ["LoginRateLimitMixin", "ModelBackend"]

if TYPE_CHECKING:
    Backend = backends.BaseBackend
else:
    Backend = object


class LoginRateLimitMixin(Backend):
    """Limits the wrong passwords that an authentication backend compares.

    >>> class Backend(LoginRateLimitMixin, LDAPBackend):
    ...     pass
    """

    limits_logins = True  # for the system checks

    @sensitive_variables()
    def get_user_id(self, credentials: Mapping[str, Any]) -> Any:
        """Return the primary key of the user whom credentials name; None for nobody.

        By the name as Django's ModelBackend finds it, otherwise by the e-mail address.
        Override it where the site's users log in by something else.
        """
        name = name_in(credentials)
        model: Any = get_user_model()
        manager = model._default_manager
        email = getattr(model, "EMAIL_FIELD", "email")
        is_email = "@" in str(name) and email != model.USERNAME_FIELD

        # Both are looked up in any case: the time does not tell whether there is one.
        user_ids = set()
        # ValueError: PostgreSQL takes no NUL character.
        with suppress(ObjectDoesNotExist, MultipleObjectsReturned, ValueError):
            user_ids.add(manager.get_by_natural_key(name).pk)
        with suppress(FieldError, ValueError):  # not every model has an e-mail address
            if is_email:
                users = manager.filter(**{f"{email}__iexact": name})
                user_ids.update(users.values_list("pk", flat=True)[:2])

        # A name of one user that is the address of another is counted as a name.
        if len(user_ids) == 1:
            return user_ids.pop()
        return None

    @sensitive_variables()
    def authenticate(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the user, or None; PermissionDenied where a limit is exceeded."""
        compare = super().authenticate
        comparison = begin(self, compare, request, args, kwargs)
        if comparison is None:
            return None
        with comparison.running():
            charge(comparison)
            user = compare(request, *args, **kwargs)
        return settle(comparison, user)

    @sensitive_variables()
    async def aauthenticate(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """As `authenticate`, natively async where the backend is."""
        compare = super().aauthenticate
        comparison = begin(self, compare, request, args, kwargs)
        if comparison is None:
            return None
        with comparison.running():
            await acharge(comparison)
            user = await compare(request, *args, **kwargs)
        return await asettle(comparison, user)


class ModelBackend(LoginRateLimitMixin, backends.ModelBackend):
    """Django's ModelBackend, which compares no more passwords than limits allow."""


class LoginSource:
    """The policies of logins, for the registry."""

    def limits(self) -> list[LimitedView]:
        policies = chain.from_iterable(conf.config().login.values())
        return [LimitedView("authenticate()", tuple(policies), {})]


_source = LoginSource()  # the registry keeps weak references
registry.sources.add(_source)
