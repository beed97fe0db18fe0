"""Actions on image templates: build again, remove."""

from datetime import datetime

from django.db import transaction

from leases import tasks
from sandboxes.admin.base.actions import AdminAction, ReasonForm
from sandboxes.admin.base.formatting import build_changelist_url
from sandboxes.admin.templates import ImageTemplateAdmin
from sandboxes.audit import Actor
from sandboxes.models import ImageTemplate, TemplateState
from sandboxes.templates import builds
from sandboxes.templates.specifications import TemplateSpecification


def _is_ended(template: ImageTemplate) -> bool:
    return template.state != TemplateState.BUILDING


def _rebuild(template: ImageTemplate, actor: Actor, reason: str, now: datetime) -> bool:
    specification = TemplateSpecification(template.base, template.commands, template.dockerfile)
    with transaction.atomic():  # the row and the task commit together
        _, is_waiting = builds.request(template.name, specification, host=template.host, now=now, actor=actor, rebuild=True)
        if is_waiting:
            tasks.enqueue_template_build(template)
    return is_waiting


def _remove(template: ImageTemplate, actor: Actor, reason: str, now: datetime) -> bool:
    """Remove a fresh copy of the row, so that `template` keeps its id for the log entry."""
    builds.remove(ImageTemplate.objects.select_related("host").get(pk=template.pk), now=now)
    return True


def _get_list_url(template: ImageTemplate, form: ReasonForm) -> str:
    return build_changelist_url("sandboxes_imagetemplate")


REBUILD_ACTION = AdminAction(
    title="Build again",
    warning="The commands run on the host's engine as root, or at the vendor, with a network. Sandboxes use the previous "
    "image until the new one is ready, and after a failed build.",
    done="queued",
    refusal_reason="it is being built",
    legal=_is_ended,
    verb=_rebuild,
    icon="replay",
    permissions=("sandboxes.manage_imagetemplate",),
)
REMOVE_ACTION = AdminAction(
    title="Remove template",
    warning="The image is removed from the host's engine, or from the vendor's account. A template whose image a pool "
    "or a sandbox uses stays.",
    done="removed",
    refusal_reason="it is being built",
    legal=_is_ended,
    verb=_remove,
    icon="delete",
    permissions=("sandboxes.manage_imagetemplate",),
    danger=True,
    button="Remove",
    get_next_url=_get_list_url,
)

ImageTemplateAdmin.add_actions({"rebuild": REBUILD_ACTION, "remove": REMOVE_ACTION})
