"""The panel as a ModelAdmin, and a mixin for the admin of users."""

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
from ..operators import actions, usage
from ..operators.identities import describe_one, is_encoded, sees_users
from . import pages, policy_pages, refusal_log
from .forms import ActionForm, action_in_words, consequences, override_in_words

View = Callable[..., HttpResponseBase]


class RateLimitAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """The pages of the panel in place of a change list: the model has no table."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def get_urls(self) -> list[URLPattern]:
        """Return the URLs of the panel, named `admin:rlaas_django_ratelimit_<name>`."""
        page = self._page
        views: list[tuple[str, str, View]] = [
            ("", "changelist", page("overview", policy_pages.overview)),
            ("policy/", "policy", page("policy", policy_pages.policy)),
            ("clients/", "clients", page("clients", pages.clients)),
            ("identity/", "identity", self.identity),
            ("refusals/", "refusals", page("refusals", refusal_log.page)),
            ("refusals.csv", "refusals_csv", refusal_log.download),
            ("shadow/", "shadow", page("shadow", policy_pages.shadow)),
            ("overrides/", "overrides", page("overrides", pages.overrides)),
            (
                "overrides/add/",
                "add_override",
                page("add_override", pages.add_override),
            ),
            ("history/", "history", page("history", pages.history)),
            ("act/", "act", require_POST(self.act)),
            ("end/", "end", require_POST(self.end)),
            ("<path:object_id>/change/", "change", self.change),
        ]

        return [
            path(route, self._wrap(view), name=f"rlaas_django_ratelimit_{name}")
            for route, name, view in views
        ]

    def _page(
        self,
        name: str,
        context: Callable[[HttpRequest], pages.Context],
    ) -> View:
        """Return the view that renders the template `name`."""
        return lambda request: self._render(request, name, context(request))

    def _wrap(self, view: View) -> Any:
        """Require a permission, and respond with 503 while Redis is unavailable."""

        def wrapped(request: HttpRequest, **kwargs: str) -> HttpResponseBase:
            acts = request.method == "POST"
            is_permitted = self.has_view_or_change_permission
            if acts:
                is_permitted = self.has_change_permission
            if not is_permitted(request):
                raise PermissionDenied
            if backend.counts_in_process():
                return self._render(
                    request, "without_redis", {"title": _("Rate limits")}
                )

            try:
                return view(request, **kwargs)
            except backend.UnavailableError as error:
                context = {
                    "title": _("Redis is unavailable"),
                    "error": error,
                    "acted": acts,
                    "unavailable_servers": usage.unavailable_servers(),
                }

                return self._render(request, "unavailable", context, status=503)

        return self.admin_site.admin_view(update_wrapper(wrapped, view))

    def identity(
        self,
        request: HttpRequest,
        form: ActionForm | None = None,
    ) -> HttpResponse:
        """Show one identity; any other text in its place is searched for."""
        text = request.GET.get("id") or request.POST.get("identity", "")
        if not is_encoded(text):
            return self._redirect("clients", q=text)

        action = request.GET.get("action", "")
        context = pages.identity(EncodedIdentity(text), form, action)
        context["live_url"] = _url(self.admin_site, "identity", id=text)

        return self._render(request, "identity", context)

    def change(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Redirect from the admin log, which links to the change page of an object."""
        return self._redirect("identity", id=unquote(object_id))

    def act(self, request: HttpRequest) -> HttpResponse:
        """Perform an action on an identity, after confirmation."""
        form = ActionForm(request.POST)
        if not form.is_valid():
            return self.identity(request, form)

        identity = form.cleaned_data["identity"]
        if not form.is_confirmed:
            return self._confirm(
                request,
                identity,
                form=form,
                question=form.question(),
                consequences=consequences(form.override),
                **pages.unknown_user(describe_one(identity)),
            )

        with transaction.atomic():  # no override without its log entry
            self._report(request, form.perform(_operator(request)))

        _warn_unpublished(request, form.override)
        return self._redirect("identity", id=identity)

    def end(self, request: HttpRequest) -> HttpResponse:
        """End an override, after confirmation."""
        try:
            override = Override.objects.get(pk=request.POST.get("override", ""))
        except (Override.DoesNotExist, ValueError):
            return self._redirect("overrides")

        if "ask" in request.POST:
            text = _(
                "End the override %(override)s? The policy applies again from the next "
                "request."
            )

            question = text % {"override": override_in_words(override)}
            return self._confirm(
                request, override.identity, override=override, question=question
            )

        with transaction.atomic():
            self._report(request, actions.end_override(_operator(request), override))

        _warn_unpublished(request, override)
        return self._redirect("overrides")

    def _confirm(
        self,
        request: HttpRequest,
        identity: str,
        **context: Any,
    ) -> HttpResponse:
        """Ask for confirmation of an action, or of the end of an override."""
        context["title"] = _("Are you sure?")
        context["back"] = _url(self.admin_site, "identity", id=identity)
        return self._render(request, "confirm", context)

    def _report(self, request: HttpRequest, action: OperatorAction) -> None:
        """Tell the operator what was done, and write it to the admin log."""
        words = action_in_words(action, describe_one(action.identity))
        message = f"{words}."
        if action.reason:
            message = f"{words}: {action.reason}"

        identity = RateLimit(pk=action.identity)
        identity.words = words
        self.log_change(request, identity, message)
        messages.success(request, message)

    def _render(
        self,
        request: HttpRequest,
        name: str,
        context: pages.Context,
        status: int = 200,
    ) -> HttpResponse:
        """Render a page of the panel, or what changes of it for a live refresh."""
        page = {
            "opts": self.opts,
            "page": name,
            "query": request.GET,
            "shell": "rlaas_django/admin/live.html",
            "can_change": self.has_change_permission(request),
            "sees_users": sees_users(request.user),
            "user_page": self._user_page(request),
        }
        if request.method == "GET":
            page["live_url"] = request.get_full_path()
        # Live refresh fetches only the part that changes, and must not consume the
        # messages of the next full page.
        if "X-Rlaas-Live" not in request.headers:
            page |= self.admin_site.each_context(request)
            page["shell"] = "rlaas_django/admin/base.html"

        request.current_app = self.admin_site.name

        return TemplateResponse(
            request, f"rlaas_django/admin/{name}.html", page | context, status=status
        )

    def _user_page(self, request: HttpRequest) -> str:
        """Return the URL name of a user's change page.

        An empty string if this admin has none, or staff may not view it.
        """
        model = get_user_model()
        if not self.admin_site.is_registered(model):
            return ""

        users = self.admin_site.get_model_admin(model)
        if not users.has_view_or_change_permission(request):
            return ""

        return f"admin:{model._meta.app_label}_{model._meta.model_name}_change"

    def _redirect(self, name: str, **query: str) -> HttpResponseRedirect:
        return HttpResponseRedirect(_url(self.admin_site, name, **query))


class RateLimitsOfUser:
    """Add a user's usage to the change page of any user model.

    Staff see it who may view the panel.

    >>> class MyUserAdmin(RateLimitsOfUser, UserAdmin): ...
    """

    admin_site: admin.AdminSite  # of the ModelAdmin that this is mixed into

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        fields = super().get_readonly_fields(request, obj)  # type: ignore[misc]
        return [*fields, "rate_limits"]

    def get_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        # The usage has a fieldset of its own.
        fields = super().get_fields(request, obj)  # type: ignore[misc]
        return [name for name in fields if name != "rate_limits"]

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        fieldsets = list(super().get_fieldsets(request, obj))  # type: ignore[misc]
        user: Any = request.user
        may_view = user.has_perm("rlaas_django.view_ratelimit")
        may_change = user.has_perm("rlaas_django.change_ratelimit")
        if obj is not None and (may_view or may_change):
            fieldsets.append((_("Rate limits"), {"fields": ["rate_limits"]}))

        return fieldsets

    @property
    def media(self) -> forms.Media:
        media: forms.Media = super().media  # type: ignore[misc]
        return media + forms.Media(css={"all": ["rlaas_django/panel.css"]})

    @admin.display(description=gettext_lazy("Usage"))
    def rate_limits(self, user: Any) -> SafeString:
        """Render the usage of a user."""
        identity = EncodedIdentity(encode(str(user.pk)))
        page = _url(self.admin_site, "identity", id=identity)
        context: dict[str, Any] = {"page": page}
        template = "rlaas_django/admin/user.html"
        if backend.counts_in_process():
            return render_to_string(template, {"without_redis": True})

        try:
            rows = usage.identity_rows(identity)
        except backend.UnavailableError as error:
            context["error"] = error
        else:
            context["rows"] = [
                row for row in rows if row.outcome.current_count or row.override
            ]

        return render_to_string(template, context)


def _warn_unpublished(request: HttpRequest, override: Override | None) -> None:
    """Tell the operator where Redis does not have yet what was saved."""
    if override is not None and not override.is_published:
        messages.warning(request, actions.NOT_PUBLISHED)


def _operator(request: HttpRequest) -> actions.Operator:
    user: Any = request.user
    return actions.Operator(user.get_username(), actions.ADMIN)


def _url(site: admin.AdminSite, name: str, **query: str) -> str:
    return reverse(
        f"admin:rlaas_django_ratelimit_{name}",
        query=query or None,
        current_app=site.name,
    )
