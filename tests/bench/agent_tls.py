"""Latency of an exec through an agent that is connected over TLS, against the unix socket, interleaved.

python -m tests.bench.agent_tls

Without HTTP API and database: the rows of token and route are replaced by constants. The network is the loopback."""
# ruff: noqa: E402

import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")

import django

django.setup()

from sandboxes.agent.addresses import AgentLocation, RoutedGateway
from sandboxes.agent.runs import AgentClient
from sandboxes.egress import gateway_tokens
from sandboxes.egress.agent_sessions import routes
from sandboxes.hosts import agent_routes
from tests.support.remote_agent import running_agent, serving_gateway, write_gateway_file
from tests.support.sandbox_agent import Gateway, make_run, start_agent
from tests.support.servers.egress import EventLoopThread
from tests.support.servers.ports import find_free_ports
from tests.support.servers.tls import create_certificates
from tests.support.waiting import wait_until

ROUNDS = int(os.environ.get("BENCH_EXECS", "300"))
COMMANDS = {"true": ["true"], "1 MB of output": ["head", "-c", "1000000", "/dev/zero"]}


def main() -> None:
    identity, loop, [port] = gateway_tokens.AgentIdentity(uuid.uuid4(), "ref", ""), EventLoopThread(), find_free_ports()
    replaced: list[tuple[object, str, Callable[..., object]]] = [
        (gateway_tokens, "join", lambda *_, **__: True),
        (gateway_tokens, "find_agent", lambda _: identity),
        (routes, "record", lambda *_, **__: 1),
        (routes, "find_valid", lambda connections, *_, **__: {*connections}),
        (routes, "clear", lambda *_: None),
    ]
    for module, name, function in replaced:
        setattr(module, name, function)
    gateway = Gateway()
    local = start_agent(gateway.path)
    with tempfile.TemporaryDirectory(prefix="lh-bench-") as directory:
        files = create_certificates(Path(directory), "127.0.0.1")
        path = write_gateway_file(Path(directory), f"https://127.0.0.1:{port}", "lhj_bench", files.authority)
        with serving_gateway(loop, port, files) as server, running_agent(path):
            location = AgentLocation(server.sessions.address, 1)
            remote = AgentClient(RoutedGateway(lambda _: location, agent_routes.derive_gateway_secret()), "ref")
            gateway.boot()
            wait_until(lambda: remote.responds(timeout=2.0), "the agent is connected over TLS")
            for title, argv in COMMANDS.items():
                compare(title, gateway.client, remote, argv)
    local.kill()
    gateway.close()
    loop.close()


def compare(title: str, local: AgentClient, remote: AgentClient, argv: list[str]) -> None:
    durations: dict[AgentClient, list[float]] = {local: [], remote: []}
    for number in range(ROUNDS):
        for client, measured in durations.items():
            run = make_run(f"{title}/{number}", *argv)
            began = time.perf_counter()
            assert client.run(run).exit_code == 0
            client.acknowledge(run.id)
            measured.append(1000 * (time.perf_counter() - began))
    unix, tls = (statistics.median(measured) for measured in durations.values())
    print(f"{title:16} unix socket p50 {unix:6.2f} ms   TLS p50 {tls:6.2f} ms   ratio {tls / unix:.2f}", flush=True)


if __name__ == "__main__":
    main()
