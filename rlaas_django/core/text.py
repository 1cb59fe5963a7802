"""Text that a client chose.

It is made safe to show, and compared as databases compare it.
"""

from __future__ import annotations

import unicodedata

MAX_FOLDED = 1_000  # characters; no user name is longer


def printable(text: str) -> str:
    r"""Escape control and bidirectional characters.

    They are shown as `\n`, `\x1b`, `\u202e`.
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable()
        else character.encode("unicode_escape").decode()
        for character in text
    )


def fold(text: str) -> str:
    """Return text without what may be overlooked in a user name.

    Forms strip white space and normalise to NFKC. Case, accents and invisible
    characters make no difference to many databases: to every MySQL by default, and to
    others where the site says so. Two names that differ only in these share a counter,
    which is the lesser evil: otherwise one name would have any number of counters.
    """
    if len(text) > MAX_FOLDED:
        return "LONG"  # no folded text is in upper case

    folded = unicodedata.normalize("NFKD", text).casefold()
    decomposed = unicodedata.normalize("NFKD", folded)
    visible = [
        character
        for character in decomposed
        if unicodedata.category(character) not in ("Cc", "Cf")
        and not unicodedata.combining(character)
    ]
    return "".join(visible).strip()
