"""Provider of a vendor with the hooks and switches of the memory provider, so that the same suites run on both.

The vendor's client runs against the vendor's emulator. A failure of a verb is a fault of the emulator during the call: the
connection is cut, or the request is refused. Other errors, and crashes, are raised around the call."""

import io
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, cast

from django.conf import settings
from django.test import override_settings

from sandboxes.fault_injection import HookedCalls
from sandboxes.providers import load_class
from sandboxes.providers.base import Provider, SandboxSpec
from sandboxes.providers.command_results import ExecResult
from sandboxes.providers.errors import FailureCause, Missing, Rejected, Unavailable
from tests.emulators.base import CUT_BEFORE, Emulator, Fault
from tests.emulators.machine import Machine
from tests.support.remote import configure
from tests.support.suites.programs import PATH, MachinePrograms, Program, ProgramServer

HOOKED_VERBS = (
    "create", "wait_ready", "exec", "find_exec", "start", "signal_process", "write_stdin", "processes", "log",
    "kill", "suspend", "resume", "set_intervals", "find_unresponsive", "responds", "restart", "destroy",
    "inspect", "stats", "list", "list_all", "read_file", "read_range", "write_file", "remove_file",
    "make_directory", "move_file", "manifest", "get_files", "put_files", "put_and_list_files", "remove_files",
    "clear", "size", "seed",
)  # fmt: skip
ALIASES = {"list_all": "list", "put_and_list_files": "put_files"}  # names of the memory provider's hooks
UNLIMITED = 1 << 30
ANY_REQUEST = ""


class SuiteProvider(HookedCalls):
    """Mixin of a vendor's provider on its emulator. `calls` has the outermost calls of verbs."""

    port = Provider
    emulator: Any  # set by `connect`, before the constructor
    retry_delays_seconds = (0.0, 0.0, 0.0)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.clear_hooks()
        self.server = self.create_program_server()
        self.created: dict[str, SandboxSpec] = {}
        self._thread = threading.local()

    def create_program_server(self) -> ProgramServer:
        return MachinePrograms(self.find_machine)

    def complete_spec(self, spec: SandboxSpec) -> SandboxSpec:
        """Return the spec with what the vendor requires and the memory provider does not."""
        return spec

    @property
    def programs(self) -> dict[str, Program]:
        return self.server.programs

    def reset(self) -> None:
        """Remove all sandboxes, hooks, faults and recorded calls."""
        self.clear_hooks()
        self.emulator.faults.clear()
        self.emulator.is_listing_late = False
        for ref in [*self.created]:
            self.call_vendor(partial(cast(Provider, self).destroy, ref))
        self.created.clear()
        self.programs.clear()

    def find_machine(self, ref: str) -> Machine | None:
        return next(iter(self.emulator.find_machines(ref)), None)

    def count_processes(self, command_line: str) -> int:
        """Return the number of processes with this command line, in all sandboxes."""
        machines = [machine for machine in self.emulator.list_machines() if machine.is_running]
        counts = [machine.run(["pgrep", "--count", "--full", "--exact", command_line])[1] for machine in machines]
        return sum(map(int, counts))

    def vanish(self, ref: str) -> None:
        """Remove a sandbox and its processes, as by an external actor."""
        try:
            self.emulator.delete_stopped(ref)
        except NotImplementedError:
            self.emulator.stop_idle(ref)  # which ends a sandbox at this vendor

    def stop(self, ref: str) -> None:
        """Stop a sandbox, as the vendor does with an idle one."""
        self.emulator.stop_idle(ref)

    def fail(self, method: str, error: BaseException, *, times: int | None = None) -> ExitStack:
        """Let the vendor fail during the next `times` calls of this method (None: all), so that they raise such an error.

        An error that no single fault of a vendor causes is raised before the call."""
        outcome = find_outcome(error)
        if outcome is None:
            return super().fail(method, error, times=times)
        remaining = itertools.repeat(None) if times is None else itertools.repeat(None, times)

        def arm(subject: str) -> None:
            for _ in remaining:
                self._thread.outcome = outcome
                return

        return self._add_hook("before", method, arm)

    @contextmanager
    def failing_emulator(self, fault: Fault | None) -> Iterator[None]:
        """Add a fault to the emulator during a block."""
        if fault:
            self.emulator.faults.insert(0, fault)
        try:
            yield
        finally:
            if fault:
                self.emulator.faults.remove(fault)

    def call(self, verb: str, arguments: Sequence[Any], act: Callable[[], Any]) -> Any:
        """Call a verb of the vendor's provider, within its hooks."""
        with self.hooked_call(ALIASES.get(verb, verb), find_subject(arguments)):
            outcome, self._thread.outcome = getattr(self._thread, "outcome", None), None
            fault = Fault(ANY_REQUEST, outcome, UNLIMITED) if outcome is not None else None
            with self.failing_emulator(fault):
                return act()

    def call_vendor(self, act: Callable[[], Any]) -> Any:
        """Call without hooks. A verb that the vendor's provider calls in its own verb has none either."""
        self._thread.depth = getattr(self._thread, "depth", 0) + 1
        try:
            return act()
        finally:
            self._thread.depth -= 1

    def is_within_call(self) -> bool:
        return bool(getattr(self._thread, "depth", 0))


def find_outcome(error: BaseException) -> int | str | None:
    """Return the outcome of a request by which a vendor's provider raises such an error."""
    if isinstance(error, Unavailable) and error.cause in (None, FailureCause.ENGINE_UNREACHABLE):
        return CUT_BEFORE
    return next((status for kind, status in ((Rejected, 400), (Missing, 404)) if type(error) is kind), None)


def find_subject(arguments: Sequence[Any]) -> str:
    """Return the name of the sandbox, or the owner, that a verb is called with."""
    subject = arguments[0] if arguments else ""
    return str(subject.name if isinstance(subject, SandboxSpec) else subject if isinstance(subject, str) else "")


def hook(base: type[Provider], verb: str) -> Callable[..., Any]:
    """Return a verb that runs within the hooks of a SuiteProvider."""
    original = getattr(base, verb)

    @wraps(original)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if self.is_within_call():
            return original(self, *args, **options)
        return self.call(verb, args, lambda: self.call_vendor(lambda: original(self, *args, **options)))

    def create(self: Any, spec: Any) -> Any:
        spec = self.complete_spec(spec)
        self.created.setdefault(spec.name, spec)
        return call(self, spec)

    def execute(self: Any, ref: str, argv: Any, *, env: Any, **options: Any) -> Any:
        if not self.programs or self.is_within_call():
            return call(self, ref, argv, env=env, **options)
        env = {**env, "PATH": PATH}

        def act() -> ExecResult:
            run = lambda: self.call_vendor(lambda: original(self, ref, argv, env=env, **options))  # noqa: E731
            return cast(ExecResult, self.server.run(ref, options["mark"], options["timeout"], run))

        return self.call(verb, (ref, options["mark"]), act)

    def find(self: Any, ref: str, mark: str) -> Any:
        state = call(self, ref, mark)
        return state._replace(result=self.server.correct(mark, state.result)) if state and state.result else state

    def read_all(self: Any, *args: Any, **options: Any) -> Any:
        if self.is_within_call():
            return original(self, *args, **options)
        return iter(self.call(verb, args, lambda: self.call_vendor(lambda: [*original(self, *args, **options)])))

    def send_all(self: Any, ref: str, root: str, tar: Any, **options: Any) -> Any:
        return call(self, ref, root, io.BytesIO(tar.read()), **options)  # before the call: the source may be slow

    special = {
        "create": create, "exec": execute, "find_exec": find, "get_files": read_all, "put_files": send_all,
        "put_and_list_files": send_all, "seed": send_all,
    }  # fmt: skip
    return special.get(verb, call)


def connect(kind: str, emulator: Emulator, mixin: type[SuiteProvider] = SuiteProvider, **attributes: Any) -> Any:
    """Return the provider of a vendor, on its emulator, with hooks around its verbs."""
    with override_settings(REMOTE_PROVIDERS={**settings.REMOTE_PROVIDERS, kind: configure(kind, emulator)}):
        return build_class(kind, mixin, emulator=emulator, **attributes)()


def build_class(kind: str, mixin: type[SuiteProvider], **attributes: Any) -> Any:
    """Return the class of a provider with a mixin of the suites, and hooks around its verbs."""
    base = load_class(kind)
    verbs = {verb: hook(base, verb) for verb in HOOKED_VERBS}
    return type(f"Suite{base.__name__}", (mixin, base), {**verbs, **attributes})
