"""The panel as a ModelAdmin: its URLs, permissions and responses."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.contrib.admin.utils import unquote
from django.contrib.auth import get_user_model
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_POST

from .. import backend
from ..core.keys import EncodedIdentity
from ..models import RateLimit
from . import actions, pages, panel, refusals
from .identities import is_encoded

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[RateLimit]
else:
    _ModelAdmin = admin.ModelAdmin

View = Callable[..., HttpResponseBase]


class RateLimitAdmin(_ModelAdmin):
    """The pages of the panel in place of a change list: the model has no table."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Return False: there are no objects."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: RateLimit | None = None) -> bool:
        """Return False: there are no objects."""
        return False

    def get_urls(self) -> list[URLPattern]:
        """Return the URLs of the panel, named `admin:rlaas_django_ratelimit_<name>`."""
        views: list[tuple[str, str, View]] = [
            ("", "changelist", self.overview),
            ("users/", "users", self.users),
            ("identity/", "identity", self.identity),
            ("refusals/", "refusals", self.refusals),
            ("refusals.csv", "refusals_csv", self.refusals_csv),
            ("shadow/", "shadow", self.shadow),
            ("overrides/", "overrides", self.overrides),
            ("act/", "act", require_POST(self.act)),
            ("end/", "end", require_POST(self.end)),
            ("<path:object_id>/change/", "change", self.change),
        ]
        return [path(route, self._wrap(view), name=f"rlaas_django_ratelimit_{name}") for route, name, view in views]

    def _wrap(self, view: View) -> Any:
        """Require the permission to view, and respond with 503 while Redis is unavailable."""

        def wrapped(request: HttpRequest, **kwargs: str) -> HttpResponseBase:
            if not self.has_view_or_change_permission(request):
                raise PermissionDenied
            try:
                return view(request, **kwargs)
            except backend.UnavailableError as error:
                context = pages.unavailable(error, acted=request.method == "POST")
                return self._render(request, "unavailable", context, status=503)

        return self.admin_site.admin_view(update_wrapper(wrapped, view))

    # Pages

    def overview(self, request: HttpRequest) -> HttpResponse:
        """Show the policies and the state of Redis."""
        return self._render(request, "overview", pages.overview())

    def users(self, request: HttpRequest) -> HttpResponse:
        """Show identities with their usage."""
        return self._render(request, "users", pages.users(request.GET))

    def identity(self, request: HttpRequest, form: actions.ActionForm | None = None) -> HttpResponse:
        """Show one identity; any other text in its place is searched for."""
        encoded = EncodedIdentity(request.GET.get("id") or request.POST.get("identity", ""))
        if not is_encoded(encoded):
            return self._redirect("users", **({"q": encoded} if encoded else {}))
        context = {**pages.identity(encoded, form), "live_url": self._url("identity", id=encoded)}
        return self._render(request, "identity", context)

    def refusals(self, request: HttpRequest) -> HttpResponse:
        """Show the refusal log."""
        return self._render(request, "refusals", pages.refusal_log(request.GET))

    def refusals_csv(self, request: HttpRequest) -> StreamingHttpResponse:
        """Download the refusal log, filtered like the page."""
        # Read before the response starts, so that an unavailable Redis gives a 503.
        found = list(refusals.filtered(request.GET, panel.policies()))
        response = StreamingHttpResponse(refusals.csv_lines(found), content_type="text/csv; charset=utf-8")
        response["Content-Disposition"] = 'attachment; filename="refusals.csv"'
        return response

    def shadow(self, request: HttpRequest) -> HttpResponse:
        """Show the shadow policies."""
        return self._render(request, "shadow", pages.shadow())

    def overrides(self, request: HttpRequest) -> HttpResponse:
        """Show the overrides."""
        return self._render(request, "overrides", pages.overrides())

    def change(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Redirect from the entries of the admin log, which link to the change page of an object."""
        return self._redirect("identity", id=unquote(object_id))

    # Actions

    def act(self, request: HttpRequest) -> HttpResponse:
        """Perform an action on an identity, after confirmation."""
        self._require_change_permission(request)
        form = actions.ActionForm(request.POST, policies=panel.policies())
        if not form.is_valid():
            return self.identity(request, form)
        identity = form.cleaned_data["identity"]
        if not form.cleaned_data["confirmed"]:
            hidden = [(name, request.POST.get(name, "")) for name in form.fields if name != "confirmed"]
            question, reason = actions.confirmation(form), form.cleaned_data["reason"]
            return self._confirm(request, "act", identity, question=question, reason=reason, hidden=hidden)
        self._report(request, identity, actions.perform(form, by=request.user))
        return self._redirect("identity", id=identity)

    def end(self, request: HttpRequest) -> HttpResponse:
        """End an override, after confirmation."""
        self._require_change_permission(request)
        override = actions.find_override(request.POST.get("override", ""))
        if override is None:
            return self._redirect("overrides")
        if "ask" in request.POST:
            question, hidden = actions.end_confirmation(override), [("override", override.pk)]
            return self._confirm(request, "end", override.identity, question=question, hidden=hidden)
        self._report(request, override.identity, actions.end_override(override, by=request.user))
        return self._redirect("overrides")

    def _require_change_permission(self, request: HttpRequest) -> None:
        if not self.has_change_permission(request):
            raise PermissionDenied

    def _confirm(self, request: HttpRequest, target: str, identity: str, **context: Any) -> HttpResponse:
        """Ask for confirmation; the form of the page posts `hidden` to `target` again."""
        page = {"title": _("Are you sure?"), "target": target, "back": self._url("identity", id=identity)}
        return self._render(request, "confirm", {**page, **context})

    def _report(self, request: HttpRequest, identity: str, message: str) -> None:
        """Show what was done to the operator, and write it to the admin log."""
        actions.log(request.user, identity, message)
        messages.success(request, message)

    # Responses

    def _render(self, request: HttpRequest, name: str, context: dict[str, Any], status: int = 200) -> HttpResponse:
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
                "user_page": self._user_page(request),
                **context,
            },
            status=status,
        )

    def _user_page(self, request: HttpRequest) -> str:
        """Return the URL name of a user's change page, or "" if this admin has none or staff may not view it."""
        model = get_user_model()
        if not self.admin_site.is_registered(model):
            return ""
        if not self.admin_site.get_model_admin(model).has_view_or_change_permission(request):
            return ""
        return f"admin:{model._meta.app_label}_{model._meta.model_name}_change"

    def _redirect(self, name: str, **query: str) -> HttpResponseRedirect:
        return HttpResponseRedirect(self._url(name, **query))

    def _url(self, name: str, **query: str) -> str:
        return reverse(f"admin:rlaas_django_ratelimit_{name}", query=query or None, current_app=self.admin_site.name)
