"""manage.py pool: list, show, add, change, drain and resume pools."""

from argparse import ArgumentParser
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from django.db import transaction

from sandboxes import pool_stats
from sandboxes.audit import COMMAND_LINE, record
from sandboxes.db import database_time
from sandboxes.hosts import capacity
from sandboxes.management.columns import find_named
from sandboxes.management.named_rows import NamedRowCommand
from sandboxes.models import Pool
from sandboxes.pool import allocation


class Command(NamedRowCommand):
    help = (
        "List, show, add and change pools. `manage.py limits pool NAME` sets what leases may request, and "
        "`manage.py environment pools` the pools of an environment type."
    )
    model = Pool
    columns = (
        "capacity", "automatic_capacity", "max_starting", "warm_target", "provider", "image", "restricted", "memory_mib",
        "millicpus", "pids", "runtime", "workspace_limit_mib",
    )  # fmt: skip
    facts = ("used", "draining", "capacity_origin", "warm_failures", "warm_error")

    def add_actions(self, actions: Any) -> Collection[ArgumentParser]:
        return (
            actions.add_parser("drain", help="accept no new sandboxes; existing ones end normally"),
            actions.add_parser("resume", help="accept new sandboxes again"),
        )

    def find_rows(self) -> Sequence[Pool]:
        rows = [*Pool.objects.order_by("name")]
        self.now = database_time.now()
        self.stats = {each.pk: each for each in pool_stats.collect_pool_stats(now=self.now)}
        return rows

    def format_line(self, row: Pool) -> str:
        stats = self.stats[row.pk]
        notes = [
            f"{stats.used} of {stats.capacity} places used",
            f"{stats.cold} cold" if stats.cold else "",
            f"{stats.warm_ready} of {stats.warm_target} pre-warmed" if stats.warm_target else "",
            "draining" if stats.draining else "",
            "circuit open" if row.warm_paused_until and row.warm_paused_until > self.now else "",
        ]
        return f"{row.name} {row.provider or 'default provider'}: {', '.join(filter(None, notes))}"

    def prepare(self, row: Pool, changes: dict[str, Any]) -> None:
        """Let a new pool without a capacity have as many places as fit into the engine's memory, as the console suggests."""
        if row._state.adding and "capacity" not in changes:
            memory_mib = changes.get("memory_mib", row.memory_mib)
            if memory_mib and (derived := capacity.try_derive_capacity(changes.get("provider", ""), memory_mib)):
                changes["capacity"] = derived.places

    def save(self, row: Pool, changes: Collection[str]) -> None:
        capacity.store_pool(row, changes)

    def complete(self, now: datetime) -> None:
        capacity.update_automatic_capacities(now=now)

    def _drain(self, options: dict[str, Any]) -> None:
        pool = find_named(Pool, options["name"])
        changed = _set_draining(pool, True)
        self.stdout.write(f"{pool.name} {'draining' if changed else 'was draining before'}")

    def _resume(self, options: dict[str, Any]) -> None:
        pool = find_named(Pool, options["name"])
        changed = _set_draining(pool, False)
        self.stdout.write(f"{pool.name} {'resumed' if changed else 'was not draining'}")


def _set_draining(pool: Pool, draining: bool) -> bool:
    with transaction.atomic():
        changed = allocation.set_draining(pool, draining=draining, actor=COMMAND_LINE)
        if changed:
            record(pool, "Drain pool" if draining else "Resume pool", actor=COMMAND_LINE, now=database_time.now())
    return changed
