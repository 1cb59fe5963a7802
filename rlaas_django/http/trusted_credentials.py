"""Credentials that were right lately, in this process.

They are not counted while they are right. So a client that sends its password with each
request takes no round trip, and is not refused for its own parallel requests.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from django.core.cache.backends.locmem import LocMemCache
from django.views.decorators.debug import sensitive_variables

from ..core.keys import digest
from ..runtime import process

trusted: LocMemCache  # the backend that accepted credentials, by their digest
_key: bytes  # of the digests


def reset() -> None:
    """Trust nothing: what is kept has digests of another key."""
    global trusted, _key
    # By the process, as a fork inherits the lock of a cache, which a thread may hold.
    name = f"{__name__} {os.getpid()}"
    trusted = LocMemCache(name, {"TIMEOUT": 300, "MAX_ENTRIES": 10_000})
    _key = os.urandom(32)


reset()
process.on_fork(reset)


@sensitive_variables()
def digest_of(credentials: Mapping[str, Any]) -> str:
    """Return a digest of credentials, by which they are known again.

    Of values that may not show what they are, it is another one each time.
    """
    if not all(isinstance(value, (str, bytes, int)) for value in credentials.values()):
        return os.urandom(16).hex()

    return digest(repr(sorted(credentials.items())), _key)
