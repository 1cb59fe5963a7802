"""What an operator can do to an identity: the form, the question to confirm, and the action."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.core.validators import RegexValidator
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from .. import limiter
from ..core.keys import EncodedIdentity
from ..core.policy import Policy, PolicyError, Rate
from ..limiter import overrides
from ..models import Override
from ..stats.policies import with_decided_rates
from . import panel
from .text import ENCODED, describe, grouped

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

    is_encoded = RegexValidator(ENCODED, gettext_lazy("Enter a valid identity."))
    identity = forms.CharField(max_length=200, widget=forms.HiddenInput, validators=[is_encoded])
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
            try:
                Override(identity=data.get("identity", ""), policy=data.get("policy", "")).clean()
            except ValidationError as error:
                self.add_error(None, error)
        if action == overrides.LIMIT and (limit := data.get("amount")):
            try:  # whether the chosen policies can have this limit with their windows
                for name in [data["policy"]] if data.get("policy") else self.policies:
                    if isinstance(self.policies[name].rate, Rate):
                        Rate(limit, self.policies[name].window)
            except PolicyError as error:
                self.add_error("amount", str(error))
        return data

    def chosen_policies(self) -> list[Policy]:
        """Return the chosen policy, or all that limit this kind of identity; without those that have no rate for it."""
        identity = EncodedIdentity(self.cleaned_data["identity"])
        if name := self.cleaned_data["policy"]:
            return [policy for policy, _ in with_decided_rates([(self.policies[name], identity)])]
        return [row.outcome.policy for row in panel.identity_rows(identity)]


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
        "identity": describe([data["identity"]])[data["identity"]].name,
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
        if policies := form.chosen_policies():
            limiter.reset(identity, policies)
        return _("Reset the usage under %(policy)s.") % {"policy": scope}
    if action == ActionForm.REFUND:
        units = sum(limiter.refund_units(identity, policy, data["amount"]) for policy in form.chosen_policies())
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


def override_words(override: Override) -> dict[str, str]:
    """Return the words for an override and its identity in the texts about ending it."""
    limit = "" if override.limit is None else f": {grouped(override.limit)}"
    name = describe([override.identity])[override.identity].name
    return {"override": f"{override.get_kind_display()}{limit}", "identity": name}
