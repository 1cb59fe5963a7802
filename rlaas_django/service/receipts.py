"""A decision's receipt as text: signed, so that it can leave the process, and refunded once wherever it comes back.

rlaas:refunded:<unique id of the check>   STRING   a marker: it was refunded; on a cluster with the identity's hash tag
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from django.core.signing import BadSignature, Signer

from .. import backend
from ..backend import Call
from ..core.decision import Decision
from ..core.keys import parse_counter_key
from ..limiter import Check
from ..limiter.adjusting import CHARGE_SIZE, charges, is_refunded, refund_call, total

MARKER_PREFIX = "rlaas:refunded:"
MAX_LENGTH = 65_536  # of a receipt; one has up to 600 characters per policy
_SALT = "rlaas_django.receipt"

Charges = tuple[
    list[str], list[Any]
]  # of the counters in one slot: their keys, and the arguments of their refund


class Receipt(NamedTuple):
    """A receipt that was read."""

    policies: frozenset[str]
    charges: list[Charges]


def write(decision: Decision) -> str | None:
    """Return the receipt of what a decision charged in Redis; None when it charged nothing there."""
    # What this process counted by itself, no other can refund.
    of_redis = [
        charges(*receipt)
        for receipt in decision.receipts
        if isinstance(receipt[0], Check)
    ]
    charged = [each for each in of_redis if each[0]]
    return Signer(salt=_SALT).sign_object(charged) if charged else None


def read(text: str) -> Receipt:
    """Return a receipt that `write` gave, in whichever process; ValueError for any other text."""
    try:
        if len(text) > MAX_LENGTH:
            raise BadSignature
        charged: list[Charges] = Signer(salt=_SALT).unsign_object(text)
    except (BadSignature, ValueError):
        raise ValueError("This is not a receipt of a check.") from None
    policies = [
        (parse_counter_key(key) or ("",))[0] for keys, _ in charged for key in keys
    ]
    return Receipt(frozenset(policies), charged)


def refund(receipt: Receipt) -> bool:
    """Refund a receipt, once; return False when there is nothing (more) to refund."""
    return is_refunded(
        total(
            backend.execute_each(backend.topology(), _calls(receipt)), receipt.policies
        )
    )


async def arefund(receipt: Receipt) -> bool:
    """As `refund`, natively async."""
    return is_refunded(
        total(
            await backend.aexecute_each(backend.topology(), _calls(receipt)),
            receipt.policies,
        )
    )


def _calls(receipt: Receipt) -> list[Call]:
    """Return the refund of each slot, which its marker allows once: also to two callers at the same time."""
    return [
        refund_call(
            [*keys, _marker(keys[0], words[0])], [*words, _marker_ttl(words[2:])]
        )
        for keys, words in receipt.charges
    ]


def _marker(key: str, unique: str) -> str:
    """Return the key of the marker; with the counter's hash tag, if it has one, so that it is in the same slot."""
    hash_tag = key[key.index("{") : key.index("}") + 1] if "{" in key else ""
    return f"{MARKER_PREFIX}{hash_tag}{unique}"


def _marker_ttl(words: list[Any]) -> int:
    """Return the ms after which a second refund would find nothing: the windows are over, and the buckets full."""
    lives: list[int] = []
    for start in range(0, len(words), CHARGE_SIZE):
        _, limit, window, capacity, ttl, _ = words[start : start + CHARGE_SIZE]
        lives.append(max(ttl, math.ceil(capacity * window / limit)))
    return max(lives)
