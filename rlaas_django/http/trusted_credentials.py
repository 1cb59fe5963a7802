"""Credentials that were right lately, in this process.

They are not counted while they are right. So a client that sends its password with each
request takes no round trip, and is not refused for its own parallel requests.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Mapping
from time import monotonic
from typing import Any

from django.views.decorators.debug import sensitive_variables

from ..runtime import process

TRUSTED_FOR = 300.0  # seconds
MAX_TRUSTED = 10_000

_KEY = os.urandom(32)  # of the digests, which do not leave the process


class TrustedCredentials:
    """Digests of credentials, with the backend that accepted them."""

    def __init__(self) -> None:
        # The backend, and until when it is trusted, the oldest first.
        self._backends: OrderedDict[bytes, tuple[type, float]] = OrderedDict()

    def find(self, digest: bytes) -> type | None:
        """Return the backend that accepted credentials lately, if any did."""
        backend, until = self._backends.get(digest, (None, 0.0))
        if monotonic() >= until:
            return None
        return backend

    def add(self, digest: bytes, backend: type) -> None:
        self._backends.pop(digest, None)
        self._backends[digest] = (backend, monotonic() + TRUSTED_FOR)
        while len(self._backends) > MAX_TRUSTED:
            self._backends.popitem(last=False)

    def remove(self, digest: bytes) -> None:
        self._backends.pop(digest, None)

    def reset(self) -> None:
        self._backends.clear()


@sensitive_variables()
def digest_of(credentials: Mapping[str, Any]) -> bytes:
    """Return a digest of credentials, by which they are known again."""
    text = repr(sorted(credentials.items()))
    encoded = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(encoded, key=_KEY, digest_size=16).digest()


trusted = TrustedCredentials()
process.on_fork(trusted.reset)
