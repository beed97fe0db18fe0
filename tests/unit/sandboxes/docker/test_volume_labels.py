"""Labels of volumes, by which a removed container is created again."""

import json

from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.docker import volumes
from sandboxes.providers.docker.volumes import SPEC_FIELDS, SPEC_LABEL, SPEC_PATHS

SPEC = SandboxSpec("name", "owner", image="image:1", pids=99, runtime="runsc", pool="default")


def test_a_spec_is_read_from_the_labels_of_its_volumes() -> None:
    assert volumes._parse_spec(volumes.build_labels(SPEC)[SPEC_LABEL]) == SPEC


def test_volumes_of_the_first_version_with_a_spec_are_those_of_a_sandbox() -> None:
    """Otherwise a container that was removed after an upgrade would be lost with its files."""
    first = ("name", "owner", "image", "labels", "memory_mib", "millicpus", "pids", "writable_root", "pool")
    assert first == SPEC_FIELDS
    fields = json.loads(volumes.build_labels(SPEC)[SPEC_LABEL])
    read = volumes._parse_spec(json.dumps({name: fields[name] for name in (*first, *SPEC_PATHS)}))
    assert read and (read.name, read.pids, read.runtime) == ("name", 99, "")


def test_a_label_without_a_field_of_the_first_version_is_no_spec() -> None:
    fields = json.loads(volumes.build_labels(SPEC)[SPEC_LABEL])
    for name in (*SPEC_FIELDS, *SPEC_PATHS):
        assert volumes._parse_spec(json.dumps({each: value for each, value in fields.items() if each != name})) is None
