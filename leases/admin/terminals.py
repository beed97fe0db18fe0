"""Actions that open terminals in sandboxes. The page is in controlplane.console.terminals."""

from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from urllib.parse import urlencode
from uuid import UUID

from django import forms
from django.core import signing
from django.urls import reverse
from unfold.widgets import UnfoldBooleanSwitchWidget

from leases import terminals
from leases.grants.issuers import TERMINAL_PERMISSION
from sandboxes.admin.base.actions import AdminAction, ReasonForm
from sandboxes.admin.processes import ProcessAdmin
from sandboxes.admin.sandboxes import SandboxAdmin
from sandboxes.errors import ProviderCallFailed
from sandboxes.models import ALIVE_STATES, Process, Sandbox
from sandboxes.processes import ProcessSpec
from sandboxes.providers.errors import ProviderError

PAGE_SALT = "leasehold.terminal-page"
PAGE_LIFETIME = timedelta(hours=1)


class InvalidPageGrant(Exception):
    """The address of the page has no valid signature, has expired, or was made for another operator or process."""


@dataclass(frozen=True)
class PageGrant:
    """Access of one operator to the page of one terminal, after the reason was recorded."""

    process: UUID
    username: str
    view_only: bool

    def encode(self) -> str:
        return signing.dumps(asdict(self) | {"process": self.process.hex}, salt=PAGE_SALT)

    @classmethod
    def decode(cls, text: str) -> "PageGrant":
        """Raise InvalidPageGrant."""
        try:
            fields = signing.loads(text, salt=PAGE_SALT, max_age=PAGE_LIFETIME)
        except signing.BadSignature as error:
            raise InvalidPageGrant("This address of a terminal is not valid. Open the terminal again.") from error
        return cls(UUID(hex=fields["process"]), fields["username"], fields["view_only"])


class ConnectForm(ReasonForm):
    view_only = forms.BooleanField(
        required=False,
        initial=True,
        label="View only",
        widget=UnfoldBooleanSwitchWidget,
        help_text="The page shows the output and accepts no input.",
    )


def _open(sandbox: Sandbox, actor: str, reason: str, now: datetime) -> bool:
    """Start a shell with a terminal."""
    if sandbox.holder is None:
        return False
    spec = ProcessSpec(terminals.DEFAULT_COMMAND, name=_name_terminal(actor))
    try:
        terminals.open_terminal(sandbox.holder, spec, now=now, actor=actor)
    except ProviderError as failed:
        raise ProviderCallFailed(str(failed)) from failed
    return True


def _name_terminal(actor: str) -> str:
    return f"terminal of {actor}"[:100]


def _build_page_url(process: Process, username: str, *, view_only: bool) -> str:
    grant = PageGrant(process.pk, username, view_only)
    return f"{reverse('terminal', args=[process.pk])}?{urlencode({'grant': grant.encode()})}"


def _get_opened_url(sandbox: Sandbox, form: ReasonForm) -> str:
    username = form.request.user.get_username()
    opened = Process.objects.filter(sandbox=sandbox.pk, is_terminal=True, name=_name_terminal(username))
    return _build_page_url(opened.latest("started_at"), username, view_only=False)


def _get_connected_url(process: Process, form: ReasonForm) -> str:
    return _build_page_url(process, form.request.user.get_username(), view_only=form.cleaned_data["view_only"])


SandboxAdmin.add_actions(
    {
        "open_terminal": AdminAction(
            title="Open terminal",
            button="Terminal",
            warning="A shell starts in the sandbox, with the rights of its agent. The lease is renewed, and input delays the "
            "eviction of the sandbox.",
            done="with a new terminal",
            refusal_reason="not awake, or without a lease",
            legal=lambda sandbox: sandbox.state in ALIVE_STATES and sandbox.holder is not None and sandbox.lost_at is None,
            verb=_open,
            icon="terminal",
            permissions=(TERMINAL_PERMISSION,),
            get_next_url=_get_opened_url,
        )
    }
)
ProcessAdmin.add_actions(
    {
        "connect": AdminAction(
            title="Connect to terminal",
            warning="The output of the terminal becomes visible to you. Input reaches the program of the agent.",
            done="connected to",
            refusal_reason="the program has ended, or has no terminal",
            legal=lambda process: process.is_terminal and process.ended_at is None,
            verb=lambda process, actor, reason, now, view_only: process.is_terminal and process.ended_at is None,
            icon="terminal",
            permissions=(TERMINAL_PERMISSION,),
            form=ConnectForm,
            get_next_url=_get_connected_url,
        )
    }
)
