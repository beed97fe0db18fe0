"""Calls of the WSGI application as the web server makes them."""

import io
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from django.core.handlers.wsgi import WSGIHandler

from controlplane.application import Application


@dataclass
class WebServer:
    """Calls the application as a WSGI server does, and counts the requests that reach Django."""

    key: str
    django_requests: int = 0

    def __post_init__(self) -> None:
        handler = WSGIHandler()

        def count(environ: Any, start_response: Callable[..., Any]) -> Any:
            self.django_requests += 1
            return handler(environ, start_response)

        self.application = Application(count)

    def send(self, method: str, path: str, body: bytes = b"", **variables: str) -> tuple[int, dict[str, str], Any]:
        """Return the status, the headers and the JSON of the answer. `variables` are of the WSGI environment."""
        answer: dict[str, Any] = {}
        environ = {
            "REQUEST_METHOD": method, "PATH_INFO": path, "SCRIPT_NAME": "", "QUERY_STRING": "", "SERVER_NAME": "localhost",
            "SERVER_PORT": "80", "SERVER_PROTOCOL": "HTTP/1.1", "CONTENT_TYPE": "application/json",
            "CONTENT_LENGTH": str(len(body)), "HTTP_AUTHORIZATION": f"Bearer {self.key}", "wsgi.input": io.BytesIO(body),
            "wsgi.url_scheme": "http", "wsgi.errors": io.StringIO(),
        }  # fmt: skip
        chunks: Iterable[bytes] = self.application(
            environ | variables, lambda status, headers, *_: answer.update(status=int(status[:3]), headers=dict(headers))
        )
        return answer["status"], answer["headers"], json.loads(b"".join(chunks))
