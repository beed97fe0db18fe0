"""Operations of the HTTP API and the sweeps, as a script for the code of another version. Prints the failures as JSON.

It runs with `python -c` in that version's tree, and imports nothing but Django and that version's entry points."""

import json
import os
import sys
import time
from io import StringIO

AGENT, OTHER = "did:plc:ada", "did:plc:bob"
COLD_WITHIN_SECONDS = 60.0
FAILURES = []


def report(name, problem):
    FAILURES.append(f"{name}: {problem}")


class Api:
    """Client of the API in this process, with an operator's key."""

    def __init__(self, key):
        from django.test import Client

        self.client = Client(headers={"Authorization": f"Bearer {key}"}, raise_request_exception=False)

    def call(self, name, method, path, body=None, **options):
        """Make a request, and note an error as a failure. Return the document of the answer, {} without one."""
        data = body if isinstance(body, bytes) else json.dumps(body) if body is not None else ""
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        response = self.client.generic(method, f"/api/v1/{path}", data, content_type=kind, **options)
        content = b"".join(response.streaming_content) if response.streaming else response.content
        if response.status_code >= 400:
            report(name, f"{response.status_code} {content[:300].decode(errors='replace')}")
        try:
            document = json.loads(content)
        except ValueError:
            document = {}
        return document if isinstance(document, dict) else {}


def execute(api, name, lease, script, expected):
    document = api.call(name, "POST", f"leases/{lease}/exec", {"argv": ["sh", "-c", script]})
    if document and document.get("stdout", "").strip() != expected:
        report(name, f"unexpected output: {json.dumps(document)[:300]}")


def sweep(name):
    from django.core.management import CommandError, call_command

    errors = StringIO()
    try:
        call_command("sweep", stdout=StringIO(), stderr=errors)
    except CommandError as error:
        report(name, f"{error} {errors.getvalue()[:500]}")


def operate(api):
    join = {"agent_did": AGENT, "environment_type": "catan", "sleep_after": "1s"}
    lease = api.call("join", "POST", "environments/game-1/join", join).get("id")
    if lease is None:
        report("join", "no lease")
        return
    execute(api, "exec", lease, "echo one > f; cat f", "one")
    api.call("write a file", "PUT", f"leases/{lease}/files/g", b"two")
    api.call("list files", "GET", f"leases/{lease}/files")
    api.call("start a process", "POST", f"leases/{lease}/processes", {"argv": ["true"]})
    api.call("open a shell", "POST", f"leases/{lease}/shells", {"name": "main"})
    api.call("renew", "POST", f"leases/{lease}/renew", {})
    snapshot = api.call("take a snapshot", "POST", f"leases/{lease}/snapshots", {"name": "first"}).get("id")
    fork = {"environment_id": "game-2"} | ({"snapshot_id": snapshot} if snapshot else {})
    second = api.call("fork", "POST", f"leases/{lease}/fork", fork).get("id")
    if second:
        execute(api, "exec in the fork", second, "cat f", "one")
        api.call("release the fork", "POST", f"leases/{second}/release", {})
    api.call("one-shot run", "POST", "runs", {"agent_did": OTHER, "argv": ["true"]})
    wait_until_cold(api, lease)
    execute(api, "exec after the sleep", lease, "cat f g", "one\ntwo")
    for path in (
        "leases",
        f"leases/{lease}",
        f"leases/{lease}/timeline",
        f"leases/{lease}/runs",
        "environments",
        "costs",
        "pool",
    ):
        api.call(f"read {path}", "GET", path)
    api.call("release", "POST", f"leases/{lease}/release", {})
    sweep("sweeps after the release")


def wait_until_cold(api, lease):
    deadline = time.monotonic() + COLD_WITHIN_SECONDS
    state = ""
    while state != "cold" and time.monotonic() < deadline and not FAILURES:
        sweep("sweeps")
        state = (api.call("read the lease", "GET", f"leases/{lease}").get("sandbox") or {}).get("state", "")
    if state != "cold" and not FAILURES:
        report("sleep", f"the sandbox is {state!r} after {COLD_WITHIN_SECONDS:.0f} s")


def main():
    sys.path.insert(0, os.getcwd())
    os.environ["DJANGO_SETTINGS_MODULE"] = "controlplane.settings"
    import django

    django.setup()
    from django.conf import settings
    from django.core.management import call_command

    settings.ALLOWED_HOSTS = ["testserver"]
    call_command("create_key", "--operator", "--json", stdout=(output := StringIO()))
    operate(Api(json.loads(output.getvalue())["key"]))
    print(json.dumps(FAILURES))


if __name__ == "__main__":
    main()
