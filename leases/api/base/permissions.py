"""Permissions of API keys."""

from typing import Any

from rest_framework.permissions import SAFE_METHODS, BasePermission
from rest_framework.request import Request

from leases.api.base.authentication import Caller
from leases.models import KeyScope


class HasKey(BasePermission):
    """The request carries a valid API key with the scope of the view: its `key_scope`, by default `leases`.

    Raises InsufficientScope."""

    def has_permission(self, request: Request, view: Any) -> bool:
        if not isinstance(request.user, Caller):
            return False
        request.user.require_scope(getattr(view, "key_scope", KeyScope.LEASES), reads=request.method in SAFE_METHODS)
        return True


class CanAccessLease(BasePermission):
    """The key may act for the agent of the lease in the URL. Sets `view.lease`.

    Raises NotFound otherwise: the response does not reveal whether another agent's lease exists."""

    def has_permission(self, request: Any, view: Any) -> bool:
        view.lease = request.user.get_lease(view.kwargs["pk"])
        return True


class ManagesTemplates(BasePermission):
    """Any key may read; only an operator's key with the scope `templates` may write. Raises InsufficientScope."""

    message = "This request requires an operator's key."

    def has_permission(self, request: Any, view: Any) -> bool:
        if request.method in SAFE_METHODS:
            return True
        request.user.require_scope(KeyScope.TEMPLATES, reads=False)
        return bool(request.user.key.operator)


class ManagesModelRates(BasePermission):
    """Only an operator's key without a list of pools, because rates apply to all. Raises InsufficientScope.

    Writing also needs the scope `leases`: a key for reports must not change prices."""

    message = "This request requires an operator's key without a list of pools."

    def has_permission(self, request: Any, view: Any) -> bool:
        if not request.user.key.operator or request.user.allowed.pools:
            return False
        if request.method not in SAFE_METHODS:
            request.user.require_scope(KeyScope.LEASES, reads=False)
        return True


class ManagesBudgets(BasePermission):
    """Any key may read; only an operator's key without a list of pools may write, because budgets apply to all pools.

    Writing also needs the scope `leases`: a key for reports must not change budgets. Raises InsufficientScope."""

    message = "This request requires an operator's key without a list of pools."

    def has_permission(self, request: Any, view: Any) -> bool:
        if request.method in SAFE_METHODS:
            return True
        if not request.user.key.operator or request.user.allowed.pools:
            return False
        request.user.require_scope(KeyScope.LEASES, reads=False)
        return True


class IsUnrestrictedOperator(BasePermission):
    """Only an operator's key without a list of pools: the response concerns all pools, and engines beyond them."""

    message = "This request requires an operator's key without a list of pools."

    def has_permission(self, request: Any, view: Any) -> bool:
        return bool(request.user.key.operator and not request.user.allowed.pools)


class OperatorWrites(BasePermission):
    """Any key may read; only an operator's key may write."""

    message = "This request requires an operator's key."

    def has_permission(self, request: Any, view: Any) -> bool:
        return request.method in SAFE_METHODS or request.user.key.operator
