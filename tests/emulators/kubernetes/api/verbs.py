"""Verbs of all resources: list, watch, get, create, update, patch and delete."""

import base64
import json
import secrets
import string
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import yaml

from tests.emulators.kubernetes.api import patches, protobuf
from tests.emulators.kubernetes.api.admission import Admission
from tests.emulators.kubernetes.api.deletion import Deletion
from tests.emulators.kubernetes.api.nodes import Node
from tests.emulators.kubernetes.api.resources import NAMESPACES, PODS, SERVICE_ACCOUNTS, Resource
from tests.emulators.kubernetes.api.selectors import Selection
from tests.emulators.kubernetes.api.server import Request, Response, as_json
from tests.emulators.kubernetes.api.status import ApiError, conflict, expired, future_version, invalid, unknown_path
from tests.emulators.kubernetes.api.store import Object, Store
from tests.emulators.kubernetes.api.tables import build_table
from tests.emulators.kubernetes.api.validation import validate
from tests.emulators.kubernetes.api.validation.semantics import find_update_errors
from tests.emulators.kubernetes.api.watches import Watch
from tests.emulators.kubernetes.faults import ClusterFaults

TERMINATING_MESSAGE = "unable to create new content in namespace {} because it is being terminated"
GENERATED_LETTERS = string.ascii_lowercase + string.digits


class Verbs:
    """Verbs on the objects of a store. Each raises ApiError."""

    def __init__(self, store: Store, admission: Admission, deletion: Deletion, node: Node, faults: ClusterFaults) -> None:
        self.store, self.admission, self.deletion, self.node, self.faults = store, admission, deletion, node, faults
        self._pages: dict[str, tuple[str, list[Object]]] = {}  # remaining objects of a list, by its continue token

    def run(self, verb: str, resource: Resource, namespace: str, name: str, subresource: str, request: Request) -> Response:
        if subresource and subresource not in {"status", "eviction", "token", "finalize"}:
            raise unknown_path()
        match verb:
            case "list":
                return self._list(resource, namespace, request)
            case "watch":
                return self._watch(resource, namespace, request)
            case "get":
                return self._answer(resource, self.store.get(resource, namespace, name), request)
            case "create" if subresource == "eviction":
                return as_json(self.deletion.evict(namespace, name, _parse(request, resource)), 201)
            case "create" if subresource == "token":
                return as_json(self.admission.issue_token(namespace, name), 201)
            case "create":
                return self._create(resource, namespace, request)
            case "update":
                body = _parse(request)
                return self._answer(resource, self.replace(resource, namespace, name, body, subresource), request)
            case "patch":
                return self._patch(resource, namespace, name, subresource, request)
            case "delete":
                return as_json(self.deletion.delete(resource, namespace, name, _parse(request), request))
        found = self._select(resource, namespace, request)
        for item in found:
            self.deletion.delete(
                resource, item["metadata"].get("namespace", ""), item["metadata"]["name"], _parse(request), request
            )
        return as_json(_build_list(resource, found, {"resourceVersion": str(self.store.version)}))

    def create(self, resource: Resource, namespace: str, body: Object, *, is_dry_run: bool = False) -> Object:
        """Create an object after validation and admission."""
        item = deepcopy(body)
        item.setdefault("apiVersion", resource.api_version)
        item.setdefault("kind", resource.kind)
        if (item["apiVersion"], item["kind"]) != (resource.api_version, resource.kind):
            raise ApiError(400, f"the API version or kind in the data ({item['apiVersion']}, {item['kind']}) does not match "
                           f"the expected ({resource.api_version}, {resource.kind})")  # fmt: skip
        metadata = item.setdefault("metadata", {})
        _set_namespace(resource, namespace, metadata)
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = metadata["generateName"] + "".join(secrets.choice(GENERATED_LETTERS) for _ in range(5))
        if resource.is_namespaced:
            self._require_namespace(namespace, creating=resource)
        validate(resource, item)
        for key in ("resourceVersion", "uid", "creationTimestamp", "deletionTimestamp", "managedFields", "selfLink"):
            metadata.pop(key, None)
        with self.store.changed:  # quota: no other create between its check and the creation
            self.admission.admit(resource, item)
            if is_dry_run:
                return item
            created = self.store.create(resource, item)
            self.admission.update_quotas(namespace)
            self.deletion.collect(resource, created)
        if resource == PODS:
            self.node.start(created)
        elif resource == NAMESPACES:
            account = {"metadata": {"name": "default", "namespace": created["metadata"]["name"]}}
            self.create(SERVICE_ACCOUNTS, created["metadata"]["name"], account)
        self.node.observe(resource)
        return created

    def replace(
        self, resource: Resource, namespace: str, name: str, body: Object, subresource: str = "", version: str = ""
    ) -> Object:
        """Replace an object, or its status alone. A resource version in the body is a precondition."""
        previous = self.store.get(resource, namespace, name)
        item = {"apiVersion": resource.api_version, "kind": resource.kind, **deepcopy(body)}
        metadata = item.setdefault("metadata", {})
        _set_namespace(resource, namespace, metadata)
        if metadata.get("name", name) != name:
            raise ApiError(400, "the name of the object does not match the name on the URL")
        if metadata.get("uid", previous["metadata"]["uid"]) != previous["metadata"]["uid"]:
            raise conflict(resource, name, f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object meta: "
                           f"{previous['metadata']['uid']}")  # fmt: skip
        validate(resource, item)
        if subresource != "status" and (errors := find_update_errors(resource, previous, item)):
            raise invalid(resource, name, errors)
        kept = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "resourceVersion")

        def change(current: Object) -> None:
            if subresource == "status":
                current["status"] = item.get("status") or {}
                return
            own = {key: current["metadata"][key] for key in kept if key in current["metadata"]}
            status = current.get("status")
            current.clear()
            current.update(item)
            current["metadata"] = {key: value for key, value in metadata.items() if key not in kept} | own
            if status is not None:
                current["status"] = status

        version = version or metadata.get("resourceVersion", "")
        edited = self.store.edit(resource, namespace, name, change, uid=previous["metadata"]["uid"], version=version)
        self.node.observe(resource)
        return edited

    def _create(self, resource: Resource, namespace: str, request: Request) -> Response:
        body = _parse(request, resource)
        if resource.is_namespaced and not namespace:
            raise ApiError(405, "the server does not allow this method on the requested resource")
        created = self.create(resource, namespace, body, is_dry_run=request.get("dryRun") == "All")
        return self._answer(resource, created, request, 201)

    def _patch(self, resource: Resource, namespace: str, name: str, subresource: str, request: Request) -> Response:
        kind = (request.headers.get("Content-Type") or "").partition(";")[0]
        patch = yaml.safe_load(request.body) if kind.endswith("yaml") else json.loads(request.body)
        previous = self.store.find(resource, namespace, name)
        if previous is None and kind == "application/apply-patch+yaml":
            return self._answer(resource, self.create(resource, namespace, patch), request, 201)
        previous = previous or self.store.get(resource, namespace, name)
        if kind == patches.JSON_PATCH_TYPE:
            body = patches.apply_operations(previous, patch)
        elif kind in patches.MERGE_TYPES:
            body = patches.merge(previous, patch)
        else:
            raise ApiError(415, f"the body of the request was in an unknown format - {kind}")
        asked = patch.get("metadata", {}).get("resourceVersion", "") if isinstance(patch, Mapping) else ""
        version = asked or previous["metadata"]["resourceVersion"]
        return self._answer(resource, self.replace(resource, namespace, name, body, subresource, version), request)

    def _select(self, resource: Resource, namespace: str, request: Request) -> list[Object]:
        selection = Selection.parse(request.get("labelSelector"), request.get("fieldSelector"))
        return [item for item in self.store.list(resource, namespace) if selection.matches(item)]

    def _list(self, resource: Resource, namespace: str, request: Request) -> Response:
        with self.store.changed:
            version, token = str(self.store.version), request.get("continue")
            if token:
                if token not in self._pages:
                    raise _refuse_continuation(token)
                version, items = self._pages.pop(token)
                if int(version) < self.store.oldest_version:
                    raise expired()
            else:
                asked = request.get("resourceVersion")
                if asked.isdecimal() and int(asked) > self.store.version:
                    raise future_version(int(asked), self.store.version)
                items = self._select(resource, namespace, request)
        metadata: dict[str, Any] = {"resourceVersion": version}
        limit = int(request.get("limit") or 0)
        if limit and len(items) > limit:
            token = base64.urlsafe_b64encode(json.dumps([version, secrets.token_hex(8)]).encode()).decode()
            self._pages[token] = (version, items[limit:])
            metadata["continue"] = token
            if not (request.get("labelSelector") or request.get("fieldSelector")):
                metadata["remainingItemCount"] = len(items) - limit
            items = items[:limit]
        if "as=Table" in request.accept:
            return as_json(build_table(resource, items, metadata))
        return as_json(_build_list(resource, items, metadata))

    def _watch(self, resource: Resource, namespace: str, request: Request) -> Response:
        selection = Selection.parse(request.get("labelSelector"), request.get("fieldSelector"))

        def render(item: Object) -> Object:
            return build_table(resource, [item], {}) if "as=Table" in request.accept else item

        watch = Watch(self.store, self.faults, resource, namespace, selection, request, render)
        return Response(stream=watch.serve)

    def _answer(self, resource: Resource, item: Object, request: Request, status: int = 200) -> Response:
        if "as=Table" in request.accept:
            version = item["metadata"].get("resourceVersion", "")
            return as_json(build_table(resource, [item], {"resourceVersion": version}), status)
        return as_json(item, status)

    def _require_namespace(self, name: str, creating: Resource) -> None:
        found = self.store.get(NAMESPACES, "", name)
        if found["metadata"].get("deletionTimestamp"):
            message = f"{creating.qualified} is forbidden: {TERMINATING_MESSAGE.format(name)}"
            causes = [
                {
                    "reason": "NamespaceTerminating",
                    "message": f"namespace {name} is being terminated",
                    "field": "metadata.namespace",
                }
            ]
            raise ApiError(403, message, details={"causes": causes})


def _build_list(resource: Resource, items: list[Object], metadata: Mapping[str, Any]) -> Object:
    """Return a list, whose items have no kind of their own."""
    bare = [{key: value for key, value in item.items() if key not in ("kind", "apiVersion")} for item in items]
    return {"kind": f"{resource.kind}List", "apiVersion": resource.api_version, "metadata": dict(metadata), "items": bare}


def _refuse_continuation(token: str) -> ApiError:
    try:
        json.loads(base64.urlsafe_b64decode(token))
    except ValueError as failed:
        return ApiError(400, f"invalid continue token: continue key is not valid: {failed}")
    return expired()


def _set_namespace(resource: Resource, namespace: str, metadata: Object) -> None:
    if not resource.is_namespaced:
        metadata.pop("namespace", None)
    elif metadata.setdefault("namespace", namespace) != namespace:
        raise ApiError(400, "the namespace of the provided object does not match the namespace sent on the request")


def _parse(request: Request, resource: Resource | None = None) -> Object:
    """Return the body as an object. An empty body is an empty object. For some resources it may be in protobuf."""
    kind = (request.headers.get("Content-Type") or "application/json").partition(";")[0]
    if not request.body:
        return {}
    if kind == protobuf.MEDIA_TYPE and resource in {NAMESPACES, SERVICE_ACCOUNTS, PODS} and request.method == "POST":
        return {"metadata": protobuf.parse_metadata(request.body)}  # of a Pod: its eviction
    if kind == protobuf.MEDIA_TYPE and request.method == "DELETE":
        return protobuf.parse_delete_options(request.body)
    try:
        if kind == "application/yaml":
            parsed = yaml.safe_load(request.body)
        elif kind == "application/json":
            parsed = json.loads(request.body)
        else:
            raise ApiError(415, f"the body of the request was in an unknown format - {kind}")
    except (ValueError, yaml.YAMLError) as failed:
        raise ApiError(400, f"the object provided is unrecognized: json parse error: {failed}") from None
    if not isinstance(parsed, dict):
        raise ApiError(400, "the object provided is unrecognized: it is not a JSON object")
    return parsed
