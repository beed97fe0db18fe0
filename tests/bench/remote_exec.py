"""Latency of an exec in a remote sandbox: by the gateway against the vendor's exec, interleaved, without HTTP API and database.

python -m tests.bench.remote_exec [VENDOR]    VENDOR: name of an emulator, by default daytona. Needs root.

The emulator answers on this machine: the time that each call of a real vendor spends on the network is not in the figures."""
# ruff: noqa: E402

import os
import statistics
import sys
import tempfile
import time
import uuid
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")

import django

django.setup()

from django.conf import settings

from sandboxes.egress import gateway_tokens
from sandboxes.egress.server import EgressServer, GatewayListener
from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.remote import channel
from sandboxes.providers.remote.provider import RemoteProvider
from tests.emulators.registry import serve
from tests.support.remote import connect_provider
from tests.support.servers import ports
from tests.support.servers.egress import EventLoopThread
from tests.support.waiting import wait_until

ROUNDS = int(os.environ.get("BENCH_EXECS", "100"))
COMMANDS = {"true": ["true"], "1 MB of output": ["head", "-c", "1000000", "/dev/zero"]}


def main(vendor: str) -> None:
    [port] = ports.find_free_ports()
    settings.GATEWAY_URL = f"http://127.0.0.1:{port}"
    loop, refs = EventLoopThread(), dict[str, str]()
    gateway_tokens.find_ref = refs.get  # type: ignore[assignment]
    with (
        tempfile.TemporaryDirectory(prefix="lh-bench-") as directory,
        serve(vendor, Path(directory)) as emulator,
        loop.run_context(EgressServer().listening({}, GatewayListener("127.0.0.1", port))),
    ):
        provider = connect_provider(vendor, emulator)
        name = f"lhb-{uuid.uuid4().hex[:12]}"
        refs["token"] = ref = provider.create(SandboxSpec(name, owner=name))
        provider.wait_ready(ref, timeout=timedelta(minutes=1))
        provider.connect_gateway(ref, settings.GATEWAY_URL, "token")
        wait_until(lambda: is_connected(ref), "the runner is connected")
        for title, argv in COMMANDS.items():
            compare(title, provider, ref, argv)
        provider.destroy(ref)
    loop.close()


def is_connected(ref: str) -> bool:
    try:
        return bool(channel.call(settings.RUNNER_GATEWAY, ref, {"verb": "kill", "mark": "none"}, wait=0.0))
    except channel.NotConnected:
        return False


def compare(title: str, provider: RemoteProvider, ref: str, argv: list[str]) -> None:
    url, durations = settings.GATEWAY_URL, {"gateway": list[float](), "vendor": list[float]()}
    for _ in range(ROUNDS):
        for way, measured in durations.items():
            settings.GATEWAY_URL = url if way == "gateway" else ""
            began = time.perf_counter()
            result = provider.exec(ref, argv, env={}, timeout=timedelta(minutes=1), mark=uuid.uuid4().hex)
            measured.append(1000 * (time.perf_counter() - began))
            assert result.exit_code == 0, result
    settings.GATEWAY_URL = url
    gateway, vendor = (statistics.median(durations[way]) for way in ("gateway", "vendor"))
    print(f"{title:16} by the gateway {gateway:6.1f} ms, by the vendor {vendor:6.1f} ms: {gateway / vendor:.2f}x", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "daytona")
