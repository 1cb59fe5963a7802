"""Errors of the service, as problem+json (RFC 9457)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from django.http import HttpResponse

from ..core.policy import nearest
from ..http.refusals import PROBLEM_JSON

MAX_ECHO = 100  # characters of a client's text in a message


class ProblemError(Exception):
    """A request that is answered by a problem; nothing was charged for it."""

    def __init__(
        self, status: int, detail: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers or {}

    def members(self) -> dict[str, Any]:
        """Return the members of the JSON."""
        title = HTTPStatus(self.status).phrase
        return {
            "type": "about:blank",
            "title": title,
            "status": self.status,
            "detail": self.detail,
        }

    def response(self) -> HttpResponse:
        body = json.dumps(self.members())
        return HttpResponse(
            body,
            content_type=PROBLEM_JSON,
            status=self.status,
            headers=dict(self.headers),
        )


def unknown(kind: str, word: object, known: Any) -> str:
    """Return the sentence that says that a word is not known, with the nearest known one."""
    text = str(word)[:MAX_ECHO]
    return f"There is no {kind} {text!r}{nearest(text, known)}"
