"""Receipts as text: signed, to leave the process, and refunded once.

rlaas:refunded:<unique id of the check>   STRING   a marker: it was refunded

On a cluster, the marker has the identity's hash tag.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from django.core import signing

from .. import backend
from ..backend import Call
from ..core.decision import Decision
from ..core.keys import parse_counter_key
from ..limiter.adjusting import (
    CHARGE_SIZE,
    refund_call,
    require_refunded,
    sum_refunds,
)
from ..limiter.fallback import LOCAL
from ..limiter.replies import refund_arguments

MARKER_PREFIX = "rlaas:refunded:"
SALT = "rlaas_django.receipt"

# Of the counters in one slot: their keys, and the arguments of their refund.
Charges = tuple[list[str], list[Any]]


class Receipt(NamedTuple):
    """A receipt that was read."""

    policies: set[str]
    charges: list[Charges]


def write(decision: Decision) -> str | None:
    """Return the receipt of what a decision charged in Redis; None for nothing."""
    charged = []
    for check, reply in decision.receipts:
        keys, words = refund_arguments(check, reply)
        # What this process counted by itself, no other can refund.
        if keys and check.unique != LOCAL:
            charged.append((keys, words))

    if not charged:
        return None
    return signing.dumps(charged, salt=SALT)


def read(text: Any) -> Receipt:
    """Return a receipt that `write` gave, in any process; ValueError for any other."""
    try:
        if not isinstance(text, str):
            raise signing.BadSignature
        charged: list[Charges] = signing.loads(text, salt=SALT)
    except (signing.BadSignature, ValueError):
        raise ValueError("This is not a receipt of a check.") from None

    counters = [parse_counter_key(key) for keys, _ in charged for key in keys]
    policies = {counter[0] for counter in counters if counter is not None}
    return Receipt(policies, charged)


async def refund(receipt: Receipt, call: Any) -> bool:
    """Refund a receipt, once; return False when there is nothing (more) to refund.

    `call` is as for an endpoint.
    """
    results = await call(
        backend.execute_each,
        backend.aexecute_each,
        backend.topology(),
        _refund_calls(receipt),
    )
    return require_refunded(sum_refunds(results, receipt.policies))


def _refund_calls(receipt: Receipt) -> list[Call]:
    """Return the refund of each slot.

    Its marker allows one, also of two callers at the same time.
    """
    calls = []
    for keys, words in receipt.charges:
        unique, _, *charged = words
        hash_tag = "".join(re.findall("{.*}", keys[0]))  # for the slot of the counters
        marker = f"{MARKER_PREFIX}{hash_tag}{unique}"
        calls.append(refund_call([*keys, marker], [*words, _marker_ttl(charged)]))

    return calls


def _marker_ttl(charged: list[Any]) -> int:
    """Return the ms after which a second refund would find nothing.

    Then the windows are over, and the buckets full.
    """
    longest = 0
    for start in range(0, len(charged), CHARGE_SIZE):
        _, limit, window, capacity, ttl, _ = charged[start : start + CHARGE_SIZE]
        longest = max(longest, ttl, math.ceil(capacity * window / limit))

    return longest
