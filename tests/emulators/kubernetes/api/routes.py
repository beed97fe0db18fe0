"""Routing of requests: fault switches, authentication, authorization, discovery, and the verb of each resource path."""

import re
import time
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tests.emulators.base import CUT_AFTER, CUT_BEFORE, FaultInjection, ForeignAnswer
from tests.emulators.kubernetes.api import access_reviews, resources
from tests.emulators.kubernetes.api.authorization import Attributes, Authorizer
from tests.emulators.kubernetes.api.resources import Resource
from tests.emulators.kubernetes.api.server import Request, Response, as_json
from tests.emulators.kubernetes.api.status import ApiError, unknown_path
from tests.emulators.kubernetes.api.verbs import Verbs

_RESOURCE_PATH = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+)/(?P<version>[^/]+))(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<subresource>[^/]+))?"
)
_NAMESPACE_PATH = re.compile(r"/api/(?P<core>v1)/namespaces(?:/(?P<name>[^/]+))?(?:/(?P<subresource>status|finalize))?")
_METHODS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


class Connections(Protocol):
    """Subresources of Pods that connect to a node."""

    def open_exec(self, request: Request, pod: dict[str, Any], *, cuts_status: bool) -> Response: ...

    def read_log(self, request: Request, pod: dict[str, Any]) -> Response: ...


@dataclass(frozen=True)
class Target:
    """Resource path of a request."""

    resource: Resource
    namespace: str
    name: str
    subresource: str


@dataclass
class Api:
    """API server without its sockets."""

    faults: FaultInjection
    verbs: Verbs
    authorizer: Authorizer
    connections: Connections
    version: str  # as in the answer of /version: 1.33
    resources: tuple[Resource, ...] = field(default=resources.BUILT_IN)

    def respond(self, request: Request) -> Response:
        """Answer one request, with the fault that it meets."""
        suffix = "?watch" if request.is_true("watch") else "?continue" if request.get("continue") else ""
        line = f"{request.method} {request.path}{suffix}"
        fault = self.faults.take_fault(line)
        cuts = False
        outcome = fault.outcome if fault else None
        if foreign := outcome if isinstance(outcome, ForeignAnswer) else self.faults.foreign_answer:
            headers = {"Location": foreign.location} if foreign.location else {}
            return Response(foreign.status, foreign.body, foreign.content_type, headers)
        if fault:
            time.sleep(fault.seconds)
            if isinstance(fault.outcome, int):
                return _as_error(ApiError(fault.outcome, "fault", retry_after=1 if fault.outcome == 429 else 0))
            if fault.outcome == CUT_BEFORE:
                return Response(is_cut=True)
            cuts = fault.outcome == CUT_AFTER
        try:
            response = self._route(request, cuts_status=cuts)
        except ApiError as error:
            response = _as_error(error)
        if callable(outcome) and response.body:
            response = replace(response, body=outcome(response.body))
        self.verbs.faults.react(line)
        return Response(is_cut=True) if cuts and response.upgrade is None else response

    def _route(self, request: Request, *, cuts_status: bool) -> Response:
        user = self.authorizer.authenticate(request.headers.get("Authorization") or "")
        if request.method in {"GET", "HEAD"} and (document := self._find_document(request.path)) is not None:
            return as_json(document)
        target = self._find_target(request.path)
        verb = _find_verb(request, target)
        # A request for a namespace itself is one in this namespace, so that a Role of the namespace may permit it.
        namespace = target.name if target.resource == resources.NAMESPACES else target.namespace
        attributes = Attributes(
            namespace, verb, target.resource.group, target.resource.plural, target.subresource, target.name
        )  # fmt: skip
        self.authorizer.require(user, attributes)
        if target.resource == resources.ACCESS_REVIEWS:
            return access_reviews.review(self.authorizer, user, request)
        if target.resource == resources.PODS and target.subresource in {"exec", "log"}:
            pod = self.verbs.store.get(target.resource, target.namespace, target.name)
            if target.subresource == "log":
                return self.connections.read_log(request, pod)
            self.authorizer.require(user, Attributes(target.namespace, "create", "", "pods", "exec", target.name))
            return self.connections.open_exec(request, pod, cuts_status=cuts_status)
        return self.verbs.run(verb, target.resource, target.namespace, target.name, target.subresource, request)

    def _find_document(self, path: str) -> dict[str, Any] | None:
        """Return a document of discovery, or None."""
        parts = path.strip("/").split("/")
        match parts:
            case ["version"]:
                major, minor = self.version.split(".")
                return {"major": major, "minor": minor, "gitVersion": f"v{self.version}.0", "platform": "linux/amd64"}
            case ["readyz" | "livez" | "healthz"]:
                return {"status": "ok"}
            case ["api"]:
                return {"kind": "APIVersions", "versions": ["v1"]}
            case ["apis"]:
                return resources.build_group_list(self.resources)
            case ["api", version]:
                return resources.build_resource_list(self.resources, "", version)
            case ["apis", group, version]:
                return resources.build_resource_list(self.resources, group, version)
            case ["openapi", "v3"]:
                return resources.build_openapi_index(self.resources)
            case ["openapi", "v3", "api", version]:
                return resources.build_openapi(self.resources, "", version)
            case ["openapi", "v3", "apis", group, version]:
                return resources.build_openapi(self.resources, group, version)
        return None

    def _find_target(self, path: str) -> Target:
        if match := _NAMESPACE_PATH.fullmatch(path):
            name = match["name"] or ""
            return Target(resources.NAMESPACES, "", name, match["subresource"] or "")
        if match := _RESOURCE_PATH.fullmatch(path):
            key = (match["group"] or "", match["version"] or match["core"], match["plural"])
            for resource in self.resources:
                if (resource.group, resource.version, resource.plural) == key:
                    return Target(resource, match["namespace"] or "", match["name"] or "", match["subresource"] or "")
        raise unknown_path()


def _find_verb(request: Request, target: Target) -> str:
    if request.method == "DELETE":
        return "delete" if target.name else "deletecollection"
    if request.method in _METHODS:
        return _METHODS[request.method]
    if target.name:
        return "get"
    return "watch" if request.is_true("watch") else "list"


def _as_error(error: ApiError) -> Response:
    response = as_json(error.status, error.code)
    if error.retry_after:
        response.headers["Retry-After"] = str(error.retry_after)
    return response
