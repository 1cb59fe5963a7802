"""What operators can do to an identity: the form, and the words for it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..core.keys import EncodedIdentity
from ..core.policy import PolicyError, Rate
from ..limiter.overrides import BLOCK, EXEMPT, FACTOR, LIMIT
from ..models import MAX_FACTOR, MIN_FACTOR, OperatorAction, Override
from ..operators import actions, usage
from ..operators.actions import effect_of
from ..operators.formatting import grouped, time_with_zone
from ..operators.identities import ENCODED, MAX_ENCODED, IdentityLabel, describe_one

RESET = "reset"
REFUND = "refund"
DAY = 24  # hours
MAX_SENTENCES = 5  # about other overrides, before an action is confirmed


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
        (DAY, gettext_lazy("1 day")),
        (168, gettext_lazy("1 week")),
        (720, gettext_lazy("30 days")),
        (8760, gettext_lazy("1 year")),
    )

    identity = forms.RegexField(
        ENCODED, max_length=MAX_ENCODED, widget=forms.HiddenInput
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
        empty_value=DAY,  # type: ignore[arg-type]  # the stubs know text only
        initial=DAY,
        label=gettext_lazy("Duration"),
    )
    reason = forms.CharField(
        max_length=200, required=False, label=gettext_lazy("Reason")
    )
    confirmed = forms.BooleanField(required=False, widget=forms.HiddenInput)
    # Asked for with the confirmation, of a network that has every address.
    everyone = forms.BooleanField(
        required=False, label=gettext_lazy("Yes, every client of the site")
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.policies = usage.policies()
        # What a valid form sets; None for a reset or a refund.
        self.override: Override | None = None

        field: Any = self.fields["policy"]
        names = [(name, name) for name in sorted(self.policies)]
        field.choices = [("", _("All policies")), *names]

    def clean(self) -> dict[str, Any]:
        """Require the fields that the action needs."""
        data = super().clean() or {}
        action = data.get("action")
        if action == REFUND and data.get("amount") is None:
            self.add_error("amount", _("Enter a number."))
        if action not in (BLOCK, EXEMPT, LIMIT):
            return data

        if not data.get("reason"):
            self.add_error("reason", _("Enter a reason."))
        if not self.errors:
            self.override = self._make_override(data)
            self._check_override(self.override)

        return data

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

    @property
    def is_for_everyone(self) -> bool:
        """Whether a valid form sets an override of all addresses."""
        if self.override is None or self.override.network is None:
            return False
        return self.override.network.prefixlen == 0

    @property
    def is_confirmed(self) -> bool:
        """Whether the operator is sure; twice, where it is about every client."""
        data = self.cleaned_data
        is_meant = data["everyone"] or not self.is_for_everyone
        return data["confirmed"] and is_meant

    def question(self) -> str:
        """Return the question to confirm before the action is performed."""
        data = self.cleaned_data
        units = data["amount"] or 0
        questions = {
            RESET: _("Reset the usage of %(identity)s under %(policy)s?"),
            REFUND: ngettext(
                "Refund %(number)s unit to %(identity)s under %(policy)s?",
                "Refund %(number)s units to %(identity)s under %(policy)s?",
                units,
            ),
            BLOCK: _(
                "Refuse all requests of %(identity)s under %(policy)s for %(duration)s?"
            ),
            EXEMPT: _(
                "Allow all requests of %(identity)s under %(policy)s for %(duration)s?"
            ),
            LIMIT: _(
                "Set the limit of %(identity)s under %(policy)s to %(number)s for "
                "%(duration)s?"
            ),
            FACTOR: _(
                "Multiply the limits of %(identity)s under %(policy)s by %(factor)s "
                "for %(duration)s?"
            ),
        }

        action = data["action"]
        if self.override is not None:
            action = self.override.kind

        return questions[action] % {
            "identity": describe_one(data["identity"]).name,
            "policy": _policy(data["policy"]),
            "number": grouped(units),
            "factor": data["factor"],
            "duration": dict(self.DURATIONS).get(data["hours"]),
        }

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


def consequences(new: Override | None) -> list[str]:
    """Return what an override does to others, and whom it does not reach."""
    if new is None:
        return []

    effect = effect_of(new)
    sentences = _about(_("This ends the override %(override)s."), effect.ends)
    sentences += _about(
        _("Where both apply, this replaces the override %(override)s."),
        effect.replaces,
    )

    for other in effect.outranked_by:
        reason = _(
            "Where both apply, the override %(override)s stays in force: it is "
            "narrower."
        )
        if other.narrowness < new.narrowness:
            reason = _(
                "Where both apply, the override %(override)s stays in force: a custom "
                "limit never lifts a block."
            )

        sentences += _about(reason, [other])

    more = len(sentences) - MAX_SENTENCES
    if more > 0:
        text = _("%(number)d more overrides are affected.")
        sentences[MAX_SENTENCES:] = [text % {"number": more}]
    if new.network is not None:
        sentences.append(_reach(new))

    return sentences


def _about(text: str, overrides: Iterable[Override]) -> list[str]:
    return [text % {"override": override_in_words(override)} for override in overrides]


def _reach(new: Override) -> str:
    """Say whether the override of an address reaches logged-in users."""
    if new.every_client:
        return _("It applies to every request from there, also of logged-in users.")
    return _(
        "It applies where a policy counts addresses. Logged-in users, whom most "
        "policies count by user, are not affected; choose “logged-in users, too” to "
        "include them."
    )


def override_in_words(override: Override) -> str:
    """Return an override such as `“blocked” of 203.0.113.9 under all policies`."""
    kind = f"{override.get_kind_display()} {override.amount_text}"
    return _("“%(override)s” of %(identity)s under %(policy)s") % {
        "override": kind.strip(),
        "identity": describe_one(override.identity).name,
        "policy": _policy(override.policy),
    }


def action_in_words(action: OperatorAction, identity: IdentityLabel) -> str:
    """Return what was done, as a sentence without its full stop.

    >>> "Blocked 203.0.113.9 under all policies until 17/11/2026 14:00 CET"
    """
    units = 0
    if action.action == REFUND:
        units = int(action.amount)

    sentences = {
        BLOCK: _("Blocked %(identity)s under %(policy)s until %(until)s"),
        EXEMPT: _("Exempted %(identity)s from %(policy)s until %(until)s"),
        LIMIT: _(
            "Set the limit of %(identity)s under %(policy)s to %(amount)s until "
            "%(until)s"
        ),
        FACTOR: _(
            "Set the limits of %(identity)s under %(policy)s to %(amount)s times their "
            "value until %(until)s"
        ),
        "end": _("Ended the override “%(amount)s” of %(identity)s under %(policy)s"),
        RESET: _("Reset the usage of %(identity)s under %(policy)s"),
        REFUND: ngettext(
            "Refunded %(amount)s unit to %(identity)s under %(policy)s",
            "Refunded %(amount)s units to %(identity)s under %(policy)s",
            units,
        ),
    }

    kinds = dict(Override.Kind.choices)  # what the end of an override has as amount
    words = {
        "identity": identity.name,
        "policy": _policy(action.policy),
        "amount": kinds.get(action.amount, action.amount),
    }
    if action.until is not None:
        words["until"] = time_with_zone(action.until)

    return sentences[action.action] % words


def _policy(name: str) -> str:
    return name or _("all policies")
