"""The panel at /admin/rlaas_django/: who, how much, why, and what an operator can do about it."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from functools import update_wrapper
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_POST

from . import backend, charts, limiter, overrides, panel, stats
from .identity import Id
from .models import Override, RateLimit
from .policy import Policy, PolicyError, Rate

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[RateLimit]
else:
    _ModelAdmin = admin.ModelAdmin

Page = Callable[[HttpRequest], HttpResponseBase]


class ActionForm(forms.Form):
    """What an operator does about one identity."""

    RESET, GIVE_BACK = "reset", "give_back"
    ACTIONS = (
        (RESET, gettext_lazy("Reset: forget what was used")),
        (GIVE_BACK, gettext_lazy("Give back some units")),
        (overrides.BLOCK, gettext_lazy("Block")),
        (overrides.EXEMPT, gettext_lazy("Exempt")),
        (overrides.LIMIT, gettext_lazy("Set another limit")),
    )
    HOURS = (
        (1, gettext_lazy("1 hour")),
        (24, gettext_lazy("1 day")),
        (168, gettext_lazy("1 week")),
        (720, gettext_lazy("30 days")),
        (8760, gettext_lazy("1 year")),
    )

    identity = forms.CharField(max_length=200, widget=forms.HiddenInput)
    action = forms.ChoiceField(choices=ACTIONS, label=gettext_lazy("Action"))
    policy = forms.ChoiceField(required=False, label=gettext_lazy("Policy"))
    amount = forms.IntegerField(min_value=1, required=False, label=gettext_lazy("Units, or the limit"))
    hours = forms.TypedChoiceField(choices=HOURS, coerce=int, required=False, initial=24, label=gettext_lazy("For"))
    reason = forms.CharField(max_length=200, required=False, label=gettext_lazy("Reason"))
    confirmed = forms.BooleanField(required=False, widget=forms.HiddenInput)

    def __init__(self, *args: Any, policies: dict[str, Policy], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.policies = policies
        field: Any = self.fields["policy"]
        field.choices = [("", _("Every policy")), *((name, name) for name in sorted(policies))]

    def clean(self) -> dict[str, Any]:
        data = super().clean() or {}
        action = data.get("action")
        if action in (self.GIVE_BACK, overrides.LIMIT) and data.get("amount") is None:
            self.add_error("amount", _("Say how many."))
        if action in (overrides.BLOCK, overrides.EXEMPT, overrides.LIMIT):
            data["hours"] = data.get("hours") or 24
            if not data.get("reason"):
                self.add_error("reason", _("Say why, for whoever looks at this next."))
        if action == overrides.LIMIT and data.get("amount"):
            self._check_limit(data)
        return data

    def _check_limit(self, data: dict[str, Any]) -> None:
        for name in [data["policy"]] if data.get("policy") else self.policies:
            try:
                Rate(data["amount"], self.policies[name].window)
            except PolicyError as error:
                self.add_error("amount", str(error))


@admin.register(RateLimit)
class RateLimitAdmin(_ModelAdmin):
    """Pages of our own instead of a change list: there is no table."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: RateLimit | None = None) -> bool:
        return False

    def get_urls(self) -> list[URLPattern]:
        pages: list[tuple[str, str, Page]] = [
            ("", "changelist", self.overview),
            ("users/", "users", self.users),
            ("identity/", "identity", self.identity),
            ("refusals/", "refusals", self.refusals),
            ("refusals.csv", "refusals_csv", self.refusals_csv),
            ("shadow/", "shadow", self.shadow),
            ("overrides/", "overrides", self.overrides),
            ("act/", "act", require_POST(self.act)),
            ("end/", "end", require_POST(self.end)),
        ]
        return [path(route, self._page(view), name=f"rlaas_django_ratelimit_{name}") for route, name, view in pages]

    def _page(self, view: Page) -> Any:
        """For staff who may look; with the server's state told when it cannot be asked."""

        def page(request: HttpRequest) -> HttpResponseBase:
            if not self.has_view_or_change_permission(request):
                raise PermissionDenied
            try:
                return view(request)
            except backend.UnavailableError as error:
                return self._render(
                    request, "unreachable", {"title": _("Redis cannot be reached"), "error": error}, 503
                )

        return self.admin_site.admin_view(update_wrapper(page, view))

    def _render(self, request: HttpRequest, name: str, context: dict[str, Any], status: int = 200) -> HttpResponse:
        # Live refresh asks for the part that changes.
        template = f"rlaas_django/admin/{name}.html"
        return TemplateResponse(
            request,
            template,
            {
                **self.admin_site.each_context(request),
                "opts": self.opts,
                "page": name,
                "can_change": self.has_change_permission(request),
                **context,
            },
            status=status,
        )

    # ── looking ───────────────────────────────────────────────────────────────────────────────────────────────────

    def overview(self, request: HttpRequest) -> HttpResponse:
        policies = panel.policies()
        series = stats.minutes(policies)
        summaries = [_summary(policies[name], series[name]) for name in sorted(policies)]
        top = sorted(stats.refused_today(policies).items(), key=lambda item: -item[1])[:10]
        people = panel.whoever({who for (_name, who), _number in top})
        context = {
            "title": _("Rate limits"),
            "summaries": summaries,
            "top": [(people[who], name, number) for (name, who), number in top],
            "server": panel.server_state(),
            "degraded": sum(minute.degraded for name in policies for minute in series[name][-5:]),
        }
        return self._render(request, "overview", context)

    def users(self, request: HttpRequest) -> HttpResponse:
        policies = panel.policies()
        name = request.GET.get("policy") if request.GET.get("policy") in policies else None
        text = request.GET.get("q", "").strip()
        tab = "search" if text else ("active" if request.GET.get("tab") == "active" else "watch")
        cursor, looked_at = 0, 0
        if tab == "search":
            found = panel.search(text)
            rows = [row for row in panel.identity_rows(*found) if name in (None, row.outcome.policy.name)]
        elif tab == "active":
            start = request.GET.get("cursor", "0")
            rows, cursor, looked_at = panel.active(int(start) if start.isdecimal() else 0, name)
        else:
            rows = panel.watch_list(name)[: panel.PAGE * 4]
        context = {
            "title": _("Users"),
            "rows": _sorted(rows, request.GET.get("sort", "")),
            "tab": tab,
            "q": text,
            "policy": name,
            "policies": sorted(policies),
            "cursor": cursor,
            "looked_at": looked_at,
            "sort": request.GET.get("sort", ""),
        }
        return self._render(request, "users", context)

    def identity(self, request: HttpRequest, form: ActionForm | None = None) -> HttpResponse:
        who = Id(request.GET.get("id") or request.POST.get("identity", ""))
        if not who:
            return HttpResponseRedirect(reverse("admin:rlaas_django_ratelimit_users"))
        policies = panel.policies()
        rows = panel.identity_rows(who)
        refusals = [refusal for refusal in stats.refusals(policies) if refusal.identity == who][:100]
        context = {
            "title": panel.whoever([who])[who].name,
            "who": panel.whoever([who])[who],
            "rows": rows,
            "refusals": [(refusal, sentence(refusal)) for refusal in refusals],
            "overrides": Override.objects.filter(identity=who)[:20],
            "form": form or ActionForm(policies=policies, initial={"identity": who}),
            "now": timezone.now(),
        }
        return self._render(request, "identity", context)

    def refusals(self, request: HttpRequest) -> HttpResponse:
        policies = panel.policies()
        found = list(_filtered(request, stats.refusals(policies, most=5_000)))
        minutes = stats.minutes(policies)
        context = {
            "title": _("Refusals"),
            "refusals": found[:200],
            "found": len(found),
            "unlogged": sum(minute.unlogged for series in minutes.values() for minute in series),
            "people": panel.whoever({refusal.identity for refusal in found[:200]}),
            "policies": sorted(policies),
            "filters": {name: request.GET.get(name, "") for name in ("policy", "identity", "path", "since")},
        }
        return self._render(request, "refusals", context)

    def refusals_csv(self, request: HttpRequest) -> StreamingHttpResponse:
        found = _filtered(request, stats.refusals(panel.policies(), most=5_000))
        writer = csv.writer(_Echo())
        columns = ("time", "policy", "identity", "method", "path", "count", "limit", "retry_after", "shadow")
        lines = ((_cell(value) for value in _values(refusal)) for refusal in found)
        response = StreamingHttpResponse(
            (writer.writerow(line) for line in (columns, *lines)), content_type="text/csv; charset=utf-8"
        )
        response["Content-Disposition"] = 'attachment; filename="refusals.csv"'
        return response

    def shadow(self, request: HttpRequest) -> HttpResponse:
        policies = {name: policy for name, policy in panel.policies().items() if policy.shadow}
        series = stats.minutes(policies)
        refused = stats.refused_today(policies)
        people = panel.whoever({who for _name, who in refused})
        summaries = []
        for name, policy in sorted(policies.items()):
            summary = _summary(policy, series[name])
            asked = summary["day_allowed"] + summary["day_shadowed"]
            ranked = sorted((-number, who) for (each, who), number in refused.items() if each == name)
            summary["share"] = 100 * summary["day_shadowed"] / asked if asked else 0
            summary["identities"] = [(people[who], -number) for number, who in ranked[:10]]
            summary["identities_count"] = len(ranked)
            summaries.append(summary)
        return self._render(request, "shadow", {"title": _("Shadow policies"), "summaries": summaries})

    def overrides(self, request: HttpRequest) -> HttpResponse:
        active = list(Override.objects.active())
        ended = list(Override.objects.exclude(pk__in=[override.pk for override in active])[:100])
        context = {
            "title": _("Overrides"),
            "active": active,
            "ended": ended,
            "people": panel.whoever({override.identity for override in (*active, *ended)}),
            "now": timezone.now(),
        }
        return self._render(request, "overrides", context)

    # ── acting ────────────────────────────────────────────────────────────────────────────────────────────────────

    def act(self, request: HttpRequest) -> HttpResponse:
        if not self.has_change_permission(request):
            raise PermissionDenied
        form = ActionForm(request.POST, policies=panel.policies())
        if not form.is_valid():
            return self.identity(request, form)
        if not form.cleaned_data["confirmed"]:
            who = panel.whoever([form.cleaned_data["identity"]])[form.cleaned_data["identity"]]
            return self._render(request, "confirm", {"title": _("Are you sure?"), "form": form, "who": who})
        done = _perform(request, form)
        self._log(request, form.cleaned_data["identity"], done)
        messages.success(request, done)
        target = reverse("admin:rlaas_django_ratelimit_identity", query={"id": form.cleaned_data["identity"]})
        return HttpResponseRedirect(target)

    def end(self, request: HttpRequest) -> HttpResponse:
        if not self.has_change_permission(request):
            raise PermissionDenied
        wanted = request.POST.get("override", "")
        override = Override.objects.filter(pk=wanted).first() if wanted.isdecimal() else None
        if override is not None:
            override.end(by=request.user)
            done = _("Ended: %(override)s") % {"override": override}
            self._log(request, override.identity, done)
            messages.success(request, done)
        return HttpResponseRedirect(reverse("admin:rlaas_django_ratelimit_overrides"))

    def _log(self, request: HttpRequest, identity: str, done: str) -> None:
        LogEntry.objects.create(
            user_id=str(request.user.pk),
            content_type=ContentType.objects.get_for_model(RateLimit, for_concrete_model=False),
            object_id=identity,
            object_repr=identity[:200],
            action_flag=CHANGE,
            change_message=done,
        )


def _perform(request: HttpRequest, form: ActionForm) -> str:
    """Do it; a sentence that says what was done."""
    data = form.cleaned_data
    who, action = Id(data["identity"]), data["action"]
    chosen = (
        [form.policies[data["policy"]]] if data["policy"] else [row.outcome.policy for row in panel.identity_rows(who)]
    )
    where = data["policy"] or _("every policy")
    if action == ActionForm.RESET:
        limiter.reset(who, chosen)
        return _("Reset under %(policy)s.") % {"policy": where}
    if action == ActionForm.GIVE_BACK:
        given = sum(limiter.give_back(who, policy, data["amount"]) for policy in chosen)
        return _("Gave back %(number)d under %(policy)s.") % {"number": given, "policy": where}
    until = timezone.now() + timedelta(hours=data["hours"])
    limit = data["amount"] if action == overrides.LIMIT else None
    override = Override.set(who, data["policy"], action, until, by=request.user, reason=data["reason"], limit=limit)
    return _("%(what)s under %(policy)s: %(reason)s") % {
        "what": override.get_kind_display().capitalize() + (f" {limit}" if limit else ""),
        "policy": where,
        "reason": override.reason,
    }


def _summary(policy: Policy, minutes: list[stats.Minute]) -> dict[str, Any]:
    """What the overview tells about a policy."""
    hour, day = charts.bars(minutes[-60:], 1), charts.bars(minutes, 15)
    return {
        "policy": policy,
        "now": minutes[-1],
        "hour_allowed": sum(bar.allowed for bar in hour),
        "hour_refused": sum(bar.refused for bar in hour),
        "day_allowed": sum(bar.allowed for bar in day),
        "day_refused": sum(bar.refused for bar in day),
        "day_shadowed": sum(bar.shadowed for bar in day),
        "hour_chart": charts.chart(hour, _("%(policy)s, last hour") % {"policy": policy}),
        "day_chart": charts.chart(day, _("%(policy)s, last day") % {"policy": policy}),
        "hour_bars": [bar for bar in hour if bar.total],
    }


def sentence(refusal: stats.Refusal) -> str:
    """Why, in words: `5 of 5 in 60 s, refused at 10:31:09 on POST /login/, free again in 38 s`."""
    words = {
        "count": refusal.count,
        "limit": refusal.limit,
        "window": refusal.window,
        "time": _local(refusal.at).strftime("%H:%M:%S"),
        "method": refusal.method,
        "path": refusal.path,
    }
    why = _("%(count)d of %(limit)d in %(window)d s, refused at %(time)s on %(method)s %(path)s") % words
    if refusal.retry_after is None:
        return _("%(why)s: more than the limit can ever give") % {"why": why}
    return _("%(why)s, free again in %(wait)d s") % {"why": why, "wait": math.ceil(refusal.retry_after)}


def _local(at: float) -> datetime:
    return datetime.fromtimestamp(at, tz=timezone.get_current_timezone())


def _sorted(rows: list[panel.Row], by: str) -> list[panel.Row]:
    keys: dict[str, Callable[[panel.Row], Any]] = {
        "identity": lambda row: row.who.name.lower(),
        "policy": lambda row: row.outcome.policy.name,
        "count": lambda row: -row.outcome.current_count,
        "used": lambda row: -row.percent,
        "reset": lambda row: row.outcome.reset_after,
        "refused": lambda row: -row.refused_today,
    }
    return sorted(rows, key=keys[by]) if by in keys else rows


def _filtered(request: HttpRequest, refusals: list[stats.Refusal]) -> Iterator[stats.Refusal]:
    wanted = request.GET
    since = wanted.get("since", "")
    oldest = timezone.now().timestamp() - 60 * int(since) if since.isdecimal() else 0
    for refusal in refusals:
        fits = (
            wanted.get("policy", "") in ("", refusal.policy)
            and wanted.get("identity", "") in refusal.identity
            and wanted.get("path", "") in refusal.path
            and refusal.at >= oldest
        )
        if fits:
            yield refusal


class _Echo:
    """A file that hands back what is written, for csv.writer."""

    def write(self, value: str) -> str:
        return value


def _values(refusal: stats.Refusal) -> tuple[Any, ...]:
    return (
        *(
            _local(refusal.at).isoformat(),
            refusal.policy,
            refusal.identity,
            refusal.method,
            refusal.path,
            refusal.count,
            refusal.limit,
        ),
        *("" if refusal.retry_after is None else refusal.retry_after, refusal.shadow),
    )


def _cell(value: Any) -> str:
    """A spreadsheet takes text that begins so for a formula, and the path is the client's."""
    text = str(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
