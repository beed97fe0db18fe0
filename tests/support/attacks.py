"""Attacks of an agent on its sandbox. Runs inside a sandbox, with the standard library only:

    python3 -I - ADDRESS... < attacks.py      ADDRESS: host:port that must be unreachable, in addition to the built-in ones

An attack returns its result, or raises OSError. The program prints one line of JSON: name -> [outcome, detail]. The outcome is
"refused" or "succeeded", or the inconclusive "hung" or "broken"."""

import contextlib
import ctypes
import errno
import json
import mmap
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

SANDBOX_WRITABLE_DIRS = ("/workspace", "/data", "/tmp", "/var/tmp", "/run", "/dev/shm", "/dev/mqueue")
WRITABLE_DEVICES = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts/ptmx")}
ATTACKS: dict[str, Callable[[], object]] = {}
libc = ctypes.CDLL(None, use_errno=True)


def register_attack(act: Callable[[], object]) -> Callable[[], object]:
    ATTACKS[act.__name__] = act
    return act


def call_libc(name: str, *args: object) -> int:
    """Call a libc function. Raise OSError if it returns -1."""
    result = int(getattr(libc, name)(*args))
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def call_syscall(name: str, *args: object) -> int:
    return call_libc("syscall", SYSCALL_NUMBERS[name][os.uname().machine == "aarch64"], *args)


SYSCALL_NUMBERS = {  # x86_64, aarch64
    "acct": (163, 89), "add_key": (248, 217), "bpf": (321, 280), "clock_settime": (227, 112), "clone": (56, 220),
    "clone3": (435, 435), "delete_module": (176, 106), "fanotify_init": (300, 262), "finit_module": (313, 273),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fsopen": (430, 430), "fspick": (433, 433), "get_mempolicy": (239, 236),
    "init_module": (175, 105), "io_setup": (206, 0), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425), "kcmp": (312, 272), "kexec_file_load": (320, 294), "kexec_load": (246, 104),
    "keyctl": (250, 219), "lookup_dcookie": (212, 18), "mbind": (237, 235), "memfd_secret": (447, 447),
    "migrate_pages": (256, 238), "mount_setattr": (442, 442), "move_mount": (429, 429), "move_pages": (279, 239),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "open_tree": (428, 428),
    "perf_event_open": (298, 241), "personality": (135, 92), "pidfd_getfd": (438, 438), "pivot_root": (155, 41),
    "process_madvise": (440, 440), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "quotactl": (179, 60),
    "request_key": (249, 218), "set_mempolicy": (238, 237), "setns": (308, 268), "socket": (41, 198),
    "syslog": (103, 116), "unshare": (272, 97), "userfaultfd": (323, 282), "vmsplice": (278, 75),
}  # fmt: skip


def succeed_unless_denied(call: Callable[..., object], *args: object) -> object:
    """Make a call with harmless, invalid arguments. Any error except a denial counts as success."""
    try:
        return call(*args) or "allowed"
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):
            raise
        return f"allowed: {error}"


def run_program(*argv: str) -> str:
    """Return the output of a program. A missing or failing program is a refusal."""
    process = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=20)
    if process.returncode:
        raise OSError(f"exit code {process.returncode}: {process.stderr.strip()}")
    return process.stdout or "it worked"


# --- network ------------------------------------------------------------------------------------------------------


ATTACKS |= {
    "resolve_a_name": partial(socket.getaddrinfo, "example.com", 443),
    "open_a_raw_socket": partial(socket.socket, socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
    "open_a_packet_socket": partial(socket.socket, socket.AF_PACKET, socket.SOCK_RAW),
    "open_a_socket_to_the_hypervisor": partial(socket.socket, socket.AF_VSOCK),  # not confined by a network namespace
    "open_a_pair_of_another_family": partial(socket.socketpair, socket.AF_VSOCK, socket.SOCK_STREAM),
    "find_another_interface": lambda: [name for _, name in socket.if_nameindex() if name != "lo"] or refuse("lo alone"),
    "find_a_route": lambda: Path("/proc/net/route").read_text().splitlines()[1:] or refuse("none"),
}


def connect_to(host: str, port: int) -> object:
    with socket.create_connection((host, port), timeout=2):
        return "connected"


@register_attack
def send_a_datagram() -> object:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        return out.sendto(b"x", ("1.1.1.1", 53))


@register_attack
def hide_a_family_in_half_a_register() -> object:
    """The kernel ignores the upper half of the register."""
    return call_syscall("socket", ctypes.c_uint64(1 << 32 | socket.AF_VSOCK), socket.SOCK_STREAM, 0)


@register_attack
def open_a_socket_of_any_other_family() -> object:
    """All families except unix, IPv4, IPv6 and netlink. 46 is beyond the last one."""
    return find_openable_sockets(
        (family, kind, 0) for family in range(47) if family not in (1, 2, 10, 16) for kind in range(1, 7)
    )


@register_attack
def speak_another_protocol() -> object:
    """All protocols except TCP and UDP, including ping, SCTP, UDP-Lite and MPTCP, and all of netlink except routing."""
    internet = [(family, kind, number) for family in (2, 10) for kind in (1, 2, 5) for number in (1, 33, 58, 132, 136, 262)]
    return find_openable_sockets([*internet, *((16, 3, number) for number in range(1, 32))])


@register_attack
def find_a_socket_of_the_host() -> object:
    """Searches all visible files outside the directories of its own sockets."""
    sockets = [
        os.path.join(above, name)
        for above, directories, names in os.walk("/")
        if prune_walk(above, directories, "/proc", "/sys", "/run/leasehold", "/run/leasehold-agent")
        for name in names
        if stat.S_ISSOCK(os.lstat(os.path.join(above, name)).st_mode)
    ]
    return sockets or refuse("none")


@register_attack
def reach_the_engine() -> object:
    for path in ("/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock"):
        with socket.socket(socket.AF_UNIX) as out:
            if out.connect_ex(path) == 0:
                return path
    raise OSError("no such socket")


# --- privileges -------------------------------------------------------------------------------------------

ATTACKS |= {
    "become_root": partial(os.setuid, 0),
    "become_another_user": partial(os.setresuid, 10002, 10002, 10002),
    "join_a_group": partial(os.setgroups, [0]),
    "su": partial(run_program, "su", "root", "-c", "id"),
    "sudo": partial(run_program, "sudo", "-n", "id"),
    "gain_privileges_by_exec": lambda: "NoNewPrivs:\t1" not in Path("/proc/self/status").read_text() or refuse("no_new_privs"),
    "run_without_a_seccomp_filter": lambda: "Seccomp:\t2" not in Path("/proc/self/status").read_text() or refuse("filtered"),
    "make_a_user_namespace_by_program": partial(run_program, "unshare", "-Ur", "id"),
    "enter_the_namespaces_of_process_1": partial(os.open, "/proc/1/ns/mnt", os.O_RDONLY),
    "change_root": partial(os.chroot, "/workspace"),
    "pivot_root": partial(succeed_unless_denied, call_syscall, "pivot_root", b"/workspace", b"/workspace"),
    "mount_a_file_system": partial(call_libc, "mount", b"none", b"/workspace", b"tmpfs", 0, None),
    "mount_by_program": partial(run_program, "mount", "-t", "proc", "proc", "/workspace"),
    "remount_writable": partial(call_libc, "mount", None, b"/", None, 32, None),
    "unmount_a_mask": partial(succeed_unless_denied, call_libc, "umount2", b"/proc/acpi", 2),
}


@register_attack
def run_a_program_that_is_setuid() -> object:
    """Runs every setuid program of the image, and checks for a changed effective user id."""
    found = [
        path
        for above, directories, names in os.walk("/")
        if prune_walk(above, directories, "/proc", "/sys", *SANDBOX_WRITABLE_DIRS)
        for name in names
        if os.path.isfile(path := os.path.join(above, name)) and os.stat(path).st_mode & (stat.S_ISUID | stat.S_ISGID)
    ]
    for path in found:
        child = subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
            ids = next(line.split()[1:] for line in lines if line.startswith("Uid:"))
            if set(ids) != {str(os.getuid())}:
                return path, ids
        except (FileNotFoundError, PermissionError) as error:  # no longer readable: its user has changed
            if isinstance(error, PermissionError):
                return path
        finally:
            child.kill()
            child.wait()
    raise OSError(f"none of {len(found)} gave anything")


@register_attack
def give_a_file_to_root() -> object:
    Path("/workspace/mine").touch()
    return os.chown("/workspace/mine", 0, 0)


@register_attack
def give_a_file_capabilities() -> object:
    Path("/workspace/mine").touch()
    return os.setxattr("/workspace/mine", "security.capability", bytes.fromhex("0100000200200000002000000000000000000000"))


@register_attack
def have_capabilities() -> object:
    lines = Path("/proc/self/status").read_text().splitlines()
    sets = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Cap")}
    return [name for name, bits in sets.items() if int(bits, 16)] or refuse("none in any of five sets")


for _name, _flag in {"user": 1 << 28, "mount": 1 << 17, "net": 1 << 30, "pid": 1 << 29, "uts": 1 << 26}.items():
    ATTACKS[f"make_a_{_name}_namespace"] = partial(call_libc, "unshare", _flag)
    ATTACKS[f"clone_into_a_{_name}_namespace"] = lambda flag=_flag: reap_child(
        call_syscall("clone", flag | signal.SIGCHLD, 0, 0, 0, 0)
    )


@register_attack
def clone_by_flags_in_memory() -> object:
    """A filter cannot read the flags, so the call must fail with ENOSYS, on which libraries fall back to clone."""
    arguments = (ctypes.c_uint64 * 11)(1 << 28, 0, 0, 0, signal.SIGCHLD)
    return reap_child(call_syscall("clone3", arguments, ctypes.sizeof(arguments)))


# --- process 1 ---------------------------------------------------------------------------------------------


def try_on_init_process(act: Callable[[int], object]) -> object:
    """Apply a call to process 1, which runs as the same user, but is not dumpable."""
    return act(1)


for _file in ("environ", "mem", "maps", "auxv", "stack", "syscall"):
    ATTACKS[f"read_its_{_file}"] = partial(
        try_on_init_process, lambda pid, file=_file: Path(f"/proc/{pid}/{file}").read_bytes()
    )
for _link in ("root", "cwd", "exe", "ns/net"):
    ATTACKS[f"see_its_{_link.replace('/', '_')}"] = partial(
        try_on_init_process, lambda pid, link=_link: os.readlink(f"/proc/{pid}/{link}")
    )
ATTACKS["see_its_files"] = partial(try_on_init_process, lambda pid: os.listdir(f"/proc/{pid}/fd"))
ATTACKS["trace_a_child"] = lambda: call_libc("ptrace", 0, 0, None, None) or "traced"
ATTACKS["trace_it"] = partial(try_on_init_process, lambda pid: call_libc("ptrace", 16, pid, None, None))
ATTACKS["read_its_memory"] = partial(
    try_on_init_process, lambda pid: succeed_unless_denied(call_syscall, "process_vm_readv", pid, None, 0, None, 0, 0)
)
ATTACKS["limit_it"] = partial(try_on_init_process, lambda pid: resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, 1)))


# --- the kernel and its devices ---------------------------------------------------------------------------------------

for _device in ("kmsg", "mem", "kmem", "port", "vda", "sda", "fuse", "kvm", "net/tun", "vsock", "vhost-vsock"):
    ATTACKS[f"open_dev_{_device.replace('/', '_')}"] = partial(os.open, f"/dev/{_device}", os.O_RDWR)
for _major, _minor in ((1, 1), (8, 0), (254, 0), (10, 229)):
    ATTACKS[f"make_device_{_major}_{_minor}"] = partial(
        os.mknod, f"/workspace/device-{_major}-{_minor}", 0o666 | stat.S_IFBLK, os.makedev(_major, _minor)
    )
for _masked in ("/proc/kcore", "/proc/keys", "/proc/timer_list"):
    ATTACKS[f"read{_masked.replace('/', '_')}"] = lambda path=_masked: Path(path).read_bytes()[:64] or refuse("empty")
for _masked in ("/proc/acpi", "/sys/firmware"):
    ATTACKS[f"list{_masked.replace('/', '_')}"] = lambda path=_masked: os.listdir(path) or refuse("empty")
ATTACKS |= {
    "turn_off_randomized_addresses": partial(succeed_unless_denied, call_syscall, "personality", 0x40000),
    "load_a_module": partial(run_program, "modprobe", "dummy"),
    "rename_the_host": partial(call_libc, "sethostname", b"x", 1),
    "reboot": partial(succeed_unless_denied, call_libc, "reboot", 0),  # 0 is not a valid command
    "swap": partial(succeed_unless_denied, call_libc, "swapon", b"/workspace/mine", 0),
}
for _name, *_arguments in (
    ("init_module", b"", 0, b""), ("finit_module", 0, b"", 0), ("bpf", 0, None, 0), ("perf_event_open", None, 0, -1, -1, 0),
    ("kexec_load", 0, 0, None, 0), ("open_by_handle_at", -100, None, 0), ("syslog", 3, ctypes.create_string_buffer(64), 64),
    ("userfaultfd", 0), ("keyctl", 0, -3, 1), ("add_key", None, None, None, 0, 0), ("request_key", None, None, None, 0),
    ("io_uring_setup", 1, None), ("io_uring_enter", -1, 0, 0, 0, None, 0), ("io_uring_register", -1, 0, None, 0),
    ("io_setup", 1, None), ("process_vm_writev", 1, None, 0, None, 0, 0), ("process_madvise", -1, None, 0, 0, 0),
    ("pidfd_getfd", -1, 0, 0), ("kcmp", 1, 1, 9, 0, 0), ("unshare", 0), ("setns", -1, 0), ("open_tree", -100, None, 0),
    ("move_mount", -1, None, -1, None, 0), ("fsopen", None, 0), ("fsconfig", -1, 0, None, None, 0), ("fsmount", -1, 0, 0),
    ("fspick", -1, None, 0), ("mount_setattr", -1, None, 0, None, 0), ("fanotify_init", -1, 0),
    ("name_to_handle_at", -100, None, None, None, 0), ("quotactl", 0, None, 0, None), ("kexec_file_load", -1, -1, 0, None, 0),
    ("delete_module", None, 0), ("memfd_secret", -1), ("vmsplice", -1, None, 0, 0), ("acct", ctypes.c_char_p(1)),
    ("clock_settime", -1, None), ("lookup_dcookie", 0, None, 0), ("mbind", None, 0, 0, None, 0, 0),
    ("get_mempolicy", None, None, 0, None, 0), ("set_mempolicy", -1, None, 0), ("move_pages", 0, 0, None, None, None, -1),
    ("migrate_pages", 0, 0, None, None),
):  # fmt: skip
    ATTACKS[f"call_{_name}"] = partial(succeed_unless_denied, call_syscall, _name, *_arguments)


@register_attack
def call_by_the_numbers_of_32_bits() -> object:
    """The filter matches numbers of the native architecture only."""
    return run_machine_code("b814000000cd80c3")  # mov eax, 20 (getpid); int 0x80; ret


@register_attack
def call_by_the_numbers_of_x32() -> object:
    return run_machine_code("b8270000400f05c3")  # mov eax, 0x40000027 (getpid); syscall; ret


# --- resources ----------------------------------------------------------------------------------------------

ATTACKS |= {
    "leave_a_core": lambda: resource.getrlimit(resource.RLIMIT_CORE)[1] or refuse("limited to nothing"),
    "come_first": partial(os.setpriority, os.PRIO_PROCESS, 0, -5),
    "run_in_real_time": partial(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1)),
    "be_spared_by_the_oom_killer": lambda: Path("/proc/self/oom_score_adj").write_text("-1000"),
    "move_to_another_cgroup": lambda: find_writable_files("/sys/fs/cgroup", "cgroup.procs"),
    "change_a_limit_of_the_cgroup": lambda: find_writable_files("/sys/fs/cgroup", "*"),
}


@register_attack
def raise_a_limit() -> object:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    try:
        return resource.setrlimit(resource.RLIMIT_NOFILE, (hard + 1, hard + 1))
    except ValueError as error:  # Python's translation of EPERM
        raise OSError(str(error)) from error


def leave_objects_behind(option: str, count: int, *call: Any) -> object:
    """Create System V objects, which outlive processes, and remove them. `option` is their option of ipcs and ipcrm."""
    try:
        return [call_libc(*call) for _ in range(count)]
    finally:
        subprocess.run(f"ipcs -{option} | awk '/^0x/ {{print $2}}' | xargs -rn1 ipcrm -{option}", shell=True, check=True)


for _object, (_option, _count, *_arguments) in {
    "memory": ("m", 5, "shmget", 0, 1 << 20, 0o1600),  # MiB: more than a thirty-second of 128
    "messages": ("q", 17, "msgget", 0, 0o1600),  # queues of up to 16 KiB each
    "semaphores": ("s", 33, "semget", 0, 250, 0o1600),
}.items():
    ATTACKS[f"leave_{_object}_behind"] = partial(leave_objects_behind, _option, _count, *_arguments)


# --- file system --------------------------------------------------------------------------------------

for _path in (
    "/x", "/etc/x", "/etc/passwd", "/etc/hosts", "/etc/resolv.conf", "/etc/ld.so.preload", "/opt/x", "/opt/leasehold/x",
    "/opt/leasehold/files.py", "/opt/leasehold/reap.py", "/opt/leasehold/take_turn.py",
    "/opt/leasehold/skills/catan/prompt.md", "/opt/leasehold/skills/x", "/usr/x", "/usr/bin/python3", "/usr/local/bin/x",
    "/usr/sbin/docker-init", "/var/x", "/var/lib/x", "/root/x", "/home/x", "/boot/x", "/dev/x", "/run/leasehold/x",
    "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/vm/drop_caches", "/proc/sysrq-trigger",
    "/proc/sys/kernel/shmall", "/sys/kernel/uevent_helper", "/sys/power/state", "/sys/x",
):  # fmt: skip
    ATTACKS[f"write{_path.replace('/', '_')}"] = lambda path=_path: os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
for _path in ("/opt/leasehold/reap.py", "/opt/leasehold", "/run/leasehold", "/workspace", "/data"):
    ATTACKS[f"move{_path.replace('/', '_')}"] = partial(os.rename, _path, f"{_path}-away")
ATTACKS["unlock_our_programs"] = partial(os.chmod, "/opt/leasehold/files.py", 0o777)
ATTACKS["unlink_our_socket"] = partial(os.unlink, "/run/leasehold/llm.sock")


@register_attack
def write_anywhere_else() -> object:
    """Tries every file and directory except /proc and the agent's own."""
    found = [
        path
        for above, directories, names in os.walk("/")
        if prune_walk(above, directories, "/proc", *SANDBOX_WRITABLE_DIRS)
        for path in (above, *(os.path.join(above, name) for name in names))
        if not os.path.islink(path) and path not in WRITABLE_DEVICES and os.access(path, os.W_OK)
    ]
    return found or refuse("nowhere")


@register_attack
def see_the_hosts_files() -> object:
    """Searches for mounts of host directories that do not belong to this sandbox."""
    lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    own = ("/workspace", "/data", "/run/leasehold", "/run/leasehold-agent", "/etc/resolv.conf", "/etc/hostname", "/etc/hosts")
    kinds = {words[4]: words[words.index("-") + 1] for words in lines}
    virtual = {"overlay", "proc", "tmpfs", "devpts", "sysfs", "cgroup", "cgroup2", "mqueue"}
    return [at for at, kind in kinds.items() if kind not in virtual and at not in own] or refuse("none")


def prune_walk(above: str, directories: list[str], *skipped: str) -> bool:
    """Exclude directories from os.walk. Always returns True."""
    directories[:] = [name for name in directories if os.path.join(above, name) not in skipped]
    return True


def find_openable_sockets(sockets: Iterable[tuple[int, int, int]]) -> object:
    """Return the sockets (family, type, protocol) that can be opened."""
    openable = []
    for spec in sockets:
        with contextlib.suppress(OSError):
            socket.socket(*spec).close()
            openable.append(spec)
    return openable or refuse("none of them")


def reap_child(pid: int) -> object:
    """End the child after a successful clone."""
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return f"a child, {pid}"


def run_machine_code(instructions: str) -> object:
    """Execute an x86_64 machine code function in a child. Return its result; the child's death is a refusal."""
    if os.uname().machine != "x86_64":
        raise OSError("not on this machine")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
            page.write(bytes.fromhex(instructions))
            result = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
            os.write(writer, str(result).encode())
            os._exit(0)
    status = os.waitpid(child, 0)[1]
    os.close(writer)
    result = int(os.read(reader, 32) or 0)
    return result if os.WIFEXITED(status) and result > 0 else refuse(f"status {status}, result {result}")


def find_writable_files(directory: str, pattern: str) -> object:
    """Return the files that can be opened for writing. File systems of the kernel ignore mode bits when mounted read-only."""
    writable = []
    paths = [path for path in Path(directory).rglob(pattern) if path.is_file() and path.stat().st_mode & 0o200]
    assert paths, f"no {pattern} in {directory}"
    for path in paths:
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY))
            writable.append(path)
    return writable or refuse(f"none of {len(paths)}")


def refuse(reason: str) -> object:
    raise OSError(reason)


def run_attack(act: Callable[[], object]) -> list[str]:
    """Run an attack in its own process. Return its outcome."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # some attacks examine every file
        try:
            outcome_and_detail = ["succeeded", repr(act())[:300]]
        except (OSError, subprocess.SubprocessError) as error:
            outcome_and_detail = ["refused", str(error)[:300]]
        except BaseException as error:
            outcome_and_detail = ["broken", repr(error)[:300]]
        os.write(writer, json.dumps(outcome_and_detail).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        words = answer.read()
    os.waitpid(child, 0)
    return list(json.loads(words)) if words else ["hung", ""]


def main(addresses: list[str]) -> None:
    for address in ["1.1.1.1:443", "8.8.8.8:53", "169.254.169.254:80", "172.17.0.1:80", *addresses]:
        host, _, port = address.rpartition(":")
        ATTACKS[f"reach {address}"] = partial(connect_to, host, int(port))
    print(json.dumps({name: run_attack(act) for name, act in ATTACKS.items()}))


if __name__ == "__main__":
    main(sys.argv[1:])
