"""Leases of several threads, for a database behind a pooler: python -m tests.e2e.pooled_workload. Prints "ok" at the end."""

import os
from concurrent.futures import ThreadPoolExecutor

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

import django

django.setup()

from datetime import timedelta  # noqa: E402

from django.core.management import call_command  # noqa: E402
from django.db import connections  # noqa: E402
from django.utils import timezone  # noqa: E402

from billing.models import CostRecord  # noqa: E402
from controlplane import metrics, schedules  # noqa: E402
from leases import execution, leasing  # noqa: E402
from leases.models import Lease  # noqa: E402
from sandboxes.models import Pool, Run  # noqa: E402
from sandboxes.runs.operations import Command  # noqa: E402

THREADS, EXECS = 8, 10


def use_lease(number: int) -> None:
    try:
        request = leasing.LeaseRequest(f"did:web:agent-{number}.invalid", "pooled", "coding")
        lease, _ = leasing.acquire(request, now=timezone.now())
        for _ in range(EXECS):
            execution.exec_command(lease.pk, Command(argv=["true"], timeout=timedelta(minutes=1)), now=timezone.now())
            leasing.renew(lease, now=timezone.now())
        leasing.release(lease.pk, now=timezone.now())
    finally:
        connections.close_all()


def main() -> None:
    call_command("migrate", verbosity=0)
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(use_lease, range(THREADS)))
    for name in ("reclaim", "meter", "recount"):
        result = schedules.run_sweep(name, now=timezone.now())
        assert not result.failures, result.failures
    assert Lease.objects.filter(status="destroyed").count() == THREADS
    assert Run.objects.filter(outcome="ok").count() == THREADS * EXECS
    assert not Pool.objects.filter(used__gt=0).exists()
    assert list(CostRecord.objects.values_list("pk").iterator(chunk_size=1)) == list(CostRecord.objects.values_list("pk"))
    metrics.read_snapshot(now=timezone.now())
    print("ok")


if __name__ == "__main__":
    main()
