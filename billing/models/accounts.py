"""Accounts and the dated memberships of agents in them."""

from collections.abc import Iterable
from datetime import date
from typing import Any

from django.core.exceptions import ValidationError
from django.db import models, transaction
from django.db.models import Exists, Max, OuterRef, QuerySet
from django.utils import timezone
from django.utils.functional import cached_property

from billing import membership
from billing.dates import EPOCH, EPOCH_DATE, start_of_next_month, to_utc_date
from billing.models.statements import Statement
from billing.models.usage import Unpriced, UsageRecord, Watermark

HOUSE_ACCOUNT_NAME = "house"  # the account of agents without another


class Account(models.Model):
    """Who pays. Allowances are used up once for each account and month."""

    name = models.SlugField(max_length=63, unique=True)
    title = models.CharField(max_length=200, blank=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class MembershipQuerySet(QuerySet["Membership"]):
    """What agents' accounts are, by day."""

    def on(self, day: date) -> "MembershipQuerySet":
        """Those that count on a day: the latest of each agent that has begun."""
        later = Membership.objects.filter(agent_did=OuterRef("agent_did"), since__gt=OuterRef("since"), since__lte=day)
        return self.filter(~Exists(later), since__lte=day)


class Membership(models.Model):
    """The account that an agent's usage is billed to from a day on, UTC, until its next membership begins. Before its first
    one, and without any, that is the house, as it is for sandboxes that nobody held yet. To leave an account is to be a
    member of the house from a day on.

    A move never changes what is closed: a day stays with its account once that, or the one that would get it, has closed the
    month of that day or a later one. So a membership begins after the last closed month of both accounts, one that began
    before its end is neither changed nor deleted, and no statement is ever corrected because of a move.

    If no day is given, the first membership of an agent counts from BEGINNING, or, where the house or its account has closed
    months, from the first day after those; a later one from today."""

    agent_did = models.CharField(max_length=255, verbose_name="agent")
    account = models.ForeignKey(Account, on_delete=models.PROTECT, related_name="memberships")
    since = models.DateField(
        blank=True,
        help_text="The first day, UTC, in no closed month. Empty: of its first account from the beginning, else from today.",
    )

    objects = MembershipQuerySet.as_manager()

    class Meta:
        ordering = ["agent_did", "since"]
        constraints = [
            models.UniqueConstraint(
                fields=["agent_did", "since"], name="membership_once_a_day",
                violation_error_message="It has a membership that begins on this day.",
            )
        ]  # fmt: skip

    def __str__(self) -> str:
        return f"{self.agent_did} in {self.account}"

    @cached_property
    def fixed(self) -> bool:
        """Did it begin in what is closed? As it was when this was asked first."""
        return bool(_explain_closed_months(self._find_account_changes(gone=True)))

    def clean(self) -> None:
        if not self.agent_did or self.account_id is None:
            return  # their fields say so
        if self.since is None and self.pk:
            raise ValidationError({"since": "Say from which day on."})
        if self.since is None:
            self.since = self._get_default_since()
        if said := _explain_closed_months(self._find_account_changes()):
            raise ValidationError({"since": said})

    def save(self, *args: Any, **options: Any) -> None:
        """ValidationError where it would change what is closed. Whatever is billed otherwise by it is priced again."""
        with transaction.atomic():
            Watermark.hold("costs", EPOCH)  # nobody closes a month, or prices one, by what this is about to change
            self.full_clean()
            self._note()
            super().save(*args, **options)

    def delete(self, *args: Any, **options: Any) -> tuple[int, dict[str, int]]:
        with transaction.atomic():
            Watermark.hold("costs", EPOCH)
            if said := _explain_closed_months(self._find_account_changes(gone=True)):
                raise ValidationError(said)
            self._note(gone=True)
            return super().delete(*args, **options)

    def _get_default_since(self) -> date:
        if Membership.objects.filter(agent_did=self.agent_did).exists():
            return to_utc_date(timezone.now())
        return max(EPOCH_DATE, get_first_open_day(_get_house_account_id(), self.account_id))

    def _find_account_changes(self, *, gone: bool = False) -> list[tuple[str, date, int, int]]:
        """What saving or deleting it does: (agent, from which day on, the account it was, the one it becomes)."""
        agents = {self.agent_did, *Membership.objects.filter(pk=self.pk).values_list("agent_did", flat=True)}
        house, found = _get_house_account_id(), []
        for agent in sorted(agents):
            rows = Membership.objects.filter(agent_did=agent).order_by("since").values_list("pk", "since", "account")
            becomes = [(since, account) for pk, since, account in rows if pk != self.pk]
            if agent == self.agent_did and not gone:
                becomes = sorted([*becomes, (self.since, self.account_id)])
            was = [(since, account) for _, since, account in rows]
            found += [(agent, *move) for move in membership.find_account_changes(was, becomes, house)]
        return found

    def _note(self, *, gone: bool = False) -> None:
        first: dict[str, date] = {}
        for agent, since, *_ in self._find_account_changes(gone=gone):
            first.setdefault(agent, since)
        for agent, since in first.items():
            used = UsageRecord.objects.filter(agent_did=agent, day__gte=since).order_by()
            Unpriced.note(used.values_list("day", flat=True).distinct())


def _get_house_account_id() -> int:
    return Account.objects.get_or_create(name=HOUSE_ACCOUNT_NAME)[0].pk


def _explain_closed_months(moves: Iterable[tuple[str, date, int, int]]) -> str:
    """Why these are not possible; nothing if they are."""
    for _, since, *accounts in moves:
        if since < (first := get_first_open_day(*accounts)):
            closed = Statement.objects.filter(account__in=accounts).select_related("account").latest("month")
            return (
                f"{closed.account} has closed {closed.month:%Y-%m}, which stays as it is. "
                f"The agent's account can change from {first} on."
            )
    return ""


def get_first_open_day(*accounts: int) -> date:
    """The first day after the months that any of these accounts has closed."""
    last = Statement.objects.filter(account__in=accounts).aggregate(month=Max("month"))["month"]
    return start_of_next_month(last) if last else date.min
