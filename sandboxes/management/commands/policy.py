"""manage.py policy: list, show, add and change sandbox policies."""

from typing import Any

from django.core.management.base import CommandError

from sandboxes.management.named_rows import NamedRowCommand
from sandboxes.models import Policy
from sandboxes.models.policies import SEALED_POLICY_NAME


class Command(NamedRowCommand):
    help = (
        "List, show, add and change sandbox policies. `manage.py environment_type set NAME --policy NAME` assigns one, and "
        "`manage.py egress_credential` adds credentials to allowed domains."
    )
    model = Policy
    columns = tuple(field.name for field in Policy._meta.local_concrete_fields if field.name not in ("id", "name"))

    def format_line(self, row: Policy) -> str:
        exceptions = (
            ("writable root", row.writable_root), ("relay", row.relay), ("previews", row.previews),
            ("tools", row.mcp_tools), ("AT Protocol records", row.record_collections),
            (f"network: {' '.join(row.allowed_domains)}", row.allowed_domains), (f"models: {' '.join(row.models)}", row.models),
        )  # fmt: skip
        stated = "; ".join(label for label, is_set in exceptions if is_set) or "no exceptions"
        return f"{row.name} {stated}{f' ({row.description})' if row.description else ''}"

    def prepare(self, row: Policy, changes: dict[str, Any]) -> None:
        """Refuse changes of the built-in policy, which applies wherever no policy is named."""
        if row.built_in and not row._state.adding:
            raise CommandError(f"The policy {SEALED_POLICY_NAME} is built in and cannot be changed. Add another policy.")
