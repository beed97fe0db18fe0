"""Emulator of a repository server of AT Protocol (PDS) that accepts service tokens for `createRecord`, and of DID documents.

Written from the specifications (https://atproto.com/specs/xrpc, /specs/data-model): signatures are verified against the key in
the DID document, without the code that signs."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from tests.support.tokens import TokenRejected, verify_token

ServerT = TypeVar("ServerT", bound=ThreadingHTTPServer)
CUT_AFTER_CREATE, CUT_BEFORE_CREATE = "cut after create", "cut before create"
CREATE_RECORD = "com.atproto.repo.createRecord"


class RequestRejected(Exception):
    def __init__(self, status: int, error: str, message: str = "") -> None:
        self.status, self.error, self.message = status, error, message


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    @property
    def port(self) -> int:
        return self.server_address[1]

    @property
    def url(self) -> str:
        return f"http://localhost:{self.port}"


class DidDocuments(_Server):
    """Serves the DID document of one did:web, as its host does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _DocumentHandler)
        self.did = f"did:web:localhost%3a{self.port}"  # lower-case, as servers read the identifier of a session
        self.document: dict[str, Any] = {}

    def publish(self, public_key: str, *, service_url: str, handle: str = "ada.test") -> None:
        self.document = {
            "@context": ["https://www.w3.org/ns/did/v1", "https://w3id.org/security/multikey/v1"],
            "id": self.did,
            "alsoKnownAs": [f"at://{handle}"],
            "verificationMethod": [
                {"id": f"{self.did}#atproto", "type": "Multikey", "controller": self.did, "publicKeyMultibase": public_key}
            ],
            "service": [
                {"id": "#atproto_pds", "type": "AtprotoPersonalDataServer", "serviceEndpoint": service_url},
            ],
        }


class Pds(_Server):
    """Repository server. `faults` are the next answers to createRecord: a status, or a constant CUT_..."""

    did = "did:web:pds.test"

    def __init__(self, documents: DidDocuments, now: Callable[[], datetime]) -> None:
        super().__init__(("127.0.0.1", 0), _PdsHandler)
        self.documents, self.now = documents, now
        self.records: dict[tuple[str, str, str], dict[str, Any]] = {}  # by repository, collection and key
        self.passwords: dict[str, str] = {}  # by DID
        self.access_tokens: dict[str, str] = {}  # token -> DID
        self.refresh_tokens: dict[str, str] = {}
        self.used_jtis: set[str] = set()
        self.faults: list[int | str] = []
        self.calls: list[str] = []  # methods, in order
        self.reset_at = 0  # RateLimit-Reset of a 429, seconds since 1970

    def handle_call(self, method: str, authorization: str, params: Mapping[str, str], body: dict[str, Any]) -> Any:
        self.calls.append(method.rpartition(".")[2])
        handlers = {
            CREATE_RECORD: lambda: self.create(authorization, body),
            "com.atproto.repo.getRecord": lambda: self.find(params["repo"], params["collection"], params["rkey"]),
            "com.atproto.server.createSession": lambda: self.open_session(body),
            "com.atproto.server.refreshSession": lambda: self.refresh_session(authorization),
        }
        return handlers[method]()

    def create(self, authorization: str, body: dict[str, Any]) -> dict[str, Any]:
        fault = self.faults.pop(0) if self.faults else None
        if fault == CUT_BEFORE_CREATE:
            raise ConnectionAbortedError
        if isinstance(fault, int):
            raise RequestRejected(fault, "RateLimitExceeded" if fault == 429 else "InternalServerError")
        did = self.authenticate(authorization)
        repo, collection, key, value = body["repo"], body["collection"], body["rkey"], body["record"]
        if repo != did:
            raise RequestRejected(401, "AuthRequiredError", "another repository")
        if value["$type"] != collection or _holds_float(value):
            raise RequestRejected(400, "InvalidRequest", "Invalid record")
        if (repo, collection, key) in self.records:
            raise RequestRejected(500, "InternalServerError", "There is already a value at key")
        self.records[repo, collection, key] = value
        if fault == CUT_AFTER_CREATE:
            raise ConnectionAbortedError
        return _describe(repo, collection, key, value)

    def find(self, repo: str, collection: str, key: str) -> dict[str, Any]:
        if value := self.records.get((repo, collection, key)):
            return _describe(repo, collection, key, value) | {"value": value}
        raise RequestRejected(400, "RecordNotFound")

    def authenticate(self, authorization: str) -> str:
        scheme, _, token = authorization.partition(" ")
        if scheme != "Bearer":
            raise RequestRejected(401, "AuthMissing")
        if token.startswith("access-"):
            if token not in self.access_tokens:
                raise RequestRejected(400, "ExpiredToken", "Token has expired")
            return self.access_tokens[token]
        return self.verify_service_token(token)

    def verify_service_token(self, token: str) -> str:
        """Check a token as https://atproto.com/specs/xrpc#inter-service-authentication-jwt says. Return the issuer."""
        key = self.documents.document["verificationMethod"][0]["publicKeyMultibase"]
        try:
            claims = verify_token(token, f"did:key:{key}")
        except TokenRejected as error:
            raise RequestRejected(401, "BadJwtSignature", str(error)) from None
        problems = {
            "iss": claims["iss"] != self.documents.did,
            "aud": claims["aud"] != self.did,
            "lxm": claims["lxm"] != CREATE_RECORD,
            "exp": claims["exp"] <= self.now().timestamp(),
            "jti": claims["jti"] in self.used_jtis,
        }
        if wrong := [name for name, is_wrong in problems.items() if is_wrong]:
            raise RequestRejected(401, "BadJwt", " ".join(wrong))
        self.used_jtis.add(claims["jti"])
        return str(claims["iss"])

    def open_session(self, body: dict[str, Any]) -> dict[str, str]:
        did = body["identifier"]
        if self.passwords.get(did) != body["password"]:
            raise RequestRejected(401, "AuthenticationRequired", "Invalid identifier or password")
        return self._issue_session(did)

    def refresh_session(self, authorization: str) -> dict[str, str]:
        did = self.refresh_tokens.pop(authorization.removeprefix("Bearer "), None)
        if did is None:
            raise RequestRejected(400, "ExpiredToken", "Token has been revoked")
        return self._issue_session(did)

    def _issue_session(self, did: str) -> dict[str, str]:
        access, refresh = f"access-{len(self.calls)}", f"refresh-{len(self.calls)}"
        self.access_tokens[access], self.refresh_tokens[refresh] = did, did
        return {"did": did, "handle": "ada.test", "accessJwt": access, "refreshJwt": refresh}


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, status: int, document: Any, headers: Mapping[str, str] | None = None) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


class _DocumentHandler(_Handler):
    server: DidDocuments

    def do_GET(self) -> None:
        self.answer(200 if self.path == "/.well-known/did.json" else 404, self.server.document)


class _PdsHandler(_Handler):
    server: Pds

    def do_GET(self) -> None:
        self._handle({})

    def do_POST(self) -> None:
        self._handle(json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}"))

    def _handle(self, body: dict[str, Any]) -> None:
        url = urlsplit(self.path)
        params = {name: values[0] for name, values in parse_qs(url.query).items()}
        try:
            method = url.path.removeprefix("/xrpc/")
            self.answer(200, self.server.handle_call(method, self.headers.get("Authorization", ""), params, body))
        except RequestRejected as error:
            headers = {"RateLimit-Reset": str(self.server.reset_at)} if error.status == 429 else {}
            self.answer(error.status, {"error": error.error, "message": error.message}, headers)
        except ConnectionAbortedError:
            self.close_connection = True


def _describe(repo: str, collection: str, key: str, value: dict[str, Any]) -> dict[str, str]:
    digest = sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    return {"uri": f"at://{repo}/{collection}/{key}", "cid": f"bafyrei{digest[:52]}"}


def _holds_float(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, float) or any(_holds_float(part) for part in parts)


@contextmanager
def serve(server: ServerT) -> Iterator[ServerT]:
    """Serve in a thread during the body of the `with`."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
