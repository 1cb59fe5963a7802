"""The panel as a ModelAdmin, its URLs, permissions and responses; and a mixin for the admin of users."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.utils import unquote
from django.contrib.auth import get_user_model
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.template.loader import render_to_string
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_POST

from .. import backend
from ..core.keys import EncodedIdentity, encode
from ..models import OperatorAction, Override, RateLimit
from ..operators import actions as operations
from ..operators import usage
from ..operators.identities import is_encoded
from . import actions, history, pages, policy_pages, refusal_log
from .text import sees_users

View = Callable[..., HttpResponseBase]


class RateLimitAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """The pages of the panel in place of a change list: the model has no table."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_delete_permission(
        self, request: HttpRequest, obj: RateLimit | None = None
    ) -> bool:
        return False

    def get_urls(self) -> list[URLPattern]:
        """Return the URLs of the panel, named `admin:rlaas_django_ratelimit_<name>`."""
        views: list[tuple[str, str, View]] = [
            ("", "changelist", self._page("overview", policy_pages.overview)),
            ("policy/", "policy", self.policy),
            ("clients/", "clients", self._page("clients", pages.clients)),
            ("identity/", "identity", self.identity),
            ("refusals/", "refusals", self._page("refusals", refusal_log.page)),
            ("refusals.csv", "refusals_csv", self.refusals_csv),
            ("shadow/", "shadow", self._page("shadow", policy_pages.shadow)),
            ("overrides/", "overrides", self._page("overrides", pages.overrides)),
            (
                "overrides/add/",
                "add_override",
                self._page("add_override", pages.add_override),
            ),
            ("history/", "history", self._page("history", pages.history)),
            ("act/", "act", require_POST(self.act)),
            ("end/", "end", require_POST(self.end)),
            ("<path:object_id>/change/", "change", self.change),
        ]
        return [
            path(route, self._wrap(view), name=f"rlaas_django_ratelimit_{name}")
            for route, name, view in views
        ]

    def _page(self, name: str, context: Callable[[HttpRequest], pages.Context]) -> View:
        return lambda request: self._render(request, name, context(request))

    def _wrap(self, view: View) -> Any:
        """Require the permission to view, or to change, and respond with 503 while Redis is unavailable."""

        def wrapped(request: HttpRequest, **kwargs: str) -> HttpResponseBase:
            acts = request.method == "POST"
            if not (
                self.has_change_permission(request)
                if acts
                else self.has_view_or_change_permission(request)
            ):
                raise PermissionDenied
            try:
                return view(request, **kwargs)
            except backend.UnavailableError as error:
                context = {
                    "title": _("Redis is unavailable"),
                    "error": error,
                    "acted": acts,
                }
                return self._render(
                    request,
                    "unavailable",
                    {**context, "breakers": usage.open_breakers()},
                    status=503,
                )

        return self.admin_site.admin_view(update_wrapper(wrapped, view))

    def policy(self, request: HttpRequest) -> HttpResponse:
        """Show one policy; an unknown name is searched for in the overview."""
        context = policy_pages.policy(request)
        if context is None:
            return self._redirect("changelist", q=request.GET.get("policy", ""))
        return self._render(request, "policy", context)

    def identity(
        self, request: HttpRequest, form: actions.ActionForm | None = None
    ) -> HttpResponse:
        """Show one identity; any other text in its place is searched for."""
        encoded = EncodedIdentity(
            request.GET.get("id") or request.POST.get("identity", "")
        )
        if not is_encoded(encoded):
            return self._redirect("clients", **({"q": encoded} if encoded else {}))
        context = pages.identity(encoded, form, request.GET.get("action", ""))
        context["live_url"] = _url(self.admin_site, "identity", id=encoded)
        return self._render(request, "identity", context)

    def refusals_csv(self, request: HttpRequest) -> HttpResponse:
        """Download the refusal log, filtered like the page."""
        headers = {"Content-Disposition": 'attachment; filename="refusals.csv"'}
        response = HttpResponse(content_type="text/csv; charset=utf-8", headers=headers)
        refusal_log.write_csv(response, request)
        return response

    def change(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Redirect from the entries of the admin log, which link to the change page of an object."""
        return self._redirect("identity", id=unquote(object_id))

    def act(self, request: HttpRequest) -> HttpResponse:
        """Perform an action on an identity, after confirmation."""
        form = actions.ActionForm(request.POST, policies=usage.policies())
        if not form.is_valid():
            return self.identity(request, form)
        identity = form.cleaned_data["identity"]
        if not form.cleaned_data["confirmed"]:
            hidden = [
                (name, request.POST.get(name, ""))
                for name in form.fields
                if name != "confirmed"
            ]
            question, reason = actions.confirmation(form), form.cleaned_data["reason"]
            context = {
                "question": question,
                "consequences": actions.consequences(form),
                "reason": reason,
            }
            return self._confirm(request, "act", identity, **context, hidden=hidden)
        with transaction.atomic():  # no override without its log entry
            self._report(request, actions.perform(form, _operator(request)))
        return self._redirect("identity", id=identity)

    def end(self, request: HttpRequest) -> HttpResponse:
        """End an override, after confirmation."""
        key = request.POST.get("override", "")
        override = (
            Override.objects.filter(pk=key).first()
            if key.isdecimal() and len(key) < 19
            else None
        )
        if override is None:
            return self._redirect("overrides")
        if "ask" in request.POST:
            text = _(
                "End the override %(override)s? The policy applies again from the next request."
            )
            question = text % {"override": actions.override_words(override)}
            return self._confirm(
                request,
                "end",
                override.identity,
                question=question,
                hidden=[("override", key)],
            )
        with transaction.atomic():
            self._report(request, operations.end_override(_operator(request), override))
        return self._redirect("overrides")

    def _confirm(
        self, request: HttpRequest, target: str, identity: str, **context: Any
    ) -> HttpResponse:
        """Ask for confirmation; the form of the page posts `hidden` to `target` again."""
        page = {
            "title": _("Are you sure?"),
            "target": target,
            "back": _url(self.admin_site, "identity", id=identity),
        }
        return self._render(request, "confirm", {**page, **context})

    def _report(self, request: HttpRequest, action: OperatorAction) -> None:
        """Show what was done to the operator, and write it to the admin log."""
        identity = RateLimit(pk=action.identity)
        identity.words = history.words(action)
        message = (
            f"{identity.words}: {action.reason}"
            if action.reason
            else f"{identity.words}."
        )
        self.log_change(request, identity, message)
        messages.success(request, message)

    def _render(
        self,
        request: HttpRequest,
        name: str,
        context: dict[str, Any],
        status: int = 200,
    ) -> HttpResponse:
        # Live refresh fetches only the part that changes, and must not consume the messages of the next full page.
        live = "X-Rlaas-Live" in request.headers
        request.current_app = self.admin_site.name
        return TemplateResponse(
            request,
            f"rlaas_django/admin/{name}.html",
            {
                **({} if live else self.admin_site.each_context(request)),
                "shell": f"rlaas_django/admin/{'live' if live else 'base'}.html",
                "opts": self.opts,
                "page": name,
                "live_url": request.get_full_path() if request.method == "GET" else "",
                "can_change": self.has_change_permission(request),
                "sees_users": sees_users(request),
                "user_page": self._user_page(request),
                **context,
            },
            status=status,
        )

    def _user_page(self, request: HttpRequest) -> str:
        """Return the URL name of a user's change page, or "" if this admin has none or staff may not view it."""
        model, site = get_user_model(), self.admin_site
        if site.is_registered(model) and site.get_model_admin(
            model
        ).has_view_or_change_permission(request):
            return f"admin:{model._meta.app_label}_{model._meta.model_name}_change"
        return ""

    def _redirect(self, name: str, **query: str) -> HttpResponseRedirect:
        return HttpResponseRedirect(_url(self.admin_site, name, **query))


class RateLimitsOfUser:
    """Add a user's usage to the change page of any user model, for staff who may view the panel.

    >>> class MyUserAdmin(RateLimitsOfUser, UserAdmin): ...
    """

    admin_site: admin.AdminSite  # of the ModelAdmin that this is mixed into

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        return [*super().get_readonly_fields(request, obj), "rate_limits"]  # type: ignore[misc]

    def get_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        # The usage has a fieldset of its own.
        return [
            name for name in super().get_fields(request, obj) if name != "rate_limits"
        ]  # type: ignore[misc]

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        user: Any = request.user
        may_view = any(
            user.has_perm(f"rlaas_django.{verb}_ratelimit")
            for verb in ("view", "change")
        )
        usage = (
            [(_("Rate limits"), {"fields": ["rate_limits"]})]
            if obj is not None and may_view
            else []
        )
        return [*super().get_fieldsets(request, obj), *usage]  # type: ignore[misc]

    @property
    def media(self) -> forms.Media:
        media: forms.Media = super().media  # type: ignore[misc]
        return media + forms.Media(css={"all": ["rlaas_django/panel.css"]})

    @admin.display(description=gettext_lazy("Usage"))
    def rate_limits(self, user: Any) -> SafeString:
        """Render the usage of a user."""
        identity = EncodedIdentity(encode(str(user.pk)))
        context: dict[str, Any] = {
            "page": _url(self.admin_site, "identity", id=identity)
        }
        try:
            rows = usage.identity_rows(identity)
            context["rows"] = [
                row for row in rows if row.outcome.current_count or row.override
            ]
        except backend.UnavailableError as error:
            context["error"] = error
        return render_to_string("rlaas_django/admin/user.html", context)


def _operator(request: HttpRequest) -> operations.Operator:
    user: Any = request.user
    return operations.Operator(user.get_username(), operations.ADMIN)


def _url(site: admin.AdminSite, name: str, **query: str) -> str:
    return reverse(
        f"admin:rlaas_django_ratelimit_{name}",
        query=query or None,
        current_app=site.name,
    )
