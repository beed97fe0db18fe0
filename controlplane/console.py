"""What the admin shows around its pages."""

from typing import Any

from django.http import HttpRequest


def navigation(request: HttpRequest) -> list[dict[str, Any]]:
    return []


def tabs(request: HttpRequest) -> list[dict[str, Any]]:
    return []


def environment(request: HttpRequest) -> list[str]:
    return ["Development", "info"]


def fleet(request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    return context
