"""The panel's permissions, and the overrides of operators, which must survive a restart of Redis."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.core.exceptions import ValidationError
from django.db import IntegrityError, models, transaction
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from .core.keys import is_client
from .limiter import overrides

COMPARED = 500  # identities per comparison of the database with Redis


class RateLimit(models.Model):
    """A model without a table: the panel's entry in the admin, with its permissions to view and to change."""

    class Meta:
        managed = False
        default_permissions = ("view", "change")
        verbose_name = _("rate limit")
        verbose_name_plural = _("rate limits")

    def __str__(self) -> str:
        return str(self.pk or self._meta.verbose_name)  # an identity, in the admin log


class OverrideQuerySet(models.QuerySet["Override"]):
    """Overrides, active and ended."""

    def active(self) -> OverrideQuerySet:
        """Return the overrides that apply now."""
        return self.filter(ended_at=None, until__gt=timezone.now())


class Override(models.Model):
    """Block, exempt or give a custom limit to one identity until a time; ended overrides are kept as history."""

    class Kind(models.TextChoices):
        BLOCK = overrides.BLOCK, _("blocked")
        EXEMPT = overrides.EXEMPT, _("exempt")
        LIMIT = overrides.LIMIT, _("custom limit")

    identity = models.CharField(_("identity"), max_length=200)
    policy = models.CharField(_("policy"), max_length=100, blank=True, help_text=_("Leave empty for all policies."))
    kind = models.CharField(_("kind"), max_length=10, choices=Kind)
    limit = models.PositiveBigIntegerField(_("limit"), null=True, blank=True)
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
                fields=("identity", "policy"), condition=Q(ended_at=None), name="rlaas_one_active_override"
            ),
        )

    def __str__(self) -> str:
        return f"{self.identity}: {self.get_kind_display()}"

    def clean(self) -> None:
        """Require a policy for the value of a parameter or a function: under other policies it is another's."""
        if not self.policy and not is_client(self.identity):
            message = _("Choose a policy: under another one, %(identity)s is the value of another parameter.")
            raise ValidationError({"policy": ValidationError(message, params={"identity": self.identity})})

    @classmethod
    def set(cls, identity: str, policy: str, kind: str, until: datetime, *, by: object, **fields: Any) -> Override:
        """Create an override, and end the one that the identity has under the same policy."""
        override = cls(identity=identity, policy=policy, kind=kind, until=until, created_by=str(by), **fields)
        override.clean()
        try:
            override._replace(by)
        except IntegrityError:  # another operator was faster; end that override too
            override._replace(by)
        return override

    def _replace(self, by: object) -> None:
        with transaction.atomic():
            self._end(Override.objects.filter(identity=self.identity, policy=self.policy), by)
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
        overrides.filter(ended_at=None).update(ended_at=timezone.now(), ended_by=str(by))

    def _publish_on_commit(self) -> None:
        """Publish what is committed, and nothing that is rolled back.

        The database has the truth: if Redis is unavailable then, the background thread publishes it later.
        """
        identity = self.identity  # a function with a name, which Django logs if it fails; a partial has none
        transaction.on_commit(lambda: self.publish(identity), robust=True)

    @classmethod
    def publish(cls, identity: str) -> None:
        """Write the active overrides of an identity to Redis, again if they change meanwhile."""
        written = None
        while (current := list(cls.objects.active().filter(identity=identity))) != written:
            overrides.publish(identity, [override._published() for override in current])
            written = current

    def _published(self) -> overrides.Override:
        policy, until = self.policy or overrides.EVERY_POLICY, int(self.until.timestamp() * 1000)
        return overrides.Override(self.identity, policy, self.kind, until, self.limit)

    @classmethod
    def publish_missing(cls, after: str = "") -> str:
        """Publish what differs in Redis, of up to COMPARED identities after one; return the last, "" at the end.

        Also of ended overrides that Redis may still have: it was unavailable when they ended.
        """
        found = cls.objects.filter(until__gt=timezone.now(), identity__gt=after).order_by("identity")
        identities = list(found.values_list("identity", flat=True).distinct()[:COMPARED])
        wanted: dict[str, list[overrides.Override]] = {identity: [] for identity in identities}
        for override in cls.objects.active().filter(identity__in=identities):
            wanted[override.identity].append(override._published())
        for identity in overrides.differing(wanted):
            cls.publish(identity)
        return identities[-1] if len(identities) == COMPARED else ""

    @classmethod
    def restore(cls) -> int:
        """Write all active overrides to Redis, and return the number of identities that have one."""
        identities = sorted(set(cls.objects.active().values_list("identity", flat=True)))
        for identity in identities:
            cls.publish(identity)
        overrides.mark_complete()
        return len(identities)
