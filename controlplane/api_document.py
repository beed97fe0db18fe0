"""OpenAPI document: served as it is checked in, because to generate it takes as much processor time as fifty requests."""

import functools
import hashlib
import json
from pathlib import Path

import yaml
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import etag, require_safe

PATH = Path(__file__).parent / "openapi.yaml"
YAML, JSON = "application/vnd.oai.openapi", "application/vnd.oai.openapi+json"


@functools.cache
def read_document(content_type: str) -> bytes:
    """Return the document as YAML or JSON."""
    content = PATH.read_bytes()
    return content if content_type == YAML else json.dumps(yaml.load(content, yaml.CSafeLoader)).encode()


def choose_content_type(request: HttpRequest) -> str:
    """Return the type that `?format=` or the header Accept names. YAML by default."""
    if "format" in request.GET:
        return JSON if request.GET["format"] == "json" else YAML
    preferred = request.get_preferred_type([YAML, JSON, "application/json"])
    return YAML if preferred in (None, YAML) else JSON


@functools.cache
def compute_etag(content_type: str) -> str:
    return f'"{hashlib.sha256(read_document(content_type)).hexdigest()[:32]}"'


@require_safe
@etag(lambda request: compute_etag(choose_content_type(request)))
def show_document(request: HttpRequest) -> HttpResponse:
    content_type = choose_content_type(request)
    return HttpResponse(read_document(content_type), content_type=content_type, headers={"Vary": "Accept"})
