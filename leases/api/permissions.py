"""Permissions of API keys."""

from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from leases.api.authentication import MISSING_KEY_MESSAGE, Caller


class HasKey(BasePermission):
    message = MISSING_KEY_MESSAGE

    def has_permission(self, request: Request, view: object) -> bool:
        return isinstance(request.user, Caller)


class IsOperator(BasePermission):
    message = "Only an operator's key may do this."

    def has_permission(self, request: Request, view: object) -> bool:
        return isinstance(request.user, Caller) and request.user.key.operator
