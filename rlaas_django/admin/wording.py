"""Actions and overrides in words: what is asked before, and what is said after."""

from __future__ import annotations

from collections.abc import Iterable

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..limiter.overrides import BLOCK, EXEMPT, FACTOR, LIMIT
from ..models import OperatorAction, Override
from ..operators.actions import effect_of
from ..operators.formatting import grouped, time_with_zone
from ..operators.identities import IdentityLabel, describe_one
from .forms import REFUND, RESET, ActionForm

MAX_SENTENCES = 5  # about other overrides, before an action is confirmed


def confirmation(form: ActionForm) -> str:
    """Return the question to confirm before the action is performed."""
    data = form.cleaned_data
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
            "Multiply the limits of %(identity)s under %(policy)s by %(factor)s for "
            "%(duration)s?"
        ),
    }
    action = data["action"]
    if form.override is not None:
        action = form.override.kind
    return questions[action] % {
        "identity": describe_one(data["identity"]).name,
        "policy": _policy(data["policy"]),
        "number": grouped(units),
        "factor": data["factor"],
        "duration": dict(form.DURATIONS).get(data["hours"]),
    }


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
