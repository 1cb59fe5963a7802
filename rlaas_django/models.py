"""The panel's permissions, overrides, which must survive a restart of Redis, and the history of operators."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from datetime import datetime
from decimal import Decimal
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import IntegrityError, models, transaction
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from .conf import Network
from .core.keys import NETWORK, decode, is_client
from .limiter import networks, overrides

COMPARED = 500  # identities per comparison of the database with Redis
MIN_FACTOR, MAX_FACTOR = Decimal("0.001"), Decimal(1000)


def network_of(identity: str) -> Network | None:
    """Return the network that an encoded address or network is; None for any other identity."""
    kind, text = decode(identity)
    try:
        return ipaddress.ip_network(text) if kind in ("ip", NETWORK) else None
    except ValueError:  # such as `unknown`
        return None


def contains(network: Network | None, other: Network | None) -> bool:
    """Return whether a network contains another one, or is the same."""
    if network is None or other is None or network.version != other.version:
        return False
    return network.supernet_of(other)  # type: ignore[arg-type]


class RateLimit(models.Model):
    """A model without a table: the panel's entry in the admin, with its permissions to view and to change."""

    words = ""  # what was done to an identity, in the admin log

    class Meta:
        managed = False
        default_permissions = ("view", "change")
        verbose_name = _("rate limit")
        verbose_name_plural = _("rate limits")

    def __str__(self) -> str:
        return str(self.words or self.pk or self._meta.verbose_name)


class OverrideQuerySet(models.QuerySet["Override"]):
    """Overrides, active and ended."""

    def active(self) -> OverrideQuerySet:
        """Return the overrides that apply now."""
        return self.filter(ended_at=None, until__gt=timezone.now())

    def matching(self, identities: Iterable[str]) -> dict[str, list[Override]]:
        """Return the overrides of each identity, and of the networks that an address is in, the widest first."""
        found: dict[str, list[Override]] = {identity: [] for identity in identities}
        if not found:
            return found
        found_networks: list[tuple[Network | None, Override]] = []
        for override in self.filter(
            Q(identity__in=[*found]) | Q(identity__startswith=f"{NETWORK}=")
        ):
            if override.is_network:
                found_networks.append((override.network, override))
            if override.identity in found:
                found[override.identity].append(override)
        for identity, matching in found.items():
            network = (
                network_of(identity)
                if found_networks and identity.startswith("ip=")
                else None
            )
            matching += [
                each for other, each in found_networks if contains(other, network)
            ]
            matching.sort(key=lambda each: each.narrowness)
        return found

    def of_addresses(self) -> OverrideQuerySet:
        """Return the overrides of addresses and of networks."""
        return self.filter(
            Q(identity__startswith=f"{NETWORK}=") | Q(identity__startswith="ip=")
        )

    def of_networks(self) -> OverrideQuerySet:
        """Return the overrides that each process matches with addresses: of networks, and of every client of one."""
        return self.filter(
            Q(identity__startswith=f"{NETWORK}=")
            | Q(identity__startswith="ip=", every_client=True)
        )


class Override(models.Model):
    """Block, exempt or give a custom limit to an identity or a network until a time; ended ones are kept as history."""

    class Kind(models.TextChoices):
        BLOCK = overrides.BLOCK, _("blocked")
        EXEMPT = overrides.EXEMPT, _("exempt")
        LIMIT = overrides.LIMIT, _("custom limit")
        FACTOR = overrides.FACTOR, _("limit times")

    identity = models.CharField(_("identity"), max_length=200)
    policy = models.CharField(
        _("policy"),
        max_length=100,
        blank=True,
        help_text=_("Leave empty for all policies."),
    )
    kind = models.CharField(_("kind"), max_length=10, choices=Kind)
    limit = models.PositiveBigIntegerField(
        _("limit"),
        null=True,
        blank=True,
        validators=[MinValueValidator(1)],
        help_text=_("For one policy."),
    )
    factor = models.DecimalField(
        _("factor"),
        max_digits=7,
        decimal_places=3,
        null=True,
        blank=True,
        validators=[MinValueValidator(MIN_FACTOR), MaxValueValidator(MAX_FACTOR)],
        help_text=_(
            "By which the limits of the policies are multiplied, such as 2 or 0.5."
        ),
    )
    every_client = models.BooleanField(
        _("logged-in users, too"),
        default=False,
        help_text=_(
            "For an address or a network: also where a policy counts users or tokens."
        ),
    )
    until = models.DateTimeField(_("until"))
    reason = models.CharField(_("reason"), max_length=200)
    created_at = models.DateTimeField(_("created at"), auto_now_add=True)
    # Usernames rather than foreign keys: the history survives the account.
    created_by = models.CharField(_("created by"), max_length=254, blank=True)
    ended_at = models.DateTimeField(_("ended at"), null=True, blank=True)
    ended_by = models.CharField(_("ended by"), max_length=254, blank=True)

    objects = OverrideQuerySet.as_manager()

    class Meta:
        default_permissions = ()  # the permissions of RateLimit apply
        verbose_name = _("override")
        verbose_name_plural = _("overrides")
        ordering = ("-created_at", "-pk")
        constraints = (
            # Of two operators who act at once, the second gets an IntegrityError, and tries again.
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
        if not self.policy and not is_client(self.identity):
            message = _(
                "Choose a policy: under another one, %(identity)s is the value of another parameter."
            )
            raise ValidationError(
                {"policy": ValidationError(message, params={"identity": self.identity})}
            )
        if self.kind == overrides.LIMIT and not self.policy:
            raise ValidationError(
                {
                    "limit": _(
                        "A limit fits one policy. Enter a factor for all policies."
                    )
                }
            )
        for kind, field in ((overrides.LIMIT, "limit"), (overrides.FACTOR, "factor")):
            if (getattr(self, field) is None) == (self.kind == kind):
                message = (
                    _("Enter a number.")
                    if self.kind == kind
                    else _("This kind of override has none.")
                )
                raise ValidationError({field: message})
        if self.every_client and self.network is None:
            raise ValidationError(
                {"every_client": _("Only an address or a network has several clients.")}
            )

    @classmethod
    def set(
        cls,
        identity: str,
        policy: str,
        kind: str,
        until: datetime,
        *,
        by: object,
        **fields: Any,
    ) -> Override:
        """Create an override, and end the one that the identity has under the same policy."""
        override = cls(
            identity=identity,
            policy=policy,
            kind=kind,
            until=until,
            created_by=str(by),
            **fields,
        )
        override.clean_fields()
        override.clean()
        try:
            override._replace(by)
        except IntegrityError:  # another operator was faster; end that override too
            override._replace(by)
        return override

    def _replace(self, by: object) -> None:
        with transaction.atomic():
            self._end(
                Override.objects.filter(identity=self.identity, policy=self.policy), by
            )
            self.save(force_insert=True)
            self._publish_on_commit()

    def is_active(self, at: datetime | None = None) -> bool:
        """Return whether the override applies at a time, by default now."""
        at = at or timezone.now()
        return self.created_at <= at < min(self.until, self.ended_at or self.until)

    def end(self, by: object) -> None:
        """End the override now."""
        with transaction.atomic():
            self._end(Override.objects.filter(pk=self.pk), by)
            self._publish_on_commit()

    @staticmethod
    def _end(overrides: models.QuerySet[Override], by: object) -> None:
        overrides.filter(ended_at=None).update(
            ended_at=timezone.now(), ended_by=str(by)
        )

    # Scope

    @property
    def network(self) -> Network | None:
        """The network of an address or a network; None for any other identity."""
        return network_of(self.identity)

    @property
    def is_network(self) -> bool:
        return decode(self.identity)[0] == NETWORK

    @property
    def narrowness(self) -> tuple[bool, int, bool]:
        """What overrides that apply to the same request are ordered by: the widest first."""
        prefix = (
            self.network.prefixlen
            if self.is_network and self.network is not None
            else 0
        )
        return not self.is_network, prefix, self.policy != ""

    # Redis

    def _publish_on_commit(self) -> None:
        """Publish what is committed, and nothing that is rolled back.

        The database has the truth: if Redis is unavailable then, the background thread publishes it later.
        """
        identity = (
            self.identity
        )  # a function with a name, which Django logs if it fails; a partial has none
        transaction.on_commit(lambda: self.publish(identity), robust=True)

    @classmethod
    def publish(cls, identity: str) -> None:
        """Write the active overrides of an identity to Redis."""
        kind = decode(identity)[0]
        if kind != NETWORK:
            cls._publish_identity(identity)
        if kind in ("ip", NETWORK):
            cls._publish_networks()

    @classmethod
    def _publish_identity(cls, identity: str) -> None:
        """Write the overrides that the script finds by the identity, again if they change meanwhile."""
        written: list[Override] | None = None
        while (
            current := list(cls.objects.active().filter(identity=identity))
        ) != written:
            overrides.publish(identity, [override._published() for override in current])
            written = current

    @classmethod
    def _publish_networks(cls) -> None:
        """Write the overrides that processes match with addresses, again if they change meanwhile."""
        written: list[Override] | None = None
        while (current := list(cls.objects.active().of_networks())) != written:
            networks.publish(cls._network_overrides(current))
            written = current

    @property
    def amount(self) -> int | None:
        """The amount as the script takes it: units, or thousandths."""
        return self.limit if self.factor is None else int(self.factor * 1000)

    @property
    def amount_text(self) -> str:
        """The limit or the factor as text, such as `120` or `1.5`."""
        return (
            str(self.limit or "")
            if self.factor is None
            else f"{self.factor.normalize():f}"
        )

    def _published(self) -> overrides.Override:
        return overrides.Override(
            self.identity, self._scope, self.kind, self._until, self.amount
        )

    @property
    def _scope(self) -> str:
        return self.policy or overrides.EVERY_POLICY

    @property
    def _until(self) -> int:
        return int(self.until.timestamp() * 1000)

    @staticmethod
    def _network_overrides(found: Iterable[Override]) -> list[overrides.Override]:
        return [
            overrides.Override(
                str(network),
                each._scope,
                each.kind,
                each._until,
                each.amount,
                each.every_client,
            )
            for each in found
            if (network := each.network) is not None
        ]

    @classmethod
    def publish_missing(cls, after: str = "") -> str:
        """Publish what differs in Redis, of up to COMPARED identities after one; return the last, "" at the end.

        Also of ended overrides that Redis may still have: it was unavailable when they ended.
        """
        if not after and networks.differs(
            cls._network_overrides(cls.objects.active().of_networks())
        ):
            cls._publish_networks()
        found = cls.objects.filter(
            until__gt=timezone.now(), identity__gt=after
        ).order_by("identity")
        found = found.exclude(identity__startswith=f"{NETWORK}=")
        identities = list(
            found.values_list("identity", flat=True).distinct()[:COMPARED]
        )
        wanted: dict[str, list[overrides.Override]] = {
            identity: [] for identity in identities
        }
        for override in cls.objects.active().filter(identity__in=identities):
            wanted[override.identity].append(override._published())
        for identity in overrides.differing(wanted):
            cls._publish_identity(identity)
        return identities[-1] if len(identities) == COMPARED else ""

    @classmethod
    def restore(cls) -> int:
        """Write all active overrides to Redis, and return the number of identities that have one."""
        identities = sorted(
            set(cls.objects.active().values_list("identity", flat=True))
        )
        for identity in identities:
            if decode(identity)[0] != NETWORK:
                cls._publish_identity(identity)
        cls._publish_networks()
        overrides.mark_complete()
        return len(identities)


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
    by = models.CharField(
        _("operator"), max_length=254
    )  # a username, which outlives the account
    via = models.CharField(
        _("by way of"), max_length=20, help_text=_("The admin, or a command.")
    )
    action = models.CharField(_("action"), max_length=10, choices=Action)
    identity = models.CharField(_("identity"), max_length=200)
    policy = models.CharField(
        _("policy"), max_length=100, blank=True, help_text=_("Empty for all policies.")
    )
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
