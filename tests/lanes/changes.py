"""Parts of the matrix that a change adds to `make test`: a table of folders, and the paths that have changed."""

from collections.abc import Iterable
from dataclasses import dataclass

from tests.lanes.table import MATRIX, REPO, VENDORS
from tests.lint.base import find_base, run_git


@dataclass(frozen=True)
class Rule:
    """Paths, each a file or a folder, and the parts that a change below them adds."""

    paths: tuple[str, ...]
    parts: tuple[str, ...] = ()


# The rule with the longest path that contains the changed one holds. Without one, nothing is added: FAST runs at every change.
RULES = (
    *(
        Rule((f"sandboxes/providers/{vendor}", f"tests/emulators/{vendor}.py"), (vendor,))
        for vendor in VENDORS
    ),
    Rule(
        (
            "sandboxes/providers/remote", "tests/unit/sandboxes/remote", "tests/support/remote.py", "tests/emulators/base.py",
            "tests/emulators/machine.py", "tests/emulators/http_handler.py", "tests/emulators/vendor.py",
        ),
        VENDORS,
    ),
    Rule(("sandboxes/state/vendor_snapshots.py",), ("modal",)),
    Rule(("sandboxes/image/runner.py", "sandboxes/image/runner_channel.py"), VENDORS),
    Rule(("sandboxes/image/launch.py", "sandboxes/image/reap.py"), (*VENDORS, "by-engine", "gvisor")),
    Rule(
        (
            "sandboxes/providers/kubernetes", "tests/unit/sandboxes/kubernetes", "tests/emulators/kubernetes",
            "tests/support/cluster.py", "tests/support/kubernetes.py",
        ),
        ("kubernetes",),
    ),
    Rule(("tests/support/real_cluster.py", "tests/support/own_cluster"), ("cluster",)),
    Rule(("sandboxes/providers/docker",), ("by-engine", "gvisor", "docker-matrix")),
    Rule(("sandboxes/image/agent", "sandboxes/agent", "sandboxes/providers/agent"), ("kubernetes", "docker-matrix")),
    Rule(("tests/unit/sandboxes/agent/test_versions.py",), ("domain-matrix",)),
    Rule(("tests/docker",), ("docker-matrix", "kubernetes")),
    Rule(
        (
            "sandboxes/egress", "tests/egress", "sandboxes/suspension.py", "tests/races/test_docker_capacity.py",
            "sandboxes/state/mounts.py", "sandboxes/state/mount_points.py", "sandboxes/state/s3fs.py",
            "sandboxes/state/storage_mode.py", "tests/unit/sandboxes/state/test_mounts.py",
            "tests/unit/sandboxes/state/test_data_trees.py",
        ),
        ("docker-matrix",),
    ),
    Rule(("sandboxes/egress/request_filter",), ("docker-matrix", "e2e-matrix")),  # LiteLLM and the agent CLIs
    Rule(("leases/coding",), ("docker-matrix", "e2e-matrix")),
    Rule(("tests/conformance",), ("by-engine", "gvisor", "kubernetes", *VENDORS)),
    Rule(("tests/e2e", "leases/packs", "leases/agent_runs", "leases/queue", "controlplane/supervisor.py"), ("e2e-matrix",)),
    Rule(
        ("sandboxes/db", "tests/support/database.py"),
        ("domain-postgres", "layers-postgres", "database-sqlite", "remote-sqlite"),
    ),
    Rule(("leases/atproto", "tests/unit/leases/atproto"), ("database-matrix",)),
    Rule(
        (
            "sandboxes/egress/litellm_callback.py", ".ci/litellm.yaml", "tests/unit/sandboxes/egress/test_litellm_callback.py",
        ),
        ("domain-matrix", "docker-matrix"),
    ),
    Rule(("tests/unit/sandboxes/egress/test_vendor_sdks.py", "tests/support/vendor_sdk_calls.py"), ("database-matrix",)),
    Rule(("tests/unit", "tests/races", "tests/machines", "tests/simulation")),
    Rule(
        (
            "leases/migrations", "sandboxes/migrations", "tests/commands/test_unmigrated_database.py",
            "tests/commands/test_upgrade.py", "billing/migrations", "tests/commands/test_previous_version.py",
            "tests/support/previous_version.py",
        ),
        ("domain-matrix", "database-matrix"),
    ),
    Rule(("tests/admin",)), Rule(("tests/api",)), Rule(("tests/commands",)),
)  # fmt: skip


def select_parts(paths: Iterable[str]) -> list[str]:
    """Return the names of the parts that changes of these paths add, in the order of the table."""
    added = {part for path in paths if (rule := find_rule(path)) for part in rule.parts}
    return [part.name for part in MATRIX if part.name in added]


def find_rule(path: str) -> Rule | None:
    """Return the rule with the longest path that is this one or contains it."""
    matches = [(len(prefix), rule) for rule in RULES for prefix in rule.paths if f"{path}/".startswith(f"{prefix}/")]
    return max(matches, key=lambda match: match[0])[1] if matches else None


def list_changes() -> list[str]:
    """Return the paths that differ from the last commit that the remote branch has, without a remote branch none."""
    if not (base := find_base(REPO)):
        return []
    changed = run_git("diff", "--name-only", "--no-renames", base, repo=REPO)
    return sorted({*changed, *run_git("ls-files", "--others", "--exclude-standard", repo=REPO)})
