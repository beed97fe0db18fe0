"""Console page of a terminal in a sandbox."""

from datetime import timedelta
from urllib.parse import urlsplit
from uuid import UUID

from django.contrib import admin, messages
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404
from django.template.response import TemplateResponse
from django.urls import reverse

from controlplane.middleware import ADMIN_POLICY
from leases import terminals
from leases.admin.terminals import InvalidPageGrant, PageGrant
from leases.grants.issuers import TERMINAL_PERMISSION, Issuer
from sandboxes.admin.base.formatting import format_command, truncate_text
from sandboxes.db import database_time
from sandboxes.errors import SandboxError
from sandboxes.models import Process

URL_LIFETIME = timedelta(hours=8)  # a working day; the connection ends with it, and with the operator's permission


def show_terminal(request: HttpRequest, process_id: UUID) -> HttpResponse:
    """Show a terminal to the operator for whom an action with a reason has just been recorded."""
    process = get_object_or_404(Process, pk=process_id)
    process_url = reverse("admin:sandboxes_process_change", args=[process.pk])
    if not (isinstance(request.user, User) and request.user.has_perm(TERMINAL_PERMISSION)):
        raise PermissionDenied
    try:
        grant = PageGrant.decode(request.GET.get("grant", ""))
        if (grant.process, grant.username) != (process.pk, request.user.get_username()):
            raise InvalidPageGrant("This address of a terminal is not valid. Open the terminal again.")
        url, _ = terminals.build_terminal_url(
            process.holder, process.pk, read_only=grant.view_only, lifetime=URL_LIFETIME,
            issuer=Issuer.of_user(request.user), actor=grant.username, now=database_time.now(),
        )  # fmt: skip
    except (InvalidPageGrant, SandboxError) as refused:
        messages.error(request, str(refused))
        return HttpResponseRedirect(process_url)
    context = {
        **admin.site.each_context(request),
        "title": "Terminal",
        "process": process, "process_url": process_url, "command": truncate_text(format_command(process.argv)),
        "url": url, "view_only": grant.view_only,
    }  # fmt: skip
    response = TemplateResponse(request, "admin/terminal.html", context)
    address = urlsplit(url)
    response.headers["Content-Security-Policy"] = f"{ADMIN_POLICY}; connect-src 'self' {address.scheme}://{address.netloc}"
    response.headers["Cache-Control"] = "no-store"
    return response
