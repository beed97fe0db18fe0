"""Answers that no parser can read, in place of each answer of a vendor: Unavailable at every verb of every provider."""

import io
import random
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from sandboxes.providers.base import VendorIntervals
from sandboxes.providers.errors import NoSuchFile, Rejected, Unavailable
from sandboxes.providers.remote import lifecycle
from tests.emulators.base import DAMAGED_MESSAGE, UNREADABLE_ANSWERS, Fault, distort
from tests.emulators.registry import EMULATORS
from tests.support.remote import GetEmulator, connect_provider
from tests.support.search import budget
from tests.unit.sandboxes.remote.conftest import Remote

THOROUGH = {"create", "inspect", "list_all", "exec", "destroy"}  # with all answers; the others share their calls with these
START_TIMEOUT, RUN_TIMEOUT = timedelta(seconds=2), timedelta(seconds=20)
HOUR = timedelta(hours=1)


@pytest.fixture(params=sorted(EMULATORS))
def any_vendor(request: pytest.FixtureRequest, emulators: GetEmulator, monkeypatch: Any, settings: Any) -> Iterator[Remote]:
    settings.SANDBOX_START_TIMEOUT = START_TIMEOUT
    monkeypatch.setattr(lifecycle, "REMOVAL_TIMEOUT_SECONDS", 2.0)
    emulator = emulators(request.param)
    provider = connect_provider(request.param, emulator)
    provider.retry_delays_seconds = ()
    remote = Remote(request.param, provider, emulator, owner=uuid4().hex)
    yield remote
    emulator.faults.clear()


def build_tar() -> io.BytesIO:
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("member"), io.BytesIO())
    tar.seek(0)
    return tar


def build_calls(remote: Remote, ref: str) -> dict[str, Callable[[], Any]]:
    """Return a call of each verb that reaches the vendor. Each may be repeated, and leaves the sandbox of `ref` as it is."""
    provider, path, root = remote.provider, "/data/kept", "/data"
    created: list[str] = []

    def call(verb: str, *args: Any, **options: Any) -> Callable[[], Any]:
        return lambda: getattr(provider, verb)(*args, **options)

    def create() -> None:
        created.append(remote.spec().name)
        provider.create(remote.spec(created[-1]))

    calls = {
        "create": create,
        "destroy": lambda: provider.destroy(created.pop() if created else "lhr-absent"),
        "wait_ready": call("wait_ready", ref, timeout=START_TIMEOUT),
        "inspect": call("inspect", ref),
        "list": call("list", remote.owner),
        "list_all": call("list_all"),
        "ping": call("ping"),
        "exec": lambda: provider.exec(ref, ["true"], env={}, timeout=RUN_TIMEOUT, mark=uuid4().hex),
        "find_exec": call("find_exec", ref, "unknown"),
        "start": lambda: provider.start(ref, ["true"], env={}, mark=uuid4().hex),
        "processes": call("processes", ref, ["process"]),
        "log": call("log", ref, "process", start=0, length=100),
        "signal_process": call("signal_process", ref, "process", 15),
        "write_stdin": call("write_stdin", ref, "process", b"", offset=0, last=False),
        "kill": call("kill", ref, "process"),
        "restart": call("restart", ref),
        "stats": call("stats", ref),
        "connect_gateway": call("connect_gateway", ref, "https://gateway.invalid", "token"),
        "set_intervals": call("set_intervals", ref, VendorIntervals(HOUR, 2 * HOUR)),
        "suspend": call("suspend", ref),
        "resume": call("resume", ref),
        "read_file": call("read_file", ref, path, limit=100),
        "read_range": call("read_range", ref, path, start=0, length=2),
        "write_file": call("write_file", ref, path, b"kept"),
        "write_file, uploaded": call("write_file", ref, "/data/large", b"x" * 100_000),
        "make_directory": call("make_directory", ref, "/data/directory"),
        "move_file": call("move_file", ref, "/data/absent", "/data/other", overwrite=True),
        "remove_file": call("remove_file", ref, "/data/absent"),
        "manifest": call("manifest", ref, root),
        "get_files": lambda: [*provider.get_files(ref, root)],
        "put_files": lambda: provider.put_files(ref, root, build_tar()),
        "put_and_list_files": lambda: provider.put_and_list_files(ref, root, build_tar()),
        "remove_files": call("remove_files", ref, root, ["absent"]),
        "size": call("size", ref, root),
        "clear": call("clear", ref, "/workspace"),
        "seed": lambda: provider.seed(ref, "kind", build_tar()),
    }
    if provider.builds_images:
        calls |= {"remove_image": call("remove_image", "unknown"), "remove_build": call("remove_build", "unknown")}
    if remote.kind == "modal":
        calls["snapshot_directory"] = call("snapshot_directory", ref, root, ttl=HOUR)
    return calls


def test_answer_that_cannot_be_read_is_unavailable_at_every_verb(any_vendor: Remote) -> None:
    emulator, ref, generator = any_vendor.emulator, any_vendor.start(), random.Random(7)
    any_vendor.provider.write_file(ref, "/data/kept", b"kept")
    answers: list[Any] = [*UNREADABLE_ANSWERS.values(), *[distort(generator)] * budget(fast=4, full=40)]
    if any_vendor.kind == "modal":  # its client reads messages of gRPC alone
        answers = [UNREADABLE_ANSWERS["page"], DAMAGED_MESSAGE, distort(generator)]
    raised, landed = [], 0
    for verb, call in build_calls(any_vendor, ref).items():
        emulator.requests.clear()
        with suppress(NoSuchFile, Rejected, Unavailable):
            call()
        for number, line in enumerate([*emulator.requests]):
            is_thorough = verb in THOROUGH and number < 3
            for answer in answers if is_thorough else generator.sample(answers, budget(fast=1, full=min(len(answers), 20))):
                fault = Fault("", answer, skip=number)
                emulator.faults[:] = [fault]
                try:
                    call()
                except (NoSuchFile, Rejected, Unavailable):
                    pass
                except Exception as error:  # all are to be reported
                    raised.append((verb, line, answer, repr(error)[:200]))
                landed += fault.times == 0
                emulator.faults.clear()
    assert raised == []
    assert landed > 100
    assert any_vendor.run(ref, "cat", "/data/kept").stdout == b"kept"
