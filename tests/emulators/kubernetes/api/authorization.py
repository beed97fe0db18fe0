"""Authentication by bearer token, and role-based authorization."""

from dataclasses import dataclass, field

from tests.emulators.kubernetes.api.resources import ROLE_BINDINGS, ROLES
from tests.emulators.kubernetes.api.status import ApiError
from tests.emulators.kubernetes.api.store import Object, Store

ADMINISTRATOR = "kubernetes-admin"  # may do everything


@dataclass(frozen=True)
class Attributes:
    """Attributes of a request that rules of a Role are compared with."""

    namespace: str
    verb: str
    group: str
    resource: str
    subresource: str = ""
    name: str = ""

    @property
    def path(self) -> str:
        return f"{self.resource}/{self.subresource}" if self.subresource else self.resource


@dataclass
class Authorizer:
    """Users and their permissions. `is_enforced` is a switch: without it, every user may do everything."""

    store: Store
    is_enforced: bool = False
    users: dict[str, str] = field(default_factory=dict)  # by token

    def authenticate(self, header: str) -> str:
        """Return the user of an Authorization header. Raise ApiError."""
        user = self.users.get(header.removeprefix("Bearer "))
        if user is None:
            raise ApiError(401, "Unauthorized")
        return user

    def is_allowed(self, user: str, attributes: Attributes) -> bool:
        if not self.is_enforced or user == ADMINISTRATOR:
            return True
        for binding in self.store.list(ROLE_BINDINGS, attributes.namespace) if attributes.namespace else ():
            if any(_get_user(subject) == user for subject in binding.get("subjects") or ()):
                role = self.store.find(ROLES, attributes.namespace, binding["roleRef"]["name"])
                if role and any(_matches(rule, attributes) for rule in role.get("rules") or ()):
                    return True
        return False

    def require(self, user: str, attributes: Attributes) -> None:
        """Raise ApiError unless the user may do this."""
        if self.is_allowed(user, attributes) or attributes.resource == "selfsubjectaccessreviews":
            return
        qualified = f"{attributes.resource}.{attributes.group}" if attributes.group else attributes.resource
        place = f'in the namespace "{attributes.namespace}"' if attributes.namespace else "at the cluster scope"
        named = f' "{attributes.name}"' if attributes.name else ""
        message = (
            f'{qualified}{named} is forbidden: User "{user}" cannot {attributes.verb} resource "{attributes.path}" in '
            f'API group "{attributes.group}" {place}'
        )
        details = {"name": attributes.name} if attributes.name else {}
        raise ApiError(403, message, details={**details, "kind": attributes.resource})


def _get_user(subject: Object) -> str:
    if subject["kind"] == "ServiceAccount":
        return f"system:serviceaccount:{subject['namespace']}:{subject['name']}"
    return str(subject["name"]) if subject["kind"] == "User" else ""


def _matches(rule: Object, attributes: Attributes) -> bool:
    wanted = (("apiGroups", attributes.group), ("resources", attributes.path), ("verbs", attributes.verb))
    if not all({"*", value} & set(rule.get(key) or ()) for key, value in wanted):
        return False
    names = rule.get("resourceNames")
    return not names or attributes.name in names
