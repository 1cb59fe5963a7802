"""manage.py rlaas restore: write the overrides of the database to Redis again."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ....models import Override
from .output import Output

HELP = "Write the active overrides to Redis again, after it was emptied."
EXAMPLE = "manage.py rlaas restore"


def add_arguments(parser: ArgumentParser) -> None:
    """Add no option."""


def run(_options: Namespace, output: Output) -> None:
    """Restore the overrides."""
    number = Override.restore()
    if output.as_json:
        output.json({"identities": number})
    else:
        output.line(f"Restored the overrides of {number} identities.")
