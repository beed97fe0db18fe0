"""Construction of tars from members."""

import io
import tarfile

TarMember = tuple[tarfile.TarInfo, io.BytesIO | None]


def file(name: str, content: bytes = b"content", mode: int = 0o644) -> TarMember:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), mode
    return member, io.BytesIO(content)


def other(name: str, kind: bytes, linkname: str = "", mode: int = 0o755) -> TarMember:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode = kind, linkname, mode
    return member, None


def link(name: str, target: str) -> TarMember:
    return other(name, tarfile.SYMTYPE, target)


def directory(name: str, mode: int = 0o755) -> TarMember:
    return other(name, tarfile.DIRTYPE, mode=mode)


def pack(*members: TarMember) -> io.BytesIO:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for member, content in members:
            tar.addfile(member, content)
    packed.seek(0)
    return packed
