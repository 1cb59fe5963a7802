"""The panel's permissions, overrides, and the history of what operators did.

Overrides are in the database because they must survive a restart of Redis, which
has a copy for the scripts that decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from decimal import Decimal
from functools import cached_property, partial
from operator import attrgetter
from typing import TypeVar

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import IntegrityError, models, transaction
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from . import backend
from .core.keys import (
    NETWORK,
    Network,
    decode,
    encode,
    is_client,
    parse_network,
)
from .core.text import printable
from .limiter import networks, overrides

Overrides = TypeVar("Overrides")

COMPARED = 500  # identities per comparison of the database with Redis
MIN_FACTOR = Decimal("0.001")
MAX_FACTOR = Decimal(1000)

IS_NETWORK = Q(identity__startswith=f"{NETWORK}=")
IS_ADDRESS = Q(identity__startswith="ip=")
MAPPED = f"{NETWORK}={encode('::ffff:')}"  # of networks that were stored as IPv4-mapped


def network_of(identity: str) -> Network | None:
    """Return the network of an encoded address or network; None for others."""
    kind, text = decode(identity)
    if kind not in ("ip", NETWORK):
        return None

    try:
        return parse_network(text)
    except ValueError:  # such as `unknown`
        return None


def canonical(identity: str) -> str:
    """Return an encoded identity, of an IPv4-mapped network as that of the IPv4 one."""
    if not identity.startswith(MAPPED):
        return identity
    return f"{NETWORK}={encode(str(network_of(identity)))}"


def supernets(identity: str, lengths: Iterable[int]) -> set[str]:
    """Return the encoded networks, with prefixes this long, that an identity is in."""
    network = network_of(identity)
    if network is None:
        return set()

    wider = [
        network.supernet(new_prefix=length)
        for length in lengths
        if length <= network.prefixlen
    ]
    return {f"{NETWORK}={encode(str(network))}" for network in wider}


class RateLimit(models.Model):
    """The panel's entry in the admin, with its permissions; it has no table."""

    words = ""  # what was done to an identity, in the admin log

    class Meta:
        managed = False
        default_permissions = ("view", "change")
        verbose_name = _("rate limit")
        verbose_name_plural = _("rate limits")

    def __str__(self) -> str:
        return self.words


class OverrideQuerySet(models.QuerySet["Override"]):
    """Overrides, active and ended."""

    def active(self) -> OverrideQuerySet:
        """Return the overrides that apply now."""
        return self.filter(ended_at=None, until__gt=timezone.now())

    def inactive(self) -> OverrideQuerySet:
        """Return those that ended or expired."""
        return self.exclude(ended_at=None, until__gt=timezone.now())

    def matching(self, identities: Iterable[str]) -> dict[str, list[Override]]:
        """Return the overrides that apply to each identity, the widest first.

        Those of an address or a network include those of the networks that it is in.
        """
        matches: dict[str, list[Override]] = {identity: [] for identity in identities}
        if not matches:
            return matches

        # The names alone: there may be thousands of networks, of which few match.
        stored = self.filter(IS_NETWORK).values_list("identity", flat=True)
        named = {canonical(name): name for name in stored}
        endings = {name.rpartition("%2F")[2] for name in named}
        lengths = [int(ending) for ending in endings if ending.isdecimal()]
        applying = {
            identity: {identity, *named.keys() & supernets(identity, lengths)}
            for identity in matches
        }

        found = set().union(*applying.values())
        candidates = self.filter(identity__in=[named.get(name, name) for name in found])
        for override in sorted(candidates, key=attrgetter("narrowness")):
            for identity, names in applying.items():
                if canonical(override.identity) in names:
                    matches[identity].append(override)

        return matches

    def mentioning(self, text: str, identities: Iterable[str]) -> OverrideQuerySet:
        """Return those that apply to one of some identities, or contain a text."""
        matches = self.matching(identities).values()
        keys = {override.pk for overrides in matches for override in overrides}
        condition = Q(pk__in=keys) | Q(identity__icontains=encode(text))
        for field in ("policy", "reason", "created_by"):
            condition |= Q(**{f"{field}__icontains": text})

        return self.filter(condition)

    def of_addresses(self) -> OverrideQuerySet:
        """Return the overrides of addresses and of networks."""
        return self.filter(IS_NETWORK | IS_ADDRESS)

    def of_networks(self) -> OverrideQuerySet:
        """Return the overrides that each process matches with addresses.

        Those of networks, and those of every client of an address.
        """
        return self.filter(IS_NETWORK | IS_ADDRESS & Q(every_client=True))

    def published(self) -> list[overrides.Override]:
        """Read them anew, and return them as Redis has them."""
        return [override.published() for override in self.all()]

    def published_by_identity(
        self, identities: Iterable[str]
    ) -> dict[str, list[overrides.Override]]:
        """Read those of each identity anew, and return them as Redis has them."""
        published: dict[str, list[overrides.Override]] = {
            identity: [] for identity in identities
        }
        for override in self.filter(identity__in=[*published]):
            published[override.identity].append(override.published())
        return published

    def end(self, by: object) -> None:
        """End those that have not ended."""
        self.filter(ended_at=None).update(ended_at=timezone.now(), ended_by=str(by))


class Override(models.Model):
    """Block, exempt or give a custom limit to an identity or a network until a time.

    Ended overrides are kept as history.
    """

    class Kind(models.TextChoices):
        BLOCK = overrides.BLOCK, _("blocked")
        EXEMPT = overrides.EXEMPT, _("exempt")
        LIMIT = overrides.LIMIT, _("custom limit")
        FACTOR = overrides.FACTOR, _("limit times")

    identity = models.CharField(_("identity"), max_length=200)
    policy = models.CharField(_("policy"), max_length=100, blank=True)
    kind = models.CharField(_("kind"), max_length=10, choices=Kind)
    limit = models.PositiveBigIntegerField(
        _("limit"),
        null=True,
        blank=True,
        validators=[MinValueValidator(1)],
    )
    factor = models.DecimalField(
        _("factor"),
        max_digits=7,
        decimal_places=3,
        null=True,
        blank=True,
        validators=[MinValueValidator(MIN_FACTOR), MaxValueValidator(MAX_FACTOR)],
    )
    # Of an address or a network: also where a policy counts users or tokens.
    every_client = models.BooleanField(_("logged-in users, too"), default=False)
    until = models.DateTimeField(_("until"))
    reason = models.CharField(_("reason"), max_length=200)
    created_at = models.DateTimeField(_("created at"), auto_now_add=True)
    # Usernames rather than foreign keys: the history survives the account.
    created_by = models.CharField(_("created by"), max_length=254, blank=True)
    ended_at = models.DateTimeField(_("ended at"), null=True, blank=True)
    ended_by = models.CharField(_("ended by"), max_length=254, blank=True)

    # False: what was saved last is not in force yet, as Redis was unavailable.
    is_published = True

    objects = OverrideQuerySet.as_manager()

    class Meta:
        default_permissions = ()  # the permissions of RateLimit apply
        verbose_name = _("override")
        verbose_name_plural = _("overrides")
        ordering = ("-created_at", "-pk")
        constraints = (
            # If two operators act at once, the second gets an IntegrityError and
            # tries again.
            models.UniqueConstraint(
                fields=("identity", "policy"),
                condition=Q(ended_at=None),
                name="rlaas_one_active_override",
            ),
        )

    def __str__(self) -> str:
        return f"{self.identity}: {self.get_kind_display()}"

    def clean(self) -> None:
        """Require a policy where it is needed, and the amount that the kind has."""
        _kind, text = decode(self.identity)
        if not self.policy and not is_client(self.identity):
            message = _(
                "Choose a policy: under another one, %(identity)s is the value of "
                "another parameter."
            )
            raise ValidationError({"policy": message % {"identity": printable(text)}})

        if self.kind == overrides.LIMIT and not self.policy:
            message = _("A limit fits one policy. Enter a factor for all policies.")
            raise ValidationError({"limit": message})

        # These kinds are called as the fields of their amounts.
        for kind in (overrides.LIMIT, overrides.FACTOR):
            has_amount = getattr(self, kind) is not None
            if self.kind == kind and not has_amount:
                raise ValidationError({kind: _("Enter a number.")})
            if self.kind != kind and has_amount:
                raise ValidationError({kind: _("This kind of override has none.")})

        if self.every_client and self.network is None:
            message = _("Only an address or a network has several clients.")
            raise ValidationError({"every_client": message})

    def activate(self, by: object) -> None:
        """Save the override, and end that of the same identity and policy.

        Raise ValidationError for fields that do not fit together.
        """
        self.created_by = str(by)
        self.clean_fields()
        self.clean()

        try:
            self._replace(by)
        except IntegrityError:  # another operator was faster: end that override
            self._replace(by)

    def _replace(self, by: object) -> None:
        same = Override.objects.filter(identity=self.identity, policy=self.policy)
        with transaction.atomic():
            same.end(by)
            self.save(force_insert=True)
            self._publish_on_commit()

    def end(self, by: object) -> None:
        """End the override now."""
        with transaction.atomic():
            Override.objects.filter(pk=self.pk).end(by)
            self._publish_on_commit()

    def is_active(self, at: datetime) -> bool:
        """Return whether the override applied at a time."""
        return self.created_at <= at < min(self.until, self.ended_at or self.until)

    @cached_property
    def network(self) -> Network | None:
        """The network of an address or a network; None for any other identity."""
        return network_of(self.identity)

    @cached_property
    def narrowness(self) -> tuple[bool, int, bool]:
        """The order of overrides that apply to the same request: the widest first."""
        prefix_length = 0
        if self.network is not None:
            prefix_length = self.network.prefixlen

        kind = decode(self.identity)[0]
        return kind != NETWORK, prefix_length, self.policy != ""

    @property
    def amount_text(self) -> str:
        """The limit or the factor as text, such as `120` or `1.5`."""
        if self.factor is not None:
            return f"{self.factor.normalize():f}"
        return str(self.limit or "")

    # The copy in Redis

    def _publish_on_commit(self) -> None:
        """Publish what is committed, and nothing that is rolled back."""
        transaction.on_commit(self._publish_committed, robust=True)

    def _publish_committed(self) -> None:
        """Publish, or leave it to the background thread while Redis is unavailable."""
        self.is_published = False
        with suppress(backend.UnavailableError):  # which is in the log
            self.publish(self.identity)
            self.is_published = True

    @classmethod
    def publish(cls, identity: str) -> None:
        """Write the active overrides of an identity to Redis."""
        kind = decode(identity)[0]
        if kind != NETWORK:
            cls._publish_identities([identity])
        if kind in ("ip", NETWORK):
            cls._publish_networks()

    @classmethod
    def _publish_identities(cls, identities: list[str]) -> None:
        """Write the overrides that the script finds by the identity."""
        read = partial(cls.objects.active().published_by_identity, identities)
        _write_until_stable(read, overrides.publish_each)

    @classmethod
    def _publish_networks(cls) -> None:
        of_networks = cls.objects.active().of_networks()
        _write_until_stable(of_networks.published, networks.publish)

    def published(self) -> overrides.Override:
        """Return the override as Redis has it: a factor in thousandths."""
        amount = self.limit
        if self.factor is not None:
            amount = int(self.factor * 1000)

        return overrides.Override(
            str(self.network or self.identity),
            self.policy or overrides.EVERY_POLICY,
            self.kind,
            int(self.until.timestamp() * 1000),
            amount,
            self.every_client,
        )

    @classmethod
    def publish_missing(cls, after: str = "") -> str:
        """Publish what differs in Redis, of COMPARED identities after one.

        Return the last of them, or "" at the end. Ended overrides are also
        compared: Redis may have been unavailable when they ended.
        """
        active = cls.objects.active()
        if not after and networks.differs(active.of_networks().published()):
            cls._publish_networks()

        unexpired = cls.objects.filter(until__gt=timezone.now(), identity__gt=after)
        ordered = unexpired.exclude(IS_NETWORK).order_by("identity")
        identities = ordered.values_list("identity", flat=True).distinct()[:COMPARED]

        expected = active.published_by_identity(identities)
        if differing := overrides.differing(expected):
            cls._publish_identities(differing)

        if len(expected) < COMPARED:
            return ""

        return [*expected][-1]

    @classmethod
    def restore(cls) -> int:
        """Publish all that Redis lacks; return how many identities have an override."""
        # First, so that of many processes one restores. Should that fail, the next
        # comparison finds what is missing.
        overrides.mark_complete()

        after = cls.publish_missing()
        while after:
            after = cls.publish_missing(after)

        active = cls.objects.active().order_by("identity")

        return active.values("identity").distinct().count()


def _write_until_stable(
    read: Callable[[], Overrides], write: Callable[[Overrides], None]
) -> None:
    """Write what is read, again if another process changes it meanwhile."""
    written = None
    while (current := read()) != written:
        write(current)
        written = current


class OperatorAction(models.Model):
    """What an operator did, and why: the history of overrides, resets and refunds."""

    class Action(models.TextChoices):
        BLOCK = overrides.BLOCK, _("block")
        EXEMPT = overrides.EXEMPT, _("exempt")
        LIMIT = overrides.LIMIT, _("custom limit")
        FACTOR = overrides.FACTOR, _("limit times")
        END = "end", _("end of an override")
        RESET = "reset", _("reset")
        REFUND = "refund", _("refund")

    at = models.DateTimeField(_("time"), auto_now_add=True)
    # A username, which outlives the account.
    by = models.CharField(_("operator"), max_length=254)
    via = models.CharField(_("by way of"), max_length=20)  # "admin" or "command"
    action = models.CharField(_("action"), max_length=10, choices=Action)
    identity = models.CharField(_("identity"), max_length=200)
    policy = models.CharField(_("policy"), max_length=100, blank=True)  # empty: all
    amount = models.CharField(_("amount"), max_length=30, blank=True)
    until = models.DateTimeField(_("until"), null=True, blank=True)
    reason = models.CharField(_("reason"), max_length=200, blank=True)

    class Meta:
        default_permissions = ()  # the permissions of RateLimit apply
        verbose_name = _("operator action")
        verbose_name_plural = _("operator actions")
        ordering = ("-at", "-pk")
        indexes = (
            models.Index(fields=("-at",), name="rlaas_action_at"),
            models.Index(fields=("identity", "-at"), name="rlaas_action_identity"),
        )

    def __str__(self) -> str:
        return f"{self.by}: {self.get_action_display()}, {self.identity}"
