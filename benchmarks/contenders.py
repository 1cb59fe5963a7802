"""Everyone who takes part."""

from __future__ import annotations

from . import ours, peers
from .contender import Contender
from .measure import Effort

EVERYONE = [*ours.CONTENDERS, *peers.CONTENDERS]
BY_NAME = {contender.name: contender for contender in EVERYONE}


def field(effort: Effort, *further: Contender) -> list[Contender]:
    """Everyone; in a quick run, without their variants."""
    return [each for each in (*EVERYONE, *further) if not (effort.quick and each.variant)]
