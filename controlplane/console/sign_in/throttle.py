"""Throttle of password and code guesses, with a growing delay.

An attempt is counted before its password is verified, by one UPDATE that is also the check. Parallel guesses therefore get no
more than the permitted number, on any number of processes, and a refused guess costs no password hash.

An attempt counts for the user name and for the client's address. A browser that has signed in as this user before has a row of
its own instead of both: a stranger who guesses for a known name then cannot keep its operator out."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Case, DateTimeField, F, IntegerField, Value, When
from django.utils.crypto import salted_hmac

from controlplane.console.sign_in.addresses import find_client_network
from controlplane.console.sign_in.models import SignInThrottle

Kind = SignInThrottle.Kind
FREE_ATTEMPTS = {Kind.NAME: 5, Kind.ADDRESS: 10, Kind.BROWSER: 5, Kind.CODE: 5, Kind.USER: 5}  # failed ones without a delay
SECOND = timedelta(seconds=1)
FIRST_DELAY = SECOND
MAX_DELAY = timedelta(minutes=15)
DOUBLINGS = 10  # after which the delay is MAX_DELAY
FORGET_AFTER = timedelta(hours=24)  # without an attempt
MAX_PRUNED_ROWS = 1000  # by one attempt


class SignInThrottled(Exception):
    """Too many failed attempts. The next one is permitted at `retry_at`, a full second, in `seconds`, at least 1."""

    def __init__(self, retry_at: datetime, now: datetime) -> None:
        super().__init__("Too many failed attempts to sign in.")
        self.retry_at = retry_at if not retry_at.microsecond else retry_at.replace(microsecond=0) + SECOND
        self.seconds = max(1, -(-(retry_at - now) // SECOND))


@dataclass(frozen=True)
class ThrottleKey:
    """One counter of attempts."""

    kind: SignInThrottle.Kind
    digest: str


def build_key(kind: SignInThrottle.Kind, value: str) -> ThrottleKey:
    return ThrottleKey(kind, salted_hmac(f"sign-in throttle {kind}", value, algorithm="sha256").hexdigest())


def build_name_key(name: str) -> ThrottleKey:
    """Build the key of a user name. Spellings that differ in case or in Unicode form share it."""
    return build_key(Kind.NAME, unicodedata.normalize("NFKC", name).casefold())


def build_address_key(address: str) -> ThrottleKey:
    return build_key(Kind.ADDRESS, find_client_network(address))


def calculate_delay(kind: SignInThrottle.Kind, failures: int) -> timedelta:
    """Return the time until the next attempt after this number of failed ones."""
    excess = failures - FREE_ATTEMPTS[kind]
    if excess < 0:
        return timedelta(0)
    return min(MAX_DELAY, FIRST_DELAY * 2**excess) if excess < DOUBLINGS else MAX_DELAY


def admit(keys: Sequence[ThrottleKey], *, now: datetime) -> None:
    """Count an attempt as failed for each key. Raise SignInThrottled, and count nothing, if one of them has to wait.

    Keys are locked in the order of their kinds, so that two attempts never wait for each other."""
    keys = sorted(keys, key=lambda key: key.kind)
    for key in keys:
        _refuse_early(key, now)
    with transaction.atomic():
        for key in keys:
            _take_attempt(key, now)
    _prune(now)


def _refuse_early(key: ThrottleKey, now: datetime) -> None:
    """Refuse a throttled key without a write: refused attempts may be many."""
    waiting = SignInThrottle.objects.filter(kind=key.kind, digest=key.digest, next_allowed_at__gt=now)
    if retry_at := waiting.values_list("next_allowed_at", flat=True).first():
        raise SignInThrottled(retry_at, now)


def _take_attempt(key: ThrottleKey, now: datetime) -> None:
    row = SignInThrottle(kind=key.kind, digest=key.digest, next_allowed_at=now, last_attempt_at=now)
    SignInThrottle.objects.bulk_create([row], ignore_conflicts=True)
    is_forgotten = When(last_attempt_at__lt=now - FORGET_AFTER, then=Value(0))
    failures = Case(is_forgotten, default=F("failures"), output_field=IntegerField())
    next_times = [now + calculate_delay(key.kind, count + 1) for count in range(FREE_ATTEMPTS[key.kind] + DOUBLINGS)]
    delays = [When(_failures=count, then=Value(moment)) for count, moment in enumerate(next_times)]
    taken = (
        SignInThrottle.objects.filter(kind=key.kind, digest=key.digest, next_allowed_at__lte=now)
        .alias(_failures=failures)
        .update(
            failures=failures + 1,
            next_allowed_at=Case(*delays, default=Value(now + MAX_DELAY), output_field=DateTimeField()),
            last_attempt_at=now,
        )
    )
    if not taken:  # another attempt was first, or the row was pruned at this moment
        rows = SignInThrottle.objects.filter(kind=key.kind, digest=key.digest)
        raise SignInThrottled(rows.values_list("next_allowed_at", flat=True).first() or now, now)


def forgive(keys: Sequence[ThrottleKey], *, now: datetime) -> None:
    """Take back the failed attempts of these keys after a successful one.

    An address is forgiven the successful attempt only: it may also guess for other names."""
    for key in keys:
        rows = SignInThrottle.objects.filter(kind=key.kind, digest=key.digest, failures__gt=0)
        left = F("failures") - 1 if key.kind == Kind.ADDRESS else 0
        rows.update(failures=left, next_allowed_at=now)


def forget(keys: Sequence[ThrottleKey]) -> int:
    """Delete the rows of these keys. Return how many had failed attempts."""
    rows = [SignInThrottle.objects.filter(kind=key.kind, digest=key.digest) for key in keys]
    failed = sum(each.filter(failures__gt=0).count() for each in rows)
    for each in rows:
        each.delete()
    return failed


def _prune(now: datetime) -> None:
    """Delete rows without a recent attempt, but those that an attempt has locked at this moment."""
    old = SignInThrottle.objects.filter(last_attempt_at__lt=now - FORGET_AFTER - MAX_DELAY)
    if not old.exists():
        return
    with transaction.atomic():
        keys = list(old.select_for_update(skip_locked=True).values_list("pk", flat=True)[:MAX_PRUNED_ROWS])
        SignInThrottle.objects.filter(pk__in=keys).delete()
