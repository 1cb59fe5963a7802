"""What operators did, in words: for the history, the admin log and the message after an action."""

from __future__ import annotations

from typing import NamedTuple

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..models import OperatorAction, Override
from ..operators.identities import IdentityLabel, describe
from ..templatetags.rlaas_panel import with_zone

MAX_ENTRIES = 200


class Entry(NamedTuple):
    """An entry of the history."""

    action: OperatorAction  # who, when, by way of what, and why
    identity: IdentityLabel
    words: str  # what was done


def entries(identity: str | None = None, limit: int = MAX_ENTRIES) -> list[Entry]:
    """Return what operators did, to one identity or to any, the latest first."""
    found = (
        OperatorAction.objects.all()
        if identity is None
        else OperatorAction.objects.filter(identity=identity)
    )
    actions = list(found[:limit])
    labels = describe({action.identity for action in actions})
    return [
        Entry(action, labels[action.identity], words(action, labels[action.identity]))
        for action in actions
    ]


def words(action: OperatorAction, identity: IdentityLabel | None = None) -> str:
    """Return what was done as a sentence without its full stop.

    >>> "Blocked 203.0.113.9 under all policies until 17/11/2026 14:00 CET"
    """
    texts = {
        "block": _("Blocked %(identity)s under %(policy)s until %(until)s"),
        "exempt": _("Exempted %(identity)s from %(policy)s until %(until)s"),
        "limit": _(
            "Set the limit of %(identity)s under %(policy)s to %(amount)s until %(until)s"
        ),
        "factor": _(
            "Set the limits of %(identity)s under %(policy)s to %(amount)s times their value until %(until)s"
        ),
        "end": _("Ended the override “%(amount)s” of %(identity)s under %(policy)s"),
        "reset": _("Reset the usage of %(identity)s under %(policy)s"),
        "refund": ngettext(
            "Refunded %(amount)s unit to %(identity)s under %(policy)s",
            "Refunded %(amount)s units to %(identity)s under %(policy)s",
            int(action.amount) if action.amount.isdecimal() else 0,
        ),
    }
    label = identity or describe([action.identity])[action.identity]
    amount: object = action.amount
    if action.action == "end":
        amount = dict(Override.Kind.choices).get(action.amount, action.amount)
    return texts[action.action] % {
        "identity": label.name,
        "policy": action.policy or _("all policies"),
        "amount": amount,
        "until": with_zone(action.until) if action.until else "",
    }
