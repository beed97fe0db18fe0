"""Index of the sandbox image: prints one line for each tool and package, `kind name version`, separated by tabs.

Runs at build, with its output in /opt/leasehold/CONTENTS. Fails if a tool is missing. Standard library only."""

import json
import platform
import re
import subprocess
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

TOOLS = ("bash", "curl", "git", "node", "npm", "pip", "ps", "python3", "tsc", "tsx")
GLOBAL_NODE_MODULES = (Path("/usr/local/lib/node_modules"), Path("/harness/lib/node_modules"))


def read_version(tool: str) -> str:
    output = subprocess.run([tool, "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"\d+(\.\d+)+", output)
    if found is None:
        raise SystemExit(f"{tool} --version prints no version: {output[:200]!r}")
    return found[0]


def list_contents() -> Iterator[tuple[str, str, str]]:
    system = platform.freedesktop_os_release()
    yield "system", system["ID"], system.get("VERSION_ID", "")
    for tool in TOOLS:
        yield "tool", tool, read_version(tool)
    for name, version in sorted({(package.metadata["Name"].lower(), package.version) for package in distributions()}):
        yield "python-package", name, version
    manifests = [path for root in GLOBAL_NODE_MODULES for name in ("*", "@*/*") for path in root.glob(f"{name}/package.json")]
    for manifest in sorted(manifests):
        package = json.loads(manifest.read_text())
        yield "npm-package", package["name"], package["version"]


if __name__ == "__main__":
    for line in list_contents():
        print(*line, sep="\t")
