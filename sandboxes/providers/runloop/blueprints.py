"""Images of Runloop: blueprints, built from a Dockerfile. Several blueprints may have the same name.

The idempotency key of a create is the name of the build, and the list of that name settles an unknown outcome. Runloop states
no size of a blueprint."""

from runloop_api_client import Runloop
from runloop_api_client.types import BlueprintView

from sandboxes.providers.answer_guard import guard_methods
from sandboxes.providers.errors import Missing
from sandboxes.providers.remote.images import BuildState, VendorBuild, VendorBuilds
from sandboxes.providers.runloop.errors import translate_errors

PAGE_SIZE = 100
STATES = {"build_complete": BuildState.READY, "failed": BuildState.REFUSED}


@guard_methods("find", "start", "look", "remove")
class BlueprintBuilds(VendorBuilds):
    """Builds of blueprints by one account."""

    def __init__(self, client: Runloop) -> None:
        self._blueprints = client.blueprints

    def find(self, name: str) -> VendorBuild | None:
        with translate_errors(name):
            listed = [*self._blueprints.list(name=name, limit=PAGE_SIZE)]
        found = [blueprint for blueprint in listed if blueprint.name == name and blueprint.state == "created"]
        return _to_build(max(found, key=lambda blueprint: blueprint.create_time_ms)) if found else None

    def start(self, name: str, dockerfile: str) -> VendorBuild:
        with translate_errors(name):
            return _to_build(self._blueprints.create(name=name, dockerfile=dockerfile, idempotency_key=name))

    def look(self, build: VendorBuild) -> str:
        with translate_errors(build.id):
            found = self._blueprints.retrieve(build.id)
            if found.state == "deleted":
                raise Missing(f"Runloop has no blueprint {build.id}.")
            entries = self._blueprints.logs(build.id).logs
        current = _to_build(found)
        build.state, build.note, build.error = current.state, current.note, current.error
        messages = [entry.message.rstrip("\n") for entry in entries[build.position :]]
        build.position = max(len(entries), build.position)
        return "".join(f"{message}\n" for message in messages)

    def remove(self, build_id: str) -> None:
        with translate_errors(build_id):
            self._blueprints.delete(build_id)


def _to_build(found: BlueprintView) -> VendorBuild:
    state = STATES.get(found.status, BuildState.RUNNING)
    if found.failure_reason == "build_failed":
        state = BuildState.COMMAND_FAILED
    error = f"The blueprint is {found.status}: {found.failure_reason or 'no reason stated'}. See the log."
    return VendorBuild(id=found.id, state=state, note=found.status, error=error)
