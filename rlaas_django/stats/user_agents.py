"""The class of a user agent: enough to tell a person from a program in the refusal log, and not a fingerprint."""

from __future__ import annotations

import re

BROWSER, BOT, PROGRAM, NONE = "browser", "bot", "program", "none"

_BOT = re.compile(r"bot\b|crawl|spider|slurp|preview|monitor|scan", re.IGNORECASE)


def classify(user_agent: str) -> str:
    """Return `browser`, `bot` (it says so), `program` (curl, a library) or `none`.

    >>> classify("Mozilla/5.0 (compatible; Googlebot/2.1)"), classify("curl/8.5.0")
    ('bot', 'program')
    """
    if not user_agent.strip():
        return NONE
    if _BOT.search(user_agent):
        return BOT
    return BROWSER if user_agent.startswith(("Mozilla/", "Opera/")) else PROGRAM
