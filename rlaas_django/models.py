"""What the admin needs a database for: permissions to hang the panel on, and overrides that outlive Redis."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Any

from django.db import IntegrityError, models, transaction
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from . import overrides


class RateLimit(models.Model):
    """No table: the panel's place in the admin, with its permissions to view and to change."""

    class Meta:
        managed = False
        default_permissions = ("view", "change")
        verbose_name = _("rate limit")
        verbose_name_plural = _("rate limits")

    def __str__(self) -> str:
        return str(self._meta.verbose_name)


class OverrideQuerySet(models.QuerySet["Override"]):
    def active(self) -> OverrideQuerySet:
        return self.filter(ended_at=None, until__gt=timezone.now())


class Override(models.Model):
    """What holds for one identity instead of a policy, until a time; ended ones stay, as history."""

    class Kind(models.TextChoices):
        BLOCK = overrides.BLOCK, _("blocked")
        EXEMPT = overrides.EXEMPT, _("exempt")
        LIMIT = overrides.LIMIT, _("another limit")

    identity = models.CharField(_("identity"), max_length=200)
    policy = models.CharField(_("policy"), max_length=100, blank=True, help_text=_("Empty: every policy."))
    kind = models.CharField(_("what holds"), max_length=10, choices=Kind)
    limit = models.PositiveBigIntegerField(_("limit"), null=True, blank=True)
    until = models.DateTimeField(_("until"))
    reason = models.CharField(_("reason"), max_length=200)
    created_at = models.DateTimeField(_("made at"), auto_now_add=True)
    # Names, not references: history stays when an account goes, and a site without accounts can have policies too.
    created_by = models.CharField(_("made by"), max_length=254, blank=True)
    ended_at = models.DateTimeField(_("ended at"), null=True, blank=True)
    ended_by = models.CharField(_("ended by"), max_length=254, blank=True)

    objects = OverrideQuerySet.as_manager()

    class Meta:
        default_permissions = ()  # the panel's permissions hold
        verbose_name = _("override")
        verbose_name_plural = _("overrides")
        ordering = ("-created_at", "-pk")
        constraints = (
            # Two who act at once: the second ends what the first began, or is told.
            models.UniqueConstraint(
                fields=("identity", "policy"), condition=Q(ended_at=None), name="rlaas_one_override_in_force"
            ),
        )

    def __str__(self) -> str:
        return f"{self.identity}: {self.get_kind_display()}"

    @classmethod
    def set(cls, identity: str, policy: str, kind: str, until: datetime, *, by: object, **rest: Any) -> Override:
        """Let this hold from now on, instead of what held for the identity and policy before."""
        try:
            return cls._set(identity, policy, kind, until, by=by, **rest)
        except IntegrityError:  # somebody else was quicker, and is ended now
            return cls._set(identity, policy, kind, until, by=by, **rest)

    @classmethod
    def _set(cls, identity: str, policy: str, kind: str, until: datetime, *, by: object, **rest: Any) -> Override:
        with transaction.atomic():
            cls._end(cls.objects.filter(identity=identity, policy=policy), by)
            override = cls.objects.create(
                identity=identity, policy=policy, kind=kind, until=until, created_by=str(by), **rest
            )
            cls._publish_both_ways(identity)
        return override

    def end(self, by: object) -> None:
        with transaction.atomic():
            self._end(type(self).objects.filter(pk=self.pk), by)
            self._publish_both_ways(self.identity)

    @staticmethod
    def _end(overrides: models.QuerySet[Override], by: object) -> None:
        overrides.filter(ended_at=None).update(ended_at=timezone.now(), ended_by=str(by))

    @classmethod
    def _publish_both_ways(cls, identity: str) -> None:
        """Now, so that nothing is kept that Redis did not take; and when others can see it, who may act at once."""
        cls.publish(identity)
        transaction.on_commit(partial(cls.publish, identity), robust=True)

    @classmethod
    def publish(cls, identity: str) -> None:
        """Let Redis have what the database has, also when somebody else changes it meanwhile."""
        written = None
        while (current := list(cls.objects.active().filter(identity=identity))) != written:
            overrides.publish(identity, [override.published() for override in current])
            written = current

    def published(self) -> overrides.Override:
        return overrides.Override(
            self.identity,
            self.policy or overrides.EVERY_POLICY,
            self.kind,
            int(self.until.timestamp() * 1000),
            self.limit,
        )

    @classmethod
    def restore(cls) -> int:
        """Write every override that is in force to Redis; how many identities they are for."""
        identities = sorted(set(cls.objects.active().values_list("identity", flat=True)))
        for identity in identities:
            cls.publish(identity)
        overrides.mark_complete()
        return len(identities)


overrides.restore = Override.restore
