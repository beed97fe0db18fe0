"""Code of the project that a migration may import. Other code moves and changes, and a migration must not change with it."""

import ast
from collections.abc import Iterator

PROJECT = ("leases", "billing", "sandboxes", "controlplane", "tests")
MODULES = (
    "sandboxes.db.dialect",
    "sandboxes.db.concurrent_indexes",
    "sandboxes.db.expressions",
    "sandboxes.db.migration_operations",
    "sandboxes.db.prefix_index",
)
# Validators and defaults of model fields, to which migrations refer by name. None is moved, renamed or removed.
FUNCTIONS = (
    "billing.models.budgets.get_default_warn_percents",
    "billing.models.budgets.validate_model_pattern",
    "billing.models.budgets.validate_time_zone",
    "billing.models.budgets.validate_warn_percents",
    "leases.catalog.models.check_patterns",
    "leases.catalog.models.check_words",
    "leases.coding.models.check_path_patterns",
    "leases.coding.models.list_default_protected_paths",
    "leases.models.check_argv",
    "leases.models.check_conditions",
    "leases.models.check_excludes",
    "leases.models.check_sleep_after",
    "leases.models.check_suspend_after",
    "leases.models.check_vendor_interval",
    "leases.models.default_key_scopes",
    "leases.models.default_turn_argv",
    "sandboxes.egress.allow_list.domains.check_allowed_domains",
    "sandboxes.models.policies.check_collections",
    "sandboxes.models.policies.check_mcp_tools",
    "sandboxes.models.policies.check_models",
    "sandboxes.models.pools.default_capacity",
    "sandboxes.models.pools.default_memory_mib",
    "sandboxes.models.pools.default_millicpus",
    "sandboxes.models.pools.default_pids",
    "sandboxes.models.pools.list_provider_choices",
    "sandboxes.models.pools.validate_images",
    "sandboxes.models.resource_limits.validate_gpu_types",
    "sandboxes.models.resource_limits.validate_images",
    "sandboxes.models.resource_limits.validate_sizes",
    "sandboxes.models.webhooks.check_kinds",
    "sandboxes.models.webhooks.check_url",
)


def find_live_imports(source: str) -> Iterator[str]:
    """Yield the names of the project's code that a migration uses and that are not permitted."""
    tree = ast.parse(source)
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = [f"{module}.{name.name}" for name in node.names]
            if node.level:
                yield from names
            elif is_project(module) and module not in MODULES:
                yield from (name for name in names if name not in (*MODULES, *FUNCTIONS))
        elif isinstance(node, ast.Import):
            for name in node.names:
                if is_project(name.name) and name.asname:
                    yield f"{name.name} as {name.asname}"
                elif is_project(name.name):
                    imported.add(name.name)
    used = {name for node in ast.walk(tree) if isinstance(node, ast.Attribute) and (name := ast.unparse(node))}
    for module in sorted(imported - {*MODULES}):
        yield from sorted(name for name in used if name.rpartition(".")[0] == module and name not in FUNCTIONS)


def is_project(module: str) -> bool:
    return module.partition(".")[0] in PROJECT
