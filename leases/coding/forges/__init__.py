"""Forges, which have the pull requests of pushed branches."""

from collections.abc import Callable

from leases.coding.forges.bare import BareForge
from leases.coding.forges.base import Forge as Forge
from leases.coding.forges.base import ForgeError as ForgeError
from leases.coding.forges.base import PullRequest as PullRequest
from leases.coding.forges.github import GitHubForge


def forge_of(
    kind: str, *, repository: str, api_url: str = "", project: str = "", token: str = "", git: Callable[..., str]
) -> Forge:
    """Return the forge of a repository."""
    if kind == "github":
        return GitHubForge(api_url, project, token)
    return BareForge(repository, git)
