"""Text that a client chose: made safe to show, and compared as databases compare it."""

from __future__ import annotations

import unicodedata

MAX_FOLDED = 1_000  # characters; no user name is longer


def printable(text: str) -> str:
    r"""Return text with control and bidirectional characters escaped, such as `a\n`, `\x1b` and `\u202e`."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode()
        for each in text
    )


def fold(text: str) -> str:
    """Return text without what a form, `authenticate` or a database may overlook in a user name.

    Forms strip white space and normalise to NFKC. Case, accents and invisible characters make no difference to many
    databases: to every MySQL by default, and to others where the site says so. Two names that are told apart only by
    these share a counter, which is the lesser evil: otherwise one name would have any number of counters.
    """
    if len(text) > MAX_FOLDED:
        return "LONG"  # no folded text is in upper case
    decomposed = unicodedata.normalize(
        "NFKD", unicodedata.normalize("NFKD", text).casefold()
    )
    visible = [
        each for each in decomposed if unicodedata.category(each) not in ("Cc", "Cf")
    ]
    return "".join(each for each in visible if not unicodedata.combining(each)).strip()
