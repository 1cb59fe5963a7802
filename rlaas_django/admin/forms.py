"""What an operator can do to an identity: the form, and what it does."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.core.validators import RegexValidator
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..core.keys import EncodedIdentity
from ..core.policy import Policy, PolicyError, Rate
from ..limiter.overrides import BLOCK, EXEMPT, FACTOR, LIMIT
from ..models import MAX_FACTOR, MIN_FACTOR, OperatorAction, Override
from ..operators import actions, usage
from ..operators.identities import ENCODED, MAX_ENCODED

RESET = "reset"
REFUND = "refund"
DEFAULT_HOURS = 24


class ActionForm(forms.Form):
    """An action on one identity, under one policy or all."""

    ACTIONS = (
        (RESET, gettext_lazy("Reset usage")),
        (REFUND, gettext_lazy("Refund units")),
        (BLOCK, gettext_lazy("Block: refuse all requests")),
        (EXEMPT, gettext_lazy("Exempt: allow all requests")),
        (LIMIT, gettext_lazy("Set a custom limit")),
    )
    DURATIONS = (
        (1, gettext_lazy("1 hour")),
        (24, gettext_lazy("1 day")),
        (168, gettext_lazy("1 week")),
        (720, gettext_lazy("30 days")),
        (8760, gettext_lazy("1 year")),
    )

    identity = forms.CharField(
        max_length=MAX_ENCODED,
        widget=forms.HiddenInput,
        validators=[RegexValidator(ENCODED, gettext_lazy("Enter a valid identity."))],
    )
    action = forms.ChoiceField(
        choices=ACTIONS,
        initial=RESET,
        widget=forms.RadioSelect,
        label=gettext_lazy("Action"),
    )
    policy = forms.ChoiceField(required=False, label=gettext_lazy("Policy"))
    amount = forms.IntegerField(
        min_value=1, required=False, label=gettext_lazy("Units or custom limit")
    )
    factor = forms.DecimalField(
        min_value=MIN_FACTOR,
        max_value=MAX_FACTOR,
        decimal_places=3,
        required=False,
        label=gettext_lazy("Factor"),
        help_text=gettext_lazy(
            "Instead of a custom limit: by which the limits are multiplied, such as 2 "
            "or 0.5."
        ),
    )
    every_client = forms.BooleanField(
        required=False,
        label=gettext_lazy("Logged-in users, too"),
        help_text=gettext_lazy(
            "Otherwise it does not reach them where a policy counts users."
        ),
    )
    hours = forms.TypedChoiceField(
        choices=DURATIONS,
        coerce=int,
        required=False,
        initial=DEFAULT_HOURS,
        label=gettext_lazy("Duration"),
    )
    reason = forms.CharField(
        max_length=200, required=False, label=gettext_lazy("Reason")
    )
    confirmed = forms.BooleanField(required=False, widget=forms.HiddenInput)

    def __init__(self, *args: Any, policies: dict[str, Policy], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.policies = policies
        # What a valid form sets; None for a reset or a refund.
        self.override: Override | None = None

        field: Any = self.fields["policy"]
        names = [(name, name) for name in sorted(policies)]
        field.choices = [("", _("All policies")), *names]

    def clean(self) -> dict[str, Any]:
        """Require the fields that the action needs."""
        data = super().clean() or {}
        action = data.get("action")
        if action == REFUND and data.get("amount") is None:
            self._require("amount", _("Enter a number."))
        if action in (BLOCK, EXEMPT, LIMIT):
            if not data.get("reason"):
                self._require("reason", _("Enter a reason."))
            data["hours"] = data.get("hours") or DEFAULT_HOURS
            if not self.errors:
                self.override = self._make_override(data)
                self._check_override(self.override)

        return data

    def _require(self, name: str, message: str) -> None:
        if name not in self.errors:
            self.add_error(name, message)

    def _make_override(self, data: dict[str, Any]) -> Override:
        """Return the override to set: a limit for all policies is a factor."""
        override = Override(
            identity=data["identity"],
            policy=data["policy"],
            kind=data["action"],
            every_client=data["every_client"],
            until=timezone.now() + timedelta(hours=data["hours"]),
            reason=data["reason"],
        )
        if override.kind != LIMIT:
            return override

        if data["factor"] is None and override.policy:
            override.limit = data["amount"]
        else:
            override.kind = FACTOR
            override.factor = data["factor"]

        return override

    def _check_override(self, override: Override) -> None:
        """Add the errors of the override to the fields that they are about."""
        try:
            override.clean()
            policy = self.policies.get(override.policy)
            if override.limit and policy and isinstance(policy.rate, Rate):
                Rate(override.limit, policy.window)  # whether it is counted exactly
        except ValidationError as error:
            for name, messages in error.message_dict.items():
                self.add_error({"limit": "amount"}.get(name, name), messages)
        except PolicyError as error:
            self.add_error("amount", str(error))

    def perform(self, by: actions.Operator) -> OperatorAction:
        """Perform the action of a valid form, and return its entry in the history."""
        if self.override is not None:
            return actions.set_override(by, self.override)

        data = self.cleaned_data
        identity = EncodedIdentity(data["identity"])
        policy = data["policy"]
        reason = data["reason"]
        rows = usage.identity_rows(identity, policy=policy or None)
        policies = [row.outcome.policy for row in rows]
        if data["action"] == RESET:
            return actions.reset_usage(
                by, identity, policies, scope=policy, reason=reason
            )

        return actions.refund_units(
            by, identity, policies, data["amount"], scope=policy, reason=reason
        )
