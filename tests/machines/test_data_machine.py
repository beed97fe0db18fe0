"""Hypothesis state machine over an agent's /data in several sandboxes at once.

Programs change files; sandboxes are evicted, woken, lost and replaced; the store fails and the process crashes. Stored data is
never lost silently, and all sandboxes have the same files in the end. A longer search, with TEST_SEARCH=200, takes
about ten minutes."""

import hashlib
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timedelta

import hypothesis
import hypothesis.strategies as st
import pytest
from django.db import transaction
from django.db.models import Sum
from hypothesis import HealthCheck, Phase
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from pytest_django import Settings

from leases import execution, leasing, sweeps
from leases.errors import LeaseError
from leases.models import EnvironmentType
from sandboxes import lifecycle, providers
from sandboxes.errors import SandboxError
from sandboxes.models import ALIVE_STATES, Pool, Sandbox
from sandboxes.models.state import AgentData, Attachment, DataFile, DataObject
from sandboxes.providers.base import DATA
from sandboxes.providers.memory import Entry, File, Files, Folder, Link, MemoryProvider, ProgramCall, ProgramResult
from sandboxes.runs.operations import Command
from sandboxes.state import data_sync, pruning
from sandboxes.state.merge import CONFLICTS_DIRECTORY
from sandboxes.storage import get_store
from sandboxes.storage.base import StoreError
from sandboxes.storage.memory import MemoryStore
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW, SimulatedCrash
from tests.support.search import budget

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("guarded UPDATEs of the state machine")]
STEPS_PER_EXAMPLE = 30  # the sandboxes of an example are expensive to start and to compare
ENVIRONMENTS = ["game-1", "game-2", "game-3"]
STEPS = [
    "created", "prepared", "run opened", "pull decided", "pulled", "run answered", "data stored", "data recorded",
    "eviction claimed", "objects stored", "persisted", "process gone", "wake claimed", "destroy claimed", "destroy answered",
]  # fmt: skip
Edit = tuple[str, str, str]  # verb, path, another path
# Checkpoint of a crash, or (method of the store, number of the failing call, whether the call acts before it fails).
Fault = str | tuple[str, int, bool] | None

ENVIRONMENT = st.sampled_from(ENVIRONMENTS)
PATH = st.sampled_from(["a", "b", "d", "d/a", "d/e", "d/e/a"])  # few paths, so that sandboxes conflict
VERB = st.sampled_from(["write", "write", "write", "copy", "mkdir", "link", "chmod", "remove", "rename"])
EDITS = st.lists(st.tuples(VERB, PATH, PATH), min_size=1, max_size=3)
METHOD = st.sampled_from(["upload", "download", "remove"])
FAULT = st.none() | st.sampled_from(STEPS) | st.tuples(METHOD, st.integers(1, 3), st.booleans())


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class DataMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.rollback = transaction.atomic()
        self.rollback._from_testcase = True  # permits durable transactions inside, as in a TestCase
        self.rollback.__enter__()
        provider, store = providers.get_provider("memory"), get_store()
        assert isinstance(provider, MemoryProvider) and isinstance(store, MemoryStore)
        self.memory, self.store = provider, store
        self.memory.reset()
        self.memory.after("put_files", self.record_files)
        self.memory.programs["edit"] = self.program
        self.now: datetime = NOW
        self.pool = Pool.objects.create(name=f"machine-{uuid.uuid4().hex[:10]}", provider="memory", capacity=20)
        self.did = f"did:plc:{uuid.uuid4().hex[:10]}"
        EnvironmentType.objects.get_or_create(name="catan", defaults={"expiry_conditions": ["game.finished"]})
        self.contents = 0
        self.had: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)  # ref -> contents that the sandbox had at some time
        self.unsaved: defaultdict[str, dict[str, str]] = defaultdict(dict)  # ref -> path -> digest that a program wrote
        self.rows: dict[str, str] = {}  # path -> digest of every stored file
        self.edits: list[Edit] = []  # of the next command
        lifecycle.CHECKPOINT_HOOKS.append(self.check_recorded)
        for environment in ENVIRONMENTS:
            self.run(environment)

    def teardown(self) -> None:
        if hasattr(self, "rows"):
            try:
                self.settle()
            finally:
                lifecycle.CHECKPOINT_HOOKS.clear()
                transaction.set_rollback(True)
                self.rollback.__exit__(None, None, None)
                self.memory.reset()
                self.store.reset()

    # --- rules --------------------------------------------------------------------------------------------------------

    @rule(environment=ENVIRONMENT, earlier=EDITS, edits=EDITS, fault=FAULT)
    def use_one(self, environment: str, earlier: list[Edit], edits: list[Edit], fault: Fault) -> None:
        """A process in the sandbox changes files, then a command does."""
        self.edit(self.usable_ref(environment), earlier)
        self.edits = edits
        self.attempt(lambda: self.run(environment), fault)

    @rule(first=ENVIRONMENT, second=ENVIRONMENT, edits=EDITS, others=EDITS, fault=FAULT)
    def use_two(self, first: str, second: str, edits: list[Edit], others: list[Edit], fault: Fault) -> None:
        """Neither sandbox has seen the other one's changes."""
        self.edit(self.usable_ref(first), edits)
        self.edit(self.usable_ref(second), others)
        self.attempt(lambda: self.run(first), fault)
        self.attempt(lambda: self.run(second))

    @rule(environment=ENVIRONMENT, edits=EDITS, step=st.sampled_from(["put_files", "get_files", "data stored"]))
    def change_files_during_sync(self, environment: str, edits: list[Edit], step: str) -> None:
        """A process changes files while /data is being pulled, read or stored."""
        pending = [edits]

        def once(ref: str) -> None:
            if pending and Sandbox.objects.filter(ref=ref, state="running").exists():
                self.edit(ref, pending.pop())

        def hook(reached: str, subject: object) -> None:
            if reached == step and isinstance(subject, Attachment):
                once(Sandbox.objects.get(pk=subject.pk).ref)

        lifecycle.CHECKPOINT_HOOKS.append(hook)
        with ExitStack() if step == "data stored" else self.memory.after(step, once):
            self.edits = [("write", "a", "a")]
            self.attempt(lambda: self.run(environment))

    @rule(minutes=st.sampled_from([6, 11, 61]), fault=FAULT)
    def evict_idle_sandboxes(self, minutes: int, fault: Fault) -> None:
        self.now += timedelta(minutes=minutes)
        self.attempt(lambda: passes.evict_idle(now=self.now), fault)

    @rule(environment=ENVIRONMENT, edits=EDITS, fault=FAULT)
    def end_lease(self, environment: str, edits: list[Edit], fault: Fault) -> None:
        """A lease ends after a process has changed files in its sandbox."""
        self.edit(self.usable_ref(environment), edits)
        self.attempt(lambda: leasing.release(self.lease(environment), now=self.now))
        self.attempt(lambda: sweeps.reclaim(now=self.now), fault)

    @rule(environment=ENVIRONMENT)
    def vanish_sandbox(self, environment: str) -> None:
        if ref := self.usable_ref(environment):
            self.memory.vanish(ref)
            self.unsaved.pop(ref, None)

    @rule(minutes=st.sampled_from([1, 11, 61]), fault=FAULT)
    def run_sweeps(self, minutes: int, fault: Fault) -> None:
        self.now += timedelta(minutes=minutes)
        for sweep in (sweeps.recover_stalled, pruning.persist_unsaved, sweeps.reclaim):
            self.attempt(lambda sweep=sweep: sweep(now=self.now), fault)  # type: ignore[misc]
        self.attempt(lambda: sweeps.reconcile(now=self.now, grace=timedelta(0)))
        # Only crashed processes leave anything in flight between two rules, so no grace period is needed.
        self.attempt(lambda: pruning.remove_orphans(now=self.now, grace=timedelta(0)), fault)

    # --- invariants ---------------------------------------------------------------------------------------------------

    @invariant()
    def rows_change_only_by_what_is_recorded(self) -> None:
        assert self.stored() == self.rows

    @invariant()
    def totals_are_the_sums(self) -> None:
        if data := AgentData.objects.filter(agent_did=self.did).first():
            live = DataFile.objects.filter(data=data, removed=False)
            assert data.files == live.filter(kind="file").count()
            assert data.size_bytes == (live.aggregate(sum=Sum("size_bytes"))["sum"] or 0)

    @invariant()
    def rows_are_a_tree(self) -> None:
        kinds = dict(DataFile.objects.filter(data__agent_did=self.did, removed=False).values_list("path", "kind"))
        for path in kinds:
            assert all(kinds.get(above, "directory") == "directory" for above in parents_of(path)), path

    @invariant()
    def referenced_objects_exist(self) -> None:
        pointed = DataFile.objects.filter(data__agent_did=self.did, stored_in__isnull=False)
        assert set(pointed.values_list("stored_in__key", flat=True)) <= self.store.values.keys()

    @invariant()
    def written_files_exist_until_they_are_stored(self) -> None:
        for ref, unsaved in self.unsaved.items():
            for path, content in unsaved.items():
                entry = self.memory.files(ref).get(f"{DATA}/{path}")
                assert isinstance(entry, File) and digest(entry.content) == content, f"{path} of {ref} is gone"

    def check_recorded(self, step: str, subject: object) -> None:
        """Check, after a sandbox's changes were stored, that it replaced or removed only files that it had."""
        if step != "data recorded" or not isinstance(subject, Attachment):
            return
        ref = Sandbox.objects.get(pk=subject.pk).ref
        self.record_files(ref)
        before, self.rows = self.rows, self.stored()
        kept = {content for path, content in self.rows.items() if path.startswith(CONFLICTS_DIRECTORY)}
        for path, content in before.items():
            if self.rows.get(path) != content and content not in kept:
                assert (path, content) in self.had[ref], f"{path} was lost to {ref}, which never had that version"
        for path, content in [*self.unsaved[ref].items()]:
            if self.rows.get(path) == content:
                del self.unsaved[ref][path]

    # --- helpers ------------------------------------------------------------------------------------------------------

    def lease(self, environment: str) -> uuid.UUID:
        request = leasing.LeaseRequest(self.did, environment, "catan", pool=self.pool.name, ttl=timedelta(hours=12))
        return leasing.acquire(request, now=self.now)[0].pk

    def run(self, environment: str) -> None:
        execution.exec_command(self.lease(environment), Command(argv=["edit"], timeout=MINUTE), now=self.now)

    def program(self, call: ProgramCall) -> ProgramResult:
        [ref] = [sandbox.spec.name for sandbox in self.memory._sandboxes.values() if sandbox.files is call.files]
        self.record_files(ref)
        self.edit(ref, self.edits)
        self.edits = []
        return ProgramResult()

    def sandbox(self, environment: str) -> Sandbox | None:
        return Sandbox.objects.filter(pool=self.pool, environment_id=environment, state__in=ALIVE_STATES, lost_at=None).first()

    def usable_ref(self, environment: str) -> str:
        """Return the ref of the environment's sandbox, or "" if no program can run in the sandbox, as during a pull."""
        sandbox = self.sandbox(environment)
        if sandbox is None or sandbox.ref not in self.memory._sandboxes:
            return ""
        return sandbox.ref if Attachment.objects.filter(pk=sandbox.pk, incarnation=sandbox.incarnation, pulling=[]) else ""

    def record_files(self, ref: str) -> None:
        """Record the current files of a sandbox."""
        for path, entry in self.memory.files(ref).items():
            if path.startswith(f"{DATA}/") and isinstance(entry, File):
                self.had[ref].add((path.removeprefix(f"{DATA}/"), digest(entry.content)))

    def stored(self) -> dict[str, str]:
        live = DataFile.objects.filter(data__agent_did=self.did, removed=False, kind="file")
        return dict(live.values_list("path", "digest"))

    def edit(self, ref: str, edits: list[Edit]) -> None:
        """Change the files of a sandbox, as a program in the sandbox would."""
        if not ref:
            return
        files, unsaved = self.memory.files(ref), self.unsaved[ref]
        for verb, path, other in edits:
            if verb == "write":
                self.contents += 1
                place(files, path, File(f"content {self.contents}\n".encode(), mtime_ns=self.contents * 10**9))
                unsaved[path] = digest(f"content {self.contents}\n".encode())
            else:
                change(files, verb, path, other)
        for name in [*unsaved]:
            entry = files.get(f"{DATA}/{name}")
            if not isinstance(entry, File) or digest(entry.content) != unsaved[name]:
                del unsaved[name]  # the program itself removed or replaced the file
        self.record_files(ref)

    def attempt(self, act: Callable[[], object], fault: Fault = None) -> None:
        """Call a function with an injected fault. Refusals and crashes are expected."""
        died: list[object] = []
        try:
            with self.inject(fault, died), suppress(SandboxError):
                act()
        except SimulatedCrash:
            # A crashed pull keeps its claim on the sandbox until the claim expires.
            if isinstance(interrupted := died[0], Attachment):
                until = self.now + timedelta(minutes=5)
                Attachment.objects.filter(pk=interrupted.pk).exclude(pulling=[]).update(pull_until=until)
        lifecycle.CHECKPOINT_HOOKS[:] = [self.check_recorded]

    @contextmanager
    def inject(self, fault: Fault, died: list[object]) -> Iterator[None]:
        """Crash once at a checkpoint, or fail one call of the store, before or after the store acts."""
        calls: list[str] = []

        def die(reached: str, subject: object) -> None:
            if reached == fault and not died:
                died.append(subject)
                raise SimulatedCrash

        def fail(key: str) -> None:
            calls.append(key)
            if isinstance(fault, tuple) and len(calls) == fault[1]:
                raise StoreError("memory", fault[0], "out of order", key=key)

        lifecycle.CHECKPOINT_HOOKS.append(die)
        with ExitStack() as stack:
            if isinstance(fault, tuple):
                method, _, acted = fault
                stack.enter_context((self.store.after if acted else self.store.before)(method, fail))
            yield

    def settle(self) -> None:
        """Run the sweeps, use each sandbox twice, and check that all sandboxes have the files of the rows."""
        for _ in range(2):
            self.now += timedelta(hours=1)
            for sweep in (sweeps.expire_due_leases, sweeps.recover_stalled, sweeps.reclaim):
                sweep(now=self.now)
            sweeps.reconcile(now=self.now, grace=timedelta(0))
            assert pruning.persist_unsaved(now=self.now).failures == []
        for environment in ENVIRONMENTS * 2:
            try:
                self.run(environment)
            except LeaseError:  # the sandbox had vanished unnoticed
                self.run(environment)
        for environment in ENVIRONMENTS:
            assert self.files_inside(environment) == self.newest(), environment
        assert not any(self.unsaved.values())
        self.rows_are_a_tree()
        self.totals_are_the_sums()
        assert pruning.remove_orphans(now=self.now + MINUTE, grace=timedelta(0)).failures == []
        pointed = DataFile.objects.filter(data__agent_did=self.did, removed=False, kind="file")
        stored_keys = set(self.store.list("agents/"))
        assert stored_keys == set(pointed.values_list("stored_in__key", flat=True))
        assert stored_keys == set(DataObject.objects.filter(data__agent_did=self.did).values_list("key", flat=True))

    def files_inside(self, environment: str) -> dict[str, tuple[str, int, str]]:
        """Path -> kind, mode, digest or target."""
        sandbox = self.sandbox(environment)
        assert sandbox
        files = self.memory.files(sandbox.ref).items()
        return {path.removeprefix(f"{DATA}/"): describe(entry) for path, entry in files if path.startswith(f"{DATA}/")}

    def newest(self) -> dict[str, tuple[str, int, str]]:
        live = DataFile.objects.filter(data__agent_did=self.did, removed=False)
        return {row.path: (row.kind, row.mode, row.digest or row.target) for row in live}


def describe(entry: Entry) -> tuple[str, int, str]:
    if isinstance(entry, File):
        return "file", entry.mode, digest(entry.content)
    return ("link", 0o777, entry.target) if isinstance(entry, Link) else ("directory", entry.mode, "")


def change(files: Files, verb: str, path: str, other: str) -> None:
    if verb == "copy":  # the same content in every sandbox
        place(files, path, File(b"the same everywhere\n"))
    elif verb == "mkdir":
        place(files, path, Folder())
    elif verb == "link":
        place(files, path, Link(f"../{other}"))
    elif verb == "remove":
        take(files, path)
    elif verb == "rename" and not f"{other}/".startswith(f"{path}/") and not f"{path}/".startswith(f"{other}/"):
        moved = take(files, path)
        for name in moved:
            place(files, other + name, moved[name])
    elif verb == "chmod":
        entry = files.get(f"{DATA}/{path}")
        if isinstance(entry, File):
            files[f"{DATA}/{path}"] = File(entry.content, mode=0o600 if entry.mode == 0o644 else 0o644)
        elif isinstance(entry, Folder):
            files[f"{DATA}/{path}"] = Folder(mode=0o700 if entry.mode == 0o755 else 0o755)


def parents_of(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def take(files: Files, path: str) -> dict[str, Entry]:
    """Remove a path and all paths below it. Returns the entries by the rest of their paths."""
    top = f"{DATA}/{path}"
    return {name.removeprefix(top): files.pop(name) for name in sorted(files) if f"{name}/".startswith(f"{top}/")}


def place(files: Files, path: str, entry: Entry) -> None:
    """Insert an entry and its parent directories. Replaces the entry that has the path."""
    for above in parents_of(path):
        if not isinstance(files.get(f"{DATA}/{above}"), Folder):
            files[f"{DATA}/{above}"] = Folder()
    if not (isinstance(entry, Folder) and isinstance(files.get(f"{DATA}/{path}"), Folder)):
        take(files, path)
        files[f"{DATA}/{path}"] = entry


def test_stored_data_is_never_lost_silently(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    # Real time that a request waits for a sandbox whose worker has crashed, before it is refused.
    settings.SANDBOX_START_TIMEOUT = timedelta(0)
    settings.EGRESS_PROXY = "none"
    monkeypatch.setattr(data_sync, "PULL_WAIT_TIMEOUT", timedelta(0))
    store = MemoryStore()
    monkeypatch.setattr("sandboxes.storage.FilesystemStore", lambda root: store)
    run_state_machine_as_test(
        DataMachine,
        settings=hypothesis.settings(
            max_examples=budget(fast=3, full=10),
            stateful_step_count=STEPS_PER_EXAMPLE,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes longer than reading a dozen such steps
        ),
    )
