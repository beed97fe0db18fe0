"""Exec runner of sandboxes that no gateway reaches: starts commands, retains their output and reports their results.

    main([REQUEST])    JSON in base64, or @PATH of a file with JSON, which is removed

The provider of the sandbox calls it through the vendor's exec, which may merge streams, garble bytes, cut its connection or
drop a timeout. Nothing of that matters here: the response is one line of ASCII after RESPONSE_PREFIX, a command runs under a
keeper of its own and outlives the call, and the same mark never starts twice. Verbs:

    run      start a command, unless its mark is known, and follow it; remove the output of the marks in `release`
    follow   wait for output or for the end, and return output from two byte offsets
    join     concatenate uploaded parts
    kill     kill all processes of a mark
    restart  kill all commands and background processes
    connect  write the gateway's address and this sandbox's token, which the relay (gateway_relay.py) and the channel
             (runner_channel.py) use

If a gateway is known, relay and channel are started again when a command finds them dead, and the command gets the variables by
which SDKs find the relay. The channel brings requests to this module without the vendor's exec.

Each command has files in RUNS_DIRECTORY: MARK.lock, locked while its keeper lives; MARK.1 and MARK.2, the first `cap` bytes of
stdout and stderr; and MARK.json, the result. Commands run as the same user and can alter these files, so a response is
untrusted. Standard library only: this runs inside sandboxes."""

import base64
import contextlib
import fcntl
import json
import os
import select
import sys
import time

TOOL_DIRECTORY = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, TOOL_DIRECTORY)  # an isolated Python does not import modules beside the program

RUNS_DIRECTORY = os.path.join(TOOL_DIRECTORY, "runs")
RESPONSE_PREFIX = "leasehold:"
KILLED_EXIT_CODE = 137
MAX_ENDED_RUNS = 32  # whose output stays without a release; a retained one stays longer
MAX_RETAINED_RUNS = 256
READ_BYTES = 1 << 18
RELAY_START_SECONDS = 5.0
MAX_PAUSE_SECONDS = 0.01  # between two looks at a command


def run(request):
    """Start the command of a request, unless its mark is known, and follow it."""
    base_path = _get_path(request["mark"])
    os.makedirs(RUNS_DIRECTORY, mode=0o700, exist_ok=True)
    partial = f"{base_path}.{os.getpid()}.tmp"
    lock = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # before the link: an unlocked file means that the keeper is dead
    try:
        os.link(partial, f"{base_path}.lock")
    except FileExistsError:
        os.close(lock)
        return follow(request)
    finally:
        os.unlink(partial)
    for mark in request["release"]:
        _remove_files(_get_path(mark))
    _remove_oldest()
    port = None if request["files"] else _ensure_relay()
    if port:
        request["base_env"].update({name: value.replace("{port}", str(port)) for name, value in request["gateway_env"].items()})
    if os.fork() == 0:
        try:
            _keep(base_path, request, lock)
        finally:
            os._exit(0)
    os.close(lock)
    return follow(request)


def follow(request):
    """Wait at most `wait` seconds for the end, or for output with `live`. Return the state and output from `offsets`."""
    base_path, begun = _get_path(request["mark"]), time.monotonic()
    offsets, pause = request["offsets"], 0.002
    while True:
        # The keeper holds the lock; None: the mark is not known. Before the result, which a keeper writes while it runs.
        is_running = _is_locked(f"{base_path}.lock")
        result = _read_result(base_path)
        waited = time.monotonic() - begun
        if result is not None or not is_running or waited > request["wait"]:
            break
        has_output = any(_get_size(base_path, stream) > offset for stream, offset in zip((1, 2), offsets, strict=True))
        if request["live"] and has_output and waited > request["live_after"]:
            break
        time.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE_SECONDS)
    limit, contents = request["limit"], []
    for stream, offset in zip((1, 2), offsets, strict=True):
        content = _read_output(base_path, stream, offset, limit)
        limit -= len(content)
        contents.append(base64.b64encode(content).decode())
    if result is not None:
        state = "ended"
    elif is_running is None:
        state = "unknown"
    else:
        state = "running" if is_running else "lost"
    age = None if result is None else max(time.time() - _get_mtime(f"{base_path}.json"), 0.0)  # noqa: TID251 - files of this sandbox
    return {"state": state, "output": contents, "result": result, "age": age}


def join(request):
    """Concatenate uploaded parts into one file, and remove them. A repeated call is success."""
    partial = f"{request['path']}.{os.getpid()}.tmp"
    if os.path.exists(request["path"]):
        return {"state": "joined"}
    with open(partial, "wb") as target:
        for path in request["parts"]:
            with open(path, "rb") as part:
                while chunk := part.read(READ_BYTES):
                    target.write(chunk)
    os.rename(partial, request["path"])
    for path in request["parts"]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return {"state": "joined"}


def kill(request):
    """Kill all processes of a mark."""
    import reap

    return {"state": "killed", "count": reap.kill_tree(request["mark"])}


def restart(request):
    """Kill the processes of all commands and background processes, and forget their results."""
    import reap

    for pid in reap.list_pids():
        mark = reap.read_mark(pid)
        if mark and pid != os.getpid():
            reap.kill_tree(mark)
    return {"state": "restarted"}


def connect(request):
    """Write the gateway's address and the token, readable by this user only, and start the relay."""
    path = os.path.join(TOOL_DIRECTORY, "gateway.json")
    descriptor = os.open(f"{path}.{os.getpid()}.tmp", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({"url": request["url"], "token": request["token"]}, file)
    os.rename(f"{path}.{os.getpid()}.tmp", path)
    return {"state": "connected", "port": _ensure_relay()}


def _ensure_channel():
    """Start the channel to the gateway if it is dead."""
    if not _is_locked(os.path.join(TOOL_DIRECTORY, "channel.lock")) and os.fork() == 0:
        _run_program("runner_channel.py")


def _ensure_relay():
    """Return the port of the relay, after starting it if it is dead; None without a gateway."""
    if not os.path.exists(os.path.join(TOOL_DIRECTORY, "gateway.json")):
        return None
    _ensure_channel()
    port_path = os.path.join(TOOL_DIRECTORY, "gateway.port")
    if not _is_locked(os.path.join(TOOL_DIRECTORY, "gateway.lock")):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(port_path)  # of a relay that is dead
        if os.fork() == 0:
            _run_program("gateway_relay.py")
    deadline = time.monotonic() + RELAY_START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError), open(port_path) as file:
            return int(file.read())
        time.sleep(MAX_PAUSE_SECONDS)
    return None


def _run_program(name):
    """Replace this fork by a program of this directory."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        program = os.path.join(TOOL_DIRECTORY, name)
        os.execv(sys.executable, [sys.executable, "-I", "-S", program, TOOL_DIRECTORY])  # noqa: S606 - no shell is wanted
    finally:
        os._exit(1)


def _get_path(mark):
    return os.path.join(RUNS_DIRECTORY, mark.encode().hex())


def _is_locked(path):
    """Return whether a living process has locked a file, or None if there is no such file."""
    try:
        lock = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(lock)


def _read_result(base_path):
    try:
        with open(f"{base_path}.json") as file:
            return json.load(file)
    except FileNotFoundError:
        return None


def _get_size(base_path, stream):
    try:
        return os.stat(f"{base_path}.{stream}").st_size
    except FileNotFoundError:
        return 0


def _read_output(base_path, stream, offset, limit):
    try:
        with open(f"{base_path}.{stream}", "rb") as file:
            file.seek(offset)
            return file.read(max(limit, 0))
    except FileNotFoundError:
        return b""


def _remove_files(base_path):
    """Remove the output and the result of a command. Its lock file stays: without it the mark could start again."""
    for ending in ("1", "2", "json"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{base_path}.{ending}")


def _remove_oldest():
    """Remove the output of ended commands above the limits."""
    ended = [entry for entry in os.scandir(RUNS_DIRECTORY) if entry.name.endswith(".json")]
    if len(ended) <= MAX_ENDED_RUNS:
        return
    kept = {True: MAX_RETAINED_RUNS, False: MAX_ENDED_RUNS}
    for entry in sorted(ended, key=lambda entry: _get_mtime(entry.path), reverse=True):
        base_path = entry.path[: -len(".json")]
        result = _read_result(base_path)
        is_retained = bool(result and result["retain"])
        kept[is_retained] -= 1
        if kept[is_retained] < 0:
            _remove_files(base_path)


def _get_mtime(path):
    try:
        return os.stat(path).st_mtime
    except FileNotFoundError:
        return 0.0


def _keep(base_path, request, lock):
    """Run the command of a request to its end or its timeout, as a process of its own."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    started = time.monotonic()
    outputs = [_Output(f"{base_path}.{stream}", request["cap"]) for stream in (1, 2)]
    result = {"timed_out": False, "retain": request["retain"]}
    try:
        child = _start(request)
    except (OSError, ValueError) as error:
        is_missing = isinstance(error, FileNotFoundError) and error.filename != request["cwd"]
        result["exit_code"] = 127 if is_missing else 126
        outputs[1].add(f"{error}\n".encode(errors="replace"))
    else:
        _collect(child, outputs, request, result, started)
    result["sizes"] = [output.size for output in outputs]
    result["dropped"] = [output.dropped for output in outputs]
    result["seconds"] = time.monotonic() - started
    with open(f"{base_path}.json.tmp", "w") as file:
        json.dump(result, file)
    os.rename(f"{base_path}.json.tmp", f"{base_path}.json")
    os.close(lock)


def _start(request):
    if request["stdin_path"]:
        stdin = os.open(request["stdin_path"], os.O_RDONLY)
        os.unlink(request["stdin_path"])
    else:
        stdin = _open_content(base64.b64decode(request["stdin"]))
    environment = dict(os.environ)
    environment.update(request["base_env"])
    path = request["path_suffix"]
    environment["PATH"] = f"{environment.get('PATH', '/usr/local/bin:/usr/bin:/bin')}:{path}"
    environment.update(request["env"])
    try:
        if request["files"]:
            return _ForkedFiles(request["files"], stdin)
        import subprocess

        return subprocess.Popen(
            request["argv"],
            cwd=request["cwd"],
            env=environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    finally:
        os.close(stdin)


def _open_content(content):
    """Return a descriptor that reads this content: a pipe if it fits, as programs expect, else a file without a name."""
    if len(content) <= select.PIPE_BUF:
        reader, writer = os.pipe()
        os.write(writer, content)
        os.close(writer)
        return reader
    path = os.path.join(RUNS_DIRECTORY, f"stdin-{os.getpid()}")
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    os.unlink(path)
    with open(os.dup(descriptor), "wb") as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _collect(child, outputs, request, result, started):
    """Record output until the program has ended, and its exit code. Kill the whole tree of processes at the timeout."""
    streams = {child.stdout.fileno(): outputs[0], child.stderr.fileno(): outputs[1]}
    poll = select.poll()
    for descriptor in streams:
        os.set_blocking(descriptor, False)
        poll.register(descriptor, select.POLLIN)
    deadline = started + request["timeout"]
    pause = 0.002
    while True:
        remaining = deadline - time.monotonic()
        poll.poll(1000 * max(min(remaining, pause), 0))
        pause = min(2 * pause, MAX_PAUSE_SECONDS)
        has_exited = child.poll() is not None  # before the last output is read
        for descriptor, output in list(streams.items()):
            if not output.read_pipe(descriptor):
                poll.unregister(descriptor)
                del streams[descriptor]
        if has_exited:
            code = child.returncode
            result["exit_code"] = code if code >= 0 else 128 - code
            return
        if remaining <= 0:
            result["timed_out"] = True
            _kill(request["env"]["LEASEHOLD_RUN"], child)
            for descriptor, output in streams.items():
                output.read_pipe(descriptor)
            result["exit_code"] = KILLED_EXIT_CODE
            return


def _kill(mark, child):
    import reap

    with contextlib.suppress(TimeoutError):
        reap.kill_tree(mark)
    child.kill()
    child.wait()


class _ForkedFiles:
    """Operation of files.py in a fork of this process, which starts faster than another Python."""

    def __init__(self, words, stdin):
        self.returncode = None
        (self.stdout, out), (self.stderr, err) = (_open_pipe() for _ in range(2))
        self.pid = os.fork()
        if self.pid == 0:
            _operate(words, stdin, out, err)
        os.close(out)
        os.close(err)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def kill(self):
        if self.poll() is None:
            os.kill(self.pid, 9)

    def wait(self):
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _open_pipe():
    reader, writer = os.pipe()
    return os.fdopen(reader, "rb", buffering=0), writer


def _operate(words, stdin, out, err):
    code = 1
    try:
        for target, descriptor in enumerate((stdin, out, err)):
            os.dup2(descriptor, target)
        os.closerange(3, 256)
        import files

        code = files.main(words)
        sys.stdout.flush()
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
    finally:
        os._exit(code)


class _Output:
    """File with the first `cap` bytes of a stream."""

    def __init__(self, path, cap):
        self.file = open(path, "wb", buffering=0)  # noqa: SIM115 - open until the keeper ends
        self.cap, self.size, self.dropped = cap, 0, 0

    def read_pipe(self, descriptor):
        """Record available output. Return False at the end of the output."""
        for _ in range(16):
            try:
                chunk = os.read(descriptor, READ_BYTES)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self.add(chunk)
        return True

    def add(self, chunk):
        kept = chunk[: max(self.cap - self.size, 0)]
        with contextlib.suppress(OSError):  # a full disk: the rest of the output is dropped
            written = 0
            while written < len(kept):
                written += self.file.write(kept[written:])
            self.size += written
            self.dropped += len(chunk) - written
            return
        self.dropped += len(chunk)


VERBS = {"run": run, "follow": follow, "join": join, "kill": kill, "restart": restart, "connect": connect}


def main(argv):
    """Execute one request and print its response. Return the exit code."""
    if argv[0].startswith("@"):
        with open(argv[0][1:], "rb") as file:
            content = file.read()
        os.unlink(argv[0][1:])
    else:
        content = base64.b64decode(argv[0])
    request = json.loads(content)
    response = VERBS[request["verb"]](request)
    print(f"\n{RESPONSE_PREFIX}{json.dumps(response)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
