"""Cost of stored state: an agent's /data around every turn, and a workspace that sleeps and wakes.

The raw side moves the same bytes with the minimum that any program needs: the same files in parallel through boto3 or the store
itself; tar, gzip and one object. If TEST_S3_URL is set, the S3 store is measured, too."""

import os
import random
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import BinaryIO, cast

from django.conf import settings
from django.db import connection
from django.utils import timezone

from leases import execution, leasing
from leases.models import Lease
from sandboxes import eviction, providers
from sandboxes.models import Pool
from sandboxes.pool import allocation
from sandboxes.providers.base import DATA, WORKSPACE
from sandboxes.providers.memory import File, MemoryProvider
from sandboxes.runs.operations import Command
from sandboxes.state import data_sync, workspace
from sandboxes.storage import get_store
from sandboxes.storage.s3 import S3Store
from tests.bench.measure import BenchCase, get_own_pids, interleave, print_report
from tests.bench.parts import destroy_sandboxes
from tests.bench.server import destroy_raw_container, start_raw_container

TURN_ROUNDS = int(os.environ.get("BENCH_TURNS", "20"))
SLEEP_ROUNDS = int(os.environ.get("BENCH_SLEEPS", "4"))
FILE_BYTES = 4 << 10  # per file
WORKSPACE_MB = int(os.environ.get("BENCH_WORKSPACE_MB", "100"))
THREAD_COUNT = 8
DID = "did:web:bench.invalid"
AGENT_USER = "10001:10001"
MINUTE = timedelta(minutes=1)
WRITE_SCRIPT = """
import os, sys
for number in range(int(sys.argv[2])):
    with open(f"{sys.argv[1]}/file-{number}", "wb") as file:
        file.write(os.urandom(int(sys.argv[3])))
"""
FILL_SCRIPT = """
import os, random, sys
words = [bytes(random.choices(b"etaoinshrdlu", k=random.randint(2, 9))) for _ in range(2000)]
for number in range(int(sys.argv[2]) // 2):
    for kind, content in (("random", os.urandom(10**6)), ("text", b" ".join(random.choices(words, k=200_000))[:10**6])):
        with open(f"{sys.argv[1]}/{kind}-{number}", "wb") as file:
            file.write(content)
"""


def main() -> None:
    kinds = ["memory"] + ["docker"] * (providers.get_default_provider_name() == "docker")
    for backend in ["filesystem"] + ["s3"] * bool(os.environ.get("TEST_S3_URL")):
        with use_store(backend):
            for kind in kinds:
                print(f"\n--- stored state, store: {backend}, provider: {kind}")
                for count in (0, 10, 1000):
                    bench_turns(kind, count)
            if connection.vendor == "sqlite" and os.environ.get("TEST_POSTGRES_URL"):
                continue  # the database does not matter here, and the test S3 server lacks the space for two runs
            for kind in ["process", *kinds[1:]]:
                print(f"\n--- a workspace of {WORKSPACE_MB} MB, store: {backend}, provider: {kind}")
                bench_sleeps(kind)


@contextmanager
def use_store(backend: str) -> Iterator[None]:
    """Configure a store; empty it afterwards."""
    settings.STORAGE_BACKEND = backend
    if backend == "s3":
        settings.S3_ENDPOINT, settings.S3_BUCKET = os.environ["TEST_S3_URL"], os.environ["TEST_BUCKET"]
        settings.S3_ACCESS_KEY_ID = os.environ["TEST_S3_ACCESS_KEY_ID"]
        settings.S3_SECRET_ACCESS_KEY = os.environ["TEST_S3_SECRET_ACCESS_KEY"]
        settings.STORAGE_PREFIX = f"bench-{uuid.uuid4().hex[:8]}/"
    get_store.cache_clear()
    try:
        yield
    finally:
        get_store().clear()


@contextmanager
def hold_lease(kind: str) -> Iterator[Lease]:
    """Acquire a lease in a new pool of this provider. Its sandboxes are destroyed afterwards."""
    own_pool = Pool.objects.create(
        name=f"state-{uuid.uuid4().hex[:8]}", provider=kind, memory_mib=512, workspace_limit_mib=4096
    )
    request = leasing.LeaseRequest(f"{DID}:{own_pool.name}", "bench", "coding", pool=own_pool.name)
    try:
        yield leasing.acquire(request, now=timezone.now())[0]
    finally:
        destroy_sandboxes()


def run_script(lease: Lease, script: str, *arguments: object) -> None:
    command = Command(argv=["python3", "-c", script, *map(str, arguments)], timeout=5 * MINUTE)
    assert execution.exec_command(lease.pk, command, now=timezone.now())[1].exit_code == 0


def make_uploader() -> Callable[[dict[str, bytes]], None]:
    """Return a function that stores values as one object each, eight at a time: through boto3 alone, or through the store."""
    store, threads = get_store(), ThreadPoolExecutor(THREAD_COUNT)
    if not isinstance(store, S3Store):
        return lambda values: [*threads.map(store.set, values.keys(), values.values())] and None
    client, bucket, prefix = store.client(), store.bucket, store.prefix

    def upload(key: str, value: bytes) -> None:
        client.put_object(Bucket=bucket, Key=f"{prefix}{key}", Body=value)

    return lambda values: [*threads.map(upload, values.keys(), values.values())] and None


def bench_turns(kind: str, count: int) -> None:
    """Cost of a turn's data besides the exec: pull newer files, store changed ones."""
    provider, upload = providers.get_provider(kind), make_uploader()
    contents = [random.randbytes(FILE_BYTES) for _ in range(count)]
    with hold_lease(kind) as lease:
        sandbox = execution.ensure_sandbox_ready(lease.pk, now=timezone.now())

        def change(number: int) -> None:
            if isinstance(provider, MemoryProvider):
                files = provider.files(sandbox.ref)
                files.update({f"{DATA}/file-{at}": File(random.randbytes(FILE_BYTES)) for at in range(count)})
            else:
                argv = ["python3", "-c", WRITE_SCRIPT, DATA, str(count), str(FILE_BYTES)]
                result = provider.exec(sandbox.ref, argv, env={}, timeout=MINUTE, mark=str(uuid.uuid4()))
                assert result.exit_code == 0, result.stderr

        def turn(number: int) -> None:
            attachment = data_sync.attach(sandbox, provider, skill="coding", now=timezone.now())
            data_sync.persist(attachment, sandbox, provider, now=timezone.now())

        def raw(number: int) -> None:
            upload({f"raw/{number}-{at}": content for at, content in enumerate(contents)})

        change(0)
        turn(0)
        listing = BenchCase("raw: one listing", lambda number: provider.manifest(sandbox.ref, DATA), get_own_pids)
        unchanged = BenchCase("attach, persist", turn, get_own_pids)
        interleave([listing, unchanged], rounds=TURN_ROUNDS)
        print_report(f"a turn that changes nothing, {count:,} files", [listing, unchanged], raw=listing, aim="20 ms")
        if count:
            bare = BenchCase(f"raw: {count:,} objects, {THREAD_COUNT} threads", raw, get_own_pids)
            changed = BenchCase("attach, persist", turn, get_own_pids, before=change)
            interleave([bare, changed], rounds=max(TURN_ROUNDS // 2, 1), warmup=2)
            print_report(f"a turn that changes {count:,} of {count:,} files of 4 KiB", [bare, changed], raw=bare, aim="1.3x")


def bench_sleeps(kind: str) -> None:
    """Sleep and wake from the store, compared with tar, gzip and one object."""
    provider, raw_name = providers.get_provider(kind), f"lh-bench-{uuid.uuid4().hex[:12]}"
    with hold_lease(kind) as lease:
        run_script(lease, FILL_SCRIPT, WORKSPACE, WORKSPACE_MB)
        sandbox = allocation.find_by_holder(lease.pk)
        assert sandbox
        packed, raw_directory = settings.STATE_DIR / "raw.tar.gz", settings.STATE_DIR / "raw"

        def pack(number: int) -> None:
            tar = f"docker exec -u {AGENT_USER} {raw_name} tar" if kind == "docker" else "tar"
            run_shell(f"{tar} cf - -C {WORKSPACE if kind == 'docker' else raw_directory} . | gzip >{packed}")
            with packed.open("rb") as source:
                get_store().upload("raw/packed", source)

        def unpack(number: int) -> None:
            with packed.open("wb") as target:
                get_store().download("raw/packed", target)
            if kind == "docker":
                start_raw_container(f"{raw_name}-{number}", sandbox.image)
                run_shell(f"gunzip <{packed} | docker exec -i -u {AGENT_USER} {raw_name}-{number} tar xf - -C {WORKSPACE}")
            else:
                run_shell(f"mkdir {raw_directory}-{number}; tar xzf {packed} -C {raw_directory}-{number}")

        def discard(number: int) -> None:
            if kind == "docker":
                destroy_raw_container(f"{raw_name}-{number}")
            else:
                run_shell(f"rm -r {raw_directory}-{number}")

        def sleep(number: int) -> None:
            assert eviction.evict(sandbox.pk, now=timezone.now(), reason="bench")

        def use(number: int) -> None:
            """Use the sandbox, so that there is something to store."""
            run_script(lease, "")

        def wake(number: int) -> None:
            execution.ensure_sandbox_ready(lease.pk, now=timezone.now())

        def prepare_sleep(number: int, *, local: bool) -> None:
            wake(number)
            sleep(number)
            snapshot = workspace.find_latest(lease.pk)
            assert snapshot
            if not local:
                workspace.forget_local(snapshot)

        try:
            if kind == "docker":
                start_raw_container(raw_name, sandbox.image)
                provider.put_files(raw_name, WORKSPACE, spool_chunks(provider.get_files(sandbox.ref, WORKSPACE)))
            else:
                run_shell(f"cp -a {provider.inside(sandbox.ref, WORKSPACE)} {raw_directory}")
            packing = BenchCase("raw: tar, gzip, one object", pack)
            sleeping = BenchCase("sleep", sleep, before=use)
            interleave([packing, sleeping], rounds=SLEEP_ROUNDS, warmup=1)
            print_report("a sandbox sleeps", [packing, sleeping], raw=packing)
            unpacking = BenchCase("raw: the object, (a container,) untar", unpack, after=discard)
            cloud = BenchCase("wake from the store", wake, before=lambda number: prepare_sleep(number, local=False))
            local = BenchCase("wake from this machine's copy", wake, before=lambda number: prepare_sleep(number, local=True))
            interleave([unpacking, cloud, local], rounds=SLEEP_ROUNDS, warmup=1)
            print_report("a sandbox wakes", [unpacking, cloud, local], raw=unpacking)
        finally:
            if kind == "docker":
                destroy_raw_container(raw_name)


def spool_chunks(chunks: Iterable[bytes]) -> BinaryIO:
    spool = tempfile.TemporaryFile()  # noqa: SIM115 - deleted with the process
    spool.writelines(chunks)
    spool.seek(0)
    return cast(BinaryIO, spool)


def run_shell(line: str) -> None:
    subprocess.run(["bash", "-o", "pipefail", "-c", line], check=True)
