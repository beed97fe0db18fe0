"""Seccomp profile of Docker sandboxes: an allow list of system calls.

Other calls fail with EPERM, except clone3 and calls newer than any listed one, which fail with ENOSYS so that libraries fall
back to older calls. The list contains the calls that shells, compilers, interpreters and tools of unprivileged users need.
Calls that mainly add attack surface (io_uring, bpf, ptrace, keyrings, namespaces, mounts) are excluded even where the engine's
default profile allows them. Names unknown to the host's kernel or libseccomp have no effect."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

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
    yield _allow(*sorted(ALLOWED_SYSCALLS))
    yield _allow("socket", (0, INT_MASK, AF_UNIX))
    yield _allow("socketpair", (0, INT_MASK, AF_UNIX))
    for family in NETWORK_FAMILIES:
        for protocol in NETWORK_PROTOCOLS:
            yield _allow("socket", (0, INT_MASK, family), (2, INT_MASK, protocol))
    yield _allow("socket", (0, INT_MASK, AF_NETLINK), (2, INT_MASK, NETLINK_ROUTE))
    yield _allow("clone", (0, NAMESPACE_FLAGS, 0))
    # Only for the calling process: a command could else end process 1, which has the same user, by a limit of its CPU time.
    yield _allow("prlimit64", (0, INT_MASK, 0))
    for kind in PERSONALITIES:
        yield _allow("personality", (0, INT_MASK, kind))
    # clone3 takes its flags from memory, where a filter cannot read them.
    yield {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS}


def _allow(*names_and_conditions: Any) -> dict[str, Any]:
    """Allow the named calls if all conditions hold. A condition (index, mask, value) requires argument & mask == value."""
    args = [
        {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}
        for index, mask, value in (item for item in names_and_conditions if not isinstance(item, str))
    ]
    return {"names": [item for item in names_and_conditions if isinstance(item, str)], "action": "SCMP_ACT_ALLOW", "args": args}
