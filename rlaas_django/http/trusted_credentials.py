"""Credentials that were right lately, in this process.

They are not counted while they are right. So a client that sends its password with each
request takes no round trip, and is not refused for its own parallel requests.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

from django.core.cache.backends.locmem import LocMemCache
from django.views.decorators.debug import sensitive_variables

from ..runtime import process

# The backend that accepted credentials, by a digest of them.
trusted = LocMemCache(__name__, {"TIMEOUT": 300, "MAX_ENTRIES": 10_000})

_key = b""  # of the digests


def reset() -> None:
    """Trust nothing: what is kept has digests of another key."""
    global _key
    _key = os.urandom(32)


reset()
process.on_fork(reset)


@sensitive_variables()
def digest_of(credentials: Mapping[str, Any]) -> str:
    """Return a digest of credentials, by which they are known again."""
    text = repr(sorted(credentials.items()))
    encoded = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(encoded, key=_key, digest_size=16).hexdigest()
