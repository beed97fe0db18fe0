"""Modules that the parent of all processes loads: each takes memory in every process."""

import json
import subprocess
import sys
from pathlib import Path

from tests.commands.manage import MANAGE, build_environment

WEB_ONLY = ["sandboxes.admin", "leases.admin", "billing.admin", "unfold.admin", "rest_framework.serializers", "leases.api"]
UNUSED = ["boto3", "psycopg", "rich"]  # on SQLite with the filesystem backend
OF_ONE_PROCESS = ["aiohttp", "cryptography", "granian"]  # egress; egress and agents with keys; web
PRINT_LOADED = """
import json, os, sys
import django
django.setup()
import controlplane.management.commands.up
print(json.dumps([name for name in json.loads(sys.argv[1]) if name in sys.modules]))
"""


def test_the_parent_process_loads_no_console_no_api_and_no_unused_client(tmp_path: Path) -> None:
    env = build_environment(tmp_path, DJANGO_SETTINGS_MODULE="controlplane.settings", PYTHONPATH=str(MANAGE.parent))
    argv = [sys.executable, "-c", PRINT_LOADED, json.dumps(WEB_ONLY + UNUSED + OF_ONE_PROCESS)]
    output = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=True).stdout
    assert json.loads(output) == []
