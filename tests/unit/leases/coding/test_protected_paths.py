"""Built-in protected names, and the patterns with which operators add and allow paths."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.core.management import call_command

from leases import migrations
from leases.coding.models import Repository
from leases.coding.protected_paths import ProtectedPaths
from leases.coding.submissions import _build_limits

PROTECTED = [
    ".github", ".github/workflows/x.yml", ".GitHub/Workflows/x.yml", ".gitea/x", ".forgejo/x", ".gitlab",
    ".gitlab/CODEOWNERS", ".gitlab-ci.yml", ".gitlab-ci.yaml", ".gitlab-ci-local.yml", ".GITLAB-CI.YML", "CODEOWNERS",
    "docs/CODEOWNERS", "codeowners", ".github/CODEOWNERS", ".circleci", ".circleci/config.yml", "circle.yml",
    ".woodpecker.yml", ".woodpecker/a.yaml", ".woodpecker", ".drone.yml", ".drone.jsonnet", ".drone.star", ".travis.yml",
    ".Travis.yaml", "azure-pipelines.yml", "azure-pipelines-1.yaml", ".azure-pipelines/a.yml", ".azuredevops/policies/x",
    "bitbucket-pipelines.yml", "Jenkinsfile", "sub/Jenkinsfile", "Jenkinsfile.deploy", "sub/deep/JENKINSFILE",
    "release.jenkinsfile", ".buildkite/pipeline.yml", "buildkite.yml", "appveyor.yml", ".appveyor.yml", ".cirrus.yml",
    ".cirrus.star", ".semaphore/semaphore.yml", ".teamcity/settings.kts", "buildspec.yml", "buildspec-test.yaml",
    "cloudbuild.yaml", "cloudbuild.json", ".tekton/push.yaml", ".prow.yaml", ".prow/jobs.yaml", ".zuul.yaml",
    "zuul.d/jobs.yaml", ".build.yml", ".builds/a.yml", "bamboo-specs/bamboo.yml", "atlantis.yaml", "netlify.toml",
    "vercel.json", ".mergify.yml", "renovate.json5", ".gitpod.yml", ".gitattributes", "sub/.gitattributes", ".lfsconfig",
    ".gitmodules", ".pre-commit-config.yaml", ".pre-commit-hooks.yaml", ".husky/pre-commit", "lefthook.yml",
    ".lefthook-local.yml", ".devcontainer", ".devcontainer.json", ".devcontainer/devcontainer.json",
    "app/.devcontainer/post.sh", ".envrc", ".github./x", ".github /x", ".github::$INDEX_ALLOCATION/x", ".git\u200chub/x",
    ".\uff47ithub/x", ".woodpec\u212aer.yml", "jen\u212ainsfile", "\u017fub/.github/x", ".travi\u017f.yml",
    "Jenkinsfile:stream",
]  # fmt: skip
FREE = [
    "README.md", "src/github/x.py", "src/.githubber", "docs/owners.md", "jenkins/x.py", "circle.py", "pipelines/azure.md",
    "render.py", ".gitignore", "gitlab-ci.md", "src/travis.yml.md", "buildspec.md", "drone.yml", "cloud/build.yaml",
    "devcontainer.json", "a.github",
]  # fmt: skip


@pytest.mark.parametrize("path", PROTECTED)
def test_a_file_that_a_forge_or_tool_executes_is_protected_by_its_name(path: str) -> None:
    assert ProtectedPaths().contains(path)
    assert ProtectedPaths(added=["deploy/*"]).contains(path)  # patterns of the operator replace none of the names


@pytest.mark.parametrize("path", FREE)
def test_other_files_are_not_protected(path: str) -> None:
    assert not ProtectedPaths().contains(path)


@pytest.mark.parametrize(
    ("pattern", "path", "is_protected"),
    [
        ("deploy/*", "deploy/prod.yml", True), ("deploy/*", "deploy", True), ("deploy/*", "Deploy/a/b", True),
        ("deploy/", "deploy/a", True), ("deploy", "deploy/a", True), ("deploy/**", "deploy", True),
        ("deploy/*", "deployed", False),
        ("*.tf", "a/b.tf", True), ("*.tf", "a/b.tf/c", True), ("Secrets.yml", "secrets.yml", True), ("a/b", "a", False),
        ("*", "any", True), ("/*", "any", False),
    ],
)  # fmt: skip
def test_a_pattern_protects_a_path_and_what_is_below_it(pattern: str, path: str, is_protected: bool) -> None:
    assert ProtectedPaths(added=[pattern]).contains(path) == is_protected


def test_an_operator_allows_built_in_names_and_none_of_the_own_patterns() -> None:
    paths = ProtectedPaths(added=["deploy/*"], allowed=[".github/workflows/docs.yml", ".devcontainer/*", "deploy/*"])
    for path in (".github/workflows/docs.yml", ".GitHub/workflows/docs.yml", ".devcontainer/a/b", ".devcontainer"):
        assert not paths.contains(path), path
    for path in (".github/workflows/other.yml", ".github", "sub/.devcontainer/a", "deploy/a", "Jenkinsfile"):
        assert paths.contains(path), path


def test_links_of_the_base_are_followed_to_their_end() -> None:
    links = {
        ".circleci": "ci",
        "ci/config.yml": "../common/ci.yml",
        "common": "lib/common",
        "a": "b",
        "b": "a/c",
        "docs/x": "../ci2",
    }
    paths = ProtectedPaths(links=links)
    for path in ("ci", "ci/x", "ci/config.yml", "common/ci.yml", "lib/common/ci.yml"):
        assert paths.contains(path), path
    for path in ("ci2", "lib/common/other", "common/other", "a", "b", "cinema"):
        assert not paths.contains(path), path


def test_links_in_a_circle_end() -> None:
    links = {".github": "x", "x": "y/x", "y": "x", "x/y": "../x/y/z"}
    assert ProtectedPaths(links=links).contains("x")


@pytest.mark.django_db
def test_repository_has_the_patterns_that_the_operator_gives(capsys: Any) -> None:
    call_command("repository", "add", "calc", "--clone-url", "/srv/calc.git")
    assert _build_limits(Repository.objects.get()).protected == ProtectedPaths([], [])
    call_command(
        "repository", "add", "calc", "--protected-path", "deploy/*", "--allowed-path", ".github/a", "--allowed-path", "b"
    )
    assert _build_limits(Repository.objects.get()).protected == ProtectedPaths(["deploy/*"], [".github/a", "b"])


@pytest.mark.django_db
def test_upgrade_removes_the_former_defaults_and_keeps_patterns_of_the_operator() -> None:
    old = [".github/*", ".gitea/*", ".forgejo/*", ".gitlab/*", ".gitlab-ci.yml", ".circleci/*", ".woodpecker*", "Jenkinsfile"]
    for name, patterns in {"default": old, "own": ["deploy/*"], "both": [*old, "deploy/*"], "none": []}.items():
        Repository.objects.create(name=name, clone_url="/srv/x", protected_paths=patterns)
    [migration] = Path(migrations.__path__[0]).glob("*_repository_allowed_paths.py")
    for _ in range(2):
        import_module(f"leases.migrations.{migration.stem}").remove_former_defaults(apps, None)
    kept = dict(Repository.objects.values_list("name", "protected_paths"))
    assert kept == {"default": [], "own": ["deploy/*"], "both": ["deploy/*"], "none": []}
