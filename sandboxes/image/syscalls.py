"""System calls that programs in a sandbox may use: an allow list, and its compiler to a seccomp filter.

Other calls fail with EPERM, except clone3 and calls newer than any listed one, which fail with ENOSYS so that libraries fall
back to older calls. The list contains the calls that shells, compilers, interpreters and tools of unprivileged users need.
Calls that mainly add attack surface (io_uring, bpf, ptrace, keyrings, namespaces, mounts) are excluded even where an engine's
default profile allows them.

Docker Engines receive the list as a profile (providers/docker/seccomp.py). A Pod has no such field, so that process 1 loads the
compiled filter there (agent/confinement.py). The image's build executes this file: it reads the numbers of its architecture as
C macros from stdin, and writes the filter to stdout. Standard library only."""

import platform
import re
import struct
import sys
from collections.abc import Mapping, Sequence

Condition = tuple[int, int, int]  # index of an argument, mask, value: argument & mask == value
Instruction = tuple[int, int, int, int]  # code, instructions to skip if true, if false, operand

FILE_SYSCALLS = """
    access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64 fallocate
    fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr file_getattr file_setattr flistxattr flock
    fremovexattr fsetxattr fstat fstatfs fsync ftruncate futimesat getcwd getdents getdents64 getxattr getxattrat lchown
    lgetxattr link linkat listxattr listxattrat llistxattr lremovexattr lseek lsetxattr lstat mkdir mkdirat mknod mknodat
    newfstatat open openat openat2 pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv
    removexattr removexattrat rename renameat renameat2 rmdir sendfile setxattr setxattrat splice stat statfs statx symlink
    symlinkat sync sync_file_range sync_file_range2 syncfs tee truncate umask unlink unlinkat utime utimensat utimes write
    writev inotify_add_watch inotify_init inotify_init1 inotify_rm_watch ioctl cachestat
"""
WAIT_SYSCALLS = """
    epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd eventfd2
    pipe pipe2 poll ppoll pselect6 select signalfd signalfd4 timerfd_create timerfd_gettime timerfd_settime futex
    futex_requeue futex_wait futex_waitv futex_wake get_robust_list set_robust_list membarrier rseq
"""
MEMORY_SYSCALLS = """
    brk madvise memfd_create mincore mlock mlock2 mlockall mmap mprotect mremap mseal msync munlock munlockall munmap
    pkey_alloc pkey_free pkey_mprotect map_shadow_stack arch_prctl set_thread_area get_thread_area
"""
PROCESS_SYSCALLS = """
    execve execveat exit exit_group fork vfork wait4 waitid kill tkill tgkill pidfd_open pidfd_send_signal pause getpid
    getppid gettid getpgid getpgrp setpgid getsid setsid set_tid_address getcpu getrusage times prctl getpriority
    setpriority ioprio_get ioprio_set getrlimit setrlimit sched_yield sched_getaffinity sched_setaffinity
    sched_getattr sched_setattr sched_getparam sched_setparam sched_getscheduler sched_setscheduler sched_get_priority_max
    sched_get_priority_min sched_rr_get_interval rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn
    rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sigaltstack restart_syscall alarm getitimer setitimer nanosleep
    clock_getres clock_gettime clock_nanosleep gettimeofday time timer_create timer_delete timer_getoverrun timer_gettime
    timer_settime getrandom sysinfo uname
"""
# The engine calls some of these under the filter to drop privileges. Without capabilities they grant nothing.
IDENTITY_SYSCALLS = """
    capget capset getuid geteuid getgid getegid getresuid getresgid getgroups setuid setgid setreuid setregid setresuid
    setresgid setfsuid setfsgid setgroups seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self
"""
IPC_SYSCALLS = """
    bind connect listen accept accept4 getsockname getpeername getsockopt setsockopt sendto sendmsg sendmmsg recvfrom
    recvmsg recvmmsg shutdown mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv
    msgsnd semctl semget semop semtimedop shmat shmctl shmdt shmget
"""
ALLOWED_SYSCALLS = frozenset(
    f"{FILE_SYSCALLS}{WAIT_SYSCALLS}{MEMORY_SYSCALLS}{PROCESS_SYSCALLS}{IDENTITY_SYSCALLS}{IPC_SYSCALLS}".split()
)
# Linux constants, independent of the control plane's platform. Families: AF_INET and AF_INET6. Protocols: default, TCP and UDP,
# so that no kernel module is loaded for another protocol. Other families, such as vsock, are not confined by a network
# namespace.
AF_UNIX, NETWORK_FAMILIES, NETWORK_PROTOCOLS = 1, (2, 10), (0, 6, 17)
AF_NETLINK, NETLINK_ROUTE = 16, 0  # used by libraries to list network interfaces
NAMESPACE_FLAGS = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
INT_MASK = 0xFFFFFFFF  # the kernel ignores the upper half of the register of an int argument
PERSONALITIES = (0, INT_MASK)  # the default, and a query of the current value
ENOSYS = 38

# Calls that are allowed if all conditions hold.
CONDITIONS: list[tuple[str, tuple[Condition, ...]]] = [
    ("socket", ((0, INT_MASK, AF_UNIX),)),
    ("socketpair", ((0, INT_MASK, AF_UNIX),)),
    *(
        ("socket", ((0, INT_MASK, family), (2, INT_MASK, protocol)))
        for family in NETWORK_FAMILIES
        for protocol in NETWORK_PROTOCOLS
    ),
    ("socket", ((0, INT_MASK, AF_NETLINK), (2, INT_MASK, NETLINK_ROUTE))),
    ("clone", ((0, NAMESPACE_FLAGS, 0),)),
    # Only for the calling process: a command could else end process 1, which has the same user, by a limit of its CPU time.
    ("prlimit64", ((0, INT_MASK, 0),)),
    *(("personality", ((0, INT_MASK, kind),)) for kind in PERSONALITIES),
]
UNIMPLEMENTED = ("clone3",)  # takes its flags from memory, where a filter cannot read them

# struct sock_filter, and offsets in struct seccomp_data on little-endian machines
INSTRUCTION = struct.Struct("=HBBI")
LOAD, AND, EQUAL, GREATER, RETURN = 0x20, 0x54, 0x15, 0x25, 0x06
NUMBER_OFFSET, ARCHITECTURE_OFFSET, ARGUMENTS_OFFSET, ARGUMENT_BYTES = 0, 4, 16, 8
ALLOW, FAIL, KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
EPERM, MAX_INSTRUCTIONS = 1, 4096
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
FIRST_X32_NUMBER = 0x40000000  # on x86_64, of the ABI with 32-bit pointers


def parse_numbers(macros: str) -> dict[str, int]:
    """Return the number of each system call from the preprocessor's definitions of __NR_…, which may name each other."""
    defined = dict(re.findall(r"^#define (__NR\w+) (\w+)$", macros, re.MULTILINE))
    numbers = {}
    for name, value in defined.items():
        while value in defined:
            value = defined[value]
        if value.isdigit():
            numbers[name.removeprefix("__NR_")] = int(value)
    return numbers


def compile_filter(numbers: Mapping[str, int], architecture: str) -> bytes:
    """Return the list as BPF: an array of struct sock_filter. Names without a number have no effect.

    A call by the numbers of another architecture, such as 32-bit x86 with its socketcall multiplexer, kills the program."""
    allowed = sorted(numbers[name] for name in ALLOWED_SYSCALLS if name in numbers)
    conditional = [(numbers[name], conditions) for name, conditions in CONDITIONS if name in numbers]
    failing = [numbers[name] for name in UNIMPLEMENTED if name in numbers]
    newest = max(*allowed, *failing, *(number for number, _ in conditional))
    program = [
        (LOAD, 0, 0, ARCHITECTURE_OFFSET), (EQUAL, 1, 0, ARCHITECTURES[architecture]), (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, NUMBER_OFFSET), (GREATER, 0, 1, FIRST_X32_NUMBER - 1), (RETURN, 0, 0, KILL_PROCESS),
        (GREATER, 0, 1, newest), (RETURN, 0, 0, FAIL | ENOSYS),
    ]  # fmt: skip
    for number, action in [*((number, ALLOW) for number in allowed), *((number, FAIL | ENOSYS) for number in failing)]:
        program += [(EQUAL, 0, 1, number), (RETURN, 0, 0, action)]
    for number, conditions in conditional:
        program += _compile_rule(number, conditions)
    program.append((RETURN, 0, 0, FAIL | EPERM))
    assert len(program) <= MAX_INSTRUCTIONS
    return b"".join(INSTRUCTION.pack(*instruction) for instruction in program)


def _compile_rule(number: int, conditions: Sequence[Condition]) -> list[Instruction]:
    """Return the instructions that allow a call under conditions. The call's number is loaded before and after them."""
    body: list[Instruction] = []
    for left, (index, mask, value) in zip(range(len(conditions) - 1, -1, -1), conditions, strict=True):
        body += [(LOAD, 0, 0, ARGUMENTS_OFFSET + ARGUMENT_BYTES * index), (AND, 0, 0, mask), (EQUAL, 0, 3 * left + 1, value)]
    body += [(RETURN, 0, 0, ALLOW), (LOAD, 0, 0, NUMBER_OFFSET)]
    return [(EQUAL, 0, len(body), number), *body]


if __name__ == "__main__":
    sys.stdout.buffer.write(compile_filter(parse_numbers(sys.stdin.read()), platform.machine()))
