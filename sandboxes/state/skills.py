"""Skills of environment packs in an agent's /data: written at first use, upgraded with the agent's own edits kept.

The marker file /data/skills/<type>/.pack.json holds the digest of each file as the pack delivered it. A file with another
digest was edited by the agent, a missing one removed: an upgrade leaves both as they are. A skill without a marker belongs to
the agent and is never changed."""

import hashlib
import io
import json
import re
import tarfile
import zlib
from collections.abc import Mapping
from typing import BinaryIO

import structlog

from sandboxes.lifecycle import checkpoint
from sandboxes.models import PackVersion, Sandbox
from sandboxes.models.state import Attachment, DataFile, DataStorageMode
from sandboxes.providers.base import DATA, Provider
from sandboxes.providers.errors import BadPath, NoSuchFile, TooLarge

log = structlog.get_logger(__name__)
MARKER_NAME = ".pack.json"
MAX_SKILL_BYTES = 1 << 20  # of all files of a skill together
_DIGEST_PATTERN = re.compile(r"[0-9a-f]{64}")
_NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def build_marker(pack: str, version: str, files: Mapping[str, str]) -> bytes:
    """Build the content of the marker file from the SHA-256 of each file."""
    return json.dumps({"pack": pack, "version": version, "files": dict(sorted(files.items()))}, indent=1).encode()


def pack_archive(contents: Mapping[str, bytes]) -> bytes:
    """Return the archive of a PackVersion. The same contents give the same bytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, content in sorted(contents.items()):
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(content), 0o755 if content.startswith(b"#!") else 0o644
            tar.addfile(member, io.BytesIO(content))
    return zlib.compress(out.getvalue())


def read_archive(version: PackVersion) -> dict[str, bytes]:
    """Return the files of a version's skill by path, with the marker."""
    with tarfile.open(fileobj=_open_tar(version)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]  # regular files


def deliver(attachment: Attachment, sandbox: Sandbox, provider: Provider, skill: str) -> None:
    """Write or upgrade the skill of an environment type in a sandbox, whose /data is up to date. Idempotent.

    Called before the first operation after each start of the sandbox. An upgrade reaches a running sandbox when it starts or
    wakes the next time."""
    assigned = PackVersion.objects.filter(assignments__environment_type=skill).defer("archive", "schemas", "defaults").first()
    if assigned:
        _deliver_version(attachment, sandbox, provider, skill, assigned)
    Attachment.objects.filter(pk=attachment.pk, incarnation=attachment.incarnation).update(skill=skill)
    attachment.skill = skill


def _deliver_version(attachment: Attachment, sandbox: Sandbox, provider: Provider, skill: str, version: PackVersion) -> None:
    path = f"skills/{skill}"
    rows = DataFile.objects.filter(data=attachment.data_id, path__in=[path, f"{path}/{MARKER_NAME}"])
    stored = {row.path: row for row in rows}
    if not stored:
        provider.seed(sandbox.ref, skill, _open_tar(version))
        if attachment.data.keeping == DataStorageMode.MOUNT:  # mounted data has no other rows that record a seeded skill
            seeded = {"kind": "directory", "mode": 0o755, "revision": 0, "at": version.created_at, "removed": True}
            DataFile.objects.get_or_create(data=attachment.data, path=path, defaults=seeded)
        return
    marker = stored.get(f"{path}/{MARKER_NAME}")
    is_current = marker is None or marker.removed or marker.digest == version.marker_digest
    if attachment.data.keeping == DataStorageMode.MOUNT or not is_current:
        _upgrade(sandbox, provider, path, version)


def _upgrade(sandbox: Sandbox, provider: Provider, path: str, version: PackVersion) -> None:
    """Change the files that the agent has not edited. The marker is written last, so a repeated call completes the work."""
    marker = _read_or_none(provider, sandbox.ref, f"{path}/{MARKER_NAME}")
    installed = None if marker is None else _parse_marker(marker)
    if marker is None or installed is None or hashlib.sha256(marker).hexdigest() == version.marker_digest:
        return
    contents, kept = read_archive(version), []
    new_marker = contents.pop(MARKER_NAME)
    for name in sorted({*installed, *version.files}):
        delivered, wanted = installed.get(name), version.files.get(name)
        content = _read_or_none(provider, sandbox.ref, f"{path}/{name}")
        present = None if content is None else hashlib.sha256(content).hexdigest()
        if present == wanted:
            continue
        if present != delivered:
            kept.append(name)
        elif wanted is None:
            provider.remove_files(sandbox.ref, DATA, [f"{path}/{name}"])
        else:
            _write(provider, sandbox.ref, f"{path}/{name}", contents[name])
    checkpoint("skill written", sandbox)
    _write(provider, sandbox.ref, f"{path}/{MARKER_NAME}", new_marker)
    log.info("skill upgraded", sandbox=str(sandbox.pk), skill=path, version=str(version), kept=kept)


def _read_or_none(provider: Provider, ref: str, path: str) -> bytes | None:
    """Return the content of a file in /data; None if it does not exist. Anything but a small file counts as edited."""
    try:
        return provider.read_file(ref, f"{DATA}/{path}", limit=MAX_SKILL_BYTES)
    except NoSuchFile:
        return None
    except (BadPath, TooLarge):
        return b""


def _write(provider: Provider, ref: str, path: str, content: bytes) -> None:
    try:
        provider.put_files(ref, DATA, io.BytesIO(zlib.decompress(pack_archive({path: content}))))
    except BadPath:  # the agent has put a file or a link in place of a directory
        log.info("skill file not written", path=path)


def _parse_marker(content: bytes) -> dict[str, str] | None:
    """Return the digests in a marker, which the agent may have changed; None for anything else."""
    try:
        files = json.loads(content)["files"]
        valid = all(is_skill_path(name) and _DIGEST_PATTERN.fullmatch(digest) for name, digest in files.items())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return files if valid else None


def is_skill_path(path: str) -> bool:
    """Return whether a path may name a file of a skill: relative, without hidden or special elements."""
    parts = path.split("/")
    return len(path) <= 200 and len(parts) <= 8 and all(_NAME_PATTERN.fullmatch(part) for part in parts)


def _open_tar(version: PackVersion) -> BinaryIO:
    return io.BytesIO(zlib.decompress(bytes(version.archive)))
