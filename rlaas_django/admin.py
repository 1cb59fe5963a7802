"""The panel at /admin/rlaas_django/: who, how much, why, and what an operator can do about it."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import update_wrapper
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.utils import unquote
from django.contrib.auth import get_user_model
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.template.loader import render_to_string
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.formats import date_format, number_format
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_POST

from . import backend, charts, conf, limiter, overrides, panel, stats
from .identity import Id, encode
from .models import Override, RateLimit
from .policy import (
    FIXED_WINDOW,
    SLIDING_WINDOW,
    SLIDING_WINDOW_COMPACT,
    SLIDING_WINDOW_COUNTER,
    TOKEN_BUCKET,
    Policy,
    PolicyError,
    Rate,
)

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[RateLimit]
else:
    _ModelAdmin = admin.ModelAdmin

Page = Callable[..., HttpResponseBase]


class ActionForm(forms.Form):
    """What an operator does about one identity."""

    RESET, GIVE_BACK = "reset", "give_back"
    ACTIONS = (
        (RESET, gettext_lazy("Reset: forget what was used")),
        (GIVE_BACK, gettext_lazy("Give back some units")),
        (overrides.BLOCK, gettext_lazy("Block: refuse every request")),
        (overrides.EXEMPT, gettext_lazy("Exempt: let every request pass")),
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
    action = forms.ChoiceField(choices=ACTIONS, initial=RESET, widget=forms.RadioSelect, label=gettext_lazy("Action"))
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

    def clean_identity(self) -> str:
        who: str = self.cleaned_data["identity"]
        if not panel.is_id(who):
            raise forms.ValidationError(_("This cannot be an identity."))
        return who

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
                self.add_error("amount", str(error))  # which takes the amount out of the data
                return


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
            ("<path:object_id>/change/", "change", self.change),
        ]
        return [path(route, self._page(view), name=f"rlaas_django_ratelimit_{name}") for route, name, view in pages]

    def _page(self, view: Page) -> Any:
        """For staff who may look; with the server's state told when it cannot be asked."""

        def page(request: HttpRequest, **named: str) -> HttpResponseBase:
            if not self.has_view_or_change_permission(request):
                raise PermissionDenied
            try:
                return view(request, **named)
            except backend.UnavailableError as error:
                context = {
                    "title": _("Redis cannot be reached"),
                    "error": error,
                    "acted": request.method == "POST",
                    "breakers": panel.breakers(),
                }
                return self._render(request, "unreachable", context, 503)

        return self.admin_site.admin_view(update_wrapper(page, view))

    def _render(self, request: HttpRequest, name: str, context: dict[str, Any], status: int = 200) -> HttpResponse:
        # Live refresh asks for the part that changes, and must not take the messages that a page is to show.
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
        """The name of the page of a user in this admin, if there is one and the viewer may see it."""
        model = get_user_model()
        if not self.admin_site.is_registered(model):
            return ""
        if not self.admin_site.get_model_admin(model).has_view_or_change_permission(request):
            return ""
        return f"admin:{model._meta.app_label}_{model._meta.model_name}_change"

    def _url(self, name: str, **query: str) -> str:
        return reverse(f"admin:rlaas_django_ratelimit_{name}", query=query or None, current_app=self.admin_site.name)

    # ── looking ───────────────────────────────────────────────────────────────────────────────────────────────────

    def overview(self, request: HttpRequest) -> HttpResponse:
        policies = panel.policies()
        series = stats.minutes(policies)
        summaries = [_summary(policies[name], series[name]) for name in sorted(policies)]
        summaries.sort(key=lambda each: (-each["hour_refused"], -each["hour_shadowed"], -each["hour_total"]))
        enforced = [name for name, policy in policies.items() if not policy.shadow]
        top = sorted(stats.refused_today(enforced).items(), key=lambda item: -item[1])[:10]
        people = panel.whoever({who for (_name, who), _number in top})
        context = {
            "title": _("Rate limits"),
            "summaries": summaries,
            "busy": [each for each in summaries if each["day_total"]],
            "quiet": [each for each in summaries if not each["day_total"]],
            "minute_total": sum(each["minute_total"] for each in summaries),
            "hour_total": sum(each["hour_total"] for each in summaries),
            "hour_refused": sum(each["hour_refused"] for each in summaries),
            "top": [(people[who], name, number) for (name, who), number in top],
            "server": panel.server_state(),
            "breakers": panel.breakers(),
            "degraded": sum(minute.degraded for name in policies for minute in series[name][-5:]),
        }
        return self._render(request, "overview", context)

    def users(self, request: HttpRequest) -> HttpResponse:
        policies = panel.policies()
        name = request.GET.get("policy") if request.GET.get("policy") in policies else None
        text = request.GET.get("q", "").strip()
        tab = "search" if text else ("active" if request.GET.get("tab") == "active" else "watch")
        cursor, looked_at = 0, 0
        idle: list[panel.Who] = []
        if tab == "search":
            found = panel.search(text)
            rows = [row for row in panel.identity_rows(*found) if name in (None, row.outcome.policy.name)]
            rows = [row for row in rows if row.outcome.current_count or row.refused_today or row.override]
            others = panel.whoever(set(found) - {row.who.id for row in rows}).values()
            idle = sorted((who for who in others if who.user or not rows), key=lambda who: (who.user is None, who.name))
        elif tab == "active":
            start = request.GET.get("cursor", "0")
            rows, cursor, looked_at = panel.active(int(start) if start.isdecimal() and len(start) < 21 else 0, name)
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
            "idle": idle,
            "columns": _columns(request.GET.get("sort", "")),
            "query": request.GET,
        }
        return self._render(request, "users", context)

    def identity(self, request: HttpRequest, form: ActionForm | None = None) -> HttpResponse:
        who = Id(request.GET.get("id") or request.POST.get("identity", ""))
        if not panel.is_id(who):
            return HttpResponseRedirect(self._url("users", **({"q": who} if who else {})))
        policies = panel.policies()
        rows = sorted(panel.identity_rows(who), key=lambda row: (-row.percent, row.outcome.policy.name))
        names = [row.outcome.policy.name for row in rows]
        refusals = [refusal for refusal in stats.refusals(names) if refusal.identity == who][:100]
        history = list(Override.objects.filter(identity=who)[:20])
        person = panel.whoever([who])[who]
        context = {
            "title": person.name,
            "who": person,
            "rows": rows,
            "refusals": [(refusal, sentence(refusal, history)) for refusal in refusals],
            "in_force": [override for override in history if _is_in_force(override)],
            "ended": [override for override in history if not _is_in_force(override)],
            "form": form or ActionForm(policies=policies, initial={"identity": who}),
            "live_url": self._url("identity", id=who),
        }
        return self._render(request, "identity", context)

    def refusals(self, request: HttpRequest) -> HttpResponse:
        policies = panel.policies()
        found = list(_filtered(request, stats.refusals(policies, most=5_000)))
        minutes = stats.minutes(policies)
        people = panel.whoever({refusal.identity for refusal in found[:200]})
        context = {
            "title": _("Refusals"),
            "refusals": [
                {
                    "refusal": refusal,
                    "who": people[refusal.identity],
                    "at": _local(refusal.at),
                    "path": panel.printable(refusal.path),
                    "wait": panel.duration(math.inf if refusal.retry_after is None else refusal.retry_after),
                }
                for refusal in found[:200]
            ],
            "found": len(found),
            "unlogged": sum(minute.unlogged for series in minutes.values() for minute in series),
            "policies": sorted(policies),
            "filters": {name: request.GET.get(name, "") for name in ("policy", "identity", "path", "since")},
            "spans": [("5", _("the last 5 minutes")), ("60", _("the last hour")), ("1440", _("the last day"))],
            "query": request.GET,
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
        if not policies:
            panel.ping()  # nothing else here would tell that there is no Redis
        series = stats.minutes(policies)
        refused = stats.refused_today(policies)
        ranked = {
            name: sorted((-number, who) for (each, who), number in refused.items() if each == name)
            for name in sorted(policies)
        }
        people = panel.whoever({who for every in ranked.values() for _number, who in every[:10]})
        summaries = []
        for name, every in ranked.items():
            summary = _summary(policies[name], series[name])
            asked = summary["day_allowed"] + summary["day_shadowed"]
            summary["share"] = 100 * summary["day_shadowed"] / asked if asked else 0
            summary["identities"] = [(people[who], -number) for number, who in every[:10]]
            summary["identities_count"] = len(every)
            summaries.append(summary)
        return self._render(request, "shadow", {"title": _("Shadow policies"), "summaries": summaries})

    def overrides(self, request: HttpRequest) -> HttpResponse:
        active = list(Override.objects.active())
        ended = list(Override.objects.exclude(pk__in=[override.pk for override in active])[:100])
        people = panel.whoever({override.identity for override in (*active, *ended)})
        now = timezone.now()
        context = {
            "title": _("Overrides"),
            "active": [
                (override, people[override.identity], panel.duration((override.until - now).total_seconds()))
                for override in active
            ],
            "ended": [(override, people[override.identity]) for override in ended],
            "reachable": panel.reachable(),
        }
        return self._render(request, "overrides", context)

    def change(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Where the entries of the admin's log lead."""
        return HttpResponseRedirect(self._url("identity", id=unquote(object_id)))

    # ── acting ────────────────────────────────────────────────────────────────────────────────────────────────────

    def act(self, request: HttpRequest) -> HttpResponse:
        if not self.has_change_permission(request):
            raise PermissionDenied
        form = ActionForm(request.POST, policies=panel.policies())
        if not form.is_valid():
            return self.identity(request, form)
        if not form.cleaned_data["confirmed"]:
            context = {
                "title": _("Are you sure?"),
                "question": _question(form),
                "reason": form.cleaned_data["reason"],
                "target": "act",
                "hidden": [(name, request.POST.get(name, "")) for name in form.fields if name != "confirmed"],
                "back": self._url("identity", id=form.cleaned_data["identity"]),
            }
            return self._render(request, "confirm", context)
        done = _perform(request, form)
        self._log(request, form.cleaned_data["identity"], done)
        messages.success(request, done)
        return HttpResponseRedirect(self._url("identity", id=form.cleaned_data["identity"]))

    def end(self, request: HttpRequest) -> HttpResponse:
        if not self.has_change_permission(request):
            raise PermissionDenied
        wanted = request.POST.get("override", "")
        override = Override.objects.filter(pk=wanted).first() if wanted.isdecimal() and len(wanted) < 19 else None
        if override is None:
            return HttpResponseRedirect(self._url("overrides"))
        words = {"what": _what(override), "who": panel.whoever([override.identity])[override.identity].name}
        if "ask" in request.POST:
            context = {
                "title": _("Are you sure?"),
                "question": _("End “%(what)s” for %(who)s? The policy holds again from the next request on.") % words,
                "target": "end",
                "hidden": [("override", override.pk)],
                "back": self._url("identity", id=override.identity),
            }
            return self._render(request, "confirm", context)
        override.end(by=request.user)
        done = _("Ended “%(what)s” for %(who)s.") % words
        self._log(request, override.identity, done)
        messages.success(request, done)
        return HttpResponseRedirect(self._url("overrides"))

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


def _question(form: ActionForm) -> str:
    """What will be done, for who is asked to confirm it."""
    data = form.cleaned_data
    questions = {
        ActionForm.RESET: _("Forget what %(who)s used under %(policy)s?"),
        ActionForm.GIVE_BACK: _("Give %(number)s units back to %(who)s under %(policy)s?"),
        overrides.BLOCK: _("Refuse every request of %(who)s under %(policy)s for %(time)s?"),
        overrides.EXEMPT: _("Let every request of %(who)s pass under %(policy)s for %(time)s?"),
        overrides.LIMIT: _("Let the limit for %(who)s be %(number)s under %(policy)s for %(time)s?"),
    }
    return questions[data["action"]] % {
        "who": panel.whoever([data["identity"]])[data["identity"]].name,
        "policy": data["policy"] or _("every policy"),
        "number": number_format(data["amount"] or 0, force_grouping=True),
        "time": dict(ActionForm.HOURS).get(data["hours"], ""),
    }


def _what(override: Override) -> str:
    """`blocked`, `another limit: 10`."""
    kind = override.get_kind_display()
    return kind if override.limit is None else f"{kind}: {number_format(override.limit, force_grouping=True)}"


def _is_in_force(override: Override, at: datetime | None = None) -> bool:
    at = at or timezone.now()
    return override.created_at <= at < min(override.until, override.ended_at or override.until)


def _summary(policy: Policy, minutes: list[stats.Minute]) -> dict[str, Any]:
    """What the overview tells about a policy."""
    hour, day = charts.bars(minutes[-60:], 1), charts.bars(minutes, 15)
    summary: dict[str, Any] = {
        "policy": policy,
        "algo": _algorithm(policy),
        "key": policy.key if isinstance(policy.key, str) else getattr(policy.key, "__name__", repr(policy.key)),
        "hour_bars": [bar for bar in reversed(hour) if bar.total],
        "day_bars": [bar for bar in reversed(charts.bars(minutes, 60)) if bar.total],
    }
    for name, shown in (("minute", hour[-1:]), ("hour", hour), ("day", day)):
        for kind in ("allowed", "refused", "shadowed", "total"):
            summary[f"{name}_{kind}"] = sum(getattr(bar, kind) for bar in shown)
    for name, shown, label in (("hour", hour, _("Last hour")), ("day", day, _("Last day"))):
        told = _("%(span)s, %(policy)s: %(total)s requests, %(refused)s refused") % {
            "span": label,
            "policy": policy,
            "total": number_format(summary[f"{name}_total"], force_grouping=True),
            "refused": number_format(summary[f"{name}_refused"], force_grouping=True),
        }
        summary[f"{name}_chart"] = charts.chart(shown, told)
        summary[f"{name}_axis"] = charts.axis(shown)
        summary[f"{name}_most"] = max(bar.total for bar in shown)
    return summary


def _algorithm(policy: Policy) -> str:
    names = {
        FIXED_WINDOW: _("fixed window"),
        SLIDING_WINDOW: _("sliding window"),
        SLIDING_WINDOW_COMPACT: _("sliding window, compact"),
        SLIDING_WINDOW_COUNTER: _("sliding window, counters"),
        TOKEN_BUCKET: _("token bucket"),
    }
    return names[policy.algo or conf.config().algo]


def sentence(refusal: stats.Refusal, history: Sequence[Override] = ()) -> str:
    """Why, in words: `5 of 5 in 1 min, refused at 10:31:09 on POST /login/, free again in 38 s`."""
    at = _local(refusal.at)
    today = at.date() == timezone.localdate()
    words = {
        "count": refusal.count,
        "limit": refusal.limit,
        "window": panel.duration(refusal.window),
        "time": date_format(at, "H:i:s" if today else "j N, H:i:s"),
        "request": f"{panel.printable(refusal.method)} {panel.printable(refusal.path)}",
    }
    for override in history:
        blocks = override.kind == overrides.BLOCK and override.policy in ("", refusal.policy)
        if blocks and _is_in_force(override, at):
            words["reason"] = override.reason
            return _("Blocked (%(reason)s), refused at %(time)s on %(request)s") % words
    if refusal.shadow:
        return _("%(count)d of %(limit)d in %(window)s, would have been refused at %(time)s on %(request)s") % words
    words["why"] = _("%(count)d of %(limit)d in %(window)s, refused at %(time)s on %(request)s") % words
    if refusal.retry_after is None:
        return _("%(why)s: more than the limit can ever give") % words
    left = refusal.at + refusal.retry_after - timezone.now().timestamp()
    if left > 0:
        return _("%(why)s, free again in %(wait)s") % {**words, "wait": panel.duration(left)}
    return _("%(why)s, free again after %(wait)s") % {**words, "wait": panel.duration(refusal.retry_after)}


def _local(at: float) -> datetime:
    return datetime.fromtimestamp(at, tz=timezone.get_current_timezone())


SORTS: dict[str, tuple[Any, Callable[[panel.Row], Any]]] = {
    "identity": (gettext_lazy("Identity"), lambda row: row.who.name.lower()),
    "policy": (gettext_lazy("Policy"), lambda row: row.outcome.policy.name),
    "count": (gettext_lazy("Count"), lambda row: -row.outcome.current_count),
    "used": (gettext_lazy("Used"), lambda row: -row.percent),
    "remaining": (gettext_lazy("Remaining"), lambda row: row.outcome.remaining),
    "reset": (gettext_lazy("Resets in"), lambda row: row.outcome.reset_after),
    "refused": (gettext_lazy("Refused today"), lambda row: -row.refused_today),
}


def _sorted(rows: list[panel.Row], by: str) -> list[panel.Row]:
    """By a column, the most telling first; the other way around with a minus before its name."""
    name = by.removeprefix("-")
    return sorted(rows, key=SORTS[name][1], reverse=by.startswith("-")) if name in SORTS else rows


def _columns(by: str) -> list[dict[str, Any]]:
    """The heads of the columns: what a click sorts by, and how it is sorted now."""
    falling = ("count", "used", "refused")  # whose first are the highest
    columns = []
    for name, (label, _key) in SORTS.items():
        chosen = name == by.removeprefix("-")
        down = (name in falling) != by.startswith("-")
        columns.append(
            {
                "name": name,
                "label": label,
                "sort": f"-{name}" if by == name else name,
                "order": ("descending" if down else "ascending") if chosen else "",
            }
        )
    return columns


def _filtered(request: HttpRequest, refusals: list[stats.Refusal]) -> Iterator[stats.Refusal]:
    wanted = request.GET
    since = wanted.get("since", "")
    oldest = timezone.now().timestamp() - 60 * int(since) if since.isdecimal() and len(since) < 9 else 0
    text = wanted.get("identity", "").strip()
    meant = set(panel.search(text))
    for refusal in refusals:
        fits = (
            wanted.get("policy", "") in ("", refusal.policy)
            and (text in refusal.identity or refusal.identity in meant)
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


class RateLimitsOfUser:
    """Adds a user's counts to their change page, for any user model, for those who may see the panel.

    >>> class MyUserAdmin(RateLimitsOfUser, UserAdmin): ...
    """

    # What a ModelAdmin has, which this is mixed into.
    admin_site: admin.AdminSite

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        return [*super().get_readonly_fields(request, obj), "rate_limits"]  # type: ignore[misc]

    def get_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        return [name for name in super().get_fields(request, obj) if name != "rate_limits"]  # type: ignore[misc]

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        fieldsets = [*super().get_fieldsets(request, obj)]  # type: ignore[misc]
        user: Any = request.user
        if obj is None or not any(user.has_perm(f"rlaas_django.{verb}_ratelimit") for verb in ("view", "change")):
            return fieldsets
        return [*fieldsets, (_("Rate limits"), {"fields": ["rate_limits"]})]

    @property
    def media(self) -> forms.Media:
        media: forms.Media = super().media  # type: ignore[misc]
        return media + forms.Media(css={"all": ["rlaas_django/panel.css"]})

    @admin.display(description=gettext_lazy("Usage"))
    def rate_limits(self, user: Any) -> SafeString:
        who = Id(encode(str(user.pk)))
        context: dict[str, Any] = {"who": who}
        try:
            context["rows"] = [row for row in panel.identity_rows(who) if row.outcome.current_count or row.override]
        except backend.UnavailableError as error:
            context["error"] = error
        query = {"id": str(who)}
        context["page"] = reverse(
            "admin:rlaas_django_ratelimit_identity", query=query, current_app=self.admin_site.name
        )
        return render_to_string("rlaas_django/admin/user.html", context)
