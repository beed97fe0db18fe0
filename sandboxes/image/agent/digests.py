"""Digest of a small directory, equal to that of its manifest (files.scan, sandboxes/state/changes.py).

The control plane compares the digest with the last one that it has recorded, and lists the directory only after a change.
Standard library only: compiled into the sandbox image beside main.py."""

import os
import stat

try:
    from _sha2 import sha256  # Python 3.12; hashlib would load OpenSSL
except ImportError:
    from _sha256 import sha256

MAX_ENTRIES = 256  # about a millisecond
MAX_PATH_CHARACTERS = 1000
KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}


def digest_directory(root):
    """Return the digest in hexadecimal, or "" if the directory is too large or an entry cannot be inspected."""
    entries = {}
    pending = [""]
    try:
        while pending:
            prefix = pending.pop()
            with os.scandir(f"{root}/{prefix}") as listed:
                for entry in listed:
                    path = prefix + entry.name
                    if len(entries) >= MAX_ENTRIES or len(path) > MAX_PATH_CHARACTERS:
                        return ""
                    entries[path] = describe(f"{root}/{path}")
                    if entries[path].startswith("directory"):
                        pending.append(path + "/")
    except OSError:
        return ""
    digest = sha256()
    for path in sorted(entries):
        digest.update(f"{path}\0{entries[path]}".encode(errors="surrogateescape"))
    return digest.hexdigest()


def describe(path):
    """Return kind, mode, size, stamp and link target of an entry, as files.scan does. Raise OSError."""
    status = os.lstat(path)
    kind, size, changed, target = status.st_mode & 0o170000, 0, status.st_ctime_ns, ""
    if kind == stat.S_IFREG:
        size = status.st_size
    elif kind == stat.S_IFDIR:
        changed = status.st_mode & 0o777
    elif kind == stat.S_IFLNK:
        target = os.readlink(path)
    stamp = f"{status.st_ino:x}.{changed:x}.{size:x}"
    return f"{KINDS.get(kind, 'other')}\0{status.st_mode & 0o777:o}\0{size}\0{stamp}\0{target}\0"
