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

from ..core.keys import EncodedIdentity
from ..core.policy import Policy, PolicyError, Rate
from ..limiter import overrides
from ..models import MAX_FACTOR, MIN_FACTOR, OperatorAction, Override
from ..operators import actions as operations
from ..operators import usage
from ..operators.identities import ENCODED, describe
from ..stats.policies import with_decided_rates
from .text import grouped

DEFAULT_HOURS = 24
MAX_SENTENCES = 5  # about other overrides, before an action is confirmed


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
    identity = forms.CharField(
        max_length=200, widget=forms.HiddenInput, validators=[is_encoded]
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
            "Instead of a custom limit: by which the limits are multiplied, such as 2 or 0.5."
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
        self.override: Override | None = (
            None  # what a valid form is about to set; None for a reset or a refund
        )
        field: Any = self.fields["policy"]
        field.choices = [
            ("", _("All policies")),
            *((name, name) for name in sorted(policies)),
        ]

    def clean(self) -> dict[str, Any]:
        """Require the fields that the action needs."""
        data = super().clean() or {}
        action = data.get("action")
        if (
            action == self.REFUND
            and data.get("amount") is None
            and "amount" not in self.errors
        ):
            self.add_error("amount", _("Enter a number."))
        if action in (overrides.BLOCK, overrides.EXEMPT, overrides.LIMIT):
            data["hours"] = data.get("hours") or DEFAULT_HOURS
            if not data.get("reason"):
                self.add_error("reason", _("Enter a reason."))
            if not self.errors:
                self.override = self._override(data)
                self._check_override(self.override)
        return data

    def _override(self, data: dict[str, Any]) -> Override:
        """Return the override that is about to be set."""
        kind, limit, factor = data["action"], None, None
        if kind == overrides.LIMIT:
            limit, factor = data.get("amount"), data.get("factor")
            if factor is not None or not data["policy"]:
                kind, limit = overrides.FACTOR, None
        return Override(
            identity=data["identity"],
            policy=data["policy"],
            kind=kind,
            limit=limit,
            factor=factor,
            every_client=data["every_client"],
            until=timezone.now() + timedelta(hours=data["hours"]),
            reason=data["reason"],
        )

    def _check_override(self, override: Override) -> None:
        try:
            override.clean()
            policy = self.policies.get(override.policy)
            if override.limit and policy is not None and isinstance(policy.rate, Rate):
                Rate(
                    override.limit, policy.window
                )  # whether it can be counted exactly over the window
        except ValidationError as error:
            for name, messages in error.message_dict.items():
                self.add_error(
                    "amount"
                    if name == "limit"
                    else name
                    if name in self.fields
                    else None,
                    messages,
                )
        except PolicyError as error:
            self.add_error("amount", str(error))

    def chosen_policies(self) -> list[Policy]:
        """Return the chosen policy, or all that limit this kind of identity; without those that have no rate for it."""
        identity = EncodedIdentity(self.cleaned_data["identity"])
        if name := self.cleaned_data["policy"]:
            return [
                policy
                for policy, _ in with_decided_rates([(self.policies[name], identity)])
            ]
        return [row.outcome.policy for row in usage.identity_rows(identity)]


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
        overrides.BLOCK: _(
            "Refuse all requests of %(identity)s under %(policy)s for %(duration)s?"
        ),
        overrides.EXEMPT: _(
            "Allow all requests of %(identity)s under %(policy)s for %(duration)s?"
        ),
        overrides.LIMIT: _(
            "Set the limit of %(identity)s under %(policy)s to %(number)s for %(duration)s?"
        ),
        overrides.FACTOR: _(
            "Multiply the limits of %(identity)s under %(policy)s by %(factor)s for %(duration)s?"
        ),
    }
    return questions[form.override.kind if form.override else data["action"]] % {
        "identity": describe([data["identity"]])[data["identity"]].name,
        "policy": data["policy"] or _("all policies"),
        "number": grouped(data["amount"] or 0),
        "factor": data["factor"],
        "duration": dict(ActionForm.DURATIONS).get(data["hours"], ""),
    }


def consequences(form: ActionForm) -> list[str]:
    """Return what an override does to others, and to whom it does not apply, as sentences to read before confirming."""
    if (new := form.override) is None:
        return []
    effect = operations.effect_of(new)
    found = [(_("This ends the override %(override)s."), each) for each in effect.ends]
    found += [
        (_("Where both apply, this replaces the override %(override)s."), each)
        for each in effect.replaces
    ]
    for each in effect.outranked_by:
        if each.kind == overrides.BLOCK and each.narrowness < new.narrowness:
            text = _(
                "Where both apply, the override %(override)s stays in force: a custom limit never lifts a block."
            )
        else:
            text = _(
                "Where both apply, the override %(override)s stays in force: it is narrower."
            )
        found.append((text, each))
    sentences = [
        text % {"override": override_words(each)}
        for text, each in found[:MAX_SENTENCES]
    ]
    if len(found) > MAX_SENTENCES:
        sentences.append(
            _("%(number)d more overrides are affected.")
            % {"number": len(found) - MAX_SENTENCES}
        )
    return [*sentences, *_reach(new)]


def _reach(new: Override) -> list[str]:
    """Say whether the override of an address reaches logged-in users."""
    if new.network is None:
        return []
    if new.every_client:
        return [_("It applies to every request from there, also of logged-in users.")]
    return [
        _(
            "It applies where a policy counts addresses. Logged-in users, whom most policies count by user, are not "
            "affected; choose “logged-in users, too” to include them."
        )
    ]


def perform(form: ActionForm, by: operations.Operator) -> OperatorAction:
    """Perform the action, and return its entry in the history."""
    data, new = form.cleaned_data, form.override
    identity, scope, reason = (
        EncodedIdentity(data["identity"]),
        data["policy"],
        data["reason"],
    )
    if new is not None:
        amounts: Any = {
            "limit": new.limit,
            "factor": new.factor,
            "every_client": new.every_client,
        }
        return operations.set_override(
            by, identity, scope, new.kind, new.until, reason, **amounts
        )
    if data["action"] == ActionForm.RESET:
        return operations.reset_usage(
            by, identity, form.chosen_policies(), scope=scope, reason=reason
        )
    policies = form.chosen_policies()
    return operations.refund_units(
        by, identity, policies, data["amount"], scope=scope, reason=reason
    )


def override_words(override: Override) -> str:
    """Return an override in words, such as `“blocked” of 203.0.113.9 under all policies`."""
    amount = f" {override.amount_text}" if override.amount_text else ""
    return _("“%(override)s” of %(identity)s under %(policy)s") % {
        "override": f"{override.get_kind_display()}{amount}",
        "identity": describe([override.identity])[override.identity].name,
        "policy": override.policy or _("all policies"),
    }
