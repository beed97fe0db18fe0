"""Work of the installation: sweeps, queued tasks, deliveries and image templates."""

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial

from django_q.models import OrmQ

from controlplane.worker.broker import DatabaseTimeBroker
from sandboxes.db import database_time
from sandboxes.errors import WebhookTestFailed
from sandboxes.hosts import registry
from sandboxes.models import (
    Delivery,
    ImageTemplate,
    Sweep,
    Webhook,
)
from sandboxes.providers.memory import MemoryProvider
from sandboxes.sweep_log import SweepResult, run_recorded
from sandboxes.templates import builds
from sandboxes.templates.specifications import TemplateSpecification
from sandboxes.webhooks import delivery, outbox, subscriptions
from tests.conftest import MINUTE, NOW
from tests.support.actors import console_user
from tests.support.claimed_work import Context, Work

HOUR = timedelta(hours=1)


def begin_sweep(context: Context) -> Work:
    act = partial(run_recorded, "meter", SweepResult, every=MINUTE)
    return Work(act, Sweep, "running_until", Sweep.objects.filter(succeeded_at__isnull=False).exists)


class QueueTask(Work):
    def is_claimed(self) -> bool:
        """The broker has the clock of the database, not that of the test."""
        return self.model._base_manager.filter(lock__gt=database_time.now() + MINUTE).exists()


def begin_queue_task(context: Context) -> Work:
    broker = DatabaseTimeBroker(list_key="q")
    broker.enqueue("task")
    fetched = list[object]()
    return QueueTask(lambda now: fetched.extend(broker.dequeue()), OrmQ, "lock", lambda: len(fetched) == 1)


def add_webhook() -> Webhook:
    return subscriptions.add_webhook("http://127.0.0.1:1/", ["budget.warning"], now=NOW, internal=True)[0]


def begin_delivery(context: Context) -> Work:
    webhook = add_webhook()
    outbox.enqueue_event("budget.warning", key="1", payload={}, now=NOW)
    claimed = Delivery.objects.filter(claim__isnull=False)
    return Work(partial(delivery.claim_delivery, webhook.pk), Delivery, "due_at", claimed.exists)


def begin_test_delivery(context: Context) -> Work:
    """A test event, whose delivery delays those of other events."""
    webhook = add_webhook()

    def send(*, now: datetime) -> None:
        with suppress(WebhookTestFailed):
            delivery.send_test_event(webhook, now=now)

    return Work(send, Delivery, "due_at", Delivery.objects.exclude(last_error="").exists)


def request_template(*, now: datetime) -> tuple[ImageTemplate, bool]:
    host = registry.get_local_host("memory", now=NOW)
    return builds.request("t", TemplateSpecification("a", ["b"]), host=host, now=now, actor=console_user("test"))


def begin_template(context: Context) -> Work:
    return Work(lambda now: request_template(now=now), ImageTemplate, "deadline_at")


def begin_template_again(context: Context) -> Work:
    """A template whose build has failed."""
    request_template(now=NOW)
    ImageTemplate.objects.update(state="failed", failure="error", deadline_at=None, finished_at=NOW)
    return begin_template(context)


def begin_overdue_build(context: Context) -> Work:
    request_template(now=NOW)
    return Work(builds.release_due, ImageTemplate, "deadline_at")


def begin_build(context: Context) -> Work:
    """The build fails in the end, because the memory provider builds no images."""
    pk = request_template(now=NOW)[0].pk
    return Work(
        partial(builds.build, pk), ImageTemplate, "deadline_at", ImageTemplate.objects.filter(state="failed", attempts=2).exists
    )


def begin_removal(context: Context) -> Work:
    request_template(now=NOW)
    for name in ("remove_image", "remove_build"):
        context.patch.setattr(MemoryProvider, name, lambda self, image: None)
    rows = ImageTemplate.objects.all()
    rows.update(state="ready", image="t", image_id="i", deadline_at=None, finished_at=NOW)

    def remove(*, now: datetime) -> None:
        if rows.exists():
            builds.remove(rows.get(), now=now)

    return Work(remove, ImageTemplate, "deadline_at", lambda: not rows.exists())


WORK: dict[str, Callable[[Context], Work]] = {
    "sweep": begin_sweep,
    "queue task": begin_queue_task,
    "delivery": begin_delivery,
    "test delivery": begin_test_delivery,
    "template": begin_template,
    "template again": begin_template_again,
    "overdue build": begin_overdue_build,
    "build": begin_build,
    "removal": begin_removal,
}
