"""Answers of API servers to the same requests, in a form in which those of two servers can be compared."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
import yaml

TIMEOUT_SECONDS = 60
# What differs between any two servers, or two runs. The value is replaced by the name of its field.
VARYING = {
    "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp", "startTime", "startedAt", "finishedAt", "podIP", "ip",
    "hostIP", "nodeName", "containerID", "imageID", "lastTransitionTime", "lastTimestamp", "firstTimestamp", "eventTime",
    "continue", "expirationTimestamp",
}  # fmt: skip
IGNORED = {"managedFields", "selfLink", "apiVersion"}
UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass
class Server:
    """An API server, and the namespace in which the requests are made. `answers` are by the name of the request, in order."""

    url: str
    token: str
    authority: str
    namespace: str
    answers: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_kubeconfig(cls, path: Path, namespace: str) -> "Server":
        content = yaml.safe_load(path.read_text())
        cluster = content["clusters"][0]["cluster"]
        return cls(cluster["server"], content["users"][0]["user"]["token"], cluster["certificate-authority"], namespace)

    def ask(self, name: str, method: str, path: str, body: Any = None, *, token: str = "", **query: str) -> Any:
        """Make a request below /api/v1/namespaces/NAMESPACE, and note its answer. Return the document as it is."""
        status, document = self._fetch(method, path, body, token, query)
        self.answers[name] = {"HTTP": status, "document": self.simplify(document)}
        return document

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Make a request whose answer is not compared. Return the document."""
        return self._fetch(method, path, body, "", {})[1]

    def _fetch(self, method: str, path: str, body: Any, token: str, query: Mapping[str, str]) -> tuple[int, Any]:
        response = self._request(method, path, body, token, query)
        try:
            return response.status_code, response.json()
        except ValueError:
            return response.status_code, response.text

    def watch(self, path: str, **query: str) -> Iterator[Mapping[str, Any]]:
        response = self._request("GET", path, None, "", {"watch": "true", **query}, stream=True)
        with response:
            for line in response.iter_lines():
                yield json.loads(line)

    def _request(self, method: str, path: str, body: Any, token: str, query: Mapping[str, str], **more: Any) -> Any:
        base = path if path.startswith("/") else f"/api/v1/namespaces/{self.namespace}/{path}"
        content = body if isinstance(body, str) or body is None else json.dumps(body)
        headers = {"Authorization": f"Bearer {token or self.token}", "Content-Type": "application/json"}
        options = {"headers": headers, "verify": self.authority, "timeout": TIMEOUT_SECONDS, **more}
        return requests.request(method, self.url + base, params=query, data=content, **options)

    def simplify(self, value: Any, key: str = "") -> Any:
        """Return a document without what differs between two servers that behave alike."""
        if key in VARYING and value is not None:
            return f"<{key}>"
        if isinstance(value, dict):
            return {name: self.simplify(each, name) for name, each in sorted(value.items()) if name not in IGNORED}
        if isinstance(value, list):
            items = sorted(value, key=lambda item: item["type"]) if key == "conditions" else value  # a set
            return [self.simplify(each) for each in items]
        return UID.sub("<uid>", value.replace(self.namespace, "<namespace>")) if isinstance(value, str) else value


def compare(expected: Any, found: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield the differences between two documents: the place and both values."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for name in sorted({*expected, *found}):
            yield from compare(expected.get(name), found.get(name), f"{path}.{name}" if path else name)
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from compare(one, other, f"{path}[{number}]")
    elif expected != found:
        yield path, json.dumps(expected), json.dumps(found)
