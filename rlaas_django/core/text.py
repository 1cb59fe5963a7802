"""Text that a client chose.

It is made safe to show, and compared as databases compare it.
"""

from __future__ import annotations

import math
import re
import unicodedata
from functools import lru_cache

MAX_FOLDED = 1_000  # characters; no user name is longer

LONG = "LONG"  # no folded text is in upper case

# The letter in the name of a character: LATIN SMALL LETTER L WITH STROKE, COMBINING
# LATIN SMALL LETTER C, LATIN SMALL LETTER DOTLESS I, NEGATIVE SQUARED IC.
_find_letter = re.compile(
    r"(?:LATIN .*?(?:LETTER|LIGATURE) (?:[A-Z-]{3,} )*(?=[A-Z]{1,2}\b)"
    r"|SQUARED (?=[A-Z]+$))([A-Z]+)"
).search

# What MySQL and MariaDB take for other letters and digits, or ignore, beyond that; and
# the fillers of Hangul. \u00df is ss to some of them, but no text can be equal to both.
_SPELLED_OUT = {
    **str.maketrans(
        "\u00d0\u00f0\u1dd9\u00df\u1e9e\u09f5\u09f6\u09f7",
        "dddss234",
        "\u00b7\u0345\u0640\u06de\u07fa\u0824\u0828"
        "\u115f\u1160\u180a\u1cd3\u1cf2\u1cf3\ufe73",
    ),
    **str.maketrans("\ua79a\ua79b\ua79c\ua79d\ua79e\ua79f\ua7c0\ua7c1", "aaoouuaa"),
    0x018D: "zw",
    0x01BE: "ts",
}


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

    Forms strip white space and normalise to NFKC. Case, accents, invisible characters
    and the script of a digit make no difference to many databases: to every MySQL by
    default, and to others where the site says so. Two names that differ only in these
    share a counter, which is the lesser evil: otherwise one name would have any number
    of counters.
    """
    if len(text) > MAX_FOLDED:
        return LONG
    return "".join(map(_fold_character, text)).strip()


@lru_cache(maxsize=4096)
def _fold_character(character: str) -> str:
    compatible = unicodedata.normalize("NFKD", character)
    if len(compatible) > 1 and compatible.startswith(" "):
        return ""  # an accent that stands by itself

    folded = compatible.translate(_SPELLED_OUT).casefold()
    decomposed = unicodedata.normalize("NFKD", folded)
    return "".join(map(_base, decomposed))


def _base(character: str) -> str:
    """Return the letter or digit of a character; nothing for a mark or a control."""
    category = unicodedata.category(character)
    if category.startswith("C"):
        return ""
    if character.isascii():
        return character

    if category.startswith("N"):
        number = unicodedata.numeric(character)
        return str(math.ceil(number))  # Tibetan writes one and a half as a 2
    letter = _find_letter(unicodedata.name(character, ""))
    if letter is not None:
        return letter[1].lower()
    if category.startswith("M"):
        return ""
    return character
