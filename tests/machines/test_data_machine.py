"""A hypothesis state machine over an agent's /data in several sandboxes at once: programs change files, sandboxes sleep,
wake, vanish and are replaced, the store fails, the process dies. Whatever happens, nothing that was stored is lost without
a word, and once all is quiet every sandbox has the same.

DATA_MACHINE_EXAMPLES=2000 makes a longer search of it: some ten minutes."""

import hashlib
import os
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
from sandboxes import sweeps as below
from sandboxes.errors import SandboxError
from sandboxes.models import ALIVE_STATES, Pool, Sandbox
from sandboxes.models.state import AgentData, Attachment, DataFile, DataObject
from sandboxes.providers.base import DATA
from sandboxes.providers.memory import Entry, File, Files, Folder, Link, MemoryProvider, ProgramCall, ProgramResult
from sandboxes.runs import Command
from sandboxes.state import data_sync, pruning
from sandboxes.state.merge import CONFLICTS_DIRECTORY
from sandboxes.storage import get_store
from sandboxes.storage.base import StoreError
from sandboxes.storage.memory import MemoryStore
from tests.conftest import MINUTE, NOW, SimulatedCrash

pytestmark = pytest.mark.django_db
EXAMPLES = int(os.environ.get("DATA_MACHINE_EXAMPLES", "30"))
ENVIRONMENTS = ["game-1", "game-2", "game-3"]
STEPS = [
    "created", "prepared", "run opened", "pull decided", "pulled", "run answered", "data stored", "data recorded",
    "eviction claimed", "objects stored", "persisted", "process gone", "wake claimed", "destroy claimed", "destroy answered",
]  # fmt: skip
Edit = tuple[str, str, str]  # verb, path, another path
Trouble = str | tuple[str, int, bool] | None  # a step; or a method of the store, at which call, and whether it has acted

ONE = st.sampled_from(ENVIRONMENTS)
PATH = st.sampled_from(["a", "b", "d", "d/a", "d/e", "d/e/a"])  # few: sandboxes are to get in each other's way
VERB = st.sampled_from(["write", "write", "write", "copy", "mkdir", "link", "chmod", "remove", "rename"])
EDITS = st.lists(st.tuples(VERB, PATH, PATH), min_size=1, max_size=3)
METHOD = st.sampled_from(["upload", "download", "remove"])
TROUBLE = st.none() | st.sampled_from(STEPS) | st.tuples(METHOD, st.integers(1, 3), st.booleans())


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class DataMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.rollback = transaction.atomic()
        self.rollback._from_testcase = True  # as the one of a test: the verbs may ask for a durable one inside
        self.rollback.__enter__()
        provider, shelf = providers.get_provider("memory"), get_store()
        assert isinstance(provider, MemoryProvider) and isinstance(shelf, MemoryStore)
        self.memory, self.store = provider, shelf
        self.memory.reset()
        self.memory.after("put_files", self.look)
        self.memory.programs["edit"] = self.program
        self.now: datetime = NOW
        self.pool = Pool.objects.create(name=f"machine-{uuid.uuid4().hex[:10]}", provider="memory", capacity=20)
        self.did = f"did:plc:{uuid.uuid4().hex[:10]}"
        EnvironmentType.objects.get_or_create(name="catan", defaults={"expiry_conditions": ["game.finished"]})
        self.contents = 0
        self.had: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)  # ref -> what was there at some moment
        self.unsaved: defaultdict[str, dict[str, str]] = defaultdict(dict)  # ref -> path -> what a program left there
        self.rows: dict[str, str] = {}  # path -> digest of every stored file
        self.edits: list[Edit] = []  # of the next command
        lifecycle.CHECKPOINT_HOOKS.append(self.recorded)
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

    # --- what happens -------------------------------------------------------------------------------------------------

    @rule(environment=ONE, left=EDITS, edits=EDITS, trouble=TROUBLE)
    def one_is_used(self, environment: str, left: list[Edit], edits: list[Edit], trouble: Trouble) -> None:
        """A program that was left running in it changes something, then a command does."""
        self.edit(self.used(environment), left)
        self.edits = edits
        self.attempt(lambda: self.run(environment), trouble)

    @rule(first=ONE, second=ONE, edits=EDITS, others=EDITS, trouble=TROUBLE)
    def two_are_used(self, first: str, second: str, edits: list[Edit], others: list[Edit], trouble: Trouble) -> None:
        """Neither has seen what was changed in the other one."""
        self.edit(self.used(first), edits)
        self.edit(self.used(second), others)
        self.attempt(lambda: self.run(first), trouble)
        self.attempt(lambda: self.run(second))

    @rule(environment=ONE, edits=EDITS, step=st.sampled_from(["put_files", "get_files", "data stored"]))
    def a_program_changes_files_meanwhile(self, environment: str, edits: list[Edit], step: str) -> None:
        """While what is newer is being written into it, or what was changed is being read or stored."""
        left = [edits]

        def once(ref: str) -> None:
            if left and Sandbox.objects.filter(ref=ref, state="running").exists():
                self.edit(ref, left.pop())

        def hook(reached: str, subject: object) -> None:
            if reached == step and isinstance(subject, Attachment):
                once(Sandbox.objects.get(pk=subject.pk).ref)

        lifecycle.CHECKPOINT_HOOKS.append(hook)
        with ExitStack() if step == "data stored" else self.memory.after(step, once):
            self.edits = [("write", "a", "a")]
            self.attempt(lambda: self.run(environment))

    @rule(minutes=st.sampled_from([6, 11, 61]), trouble=TROUBLE)
    def the_idle_fall_asleep(self, minutes: int, trouble: Trouble) -> None:
        self.now += timedelta(minutes=minutes)
        self.attempt(lambda: below.evict_idle(now=self.now), trouble)

    @rule(environment=ONE, left=EDITS, trouble=TROUBLE)
    def one_goes(self, environment: str, left: list[Edit], trouble: Trouble) -> None:
        """Its lease ends; a program in it has gone on."""
        self.edit(self.used(environment), left)
        self.attempt(lambda: leasing.release(self.lease(environment), now=self.now))
        self.attempt(lambda: sweeps.reclaim(now=self.now), trouble)

    @rule(environment=ONE)
    def one_vanishes(self, environment: str) -> None:
        if ref := self.used(environment):
            self.memory.vanish(ref)
            self.unsaved.pop(ref, None)

    @rule(minutes=st.sampled_from([1, 11, 61]), trouble=TROUBLE)
    def the_sweeps_run(self, minutes: int, trouble: Trouble) -> None:
        self.now += timedelta(minutes=minutes)
        for sweep in (sweeps.recover_stalled, pruning.persist_unsaved, sweeps.reclaim):
            self.attempt(lambda sweep=sweep: sweep(now=self.now), trouble)  # type: ignore[misc]
        self.attempt(lambda: sweeps.reconcile(now=self.now, grace=timedelta(0)))
        # Nothing is in flight between two rules, except what a process that died has left: so no grace is needed.
        self.attempt(lambda: pruning.remove_orphans(now=self.now, grace=timedelta(0)), trouble)

    # --- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def rows_change_only_by_what_is_recorded(self) -> None:
        if hasattr(self, "rows"):
            assert self.stored() == self.rows

    @invariant()
    def totals_are_the_sums(self) -> None:
        if hasattr(self, "rows") and (found := AgentData.objects.filter(agent_did=self.did).first()):
            live = DataFile.objects.filter(data=found, removed=False)
            assert found.files == live.filter(kind="file").count()
            assert found.size_bytes == (live.aggregate(sum=Sum("size_bytes"))["sum"] or 0)

    @invariant()
    def rows_are_a_tree(self) -> None:
        if hasattr(self, "rows"):
            kinds = dict(DataFile.objects.filter(data__agent_did=self.did, removed=False).values_list("path", "kind"))
            for path in kinds:
                assert all(kinds.get(above, "directory") == "directory" for above in above_of(path)), path

    @invariant()
    def what_rows_point_to_is_there(self) -> None:
        if hasattr(self, "rows"):
            pointed = DataFile.objects.filter(data__agent_did=self.did, stored_in__isnull=False)
            assert set(pointed.values_list("stored_in__key", flat=True)) <= self.store.values.keys()

    @invariant()
    def what_a_program_wrote_is_there_until_it_is_stored(self) -> None:
        if hasattr(self, "rows"):
            for ref, left in self.unsaved.items():
                for path, content in left.items():
                    entry = self.memory.files(ref).get(f"{DATA}/{path}")
                    assert isinstance(entry, File) and digest(entry.content) == content, f"{path} of {ref} is gone"

    def recorded(self, step: str, subject: object) -> None:
        """A sandbox's changes were just stored: it may have replaced and removed only what it had been given."""
        if step != "data recorded" or not isinstance(subject, Attachment):
            return
        ref = Sandbox.objects.get(pk=subject.pk).ref
        self.look(ref)
        before, self.rows = self.rows, self.stored()
        kept = {content for path, content in self.rows.items() if path.startswith(CONFLICTS_DIRECTORY)}
        for path, content in before.items():
            if self.rows.get(path) != content and content not in kept:
                assert (path, content) in self.had[ref], f"{path} was lost to {ref}, which never had it"
        for path, content in [*self.unsaved[ref].items()]:
            if self.rows.get(path) == content:
                del self.unsaved[ref][path]

    # --- how ----------------------------------------------------------------------------------------------------------

    def lease(self, environment: str) -> uuid.UUID:
        ask = leasing.LeaseRequest(self.did, environment, "catan", pool=self.pool.name, ttl=timedelta(hours=12))
        return leasing.acquire(ask, now=self.now)[0].pk

    def run(self, environment: str) -> None:
        execution.exec_command(self.lease(environment), Command(argv=["edit"], timeout=MINUTE), now=self.now)

    def program(self, call: ProgramCall) -> ProgramResult:
        [ref] = [box.spec.name for box in self.memory._boxes.values() if box.files is call.files]
        self.look(ref)
        self.edit(ref, self.edits)
        self.edits = []
        return ProgramResult()

    def sandbox(self, environment: str) -> Sandbox | None:
        return Sandbox.objects.filter(pool=self.pool, environment_id=environment, state__in=ALIVE_STATES, lost_at=None).first()

    def used(self, environment: str) -> str:
        """The environment's sandbox, if a program may be running in it; "" if not. In one that is half filled none does."""
        sandbox = self.sandbox(environment)
        if sandbox is None or sandbox.ref not in self.memory._boxes:
            return ""
        return sandbox.ref if Attachment.objects.filter(pk=sandbox.pk, incarnation=sandbox.incarnation, pulling=[]) else ""

    def look(self, ref: str) -> None:
        """Note what is in a sandbox now."""
        for path, entry in self.memory.files(ref).items():
            if path.startswith(f"{DATA}/") and isinstance(entry, File):
                self.had[ref].add((path.removeprefix(f"{DATA}/"), digest(entry.content)))

    def stored(self) -> dict[str, str]:
        live = DataFile.objects.filter(data__agent_did=self.did, removed=False, kind="file")
        return dict(live.values_list("path", "digest"))

    def edit(self, ref: str, edits: list[Edit]) -> None:
        """What a program does to the files of a sandbox."""
        if not ref:
            return
        files, left = self.memory.files(ref), self.unsaved[ref]
        for verb, path, other in edits:
            if verb == "write":
                self.contents += 1
                place(files, path, File(f"content {self.contents}\n".encode(), mtime=self.contents))
                left[path] = digest(f"content {self.contents}\n".encode())
            else:
                change(files, verb, path, other)
        for name in [*left]:
            entry = files.get(f"{DATA}/{name}")
            if not isinstance(entry, File) or digest(entry.content) != left[name]:
                del left[name]  # the program itself has removed or replaced it
        self.look(ref)

    def attempt(self, act: Callable[[], object], trouble: Trouble = None) -> None:
        """Do it, unless it is refused, or the process dies in it."""
        died: list[object] = []
        try:
            with self.having(trouble, died), suppress(SandboxError):
                act()
        except SimulatedCrash:
            # Nobody has cleared up after this one: what it was writing into a sandbox is claimed until that runs out.
            if isinstance(here := died[0], Attachment):
                until = self.now + timedelta(minutes=5)
                Attachment.objects.filter(pk=here.pk).exclude(pulling=[]).update(pull_until=until)
        lifecycle.CHECKPOINT_HOOKS[:] = [self.recorded]

    @contextmanager
    def having(self, trouble: Trouble, died: list[object]) -> Iterator[None]:
        """Once the process dies at a step, or the store fails at one call, before it has acted or after."""
        calls: list[str] = []

        def die(reached: str, subject: object) -> None:
            if reached == trouble and not died:
                died.append(subject)
                raise SimulatedCrash

        def fail(key: str) -> None:
            calls.append(key)
            if isinstance(trouble, tuple) and len(calls) == trouble[1]:
                raise StoreError("memory", trouble[0], "out of order", key=key)

        lifecycle.CHECKPOINT_HOOKS.append(die)
        with ExitStack() as stack:
            if isinstance(trouble, tuple):
                method, _, acted = trouble
                stack.enter_context((self.store.after if acted else self.store.before)(method, fail))
            yield

    def settle(self) -> None:
        """Whatever happened: the sweeps run, each sandbox is used twice, and all of them have what the rows say."""
        for _ in range(2):
            self.now += timedelta(hours=1)
            for sweep in (sweeps.expire_due_leases, sweeps.recover_stalled, sweeps.reclaim):
                sweep(now=self.now)
            sweeps.reconcile(now=self.now, grace=timedelta(0))
            assert pruning.persist_unsaved(now=self.now).failures == []
        for environment in ENVIRONMENTS * 2:
            try:
                self.run(environment)
            except LeaseError:  # its sandbox had vanished, and nobody knew
                self.run(environment)
        for environment in ENVIRONMENTS:
            assert self.inside(environment) == self.newest(), environment
        assert not any(self.unsaved.values())
        self.rows_are_a_tree()
        self.totals_are_the_sums()
        assert pruning.remove_orphans(now=self.now + MINUTE, grace=timedelta(0)).failures == []
        pointed = DataFile.objects.filter(data__agent_did=self.did, removed=False, kind="file")
        there = set(self.store.list("agents/"))
        assert there == set(pointed.values_list("stored_in__key", flat=True))
        assert there == set(DataObject.objects.filter(data__agent_did=self.did).values_list("key", flat=True))

    def inside(self, environment: str) -> dict[str, tuple[str, int, str]]:
        """Path -> kind, mode, digest or target."""
        sandbox = self.sandbox(environment)
        assert sandbox
        files = self.memory.files(sandbox.ref).items()
        return {path.removeprefix(f"{DATA}/"): described(entry) for path, entry in files if path.startswith(f"{DATA}/")}

    def newest(self) -> dict[str, tuple[str, int, str]]:
        live = DataFile.objects.filter(data__agent_did=self.did, removed=False)
        return {row.path: (row.kind, row.mode, row.digest or row.target) for row in live}


def described(entry: Entry) -> tuple[str, int, str]:
    if isinstance(entry, File):
        return "file", entry.mode, digest(entry.content)
    return ("link", 0o777, entry.target) if isinstance(entry, Link) else ("directory", entry.mode, "")


def change(files: Files, verb: str, path: str, other: str) -> None:
    if verb == "copy":  # the same in whatever sandbox it is
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


def above_of(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def take(files: Files, path: str) -> dict[str, Entry]:
    """Remove a path with all below it; what it was, by the rest of each path."""
    top = f"{DATA}/{path}"
    return {name.removeprefix(top): files.pop(name) for name in sorted(files) if f"{name}/".startswith(f"{top}/")}


def place(files: Files, path: str, entry: Entry) -> None:
    """Put an entry, with directories above it, in the place of whatever is there."""
    for above in above_of(path):
        if not isinstance(files.get(f"{DATA}/{above}"), Folder):
            files[f"{DATA}/{above}"] = Folder()
    if not (isinstance(entry, Folder) and isinstance(files.get(f"{DATA}/{path}"), Folder)):
        take(files, path)
        files[f"{DATA}/{path}"] = entry


def test_stored_data_is_never_lost_silently(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    # Who finds a sandbox in the hands of somebody dead waits this long in real time, and is refused.
    settings.SANDBOX_START_TIMEOUT = timedelta(milliseconds=20)
    monkeypatch.setattr(data_sync, "PULL_WAIT_TIMEOUT", timedelta(0))
    shelf = MemoryStore()
    monkeypatch.setattr("sandboxes.storage.FilesystemStore", lambda root: shelf)
    run_state_machine_as_test(
        DataMachine,
        settings=hypothesis.settings(
            max_examples=EXAMPLES,
            stateful_step_count=12,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes longer than reading a dozen such steps
        ),
    )
