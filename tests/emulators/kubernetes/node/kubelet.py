"""Kubelet of the emulated node: the life cycle of Pods on a Docker Engine.

Work on one Pod is done by a pool of threads under the lock of that Pod. A thread that reads the engine's events notices the end
of containers. Times are those of the engine and the clock: grace periods and deadlines pass for real."""

import shutil
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tests.emulators.kubernetes.api.deletion import ENDED_PHASES, Deletion, set_condition
from tests.emulators.kubernetes.api.resources import ENDPOINTS, NAMESPACES, NETWORK_POLICIES, PODS, SERVICES, Resource
from tests.emulators.kubernetes.api.status import ApiError
from tests.emulators.kubernetes.api.store import Object, Store
from tests.emulators.kubernetes.faults import (
    CONTAINER_CONFIG,
    IMAGE_PULL,
    NOT_STARTED,
    STUCK_TERMINATING,
    ClusterFaults,
)
from tests.emulators.kubernetes.node import containers, statuses
from tests.emulators.kubernetes.node.containers import POD_LABEL, RUN_LABEL, ContainerError, Sandbox
from tests.emulators.kubernetes.node.engine import Engine
from tests.emulators.kubernetes.node.events import Recorder
from tests.emulators.kubernetes.node.network import PodNetwork
from tests.emulators.kubernetes.node.pauses import Pauses
from tests.emulators.kubernetes.node.scheduler import Scheduler
from tests.emulators.kubernetes.node.timers import Loop
from tests.emulators.kubernetes.node.volumes import TOKEN_DIRECTORY, TOKEN_VOLUME, Credentials, VolumeMissing, create_volumes

WORKERS = 16
RETRY_SECONDS = 0.1  # of a missing Secret
PULL_BACKOFF_SECONDS = 0.5
MAX_RESTART_BACKOFF_SECONDS = 30.0
DISCARD_GRACE_SECONDS = 1  # of containers whose Pod was deleted without a grace period
START_FAULTS = frozenset({IMAGE_PULL, CONTAINER_CONFIG, NOT_STARTED})


class Kubelet:
    """Node with all Pods of one emulator. `deletion` is set before the first Pod."""

    deletion: Deletion

    def __init__(
        self, run: str, store: Store, faults: ClusterFaults, directory: Path, network: PodNetwork, loop: Loop, pause_image: str,
        get_credentials: Callable[[str, str], Credentials],
    ) -> None:  # fmt: skip
        self.run, self.store, self.faults, self.directory, self.network, self.loop = (
            run,
            store,
            faults,
            directory,
            network,
            loop,
        )
        self.get_credentials = get_credentials
        self.engine = Engine(run, WORKERS + 8)
        self.pauses = Pauses(self.engine.client, pause_image, {RUN_LABEL: run})
        self.recorder = Recorder(store)
        self.scheduler = Scheduler(store, faults, self.recorder)
        self.sandboxes: dict[str, Sandbox] = {}  # by uid of the Pod
        self.shared_directories: dict[str, Path] = {}  # of the node, by path in each container, read-only
        self.lock = threading.RLock()
        self._pool = ThreadPoolExecutor(WORKERS, "kubelet")
        self._held: dict[str, Object | None] = {}  # Pods whose termination is held, by name; None: not deleted yet
        self._pod_locks: dict[str, threading.RLock] = {}
        self.engine.watch_ends(self._notice_end)

    # Interface of the API server

    def start(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        self._submit(lambda: self.scheduler.place(pod) and self._launch(uid, pod))

    def stop(self, pod: Object) -> None:
        uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        if sandbox := self.sandboxes.get(uid):
            if sandbox.is_ending:  # a later deletion, with a shorter grace period than the one that is in progress
                self._submit(lambda: self.engine.stop(sandbox, pod["metadata"]["deletionGracePeriodSeconds"]))
            sandbox.is_ending = True
        if name in self._held or self.faults.take_pod(name, frozenset({STUCK_TERMINATING})):
            self._held[name] = pod
            return
        self._submit(lambda: self._terminate(uid, pod))

    def discard(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        self._held.pop(pod["metadata"]["name"], None)
        ended = pod["status"].get("phase") in ENDED_PHASES
        self._submit(lambda: self._remove(uid, 0 if ended else DISCARD_GRACE_SECONDS))

    def observe(self, resource: Resource) -> None:
        if resource in {ENDPOINTS, NAMESPACES, NETWORK_POLICIES, SERVICES}:
            self._submit(self.network.refresh)

    # Switches of tests

    def schedule(self, name: str) -> None:
        """Place Pods of this name that a fault keeps unscheduled, as after the start of a node."""
        for pod in self.store.list(PODS):
            if pod["metadata"]["name"] == name and not pod["spec"].get("nodeName"):
                uid = pod["metadata"]["uid"]
                self.scheduler.bind(pod)
                self._submit(lambda uid=uid, pod=pod: self._launch(uid, pod))

    def hold(self, name: str) -> None:
        """Let the next termination of a Pod of this name not end before `release`."""
        self._held.setdefault(name, None)

    def release(self, name: str) -> None:
        """Let a termination that is held go on."""
        if pod := self._held.pop(name, None):
            self._submit(lambda: self._terminate(pod["metadata"]["uid"], pod))

    def close(self) -> None:
        """Stop all work, and remove all containers of the run."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.engine.stop_events()
        self.engine.remove_all()  # which ends the grace periods that threads wait for
        self._pool.shutdown(wait=True)
        self.engine.remove_all()
        self.engine.client.close()

    # Life cycle

    def edit(self, pod: Object, change: Callable[[Object], None]) -> Object | None:
        """Change a Pod, unless it is gone."""
        metadata = pod["metadata"]
        with suppress(ApiError):
            return self.store.edit(PODS, metadata["namespace"], metadata["name"], change, uid=metadata["uid"])
        return None

    def find(self, pod: Object) -> Object | None:
        """Return the present state of a Pod, or None if it is gone."""
        found = self.store.find(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"])
        return found if found and found["metadata"]["uid"] == pod["metadata"]["uid"] else None

    def find_sandbox(self, pod: Object) -> Sandbox | None:
        return self.sandboxes.get(pod["metadata"]["uid"])

    def _submit(self, work: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the pool is closed
            self._pool.submit(_report_errors, work)

    def _get_lock(self, uid: str) -> threading.RLock:
        with self.lock:
            return self._pod_locks.setdefault(uid, threading.RLock())

    def _launch(self, uid: str, pod: Object) -> None:
        """Start the containers of a Pod that has a node."""
        with self._get_lock(uid):
            current = self.find(pod)
            if current is None or current["metadata"].get("deletionTimestamp") or current["status"]["phase"] in ENDED_PHASES:
                return
            sandbox = self._get_sandbox(current)
            fault = self.faults.take_pod(sandbox.name, START_FAULTS)
            self.edit(current, statuses.begin)
            if fault:
                self._meet(fault, current)
                return
            try:
                self._create(current, sandbox)
            except VolumeMissing as missing:
                self.recorder.record(current, "Warning", "FailedMount", f"MountVolume.SetUp failed: {missing}")
                self.loop.call_later(RETRY_SECONDS, lambda: self._submit(lambda: self._launch(uid, current)))
            except ContainerError as failed:
                self._fail_start(current, failed)
            else:
                self._schedule_deadline(current)
                self.refresh(uid, current)

    def _get_sandbox(self, pod: Object) -> Sandbox:
        uid, namespace, name = (pod["metadata"][key] for key in ("uid", "namespace", "name"))
        with self.lock:
            if uid not in self.sandboxes:
                self.sandboxes[uid] = Sandbox(uid, namespace, name, self.directory / uid)
            return self.sandboxes[uid]

    def _create(self, pod: Object, sandbox: Sandbox) -> None:
        labels = {RUN_LABEL: self.run, POD_LABEL: sandbox.uid}
        if pod["spec"].get("initContainers"):
            raise ContainerError("CreateContainerConfigError", "init containers are not emulated")
        credentials = None
        if pod["spec"].get("automountServiceAccountToken") is not False:
            credentials = self.get_credentials(sandbox.namespace, pod["spec"]["serviceAccountName"])
        volumes = create_volumes(self.store, pod, sandbox.directory, credentials)
        if sandbox.pause is None:
            pause = sandbox.pause = self.pauses.start(pod)
            self.edit(pod, lambda item: statuses.set_address(item, pause.address))
            self.network.attach(pod, pause.address, pause.process)
        for container in pod["spec"]["containers"]:
            containers.find_image(self.engine.client, container)
        for container in pod["spec"]["containers"]:
            if credentials:
                token = {"name": TOKEN_VOLUME, "mountPath": TOKEN_DIRECTORY, "readOnly": True}
                container = {**container, "volumeMounts": [*(container.get("volumeMounts") or ()), token]}
            identifier = containers.create_container(
                self.engine.client, self.store, pod, container, sandbox, volumes, labels, self.shared_directories
            )
            sandbox.containers[container["name"]] = identifier
            self.engine.start(identifier)
            self.recorder.record(pod, "Normal", "Started", f"Started container {container['name']}")

    def _meet(self, fault: str, pod: Object) -> None:
        image = pod["spec"]["containers"][0]["image"]
        if fault == IMAGE_PULL:
            self._fail_start(pod, ContainerError("ErrImagePull", f'failed to pull and unpack image "{image}": not found'))
        elif fault == CONTAINER_CONFIG:
            self._fail_start(pod, ContainerError("CreateContainerConfigError", "the configuration of the container is invalid"))

    def _fail_start(self, pod: Object, failed: ContainerError) -> None:
        self.edit(pod, lambda item: statuses.set_waiting(item, failed.reason, failed.message))
        self.recorder.record(pod, "Warning", "Failed", f"Error: {failed.reason}: {failed.message}")
        if failed.reason == "ErrImagePull":
            image = pod["spec"]["containers"][0]["image"]

            def back_off() -> None:
                message = f'Back-off pulling image "{image}"'
                self.edit(pod, lambda item: statuses.set_waiting(item, "ImagePullBackOff", message))

            self.loop.call_later(PULL_BACKOFF_SECONDS, back_off)

    def _schedule_deadline(self, pod: Object) -> None:
        seconds = pod["spec"].get("activeDeadlineSeconds")
        if seconds:
            message = "Pod was active on the node longer than the specified deadline"
            self.loop.call_later(seconds, lambda: self._submit(lambda: self.fail(pod, "DeadlineExceeded", message)))

    def fail(self, pod: Object, reason: str, message: str, disruption: str = "") -> None:
        """End a Pod that is not deleted: phase Failed. `disruption` is the reason of a condition DisruptionTarget."""

        def change(item: Object) -> None:
            if item["status"]["phase"] not in ENDED_PHASES:
                item["status"] |= {"phase": "Failed", "reason": reason, "message": message}
                if disruption:
                    set_condition(item, "DisruptionTarget", "True", disruption, message)

        if self.edit(pod, change) and (sandbox := self.find_sandbox(pod)):
            self.engine.kill(sandbox)
            self.refresh(sandbox.uid, pod)

    def refresh(self, uid: str, pod: Object) -> None:
        """Take over the states of a Pod's containers into its status, and restart what its policy restarts."""
        sandbox = self.sandboxes.get(uid)
        if sandbox is None:
            return
        with self._get_lock(uid):
            states = self.engine.inspect(sandbox)
            updated = self.edit(pod, lambda item: statuses.update(item, states, sandbox.restarts))
            for status in updated["status"]["containerStatuses"] if updated and not sandbox.is_ending else ():
                if statuses.is_restarted(updated, status):
                    count = sandbox.restarts[status["name"]] = status["restartCount"] + 1
                    delay = min(2.0 ** (count - 1), MAX_RESTART_BACKOFF_SECONDS)
                    name = status["name"]
                    self.loop.call_later(delay, lambda name=name: self._submit(lambda: self._restart(sandbox, pod, name)))
        self.deletion.admission.update_quotas(sandbox.namespace)

    def _restart(self, sandbox: Sandbox, pod: Object, name: str) -> None:
        with self._get_lock(sandbox.uid):
            if not sandbox.is_ending:
                self.engine.start(sandbox.containers[name])
                self.refresh(sandbox.uid, pod)

    def _terminate(self, uid: str, pod: Object) -> None:
        """End a deleted Pod within its grace period, then let its object go."""
        self._remove(uid, pod["metadata"].get("deletionGracePeriodSeconds", 0), pod)
        self.deletion.finish(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"], uid)

    def _remove(self, uid: str, grace: int, pod: Object | None = None) -> None:
        """Stop and remove the containers of a Pod. Idempotent."""
        with self._get_lock(uid):  # a start that is under way ends first
            sandbox = self.sandboxes.get(uid)
            if sandbox is None:
                return
            sandbox.is_ending = True
            self.engine.stop(sandbox, grace)
            if pod:
                self.refresh(uid, pod)
            self.network.detach(uid)
            for identifier in sandbox.containers.values():
                self.engine.remove(identifier)
            if sandbox.pause:
                self.pauses.stop(sandbox.pause, self.engine.remove)
            self.sandboxes.pop(uid, None)
            shutil.rmtree(sandbox.directory, ignore_errors=True)

    def _notice_end(self, uid: str) -> None:
        """Refresh a Pod one of whose containers has ended."""
        sandbox = self.sandboxes.get(uid)
        if sandbox is None or sandbox.is_ending:
            return
        pod = self.store.find(PODS, sandbox.namespace, sandbox.name)
        if pod and pod["metadata"]["uid"] == uid:
            self._submit(lambda: self.refresh(uid, pod))


def _report_errors(work: Callable[[], object]) -> None:
    try:
        work()
    except Exception:
        traceback.print_exc()
        raise
