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


def _make_cache() -> LocMemCache:
    # By the process, as a fork inherits the lock of a cache, which a thread may hold.
    name = f"{__name__} {os.getpid()}"
    return LocMemCache(name, {"TIMEOUT": 300, "MAX_ENTRIES": 10_000})


trusted = _make_cache()  # the backend that accepted credentials, by their digest
_key = os.urandom(32)  # of the digests


def reset() -> None:
    """Trust nothing: what is kept has digests of another key."""
    global trusted, _key
    trusted = _make_cache()
    _key = os.urandom(32)


process.on_fork(reset)


@sensitive_variables()
def digest_of(credentials: Mapping[str, Any]) -> str:
    """Return a digest of credentials, by which they are known again.

    Of values that may not show what they are, it is another one each time.
    """
    if not all(isinstance(value, (str, bytes, int)) for value in credentials.values()):
        return os.urandom(16).hex()

    text = repr(sorted(credentials.items()))
    encoded = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(encoded, key=_key, digest_size=16).hexdigest()
