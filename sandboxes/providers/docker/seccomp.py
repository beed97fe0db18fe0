"""Seccomp profile of Docker sandboxes: the allow list of image/syscalls.py as JSON.

Names unknown to the host's kernel or libseccomp have no effect."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from sandboxes.image.syscalls import ALLOWED_SYSCALLS, CONDITIONS, ENOSYS, UNIMPLEMENTED


@cache
def build_profile() -> str:
    """Build the profile as JSON for Docker's `security_opt` ("seccomp=...").

    Secondary architectures are excluded: a call by the numbers of another architecture, such as 32-bit x86 with its socketcall
    multiplexer, kills the calling program."""
    return json.dumps(
        {
            "defaultAction": "SCMP_ACT_ERRNO",
            "archMap": [{"architecture": name, "subArchitectures": []} for name in ("SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64")],
            "syscalls": [*_build_rules()],
        },
        separators=(",", ":"),
    )


def _build_rules() -> Iterator[dict[str, Any]]:
    yield _allow(sorted(ALLOWED_SYSCALLS))
    for name, conditions in CONDITIONS:
        yield _allow([name], conditions)
    yield {"names": [*UNIMPLEMENTED], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS}


def _allow(names: list[str], conditions: tuple[tuple[int, int, int], ...] = ()) -> dict[str, Any]:
    args = [{"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"} for index, mask, value in conditions]
    return {"names": names, "action": "SCMP_ACT_ALLOW", "args": args}
