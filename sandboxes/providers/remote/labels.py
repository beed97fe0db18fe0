"""Labels by which a vendor's sandboxes are found: owner and name."""

from sandboxes.providers.base import SandboxSpec, truncate_labels
from sandboxes.providers.errors import Rejected

OWNER_LABEL, NAME_LABEL = "leasehold.owner", "leasehold.name"  # of sandboxes at vendors that have labels


def build_labels(spec: SandboxSpec) -> dict[str, str]:
    """Return the labels of a sandbox at its vendor, with its owner and its name."""
    return truncate_labels({**spec.labels, OWNER_LABEL: spec.owner, NAME_LABEL: spec.name}.items())


def require_owner(spec: SandboxSpec, owner: str | None) -> None:
    """Raise Rejected if the sandbox of this name has another owner."""
    if owner != spec.owner:
        raise Rejected(f"The name {spec.name} is used by a sandbox of another owner.")
