"""First byte of a file of 1 MB in a live sandbox through HTTP, against `docker cp` and the engine's archive call."""

import http.client
import os
import subprocess
import tempfile
from pathlib import Path

from tests.bench.docker import leases as bench_leases
from tests.bench.measure import BenchCase, interleave, print_report
from tests.bench.server import ApiClient, FirstByte, connect_engine, run_control_plane
from tests.bench.table import Aim

READ_COUNT = int(os.environ.get("BENCH_EXECS", "60"))
FILE_BYTES = 1_000_000
DID = "did:web:bench.invalid"
FILE_NAME = "megabyte"


def main() -> None:
    with run_control_plane() as (up, port), tempfile.TemporaryDirectory() as directory:
        api = ApiClient(port, bench_leases.create_key(DID))
        lease = bench_leases.join(api, "files", DID)
        [ref] = bench_leases.find_refs([lease])
        api.post(f"/leases/{lease}/exec", {"argv": ["sh", "-c", f"head -c {FILE_BYTES} /dev/urandom >{FILE_NAME}"]})
        first_byte = FirstByte(lambda: api.get(f"/leases/{lease}/files/{FILE_NAME}"), FILE_BYTES)
        archive = FirstByte(lambda: open_archive(ref))
        target = Path(directory) / FILE_NAME

        def copy(number: int) -> None:
            subprocess.run(["docker", "cp", "--quiet", f"{ref}:/workspace/{FILE_NAME}", str(target)], check=True)

        raw = BenchCase("raw: docker cp", copy)
        engine = BenchCase("engine's archive, first byte", archive.receive, after=archive.drain)
        through = BenchCase(
            "through HTTP, first byte",
            first_byte.receive,
            lambda: bench_leases.list_server_pids(up.pid),
            after=first_byte.drain,
            aim=Aim("first byte of a file of 1 MB through the API : `docker cp`", p50_ratio=0.1),
        )
        interleave([raw, engine, through], rounds=READ_COUNT, warmup=5)
        print_report("read of a file of 1 MB", [raw, engine, through], raw=raw)
        whole = BenchCase(
            "through HTTP, whole file",
            lambda number: first_byte.read_all(),
            lambda: bench_leases.list_server_pids(up.pid),
        )
        small = FirstByte(lambda: api.get(f"/leases/{lease}/files/config.json"))
        of_small = BenchCase("through HTTP, config.json", lambda number: small.read_all())
        interleave([whole, of_small], rounds=READ_COUNT, warmup=5)
        print_report("whole files, against `docker cp` above", [whole, of_small], raw=raw)


def open_archive(ref: str) -> http.client.HTTPResponse:
    connection = connect_engine()
    connection.request("GET", f"/containers/{ref}/archive?path=/workspace/{FILE_NAME}")
    return connection.getresponse()
