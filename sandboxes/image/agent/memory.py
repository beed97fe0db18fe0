"""Memory guard: kills the largest run before the kernel kills the whole container.

The kubelet sets memory.oom.group on cgroups of version 2. The kernel then answers an out-of-memory condition by killing all
processes of the container, process 1 included. The guard compares the memory that the kernel cannot reclaim with the limit. It
looks at intervals in which no program can allocate what is free, so rarely while much is free, and only while a run is active.
An unprivileged process has no better signal: memory.high and pressure triggers need a writable cgroup, and the kernel reports
the first refused allocation only moments before it kills.

Standard library only: compiled into the sandbox image beside main.py."""

import contextlib
import os

from processes import HelperCall, list_descendants, list_processes

ROOT = "/sys/fs/cgroup"
# Of version 2 and 1: directory, limit, usage, events, statistics, and the prefix of the statistics' names.
FILES = (
    (".", "memory.max", "memory.current", "memory.events", "memory.stat", b""),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "memory.stat", b"total_"),
)
RECLAIMABLE = (b"inactive_file", b"active_file", b"slab_reclaimable")  # what the kernel frees before it kills
UNLIMITED_BYTES = 1 << 60
MIN_MARGIN_SHARE, MAX_MARGIN_SHARE = 1 / 16, 1 / 8  # of the limit, which must stay free
MIN_MARGIN_BYTES = 16 << 20  # within MAX_MARGIN_SHARE
REACTION_SECONDS = 0.02  # from a look to the stop of the processes
MAX_LATENESS_SECONDS, LATENESS_DECAY = 0.5, 0.9  # of looks, on a machine that gives process 1 no processor in time
BYTES_PER_CPU_SECOND = 4 << 30  # first use of memory by one thread, in huge pages
MIN_CPUS, MAX_CPUS = 1 / 4, 2.0  # more are limited by the memory's own speed
CPU_FILES = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))  # of version 2 and 1: quota and period
MIN_INTERVAL_SECONDS, MAX_INTERVAL_SECONDS = 0.005, 1.0
NO_CAUSE_SECONDS = 0.2  # until the next look, if no run is the cause: each of these looks stops all processes for a moment
MIN_RUN_SHARE = 1 / 8  # of the limit; a smaller run is no cause
KERNEL_BYTES_PER_PROCESS = 64 << 10  # stack and page tables
PAGE_BYTES = os.sysconf("SC_PAGESIZE")


class Memory:
    """Limit and usage of the container, from open files of its cgroup. Raise OSError if they are not visible."""

    def __init__(self, root):
        for directory, *names, self._prefix in FILES:
            with contextlib.suppress(FileNotFoundError):
                self._limit, self._usage, self._events, self._statistics = [
                    os.open(f"{root}/{directory}/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in names
                ]
                return
        raise FileNotFoundError(root)

    def read_limit(self):
        """Return bytes, or None without a limit."""
        content = os.pread(self._limit, 64, 0).strip()
        limit = int(content) if content.isdigit() else UNLIMITED_BYTES
        return limit if limit < UNLIMITED_BYTES else None

    def read_usage(self):
        return int(os.pread(self._usage, 64, 0))

    def read_reclaimable(self):
        values = self._read_table(self._statistics)
        return sum(values.get(self._prefix + name, 0) for name in RECLAIMABLE)

    def count_kills(self):
        """Return the number of processes that the kernel has killed for lack of memory."""
        return self._read_table(self._events).get(b"oom_kill", 0)

    def _read_table(self, fd):
        words = os.pread(fd, 16 << 10, 0).split()
        return dict(zip(words[::2], map(int, words[1::2])))  # noqa: B905 - the last line may be cut


def read_cpus(root):
    """Return the number of processors that the container may use, as far as it is limited."""
    for names in CPU_FILES:
        with contextlib.suppress(OSError, ValueError):
            words = []
            for name in names:
                with open(f"{root}/{name}") as file:
                    words += file.read().split()
            quota, period = map(int, words)  # "max" is no number
            if quota > 0:
                return min(max(quota / period, MIN_CPUS), MAX_CPUS)
    return MAX_CPUS


class MemoryGuard:
    """Decides when to look again, and whether a run must be killed."""

    def __init__(self, memory, cpus=MAX_CPUS):
        self._memory, self._bytes_per_second = memory, BYTES_PER_CPU_SECOND * cpus
        self._looked_at = self.next_look = 0.0  # monotonic
        self.limit = self._used = 0
        self._lateness = 0.0  # of recent looks, in seconds

    def count_kills(self):
        return self._memory.count_kills()

    def is_short(self, now):
        """Look at the memory, if it is time. Return whether it is nearly used up."""
        if now < self.next_look:
            return False
        self._lateness = max(min(now - self.next_look, MAX_LATENESS_SECONDS), self._lateness * LATENESS_DECAY)
        limit = self._memory.read_limit()
        if limit is None:
            self.next_look = now + MAX_INTERVAL_SECONDS
            return False
        used = self._memory.read_usage()
        if used > limit / 2:
            used -= self._memory.read_reclaimable()
        free = limit - used - self._compute_margin(limit, used, now)
        self.limit, self._used, self._looked_at = limit, used, now
        self.next_look = now + min(max(free / self._bytes_per_second, MIN_INTERVAL_SECONDS), MAX_INTERVAL_SECONDS)
        return free <= 0

    def find_largest(self, runs):
        """Return the run whose processes use most memory, or None, and then look less often. See `find_largest`."""
        found = find_largest(runs, self.limit)
        if found is None:
            self.next_look += NO_CAUSE_SECONDS
        return found

    def _compute_margin(self, limit, used, now):
        """Return the bytes that must stay free: those that will be allocated before a kill has effect."""
        pace = (used - self._used) / max(now - self._looked_at, MIN_INTERVAL_SECONDS)
        allocated = pace * (REACTION_SECONDS + self._lateness)
        return min(max(allocated, limit * MIN_MARGIN_SHARE, MIN_MARGIN_BYTES), limit * MAX_MARGIN_SHARE)


def find_largest(runs, limit):
    """Return the run whose processes use most memory, or None if none uses MIN_RUN_SHARE of the limit.

    Files in memory and buffers of the kernel belong to no run."""
    runs = [run for run in runs if run.process.pid and not isinstance(run.process, HelperCall)]
    parents = list_processes()
    members = {run: list_descendants(parents, {run.process.pid}) for run in runs}
    sizes = {run: measure(members[run], read_resident_bytes) for run in runs}
    large = [run for run in runs if sizes[run] >= limit * MIN_RUN_SHARE]
    if len(large) > 1:  # processes that share their memory with a parent count less
        sizes = {run: measure(members[run], read_proportional_bytes) for run in large}
    return max(large, key=sizes.get, default=None)


def measure(pids, read_bytes):
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, LookupError):  # ended, or not readable
            total += read_bytes(pid) + KERNEL_BYTES_PER_PROCESS
    return total


def read_resident_bytes(pid):
    """Return the anonymous memory of a process. Memory that it shares with other processes counts in full."""
    with open(f"/proc/{pid}/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * PAGE_BYTES


def read_proportional_bytes(pid):
    """Return the anonymous memory of a process, and its part of what it shares with others."""
    with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        lines = dict(line.split(b":", 1) for line in file if b":" in line[:32])
    return sum(int(lines[name].split()[0]) << 10 for name in (b"Pss_Anon", b"Pss_Shmem"))


def create_guard():
    """Return the guard of this container, or None if its memory is not limited or not visible."""
    with contextlib.suppress(OSError, ValueError):
        memory = Memory(ROOT)
        if memory.read_limit() is not None:
            memory.count_kills()
            return MemoryGuard(memory, read_cpus(ROOT))
    return None
