"""Paths that an agent may not change: files with which a forge, its runners or a reviewer's tools execute code of the branch.

The built-in names hold for every repository. They are compared with each part of a path, so that a name is protected as a file,
as a directory with its content, and as a symbolic link, at any depth. Operators add patterns, and allow paths by others."""

import fnmatch
import posixpath
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

PROTECTED_NAMES = (
    # forges: workflows, required reviews, instance settings
    ".github", ".gitea", ".forgejo", ".gitlab", ".bitbucket", ".gogs", "codeowners",
    # continuous integration and deployment
    ".gitlab-ci*", ".circleci", "circle.y*ml", ".woodpecker*", ".drone*", ".travis.y*ml", "azure-pipelines*",
    ".azure-pipelines*", ".azuredevops", ".vsts-ci.y*ml", "bitbucket-pipelines*", "jenkinsfile*", "*.jenkinsfile",
    ".jenkins*", "jenkins-x*", ".buildkite", "buildkite.*", "appveyor.y*ml", ".appveyor*", ".cirrus.*", ".semaphore",
    ".teamcity", "codefresh.y*ml", ".codefresh", "wercker.y*ml", "buildspec*.y*ml", "amplify.y*ml", "cloudbuild*.y*ml",
    "cloudbuild*.json", ".cloudbuild", ".tekton", ".prow*", ".ci-operator*", ".zuul*", "zuul.y*ml", "zuul.d", ".build.y*ml",
    ".builds", "bamboo-specs", ".bazelci", ".kokoro", ".evergreen*", ".rultor*", ".scrutinizer*", ".harness", ".spacelift",
    "atlantis.y*ml", ".dagger", "netlify.toml", "vercel.json", "render.y*ml", ".gitpod*", ".mergify*", "bors.toml",
    ".kodiak.toml", "renovate.json*", ".renovaterc*",
    # programs that run on a checkout, a commit or the opening of a copy
    ".gitattributes", ".gitmodules", ".lfsconfig", ".gitconfig", ".githooks", ".pre-commit-*", ".husky", ".lefthook*",
    "lefthook*.y*ml", ".overcommit*", ".devcontainer*", ".envrc",
)  # fmt: skip
IGNORED_BY_FILE_SYSTEMS = dict.fromkeys(
    [0x200C, 0x200D, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x206A, 0x2070), 0xFEFF]
)  # HFS+ ignores these characters in names
PROTECTED_NAME = re.compile("|".join(fnmatch.translate(name) for name in PROTECTED_NAMES))


def fold_name(name: str) -> str:
    """Return a part of a path as file systems compare it that ignore case, some characters, or what NTFS takes for a stream."""
    shown = name.translate(IGNORED_BY_FILE_SYSTEMS).split(":")[0].rstrip(" .")
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", shown).casefold())


def has_protected_name(path: str) -> bool:
    return any(PROTECTED_NAME.match(fold_name(part)) for part in path.split("/"))


@dataclass(frozen=True)
class ProtectedPaths:
    """Protected paths of a repository. `links` are the symbolic links of the base: path -> target.

    `added` protects more than the built-in names, and `allowed` takes paths from the latter only."""

    added: Sequence[str] = ()
    allowed: Sequence[str] = ()
    links: Mapping[str, str] = field(default_factory=dict)

    def contains(self, path: str) -> bool:
        folded = _fold_path(path)
        if any(_matches(folded, pattern) for pattern in self.added):
            return True
        is_linked = any(folded == target or folded.startswith(f"{target}/") for target in self._targets)
        return (is_linked or has_protected_name(path)) and not any(_matches(folded, pattern) for pattern in self.allowed)

    @cached_property
    def _targets(self) -> frozenset[str]:
        """Paths to which protected links of the base lead, also by further links: a tool that follows links reads these."""
        links = {_fold_path(path): _fold_path(resolve_link(path, target)) for path, target in self.links.items()}
        rules = ProtectedPaths(self.added, self.allowed)
        found: set[str] = set()
        pending = {target for path, target in links.items() if rules.contains(path)}
        while pending:
            target = pending.pop()
            found.add(target)
            for path, further in links.items():
                is_on_the_way = path == target or path.startswith(f"{target}/")
                leads = f"{further}{target[len(path) :]}" if target.startswith(f"{path}/") else further if is_on_the_way else ""
                if leads and leads not in found and len(found) < len(links) + 1:
                    pending.add(leads)
        return frozenset(found - {"", "."})


def resolve_link(path: str, target: str) -> str:
    """Return the path to which a symbolic link leads. Links on the way are not followed."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def _fold_path(path: str) -> str:
    return "/".join(map(fold_name, path.split("/")))


def _matches(folded: str, pattern: str) -> bool:
    """Return whether a pattern matches a path or a directory above it. "x/*" matches x, too: it may become a link."""
    pattern = _fold_path(re.sub(r"/+(\*+)?$", "", pattern)) if pattern.strip("/*") else pattern
    parts = folded.split("/")
    return any(fnmatch.fnmatchcase("/".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))
