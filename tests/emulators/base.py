"""Interface of the vendor emulators: fault switches, and machines that execute for real."""

import json
import random
import re
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tests.emulators.images import ImageBuild
from tests.emulators.machine import Machine

CUT_BEFORE, CUT_AFTER = "cut before", "cut after"  # the connection, before or after the request is carried out


@dataclass(frozen=True)
class ForeignAnswer:
    """Answer of another server than the vendor's, such as a proxy before it, which the vendor's API never gives."""

    status: int
    body: bytes = b""
    content_type: str = "text/html"
    location: str = ""  # path to which the client is redirected, where LOGIN_PAGE is


@dataclass(frozen=True)
class Throttle:
    """Refusal of a gRPC call, with the time after which the vendor accepts a repetition."""

    message: str
    retry_after_seconds: float


LOGIN_PAGE = ForeignAnswer(200, b"<!DOCTYPE html><html><body><form>Sign in to continue</form></body></html>")
NOT_FOUND_PAGE = ForeignAnswer(404, b"<html><head><title>404 Not Found</title></head><body><hr>nginx</body></html>")
FOREIGN_ANSWERS = {
    "not found page": NOT_FOUND_PAGE,
    "gone": ForeignAnswer(410, b'{"message": "This version of the API has ended."}', "application/json"),
    "unknown route": ForeignAnswer(404, b'{"message": "no Route matched with those values"}', "application/json"),
    "redirect": ForeignAnswer(302, location="/login"),
    "login page": LOGIN_PAGE,
    "other service": ForeignAnswer(200, b"{}", "application/json"),
    "nothing": ForeignAnswer(204),
}
JSON = "application/json"
UNREADABLE_ANSWERS = {  # with the status of a success
    "page": ForeignAnswer(200, LOGIN_PAGE.body),
    "page as JSON": ForeignAnswer(200, LOGIN_PAGE.body, JSON),
    "empty": ForeignAnswer(200, b"", JSON),
    "truncated": ForeignAnswer(200, b'{"id": "box", "sta', JSON),
    "object": ForeignAnswer(200, b"{}", JSON),
    "list": ForeignAnswer(200, b"[]", JSON),
    "list of objects": ForeignAnswer(200, b'[{"id": "box"}]', JSON),
    "null": ForeignAnswer(200, b"null", JSON),
    "number": ForeignAnswer(200, b"1e999", JSON),
    "text": ForeignAnswer(200, b'"started"', JSON),
    "nested": ForeignAnswer(200, b"[" * 100_000, JSON),
    "not UTF-8": ForeignAnswer(200, b'{"id": "\xff\xfe"}', JSON),
}
DAMAGED_MESSAGE = ForeignAnswer(200, b"\0\0\0\0\3\xff\xff\xff", "application/grpc")  # of gRPC, with its frame
WRONG_VALUES = (None, [], {}, [None], 1e999, -1, True, "")


def distort(generator: random.Random) -> Callable[[bytes], bytes]:
    """Return a function that replaces or removes one value of a JSON document, and cuts off any other text."""

    def change(body: bytes) -> bytes:
        try:
            document = json.loads(body)
        except ValueError:
            return body[: len(body) // 2]
        places = [*_iterate_places(document)]
        if not places:
            return json.dumps(generator.choice(WRONG_VALUES)).encode()
        holder, key = generator.choice(places)
        if generator.random() < 0.25:
            del holder[key]
        else:
            holder[key] = generator.choice(WRONG_VALUES)
        return json.dumps(document).encode()

    return change


def _iterate_places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and the key of each value within a JSON document."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield value, key
        yield from _iterate_places(inner)


@dataclass
class Fault:
    """Fault of the next `times` requests whose "METHOD /path" or "RPC /Name" matches `pattern`.

    `outcome` is an HTTP status, CUT_BEFORE or CUT_AFTER, a refusal, an answer that is given in place of the vendor's, or a
    function that changes the body of the vendor's answer; None: only a delay of `seconds`. The first `skip` requests are
    spared."""

    pattern: str
    outcome: int | str | ForeignAnswer | Throttle | Callable[[bytes], bytes] | None = None
    times: int = 1
    seconds: float = 0.0
    skip: int = 0


class FaultInjection:
    """Fault switches and record of the requests to an emulator."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.faults: list[Fault] = []
        self.foreign_answer: ForeignAnswer | None = None  # to every request, in place of the vendor's
        self.requests: list[str] = []  # "METHOD /path" or "RPC /Name", in the order of their arrival

    def take_fault(self, line: str) -> Fault | None:
        """Record a request, and return the fault that it meets."""
        with self.lock:
            self.requests.append(line)
            fault = next((fault for fault in self.faults if fault.times > 0 and re.search(fault.pattern, line)), None)
            if fault and fault.skip:
                fault.skip -= 1
                return None
            if fault:
                fault.times -= 1
        return fault


class Emulator(FaultInjection, ABC):
    """Emulator of one vendor."""

    key = "emulator-key"
    options: ClassVar[Mapping[str, str]] = {}  # that the provider's configuration needs besides the key
    home: ClassVar[str] = "/home/user"
    writable: ClassVar[tuple[str, ...]] = ("/workspace", "/data", "/opt/leasehold")

    def __init__(self, directory: Path) -> None:
        FaultInjection.__init__(self)
        self.directory = directory
        self.is_listing_late = False  # new sandboxes are not listed
        self.builds: dict[str, ImageBuild] = {}  # of images, by id, until they are removed
        self.build_count = 0

    @property
    @abstractmethod
    def api_url(self) -> str:
        """Address for the provider's configuration."""

    @abstractmethod
    def serve_forever(self) -> None:
        """Serve until `close` is called in another thread."""

    @abstractmethod
    def stop_server(self) -> None: ...

    def close(self) -> None:
        """Stop the server, and remove every machine."""
        self.stop_server()
        for machine in self.list_machines():
            machine.remove()

    def create_machine(self, identifier: str, image: Path | None = None) -> Machine:
        """Start a machine with an empty disk, or on a copy of the disk of an image."""
        machine = Machine(self.directory / identifier, writable=self.writable, home=self.home, image=image)
        machine.start()
        return machine

    def start_build(self, identifier: str, dockerfile: str) -> ImageBuild:
        """Start the build of an image in a thread."""
        build = ImageBuild(identifier, dockerfile, self.directory / f"image-{identifier}")
        with self.lock:
            self.builds[identifier] = build
            self.build_count += 1
        threading.Thread(target=build.run, args=(self.create_machine,), daemon=True).start()
        return build

    def remove_build(self, identifier: str) -> None:
        with self.lock:
            build = self.builds.pop(identifier)
        shutil.rmtree(build.disk, ignore_errors=True)

    @property
    def is_removing_images(self) -> bool:
        """Return whether the vendor still removes an image whose removal it has accepted. Until then the name is taken."""
        return False

    def find_disk(self, identifier: str) -> Path | None:
        """Return the disk of an image that was built, None for an image of a registry."""
        build = self.builds.get(identifier)
        return build.disk if build and build.ended.is_set() and not build.error else None

    @abstractmethod
    def list_machines(self) -> list[Machine]: ...

    @abstractmethod
    def find_machines(self, name: str) -> list[Machine]:
        """Return the machines of the sandboxes with this name that have not been destroyed."""

    @abstractmethod
    def stop_idle(self, name: str) -> None:
        """Stop a sandbox, as the vendor does with an idle one."""

    def delete_stopped(self, name: str) -> None:
        """Delete a stopped sandbox, as a vendor that can does after its auto-delete interval."""
        raise NotImplementedError

    @abstractmethod
    def get_creation(self, name: str) -> dict[str, Any]:
        """Return the fields of the request that created a sandbox."""
