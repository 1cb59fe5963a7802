"""A mixin for the admin of a site's own user model."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.http import HttpRequest
from django.template.loader import render_to_string
from django.urls import reverse
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from .. import backend
from ..core.keys import EncodedIdentity, encode
from . import panel


class RateLimitsOfUser:
    """Add a user's usage to the change page of any user model, for staff who may view the panel.

    >>> class MyUserAdmin(RateLimitsOfUser, UserAdmin): ...
    """

    admin_site: admin.AdminSite  # of the ModelAdmin that this is mixed into

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        """Add the usage."""
        return [*super().get_readonly_fields(request, obj), "rate_limits"]  # type: ignore[misc]

    def get_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        """Leave the usage out of the other fields: it has a fieldset of its own."""
        return [name for name in super().get_fields(request, obj) if name != "rate_limits"]  # type: ignore[misc]

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        """Add the fieldset of an existing user, for staff who may view the panel."""
        fieldsets = [*super().get_fieldsets(request, obj)]  # type: ignore[misc]
        user: Any = request.user
        if obj is None or not any(user.has_perm(f"rlaas_django.{verb}_ratelimit") for verb in ("view", "change")):
            return fieldsets
        return [*fieldsets, (_("Rate limits"), {"fields": ["rate_limits"]})]

    @property
    def media(self) -> forms.Media:
        """Add the panel's style sheet."""
        media: forms.Media = super().media  # type: ignore[misc]
        return media + forms.Media(css={"all": ["rlaas_django/panel.css"]})

    @admin.display(description=gettext_lazy("Usage"))
    def rate_limits(self, user: Any) -> SafeString:
        """Render the usage of a user."""
        identity = EncodedIdentity(encode(str(user.pk)))
        context: dict[str, Any] = {}
        try:
            rows = panel.identity_rows(identity)
        except backend.UnavailableError as error:
            context["error"] = error
        else:
            context["rows"] = [row for row in rows if row.outcome.current_count or row.override]
        context["page"] = reverse(
            "admin:rlaas_django_ratelimit_identity",
            query={"id": str(identity)},
            current_app=self.admin_site.name,
        )
        return render_to_string("rlaas_django/admin/user.html", context)
