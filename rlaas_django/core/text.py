"""Text that a client chose, made safe to show."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Return text with control and bidirectional characters escaped, such as `a\n`, `\x1b` and `\u202e`."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
