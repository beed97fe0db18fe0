"""What the facts amount to: time, use and tokens by day, what they cost, and what may be spent. Facts are elsewhere; all
that is in usage and cost records can be thrown away and derived again."""

from collections.abc import Iterable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator
from django.db import models, transaction
from django.db.models import Exists, F, Max, OuterRef, Q, QuerySet, Value
from django.db.models.functions import Coalesce
from django.utils import timezone
from django.utils.functional import cached_property

from billing import members
from billing.days import BEGINNING, LONG_AGO, day_of, following
from billing.models_budgets import Budget, Tab
from billing.models_statements import Credit, Statement, StatementLine

__all__ = [
    "HOUSE", "Account", "Budget", "CostRecord", "Credit", "Item", "Membership", "Meter", "Priced", "Rate", "Statement",
    "StatementLine", "Tab", "Unpriced", "UsageRecord", "Watermark",
]  # fmt: skip
HOUSE = "house"  # the account of whoever has no other
DIGITS = 15  # of a number: SQLite keeps no more


class Watermark(models.Model):
    """Up to when something has been derived. Whoever derives holds its lock, so one pass at a time does, and never back."""

    name = models.CharField(max_length=32, primary_key=True)
    at = models.DateTimeField()

    class Meta:
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.name} {self.at:%Y-%m-%d %H:%M:%S}"

    @classmethod
    def hold(cls, name: str, now: datetime) -> datetime:
        """Lock it until the transaction ends, and move it to now, but never back; where it is then."""
        cls.objects.get_or_create(name=name, defaults={"at": now})
        mark = cls.objects.select_for_update().get(name=name)
        if mark.at < now:
            mark.at = now
            mark.save(update_fields=["at"])
        return mark.at


class Item(models.TextChoices):
    TIME = "time", "sandbox time"
    USE = "use", "CPU and memory used"
    RUNS = "runs", "runs"
    STORAGE = "storage", "storage"
    TOKENS = "tokens", "model calls"


class Unpriced(models.Model):
    """A day whose costs do not follow from its usage yet: something was written or removed since they were derived.

    One row for each change, so nobody waits for anybody: whoever prices removes the rows it saw before it read the usage."""

    day = models.DateField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.day)

    @classmethod
    def note(cls, days: Iterable[date]) -> None:
        """Call it in the transaction that changes what these days cost."""
        Unpriced.objects.bulk_create([Unpriced(day=day) for day in sorted({*days})], batch_size=200)


class UsageRecords(QuerySet["UsageRecord"]):
    """Whatever is written or removed leaves its day unpriced, in the same transaction."""

    def bulk_create(self, objs: Iterable[Any], *args: Any, **options: Any) -> list[Any]:
        records = [*objs]
        with transaction.atomic():
            Unpriced.note(record.day for record in records)
            return super().bulk_create(records, *args, **options)

    def delete(self) -> tuple[int, dict[str, int]]:
        with transaction.atomic():
            Unpriced.note(self.order_by().values_list("day", flat=True).distinct())
            return super().delete()

    delete.alters_data = delete.queryset_only = True  # type: ignore[attr-defined]


class UsageRecord(models.Model):
    """One fact's share of one day, UTC: a sandbox's time in one state, the bytes of a snapshot, one lease's calls of a model.

    Of what is not over yet the part up to the watermark is here, and grows with the next pass."""

    item = models.CharField(max_length=8, choices=Item.choices)
    source = models.CharField(
        max_length=320, help_text="The fact: the transition that began it, the snapshot, lease and model."
    )
    day = models.DateField()
    began_at = models.DateTimeField()
    ended_at = models.DateTimeField()
    sandbox = models.ForeignKey(
        "sandboxes.Sandbox", on_delete=models.PROTECT, null=True, blank=True, related_name="usage", db_index=False
    )
    holder = models.UUIDField(null=True, blank=True, help_text="The lease. Empty: a sandbox that nobody held yet.")
    agent_did = models.CharField(max_length=255, blank=True, verbose_name="agent")
    environment_id = models.CharField(max_length=200, blank=True)
    provider = models.CharField(max_length=32, blank=True)
    state = models.CharField(max_length=16, blank=True)
    memory_mib = models.PositiveIntegerField(default=0)
    millicpus = models.PositiveIntegerField(default=0)
    measured = models.BooleanField(default=False, help_text="What it used of CPU and memory is in records of its own.")
    cpu_micros = models.PositiveBigIntegerField("CPU", default=0, help_text="Used, in microseconds.")
    mib_micros = models.PositiveBigIntegerField("memory", default=0, help_text="Used, in microseconds x MiB.")
    size_bytes = models.PositiveBigIntegerField(default=0)
    model = models.CharField(max_length=200, blank=True)
    calls = models.PositiveBigIntegerField(default=0, help_text="Of a model; or runs.")
    unpriced = models.PositiveBigIntegerField(default=0, help_text="Calls of which nobody knows what they cost.")
    input_tokens = models.PositiveBigIntegerField(default=0)
    cached_tokens = models.PositiveBigIntegerField(default=0)
    output_tokens = models.PositiveBigIntegerField(default=0)
    usd = models.DecimalField(max_digits=18, decimal_places=9, default=Decimal(0), help_text="Of model calls.")

    objects = UsageRecords.as_manager()

    class Meta:
        default_permissions = ("view",)
        ordering = ["-day", "-pk"]
        constraints = [
            models.UniqueConstraint(fields=["source", "day"], name="usage_once_a_day"),
            models.CheckConstraint(condition=Q(ended_at__gte=F("began_at")), name="usage_ends_later"),
        ]
        indexes = [
            models.Index(fields=["day", "item"], name="usage_day"),
            models.Index(fields=["holder", "day"], name="usage_holder"),
            models.Index(fields=["agent_did", "day"], name="usage_agent"),
        ]

    def __str__(self) -> str:
        return f"{self.source} on {self.day}"


class Meter(models.Model):
    """How far the life of one sandbox has been read: the transition whose state it is in now, and since when.

    A sandbox's transitions follow one another, so none is passed over; a table's do not."""

    sandbox = models.OneToOneField("sandboxes.Sandbox", on_delete=models.PROTECT, primary_key=True, related_name="meter")
    transition = models.BigIntegerField()
    began_at = models.DateTimeField()
    read_at = models.DateTimeField(help_text="The watermark when its usage was last written.")

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.sandbox_id} at {self.transition}"


# --- money ------------------------------------------------------------------------------------------------------------


class Account(models.Model):
    """Who pays. Allowances are used up once for each account and month."""

    name = models.SlugField(max_length=63, unique=True)
    title = models.CharField(max_length=200, blank=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class Memberships(QuerySet["Membership"]):
    """What agents' accounts are, by day."""

    def on(self, day: date) -> "Memberships":
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

    objects = Memberships.as_manager()

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
        return bool(_closed(self._moves(gone=True)))

    def clean(self) -> None:
        if not self.agent_did or self.account_id is None:
            return  # their fields say so
        if self.since is None and self.pk:
            raise ValidationError({"since": "Say from which day on."})
        if self.since is None:
            self.since = self._default()
        if said := _closed(self._moves()):
            raise ValidationError({"since": said})

    def save(self, *args: Any, **options: Any) -> None:
        """ValidationError where it would change what is closed. Whatever is billed otherwise by it is priced again."""
        with transaction.atomic():
            Watermark.hold("costs", LONG_AGO)  # nobody closes a month, or prices one, by what this is about to change
            self.full_clean()
            self._note()
            super().save(*args, **options)

    def delete(self, *args: Any, **options: Any) -> tuple[int, dict[str, int]]:
        with transaction.atomic():
            Watermark.hold("costs", LONG_AGO)
            if said := _closed(self._moves(gone=True)):
                raise ValidationError(said)
            self._note(gone=True)
            return super().delete(*args, **options)

    def _default(self) -> date:
        if Membership.objects.filter(agent_did=self.agent_did).exists():
            return day_of(timezone.now())
        return max(BEGINNING, first_open(_house(), self.account_id))

    def _moves(self, *, gone: bool = False) -> list[tuple[str, date, int, int]]:
        """What saving or deleting it does: (agent, from which day on, the account it was, the one it becomes)."""
        agents = {self.agent_did, *Membership.objects.filter(pk=self.pk).values_list("agent_did", flat=True)}
        house, found = _house(), []
        for agent in sorted(agents):
            rows = Membership.objects.filter(agent_did=agent).order_by("since").values_list("pk", "since", "account")
            becomes = [(since, account) for pk, since, account in rows if pk != self.pk]
            if agent == self.agent_did and not gone:
                becomes = sorted([*becomes, (self.since, self.account_id)])
            was = [(since, account) for _, since, account in rows]
            found += [(agent, *move) for move in members.moves(was, becomes, house)]
        return found

    def _note(self, *, gone: bool = False) -> None:
        first: dict[str, date] = {}
        for agent, since, *_ in self._moves(gone=gone):
            first.setdefault(agent, since)
        for agent, since in first.items():
            used = UsageRecord.objects.filter(agent_did=agent, day__gte=since).order_by()
            Unpriced.note(used.values_list("day", flat=True).distinct())


def _house() -> int:
    return Account.objects.get_or_create(name=HOUSE)[0].pk


def _closed(moves: Iterable[tuple[str, date, int, int]]) -> str:
    """Why these are not possible; nothing if they are."""
    for _, since, *accounts in moves:
        if since < (first := first_open(*accounts)):
            closed = Statement.objects.filter(account__in=accounts).select_related("account").latest("month")
            return (
                f"{closed.account} has closed {closed.month:%Y-%m}, which stays as it is. "
                f"The agent's account can change from {first} on."
            )
    return ""


def first_open(*accounts: int) -> date:
    """The first day after the months that any of these accounts has closed."""
    last = Statement.objects.filter(account__in=accounts).aggregate(month=Max("month"))["month"]
    return following(last) if last else date.min


class Priced(models.TextChoices):
    """What rates and costs are for, and in which unit."""

    TIME = "time", "sandbox-hours"
    MEMORY = "memory", "GiB-hours of memory"
    CPU = "cpu", "vCPU-minutes"
    DISK = "disk", "GB-hours of disk"
    STORAGE = "storage", "GB-months of storage"
    REQUEST = "request", "requests (runs)"
    PLAN = "plan", "months of a plan"
    LLM = "llm", "model calls"


class Rate(models.Model):
    """What one unit costs at a provider from a moment on. One that has begun never changes: a new price is a new row, which
    begins later, and nothing before it costs something else."""

    provider = models.SlugField(max_length=32)
    instance_type = models.CharField(max_length=32, blank=True, help_text="Such as basic. Empty: of any.")
    item = models.CharField(max_length=8, choices=[choice for choice in Priced.choices if choice[0] != Priced.LLM])
    usd = models.DecimalField(
        "USD", max_digits=18, decimal_places=12, validators=[MinValueValidator(Decimal(0))], help_text="For one unit."
    )
    allowance = models.DecimalField(
        max_digits=15, decimal_places=6, default=Decimal(0), validators=[MinValueValidator(Decimal(0))],
        help_text="Units that each account has free in each calendar month, UTC.",
    )  # fmt: skip
    valid_from = models.DateTimeField(help_text="What was used before is not priced by it.")
    source = models.CharField(max_length=300, blank=True, help_text="Where the figure is from.")
    own = models.BooleanField("set your own", default=False, help_text="A zero in the place of a price that only you know.")
    by_use = models.BooleanField(
        default=False, help_text="CPU and memory: for what was used, where that is measured. Else for what a sandbox was given."
    )  # fmt: skip

    class Meta:
        ordering = ["provider", "item", "instance_type", "-valid_from"]
        constraints = [
            models.UniqueConstraint(fields=["provider", "instance_type", "item", "valid_from"], name="rate_once"),
            models.CheckConstraint(
                condition=Q(usd__gte=0, allowance__gte=0),
                name="rate_positive",
                violation_error_message="A rate is not below 0.",
            ),
            models.CheckConstraint(
                condition=Q(by_use=False) | Q(item__in=["cpu", "memory"]),
                name="rate_by_use",
                violation_error_message="Only CPU and memory are measured by use.",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.provider} {self.instance_type} {self.item}".replace("  ", " ")

    def clean(self) -> None:
        """That it has not begun, before and after, as of now: what is priced by it cannot change."""
        stored = Rate.objects.filter(pk=self.pk).first() if self.pk else None
        if stored and stored.valid_from <= timezone.now():
            raise ValidationError("This rate has begun, and what it priced stays. Add another one that begins later.")
        if self.valid_from and self.valid_from < earliest_start(timezone.now()):
            raise ValidationError({"valid_from": "A rate does not begin in the past: what was used then has its price."})
        if isinstance(self.usd, Decimal) and len(self.usd.normalize().as_tuple().digits) > DIGITS:
            raise ValidationError({"usd": f"At most {DIGITS} digits."})

    def save(self, *args: Any, **options: Any) -> None:
        """ValidationError for one that has begun. Whatever was used since it begins is priced again."""
        self.full_clean()
        with transaction.atomic():
            super().save(*args, **options)
            since = self.valid_from.astimezone(UTC).date()
            Unpriced.note(UsageRecord.objects.filter(day__gte=since).order_by().values_list("day", flat=True).distinct())

    def delete(self, *args: Any, **options: Any) -> tuple[int, dict[str, int]]:
        if self.valid_from <= timezone.now():
            raise ValidationError("This rate has begun, and what it priced stays.")
        return super().delete(*args, **options)


def earliest_start(now: datetime) -> datetime:
    """When a new rate may begin at the earliest. What is used up to now has a price already, or is about to get it."""
    return now


class CostRecord(models.Model):
    """What one lease used of one item on one day, and what that cost by one rate. Derived from usage, rates and memberships
    alone: thrown away and derived again it is the same to the last digit."""

    account = models.ForeignKey(Account, on_delete=models.PROTECT, related_name="costs", db_index=False)
    day = models.DateField()
    provider = models.CharField(max_length=32, blank=True)
    item = models.CharField(max_length=8, choices=Priced.choices)
    agent_did = models.CharField(max_length=255, blank=True, verbose_name="agent")
    holder = models.UUIDField(null=True, blank=True, help_text="The lease. Empty: a sandbox that nobody held yet, or a plan.")
    environment_id = models.CharField(max_length=200, blank=True)
    rate = models.ForeignKey(
        Rate, on_delete=models.PROTECT, null=True, blank=True, related_name="costs", help_text="Empty: model calls."
    )
    whole = models.CharField(
        max_length=40, help_text="The quantity in the smallest units there are, such as microseconds x MiB: a whole number."
    )
    quantity = models.DecimalField(max_digits=18, decimal_places=9, help_text="In the unit of the item.")
    free = models.DecimalField(max_digits=18, decimal_places=9, default=Decimal(0), help_text="Within the allowance.")
    usd = models.DecimalField("USD", max_digits=18, decimal_places=9)

    class Meta:
        default_permissions = ("view",)
        ordering = ["-day", "account", "provider", "item", "-pk"]
        constraints = [
            models.UniqueConstraint(
                "day", "account", "provider", "item", "agent_did", "environment_id",
                Coalesce("holder", Value(UUID(int=0), models.UUIDField())),
                Coalesce("rate", Value(0), output_field=models.BigIntegerField()),
                name="cost_once",
            ),
            models.CheckConstraint(
                condition=Q(quantity__gte=0, usd__gte=0, free__gte=0, free__lte=F("quantity")), name="cost_positive"
            ),
            models.CheckConstraint(
                condition=Q(item="llm", rate__isnull=True) | (~Q(item="llm") & Q(rate__isnull=False)), name="cost_has_its_rate"
            ),
        ]  # fmt: skip
        indexes = [
            models.Index(fields=["account", "day"], name="cost_account"),
            models.Index(fields=["agent_did", "day"], name="cost_agent"),
            models.Index(fields=["holder", "day"], name="cost_holder"),
        ]

    def __str__(self) -> str:
        return f"{self.item} on {self.day}"
