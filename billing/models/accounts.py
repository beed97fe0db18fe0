"""Accounts and the dated memberships of agents in them."""

from collections.abc import Iterable
from datetime import date
from typing import Any

from django.core.exceptions import ValidationError
from django.db import models, transaction
from django.db.models import Exists, Max, OuterRef, QuerySet
from django.utils.functional import cached_property

from billing import membership
from billing.dates import EPOCH, EPOCH_DATE, start_of_next_month, to_utc_date
from billing.membership import HOUSE_ACCOUNT_NAME
from billing.models.budgets import Budget, Scope
from billing.models.statements import Statement
from billing.models.usage import Unpriced, UsageRecord, Watermark
from sandboxes.db import database_time


class Account(models.Model):
    """A paying account. Allowances apply once per account and calendar month."""

    name = models.SlugField(max_length=63, unique=True)
    title = models.CharField(max_length=200, blank=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class MembershipQuerySet(QuerySet["Membership"]):
    """Memberships by day."""

    def on(self, day: date) -> "MembershipQuerySet":
        """Return each agent's membership in force on `day`: the latest one that began on or before it."""
        superseding = Membership.objects.filter(agent_did=OuterRef("agent_did"), since__gt=OuterRef("since"), since__lte=day)
        return self.filter(~Exists(superseding), since__lte=day)


class Membership(models.Model):
    """Account that an agent's usage is billed to, from a UTC day until the agent's next membership begins.

    The house account is billed for usage before an agent's first membership, for agents without any, and for sandboxes
    without a lease. An agent leaves an account by a membership in the house account.

    A move never changes a closed month. Once the old or the new account has closed the month of a day, or a later month, the
    account of that day cannot change. A membership therefore begins after the last closed month of both accounts, and one that
    began in a closed month can be neither changed nor deleted. No statement is ever corrected because of a move.

    Without a given day, an agent's first membership begins at EPOCH_DATE or, if the house account or the new account has
    closed months, on the first day after them. A later membership begins today."""

    agent_did = models.CharField(max_length=255, verbose_name="agent")
    account = models.ForeignKey(Account, on_delete=models.PROTECT, related_name="memberships")
    since = models.DateField(
        blank=True,
        help_text="First day (UTC), after any closed month. If empty: the earliest possible day for the agent's first account, "
        "otherwise today.",
    )

    objects = MembershipQuerySet.as_manager()

    class Meta:
        ordering = ["agent_did", "since"]
        constraints = [
            models.UniqueConstraint(
                fields=["agent_did", "since"], name="membership_once_a_day",
                violation_error_message="The agent already has a membership that begins on this day.",
            )
        ]  # fmt: skip

    def __str__(self) -> str:
        return f"{self.agent_did} in {self.account}"

    @cached_property
    def fixed(self) -> bool:
        """True if the membership affects a closed month and cannot change. Evaluated once per instance."""
        return bool(_explain_closed_months(self._find_account_changes(deleted=True)))

    def changes_nothing(self) -> bool:
        """Return whether the agent already belongs to the account on the first day, which is today if it is not stated."""
        present = Membership.objects.on(self.since or to_utc_date(database_time.now())).filter(agent_did=self.agent_did)
        account = present.values_list("account__name", flat=True).first() or HOUSE_ACCOUNT_NAME
        return self.account.name == account

    def clean(self) -> None:
        if not self.agent_did or self.account_id is None:
            return  # reported by the fields' own validation
        if self.since is None and self.pk:
            raise ValidationError({"since": "Enter the first day."})
        if self.since is None:
            self.since = self._get_default_since()
        if error := _explain_closed_months(self._find_account_changes()):
            raise ValidationError({"since": error})

    def save(self, *args: Any, **options: Any) -> None:
        """Save the membership and mark the usage that changes its account as unpriced.

        Raise ValidationError if that would change a closed month."""
        with transaction.atomic():
            _hold_sums()
            self.full_clean()
            self._mark_unpriced()
            super().save(*args, **options)

    def delete(self, *args: Any, **options: Any) -> tuple[int, dict[str, int]]:
        with transaction.atomic():
            _hold_sums()
            if error := _explain_closed_months(self._find_account_changes(deleted=True)):
                raise ValidationError(error)
            self._mark_unpriced(deleted=True)
            return super().delete(*args, **options)

    def _get_default_since(self) -> date:
        if Membership.objects.filter(agent_did=self.agent_did).exists():
            return to_utc_date(database_time.now())
        return max(EPOCH_DATE, get_first_open_day(_get_house_account_id(), self.account_id))

    def _find_account_changes(self, *, deleted: bool = False) -> list[tuple[str, date, int, int]]:
        """Return the effect of saving or deleting as (agent, first day, old account, new account).

        A saved change of the agent affects both the old and the new agent."""
        agents = {self.agent_did, *Membership.objects.filter(pk=self.pk).values_list("agent_did", flat=True)}
        house, changes = _get_house_account_id(), []
        for agent in sorted(agents):
            rows = Membership.objects.filter(agent_did=agent).order_by("since").values_list("pk", "since", "account")
            new = [(since, account) for pk, since, account in rows if pk != self.pk]
            if agent == self.agent_did and not deleted:
                new = sorted([*new, (self.since, self.account_id)])
            old = [(since, account) for _, since, account in rows]
            changes += [(agent, *change) for change in membership.find_account_changes(old, new, house)]
        return changes

    def _mark_unpriced(self, *, deleted: bool = False) -> None:
        first: dict[str, date] = {}
        for agent, since, *_ in self._find_account_changes(deleted=deleted):
            first.setdefault(agent, since)
        for agent, since in first.items():
            used = UsageRecord.objects.filter(agent_did=agent, day__gte=since).order_by()
            Unpriced.note(used.values_list("day", flat=True).distinct())


def _get_house_account_id() -> int:
    return Account.objects.get_or_create(name=HOUSE_ACCOUNT_NAME)[0].pk


def _explain_closed_months(changes: Iterable[tuple[str, date, int, int]]) -> str:
    """Return an error message if a change affects a closed month, else an empty string."""
    for _, since, *accounts in changes:
        if since < (first := get_first_open_day(*accounts)):
            closed = Statement.objects.filter(account__in=accounts).select_related("account").latest("month")
            return (
                f"{closed.account} has closed {closed.month:%Y-%m}; closed months cannot change. "
                f"The agent's account can change from {first} on."
            )
    return ""


def get_first_open_day(*accounts: int) -> date:
    """Return the first day after the last closed month of any of these accounts; `date.min` if none is closed."""
    last = Statement.objects.filter(account__in=accounts).aggregate(month=Max("month"))["month"]
    return start_of_next_month(last) if last else date.min


def _hold_sums() -> None:
    """Exclude a concurrent month close or pricing by the old account, and delete the sums that budgets of accounts keep."""
    Watermark.hold("costs", EPOCH)
    Budget.objects.filter(scope=Scope.ACCOUNT).update(calls_metered_mark=None)
