"""End-to-end run with recognizable secrets, followed by a search of all observable output for them."""

import io
import json
import logging
import os
import subprocess
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import structlog
from aiohttp import web
from django.conf import settings as django_settings
from django.db import connection
from django.utils import timezone

from leases import api_keys
from leases.api import leases
from sandboxes.identity import curves, signing
from sandboxes.models import LlmCall, MintedToken, Pool, Sandbox
from tests.api.conftest import ApiClient
from tests.egress.relay import RelaySwitch
from tests.egress.stack import CLIENT_SCRIPT, EgressStack, run_egress_command
from tests.egress.test_attacks import EXCHANGE, INNER, upgrade
from tests.support.secrets import list_encodings, list_key_encodings
from tests.support.servers.egress import COMPLETION_RESPONSE
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.django_db(transaction=True)]
ADA = "did:plc:ada"
OUTSIDE = ("LLM_API_KEY", "SECRET_KEY", "S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY", "KV_API_TOKEN")
# Four calls whose messages select the upstream's response, one refused call, and a relay connection.
SCRIPT = f"""{CLIENT_SCRIPT}{EXCHANGE}
reply = [ask({{**BODY, "messages": [{{"role": "user", "content": content}}]}})[0] for content in ("ok", "quote", "400", "500")]
reply.append(ask({{**BODY, "model": "none-of-ours"}})[0])
reply.append(exchange({upgrade() + INNER!r}, 1)[:12])
environment = {{name: value for name, value in os.environ.items() if name != "TOKEN"}}
print(json.dumps([reply, sorted(os.listdir("/run/leasehold")), environment]))
"""


@pytest.fixture
def planted(settings: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Secrets in the environment and the settings, as in a deployment."""
    planted = {name: f"planted-{name}-{uuid4().hex}" for name in OUTSIDE}
    for name, value in planted.items():
        setattr(settings, name, value)
        monkeypatch.setenv(name if name == "SECRET_KEY" else f"LEASEHOLD_{name}", value)
    sealing = os.urandom(32)
    settings.IDENTITY_KEYS = [sealing]
    monkeypatch.setenv("LEASEHOLD_IDENTITY_KEYS", b64encode(sealing).decode())
    password = f'pl%nted/"{uuid4().hex}'
    monkeypatch.setenv("PGPASSWORD", password)
    return {name: value.encode() for name, value in (planted | {"PGPASSWORD": password}).items()} | {"IDENTITY_KEYS": sealing}


@pytest.fixture
def our_log() -> Iterator[io.StringIO]:
    """Capture everything this process logs."""
    root, written = logging.getLogger(), io.StringIO()
    formatters = (each.formatter for each in root.handlers)
    handler, level = logging.StreamHandler(written), root.level
    handler.setFormatter(next(each for each in formatters if isinstance(each, structlog.stdlib.ProcessorFormatter)))
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield written
    root.removeHandler(handler)
    root.setLevel(level)


async def quoting(request: web.Request) -> web.StreamResponse:
    """Upstream that quotes the credential in status line, headers and body."""
    sent, wanted = request.headers["Authorization"], (await request.json())["messages"][0]["content"]
    quoted = {} if wanted == "ok" else {"model": sent, "error": f"Incorrect API key provided: {sent}"}
    status = int(wanted) if wanted.isdigit() else 200
    return web.json_response(COMPLETION_RESPONSE | quoted, status=status, headers={"X-Key": sent})


def test_no_secret_is_exposed(
    planted: dict[str, bytes], our_log: io.StringIO, docker_pool: Pool, egress: EgressStack, relayed: RelaySwitch,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    egress.upstream.answer = quoting
    egress.serving.close()
    private = curves.generate_key()
    signing.create_key(ADA, now=timezone.now(), private=private)
    issued, api_key = api_keys.issue_key([ADA], name="planted", now=timezone.now())
    ada, egress_log = ApiClient(api_key), tmp_path / "egress.log"
    more = {name: value.decode() for name, value in planted.items() if name == "SECRET_KEY"}
    more |= {"LEASEHOLD_LLM_API_KEY": planted["LLM_API_KEY"].decode(), "LEASEHOLD_LOG_LEVEL": "DEBUG"}
    more |= {f"LEASEHOLD_{name}": getattr(django_settings, name) for name in ("RELAY_URL", "RELAY_AUD", "RELAY_LXM")}
    with run_egress_command(egress, egress_log, **more):
        asked = {"agent_did": ADA, "environment_id": f"egress-{uuid4().hex[:8]}", "environment_type": "coding"}
        lease = ada.post("leases", {**asked, "pool": docker_pool.name}).json()
        in_env = f"planted-env-{uuid4().hex}"
        ran = {"argv": ["python3", "-I", "-"], "stdin": SCRIPT, "env": {"TOKEN": in_env}}
        done = ada.post(f"leases/{lease['id']}/exec", ran, idempotency_key="once").json()
        assert done["exit_code"] == 0, done["stderr"]
        reply, listed, environment = json.loads(done["stdout"])
        assert (reply, listed) == ([200, 200, 502, 502, 403, "HTTP/1.1 101"], ["llm.sock"])
        wait_until(lambda: not LlmCall.objects.filter(ended_at__isnull=True).exists(), "all calls are closed")
        box = Sandbox.objects.get(holder=lease["id"])
        seen = {**inside(box.ref, egress.proxy.name), **answers(ada, lease["id"], monkeypatch), "exec": json.dumps(environment)}

    [(_, headers)] = relayed.relay.connections
    token = headers["authorization"].removeprefix("Bearer ")
    assert MintedToken.objects.get().agent_did == ADA and token.count(".") == 2
    assert egress.upstream.requests[0][1]["authorization"].removeprefix("Bearer ").encode() == planted["LLM_API_KEY"]
    rows, logged = dump(), our_log.getvalue()
    seen |= {"rows": rows, "our log": logged, "log of the egress server": egress_log.read_text()}

    # Every source was searched: each contains its expected marker.
    shown = {
        "exec": "PATH", "inspect": box.ref, "inspect of the proxy": egress.proxy.name, "processes": "PATH=",
        "processes of the proxy": "nginx", "files": lease["id"], "files of the proxy": "leasehold-locations.conf",
        "rows": issued.digest, "our log": "Traceback", "log of the egress server": "upstream refused a call",
        "API": "/leases/{", "errors": "not_found", "calls": "none-of-ours",
    }  # fmt: skip
    assert {place for place, known in shown.items() if known not in seen[place]} == set()
    assert len(LlmCall.objects.filter(kind="llm")) == 5 and "gpt-4o-mini" in seen["rows"]

    found = {name: list_encodings(secret) for name, secret in planted.items()}
    found |= {"the API key": list_encodings(api_key.encode()), "its secret part": list_encodings(api_key[12:].encode())}
    found |= {"the private key": list_key_encodings(private), "the service token": list_encodings(token.encode())}
    found |= {"its signature": list_encodings(token.rpartition(".")[2].encode())}
    found |= {"a value of an exec's env": list_encodings(in_env.encode())}
    assert [(name, place) for place, text in seen.items() for name in found if any(form in text for form in found[name])] == []


def inside(ref: str, proxy: str) -> dict[str, str]:
    """Collect everything about a sandbox and nginx: engine metadata, processes and visible files."""
    read = "find {} -xdev -type f -print -exec cat {{}} + 2>/dev/null"
    files = read.format("/workspace /data /tmp /var/tmp /run /run/leasehold /dev/shm /etc /opt/leasehold")
    proxys = read.format("/s /server /logs /etc/nginx /tmp")
    volumes = [each["Name"] for each in json.loads(ran("docker", "inspect", ref))[0]["Mounts"] if each["Type"] == "volume"]
    return {
        "inspect": ran("docker", "inspect", ref) + ran("docker", "volume", "inspect", *volumes),
        "changes": ran("docker", "diff", ref),
        "inspect of the proxy": ran("docker", "inspect", proxy),
        "output": ran("docker", "logs", ref), "output of the proxy": ran("docker", "logs", proxy),
        "processes": processes_of(ref), "processes of the proxy": processes_of(proxy),
        "files": "".join(ran("docker", "exec", "-u", user, ref, "sh", "-c", files) for user in ("10001:10001", "10002:10002")),
        "files of the proxy": ran("docker", "exec", proxy, "sh", "-c", proxys),
    }  # fmt: skip


def processes_of(container: str) -> str:
    """Read environment and command line of all processes of a container, from the host."""
    pids = [line.split()[0] for line in ran("docker", "top", container, "-eo", "pid").splitlines()[1:]]
    return "".join(Path(f"/proc/{pid}/{name}").read_text() for pid in pids for name in ("environ", "cmdline"))


def ran(*argv: str) -> str:
    done = subprocess.run(argv, check=False, capture_output=True)
    return (done.stdout + done.stderr).decode(errors="replace")


def answers(ada: ApiClient, lease: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Collect API responses: schema, calls, client errors and server errors."""

    def fails(*args: Any, **named: Any) -> None:
        secret = django_settings.LLM_API_KEY
        raise RuntimeError(f"a failure of ours, {len(secret)}")

    wrong = [
        ApiClient().get(f"leases/{lease}"), ApiClient("lh_00000000_" + "x" * 43).get("pool"), ada.get(f"leases/{uuid4()}"),
        ada.post("leases", {"agent_did": "did:plc:eve"}), ada.post("leases", b"{"),
        ada.post(f"leases/{lease}/exec", {"argv": 7}),
    ]  # fmt: skip
    assert [answer.status_code for answer in wrong] == [401, 401, 404, 400, 400, 400]
    calls = ada.get(f"leases/{lease}/calls")
    with monkeypatch.context() as broken:
        broken.setattr(leases.LeaseView, "get", fails)
        failed = ada.client.get(f"/api/v1/leases/{lease}", headers={"Authorization": f"Bearer {ada.key}"})
    assert failed.status_code == 500
    schema = ada.client.get("/api/schema")
    assert (calls.status_code, schema.status_code) == (200, 200)
    errors = [*wrong, failed]
    return {
        "calls": calls.content.decode(), "API": schema.content.decode() + str(schema.headers),
        "errors": "\n".join(f"{answer.headers} {answer.content.decode()}" for answer in errors),
    }  # fmt: skip


def dump() -> str:
    """Dump the database as text."""
    connection.ensure_connection()
    if connection.vendor == "sqlite":
        return "\n".join(connection.connection.iterdump())
    with connection.cursor() as cursor:
        lines: list[str] = []
        for table in connection.introspection.table_names():
            cursor.execute(f'SELECT row::text FROM "{table}" AS row')
            lines += [line for (line,) in cursor.fetchall()]
    return "\n".join(lines)
