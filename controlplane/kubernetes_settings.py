"""Settings of the provider for Kubernetes."""

import re

from django.core.exceptions import ImproperlyConfigured

from controlplane import env
from sandboxes.providers.kubernetes.configuration import KubernetesConfiguration, ObjectKind

NAME_PATTERN = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"  # of objects
MIN_LIFETIME_HOURS = 2


def read() -> KubernetesConfiguration:
    """Read the configuration. Raise ImproperlyConfigured."""
    configuration = KubernetesConfiguration(
        context=env.text("LEASEHOLD_KUBERNETES_CONTEXT", help="context of the kubeconfig; unset: its current one"),
        namespace=env.text(
            "LEASEHOLD_KUBERNETES_NAMESPACE",
            "leasehold-sandboxes",
            help="namespace of the sandboxes, for nothing else",
            accepts="the name of a namespace",
            pattern=r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?",
        ),
        runtime_class=_read_name(
            "LEASEHOLD_KUBERNETES_RUNTIME_CLASS", help="RuntimeClass of sandboxes, such as gvisor; unset: the default"
        ),
        pool_runtime_classes=_parse_pools(
            env.string_list(
                "LEASEHOLD_KUBERNETES_POOL_RUNTIME_CLASSES",
                "",
                help="RuntimeClass by pool, as pool=class; overrides LEASEHOLD_KUBERNETES_RUNTIME_CLASS",
            )
        ),
        priority_class=_read_name("LEASEHOLD_KUBERNETES_PRIORITY_CLASS", help="PriorityClass of sandboxes; unset: the default"),
        service_account=_read_name(
            "LEASEHOLD_KUBERNETES_SERVICE_ACCOUNT", "sandbox", help="service account of sandboxes, without any right"
        ),
        pull_secret=_read_name("LEASEHOLD_KUBERNETES_PULL_SECRET", help="Secret for images of a private registry"),
        gateway_address=env.text(
            "LEASEHOLD_KUBERNETES_GATEWAY_ADDRESS",
            help="IP address of the gateway, written to the hosts file of sandboxes; unset: resolved by the control plane",
            accepts="an IP address",
            pattern=r"[0-9a-fA-F.:]{2,45}",
        ),
        user_namespaces=env.boolean(
            "LEASEHOLD_KUBERNETES_USER_NAMESPACES", False, help="give each sandbox a user namespace (hostUsers: false)"
        ),
        disk_mib=env.integer(
            "LEASEHOLD_KUBERNETES_DISK_MIB",
            4096,
            minimum=64,
            help="limit on the files of one sandbox in MiB, over which the Pod is evicted",
        ),
        grace=env.duration(
            "LEASEHOLD_KUBERNETES_GRACE",
            "2m",
            help="time in which the state of a sandbox is stored after the cluster has begun to delete its Pod",
        ),
        lifetime=env.duration(
            "LEASEHOLD_KUBERNETES_LIFETIME",
            "7d",
            help="age at which the cluster ends a sandbox if no control plane does; it is put to sleep before",
        ),
        scale_timeout=env.duration(
            "LEASEHOLD_KUBERNETES_SCALE_TIMEOUT", "10m", help="time for which a sandbox without a node keeps its place"
        ),
        object_kind=ObjectKind(
            env.choice(
                "LEASEHOLD_KUBERNETES_OBJECT",
                ObjectKind.POD,
                [*ObjectKind],
                help="object by which sandboxes are created: pod, or sandbox of the project agent-sandbox",
            )
        ),
        exec_fallback=env.boolean(
            "LEASEHOLD_KUBERNETES_EXEC_FALLBACK",
            False,
            help="for debugging: execute commands through the API server (pods/exec) while an agent is not connected",
        ),
    )
    if configuration.lifetime.total_seconds() < MIN_LIFETIME_HOURS * 3600:
        raise ImproperlyConfigured(f"LEASEHOLD_KUBERNETES_LIFETIME must be at least {MIN_LIFETIME_HOURS} hours.")
    return configuration


def _read_name(variable: str, default: str = "", *, help: str) -> str:
    return env.text(variable, default, help=help, accepts="the name of an object of Kubernetes", pattern=NAME_PATTERN)


def _parse_pools(entries: list[str]) -> dict[str, str]:
    pairs = [entry.partition("=") for entry in entries]
    if not all(re.fullmatch(NAME_PATTERN, runtime_class.strip()) for _, _, runtime_class in pairs):
        raise ImproperlyConfigured("LEASEHOLD_KUBERNETES_POOL_RUNTIME_CLASSES takes pool=class, separated by commas.")
    return {pool.strip(): runtime_class.strip() for pool, _, runtime_class in pairs}
