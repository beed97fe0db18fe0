"""Streams from live Docker sandboxes against the raw engine: streamed execs, the echo of a terminal, idle streams."""

import asyncio
import http.client
import json
import os
import resource
import time
from collections.abc import Callable
from contextlib import ExitStack, closing

import aiohttp

from sandboxes.streams.reader import KEEP_ALIVE_SECONDS
from tests.bench.docker import leases as bench_leases
from tests.bench.footprint import read_sizes
from tests.bench.measure import (
    BenchCase,
    Timing,
    interleave,
    list_process_tree,
    measure_seconds,
    print_report,
    read_cpu_seconds,
)
from tests.bench.server import ApiClient, call_engine, connect_engine, run_control_plane
from tests.bench.table import Aim
from tests.support.event_stream import open_stream, parse_events

EXEC_COUNT = int(os.environ.get("BENCH_EXECS", "60"))
CALL_COUNT = int(os.environ.get("BENCH_CALLS", "2000"))
ECHO_COUNT = 1000
STREAM_COUNT, LEASE_COUNT = 500, 5
DID = "did:web:bench-0.invalid"
TEXT_SCRIPT = "head -c 750000 /dev/urandom | base64 >/workspace/text"
TEXT_MEGABYTE = ["head", "-c", "1000000", "/workspace/text"]


def main() -> None:
    with run_control_plane() as (up, port):
        key = bench_leases.create_key(DID)
        leases = bench_leases.join_many(port, key, dict.fromkeys([f"stream-{number}" for number in range(LEASE_COUNT)], DID))
        [ref, *_] = bench_leases.find_refs(leases)
        ApiClient(port, key).post(f"/leases/{leases[0]}/exec", {"argv": ["sh", "-c", TEXT_SCRIPT]})
        bench_first_byte(port, key, leases[0], ref, up.pid)
        bench_output(port, key, leases[0], ref, up.pid)
        bench_echo(port, key, leases[0], ref, up.pid)
        bench_idle(port, key, leases, up.pid)


def attach_raw(ref: str, argv: list[str]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Start a command by the engine and attach to its output."""
    config = {"Cmd": argv, "AttachStdout": True, "AttachStderr": True, "User": "10001:10001"}
    exec_id = json.loads(call_engine("POST", f"/containers/{ref}/exec", config))["Id"]
    connection = connect_engine()
    body = json.dumps({"Detach": False, "Tty": False})
    connection.request("POST", f"/exec/{exec_id}/start", body, {"Content-Type": "application/json"})
    return connection, connection.getresponse()


class Execution:
    """Two ways to execute a command, up to its first byte or its end."""

    def __init__(self, port: int, key: str, lease: str, ref: str, argv: list[str]) -> None:
        self._open = lambda: open_stream(port, key, "POST", f"/leases/{lease}/exec/stream", {"argv": argv})
        self._ref, self._argv = ref, argv
        self.rest: Callable[[], object] = lambda: None

    def receive_first(self, number: int) -> None:
        events = parse_events(self._open())
        while next(events).name != "stdout":
            pass
        self.rest = lambda: [*events]

    def receive_first_raw(self, number: int) -> None:
        connection, response = attach_raw(self._ref, self._argv)
        assert response.read(9)  # a header of 8 bytes precedes the output
        self.rest = lambda: [response.read(), connection.close()]

    def receive_all(self, number: int) -> None:
        events = [*parse_events(self._open())]
        assert sum(len(event.data["data"]) for event in events if event.name == "stdout") == 10**6
        assert events[-1].name == "exit"

    def receive_all_raw(self, number: int) -> None:
        connection, response = attach_raw(self._ref, self._argv)
        assert len(response.read()) > 10**6
        connection.close()

    def finish(self, number: int) -> None:
        self.rest()


def bench_first_byte(port: int, key: str, lease: str, ref: str, up: int) -> None:
    execution = Execution(port, key, lease, ref, ["echo", "first"])
    raw = BenchCase("raw: create, attach", execution.receive_first_raw, after=execution.finish)
    aim = Aim("first byte of a streamed exec : raw", p50_ratio=0.5)
    http_case = BenchCase(
        "through HTTP", execution.receive_first, lambda: bench_leases.list_server_pids(up), after=execution.finish, aim=aim
    )
    interleave([raw, http_case], rounds=EXEC_COUNT, warmup=10)
    print_report("first byte of a streamed exec", [raw, http_case], raw=raw)


def bench_output(port: int, key: str, lease: str, ref: str, up: int) -> None:
    execution = Execution(port, key, lease, ref, TEXT_MEGABYTE)
    raw = BenchCase("raw: create, attach", execution.receive_all_raw)
    aim = Aim("streamed exec with 1 MB of output : raw", p50_ratio=1.5)
    http_case = BenchCase("through HTTP", execution.receive_all, lambda: bench_leases.list_server_pids(up), aim=aim)
    interleave([raw, http_case], rounds=EXEC_COUNT, warmup=10)
    print_report("streamed exec with 1 MB of output", [raw, http_case], raw=raw)


class EngineTerminal:
    """A terminal of the engine's own exec, attached by a hijacked connection. One byte of input is echoed by the terminal."""

    def __init__(self, ref: str) -> None:
        config = {"Cmd": ["cat"], "AttachStdin": True, "AttachStdout": True, "Tty": True, "User": "10001:10001"}
        exec_id = json.loads(call_engine("POST", f"/containers/{ref}/exec", config))["Id"]
        self._connection = connect_engine()
        body = json.dumps({"Detach": False, "Tty": True})
        headers = {"Content-Type": "application/json", "Connection": "Upgrade", "Upgrade": "tcp"}
        self._connection.request("POST", f"/exec/{exec_id}/start", body, headers)
        self._socket = self._connection.sock
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += self._socket.recv(1)
        assert head.startswith(b"HTTP/1.1 101"), head

    def echo(self, number: int) -> None:
        self._socket.sendall(b"x")
        assert self._socket.recv(1) == b"x"

    def close(self) -> None:
        self._connection.close()


class WebSocketTerminal:
    """A terminal through the stream server, from an event loop of this process."""

    def __init__(self, port: int, key: str, lease: str) -> None:
        terminal = ApiClient(port, key).post(f"/leases/{lease}/terminals", {"argv": ["cat"]})
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._connect(terminal["url"]))

    async def _connect(self, url: str) -> None:
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(url)
        assert (await self._socket.receive()).type == aiohttp.WSMsgType.TEXT  # `start`

    def echo(self, number: int) -> None:
        self._loop.run_until_complete(self._echo())

    async def _echo(self) -> None:
        await self._socket.send_bytes(b"x")
        assert (await self._socket.receive()).data == b"x"

    async def _close(self) -> None:
        await self._socket.close()
        await self._session.close()

    def close(self) -> None:
        self._loop.run_until_complete(self._close())
        self._loop.close()


def bench_echo(port: int, key: str, lease: str, ref: str, up: int) -> None:
    """Measure the time from a key to its echo."""
    with closing(EngineTerminal(ref)) as engine, closing(WebSocketTerminal(port, key, lease)) as terminal:
        raw = BenchCase("raw: exec with a terminal", engine.echo)
        aim = Aim("echo of a terminal : raw", p50_ratio=4.0)
        through = BenchCase("through the stream server", terminal.echo, lambda: bench_leases.list_server_pids(up), aim=aim)
        interleave([raw, through], rounds=ECHO_COUNT, warmup=10)
        print_report("echo of one byte in a terminal", [raw, through], raw=raw)


def bench_idle(port: int, key: str, leases: list[str], up: int) -> None:
    """Measure renewals and other short calls beside idle streams, and the memory of all processes."""
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    before, memory_before = measure_calls(port, key, leases[0], "without streams"), measure_memory(up)
    with ExitStack() as streams:
        for lease in leases:
            body = {"argv": ["sleep", "600"], "timeout_seconds": 600}
            response = streams.enter_context(closing(open_stream(port, key, "POST", f"/leases/{lease}/exec/stream", body)))
            run_id = next(parse_events(response)).data["run_id"]
            for _ in range(STREAM_COUNT // LEASE_COUNT - 1):
                response = streams.enter_context(
                    closing(open_stream(port, key, "GET", f"/leases/{lease}/runs/{run_id}/stream"))
                )
                assert next(parse_events(response)).name == "start"
        cpu = measure_idle_cpu(up)
        beside = measure_calls(port, key, leases[0], f"beside {STREAM_COUNT} idle streams")
        beside.aim = Aim(f"short calls beside {STREAM_COUNT} idle streams : without", p50_ratio=1.2, p95_ratio=1.5)
        added = measure_memory(up) - memory_before
        print_report("renew and get of a lease", [before, beside], raw=before)
        for timing in (before, beside):
            print(f"  {timing.name}: p99 {1e3 * sorted(timing.seconds)[int(len(timing.seconds) * 0.99)]:.2f} ms")
        print(f"  memory of {STREAM_COUNT} idle streams: {added / 1024:.1f} MiB, {added / STREAM_COUNT:.0f} KiB each")
        print(f"  CPU of {STREAM_COUNT} idle streams: {100 * cpu:.1f} % of a core", flush=True)


def measure_calls(port: int, key: str, lease: str, name: str) -> Timing:
    api = ApiClient(port, key)
    renew, timing = api.calls(f"/leases/{lease}/renew"), Timing(name)

    def get() -> None:
        api.get(f"/leases/{lease}").read()

    for number in range(CALL_COUNT):
        timing.seconds.append(measure_seconds(renew if number % 2 else get))
    return timing


def measure_memory(up: int) -> int:
    """Return the proportional set size of all processes, in KiB."""
    return sum(read_sizes(pid)["Pss"] for pid in list_process_tree(up))


def measure_idle_cpu(up: int) -> float:
    """Return the CPU time of all processes in one second, averaged over two keep-alive periods."""
    pids, seconds = list_process_tree(up), 2 * KEEP_ALIVE_SECONDS
    cpu = read_cpu_seconds(pids)
    time.sleep(seconds)
    return (read_cpu_seconds(pids) - cpu) / seconds
