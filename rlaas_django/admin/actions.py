"""What an operator can do to an identity: the form, the question to confirm, the action, and its log entry."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django import forms
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from .. import limiter
from ..core.keys import EncodedIdentity
from ..core.policy import Policy, PolicyError, Rate
from ..limiter import overrides
from ..models import Override, RateLimit
from . import panel
from .formats import grouped
from .identities import describe_one, is_encoded

DEFAULT_HOURS = 24


class ActionForm(forms.Form):
    """An action on one identity, under one policy or all."""

    RESET, REFUND = "reset", "refund"
    ACTIONS = (
        (RESET, gettext_lazy("Reset usage")),
        (REFUND, gettext_lazy("Refund units")),
        (overrides.BLOCK, gettext_lazy("Block: refuse all requests")),
        (overrides.EXEMPT, gettext_lazy("Exempt: allow all requests")),
        (overrides.LIMIT, gettext_lazy("Set a custom limit")),
    )
    DURATIONS = (
        (1, gettext_lazy("1 hour")),
        (24, gettext_lazy("1 day")),
        (168, gettext_lazy("1 week")),
        (720, gettext_lazy("30 days")),
        (8760, gettext_lazy("1 year")),
    )

    identity = forms.CharField(max_length=200, widget=forms.HiddenInput)
    action = forms.ChoiceField(choices=ACTIONS, initial=RESET, widget=forms.RadioSelect, label=gettext_lazy("Action"))
    policy = forms.ChoiceField(required=False, label=gettext_lazy("Policy"))
    amount = forms.IntegerField(min_value=1, required=False, label=gettext_lazy("Units or custom limit"))
    hours = forms.TypedChoiceField(
        choices=DURATIONS, coerce=int, required=False, initial=DEFAULT_HOURS, label=gettext_lazy("Duration")
    )
    reason = forms.CharField(max_length=200, required=False, label=gettext_lazy("Reason"))
    confirmed = forms.BooleanField(required=False, widget=forms.HiddenInput)

    def __init__(self, *args: Any, policies: dict[str, Policy], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.policies = policies
        field: Any = self.fields["policy"]
        field.choices = [("", _("All policies")), *((name, name) for name in sorted(policies))]

    def clean_identity(self) -> str:
        """Require an encoded identity."""
        identity: str = self.cleaned_data["identity"]
        if not is_encoded(identity):
            raise forms.ValidationError(_("Enter a valid identity."))
        return identity

    def clean(self) -> dict[str, Any]:
        """Require the fields that the action needs."""
        data = super().clean() or {}
        action = data.get("action")
        if action in (self.REFUND, overrides.LIMIT) and data.get("amount") is None:
            self.add_error("amount", _("Enter a number."))
        if action in (overrides.BLOCK, overrides.EXEMPT, overrides.LIMIT):
            data["hours"] = data.get("hours") or DEFAULT_HOURS
            if not data.get("reason"):
                self.add_error("reason", _("Enter a reason."))
        if action == overrides.LIMIT and data.get("amount"):
            self._clean_custom_limit(data)
        return data

    def _clean_custom_limit(self, data: dict[str, Any]) -> None:
        """Require a limit that the chosen policies can have with their windows."""
        for name in [data["policy"]] if data.get("policy") else self.policies:
            try:
                Rate(data["amount"], self.policies[name].window)
            except PolicyError as error:
                self.add_error("amount", str(error))  # removes the amount from the data, so stop here
                return


def confirmation(form: ActionForm) -> str:
    """Return the question to confirm before the action is performed."""
    data = form.cleaned_data
    questions = {
        ActionForm.RESET: _("Reset the usage of %(identity)s under %(policy)s?"),
        ActionForm.REFUND: ngettext(
            "Refund %(number)s unit to %(identity)s under %(policy)s?",
            "Refund %(number)s units to %(identity)s under %(policy)s?",
            data["amount"] or 0,
        ),
        overrides.BLOCK: _("Refuse all requests of %(identity)s under %(policy)s for %(duration)s?"),
        overrides.EXEMPT: _("Allow all requests of %(identity)s under %(policy)s for %(duration)s?"),
        overrides.LIMIT: _("Set the limit of %(identity)s under %(policy)s to %(number)s for %(duration)s?"),
    }
    return questions[data["action"]] % {
        "identity": describe_one(data["identity"]).name,
        "policy": data["policy"] or _("all policies"),
        "number": grouped(data["amount"] or 0),
        "duration": dict(ActionForm.DURATIONS).get(data["hours"], ""),
    }


def perform(form: ActionForm, by: object) -> str:
    """Perform the action, and return the message for the operator and the admin log."""
    data = form.cleaned_data
    identity, action = EncodedIdentity(data["identity"]), data["action"]
    scope = data["policy"] or _("all policies")
    if action == ActionForm.RESET:
        limiter.reset(identity, _chosen_policies(form))
        return _("Reset the usage under %(policy)s.") % {"policy": scope}
    if action == ActionForm.REFUND:
        units = sum(limiter.refund_units(identity, policy, data["amount"]) for policy in _chosen_policies(form))
        message = ngettext(
            "Refunded %(number)d unit under %(policy)s.", "Refunded %(number)d units under %(policy)s.", units
        )
        return message % {"number": units, "policy": scope}
    until = timezone.now() + timedelta(hours=data["hours"])
    limit = data["amount"] if action == overrides.LIMIT else None
    override = Override.set(identity, data["policy"], action, until, by=by, reason=data["reason"], limit=limit)
    return _("%(override)s under %(policy)s: %(reason)s") % {
        "override": override.get_kind_display().capitalize() + (f" {limit}" if limit else ""),
        "policy": scope,
        "reason": override.reason,
    }


def _chosen_policies(form: ActionForm) -> list[Policy]:
    """Return the chosen policy, or all that limit this kind of identity."""
    data = form.cleaned_data
    if data["policy"]:
        return [form.policies[data["policy"]]]
    return [row.outcome.policy for row in panel.identity_rows(EncodedIdentity(data["identity"]))]


def find_override(pk: str) -> Override | None:
    """Return the override with a primary key that a client sent."""
    return Override.objects.filter(pk=pk).first() if pk.isdecimal() and len(pk) < 19 else None


def end_confirmation(override: Override) -> str:
    """Return the question to confirm before an override is ended."""
    text = _("End the override “%(override)s” of %(identity)s? The policy applies again from the next request.")
    return text % _override_words(override)


def end_override(override: Override, by: object) -> str:
    """End an override, and return the message for the operator and the admin log."""
    override.end(by=by)
    return _("Ended the override “%(override)s” of %(identity)s.") % _override_words(override)


def _override_words(override: Override) -> dict[str, str]:
    kind = override.get_kind_display()
    return {
        "override": kind if override.limit is None else f"{kind}: {grouped(override.limit)}",
        "identity": describe_one(override.identity).name,
    }


def log(user: Any, identity: str, message: str) -> None:
    """Write an entry to the admin log, as Django does for a changed object."""
    LogEntry.objects.create(
        user_id=str(user.pk),
        content_type=ContentType.objects.get_for_model(RateLimit, for_concrete_model=False),
        object_id=identity,
        object_repr=identity[:200],
        action_flag=CHANGE,
        change_message=message,
    )
