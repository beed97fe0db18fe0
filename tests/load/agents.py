"""Agents under load: each joins, works, sleeps, forks and releases through the HTTP API, and verifies what it has written.

Each command appends a line of its own to a file in /workspace and to a file in /data. A line is acknowledged if the command
was answered with exit code 0, and uncertain if the API says that the outcome is unknown. Readings are compared with both."""

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tests.load.client import Answer, BudgetExhausted, Client, LeaseEnded, Stuck
from tests.load.ledger import Findings, Ledger

CLOCKS = {"ttl_seconds": 900, "sleep_after": "10s"}
FORKED_SHARE = 0.7  # of lives after a release
REFUSED_PAUSE_SECONDS = 10.0
COMMAND_TIMEOUT_SECONDS = 20
NAP_SECONDS = (12.0, 45.0)
PAUSE_SECONDS = (0.0, 0.6)
# A sandbox in which a run is open gets no newer /data. A run whose web process was killed is open for up to two minutes.
DATA_DELAY_SECONDS, DATA_POLL_SECONDS = 150.0, 2.0
SLOW_WRITE_SHARE, SLOW_WRITE_SECONDS = 0.4, (1.0, 10.0)
WORKSPACE_LOG, SEPARATOR = "/workspace/log", "----"
CALL_MODEL = """
import json, os, urllib.request
body = json.dumps({"model": "default", "messages": [{"role": "user", "content": "hi"}]}).encode()
url, headers = os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"Content-Type": "application/json"}
request = urllib.request.Request(url, body, headers)
print(urllib.request.urlopen(request, timeout=15).status)
"""
UNKNOWN_CODES = ("outcome_unknown",)


class Agent:
    """One agent, in one thread. `run` ends after `stop` is set, when its last state is verified and its lease released."""

    def __init__(self, number: int, client: Client, findings: Findings, stop: threading.Event) -> None:
        self.did, self.name = f"did:web:agent{number}.example", f"a{number}"
        self.client, self.findings, self.stop = client, findings, stop
        self.random: random.Random = client.random
        self.lease, self.workspace = "", Ledger()
        self.data: dict[str, Ledger] = {}  # by file: two sandboxes of an agent do not write to the same file
        self.lines = self.environments = 0
        self.ended: dict[str, str] = {}  # end reasons of leases, as answered to this agent
        self.acts: dict[Callable[[], None], int] = {
            self.write: 10, self.read: 3, self.nap: 2, self.start_process: 2, self.call_model: 3, self.fork: 1, self.snapshot: 1
        }  # fmt: skip

    def run(self) -> None:
        """Live until `stop` is set. Each life begins in a new environment, or as a fork of the life before."""
        is_last = False
        while not is_last:
            is_last = self.stop.is_set()
            try:
                self._live(is_last)
            except LeaseEnded as ended:
                self.ended[self.lease] = str(ended)
            except BudgetExhausted:
                self.findings.count("requests refused by a budget")
                if self.lease and self.lease not in self.ended:
                    with suppress(LeaseEnded):
                        self._release(self.lease)
                self.stop.wait(REFUSED_PAUSE_SECONDS)
            except Exception as error:
                self._note(
                    self.findings.stuck if isinstance(error, Stuck) else self.findings.unexpected, f"{self.name}: {error}"
                )
                self.lease, self.workspace = "", Ledger()

    def _live(self, is_last: bool) -> None:
        self._begin(is_last)
        for _ in range(self.random.randint(6, 18)):
            if self.stop.is_set():
                break
            [act] = self.random.choices([*self.acts], [*self.acts.values()])
            act()
            time.sleep(self.random.uniform(*PAUSE_SECONDS))
        self.read()
        self._release(self.lease)

    def _begin(self, is_last: bool) -> None:
        """Take a lease: as a fork of the life before, whose last state must have been stored, or with an empty workspace.

        The last life verifies the life before, and so does the life after a lease that this agent did not release."""
        released = self.ended.get(self.lease) == "released"
        if self.workspace.acknowledged and (is_last or not released or self.random.random() < FORKED_SHARE):
            self.lease = self._fork(self.lease)
            self.read()
            return
        body = {"agent_did": self.did, "environment_type": "coding", **CLOCKS}
        self.lease = str(self._expect(self.client.post("join", f"/environments/{self._name_environment()}/join", body))["id"])
        self.workspace = Ledger()

    # --- acts ---------------------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Append a line in /workspace and in /data. Some commands take seconds, so that kills interrupt them."""
        line, data = self._next_line(), f"{self.lease}.log"
        seconds = self.random.uniform(*SLOW_WRITE_SECONDS) if self.random.random() < SLOW_WRITE_SHARE else 0
        answer = self._exec("write", f"echo {line} >>{WORKSPACE_LOG} && sleep {seconds:.1f} && echo {line} >>/data/{data}")
        self._settle(answer, line, self.workspace, self.data.setdefault(data, Ledger()))

    def read(self) -> None:
        """Compare /workspace and all files of the agent in /data with the ledgers."""
        self.findings.count("reads")
        until = time.monotonic() + DATA_DELAY_SECONDS
        while (files := self._read_files()) and self._is_data_outdated(files) and time.monotonic() < until:
            self.findings.count("reads of /data repeated")
            time.sleep(DATA_POLL_SECONDS)
        if files is None:
            return
        self.findings.compare(f"{self.name} {self.lease} /workspace", self.workspace, files[WORKSPACE_LOG])
        for name, ledger in self.data.items():
            self.findings.compare(f"{self.name} {self.lease} /data/{name}", ledger, files.get(f"/data/{name}", ""))

    def _read_files(self) -> dict[str, str] | None:
        """Return the contents of the log in /workspace and of the files in /data by path, or None without an answer."""
        script = f"cat {WORKSPACE_LOG} 2>/dev/null; for file in /data/*.log; do echo {SEPARATOR} $file; cat $file; done; true"
        answer = self._exec("read", script)
        if not _has_succeeded(answer):
            return None
        workspace, *sections = answer.body["stdout"].split(SEPARATOR)
        contents = {name: text for name, _, text in (section.strip().partition("\n") for section in sections)}
        return {WORKSPACE_LOG: workspace, **contents}

    def _is_data_outdated(self, files: dict[str, str]) -> bool:
        """Return whether lines are missing that other sandboxes of the agent have written to /data."""
        others = {name: ledger for name, ledger in self.data.items() if name != f"{self.lease}.log"}
        return any(ledger.acknowledged - {*files.get(f"/data/{name}", "").split()} for name, ledger in others.items())

    def nap(self) -> None:
        """Leave the sandbox unused, so that it may be evicted. Then read a file, which wakes nothing."""
        self.stop.wait(self.random.uniform(*NAP_SECONDS))
        answer = self.client.get("file", f"/leases/{self.lease}/files/log")
        if answer.ok:
            self.findings.compare(f"{self.name} {self.lease} file", self.workspace, str(answer.body))
        elif answer.code != "file_not_found" or self.workspace.acknowledged:
            self._note(self.findings.unexpected, f"{self.name} {self.lease} file: {answer}")

    def start_process(self) -> None:
        """Start a background process that appends a line."""
        line = self._next_line()
        argv = ["sh", "-c", f"echo {line} >>{WORKSPACE_LOG} && echo written; sleep 5"]
        body = {"argv": argv, "wait_for": "written", "wait_seconds": 10}
        answer = self.client.post("process", f"/leases/{self.lease}/processes", body)
        if answer.ok and answer.body["found"]:
            self.workspace.acknowledged.add(line)
        else:
            self.workspace.uncertain.add(line)
            self._require_known(answer)

    def call_model(self) -> None:
        """Call a model from the sandbox through the egress proxy."""
        answer = self._exec("model", "exec python3 -", stdin=CALL_MODEL)
        self.findings.count("model calls" if _has_succeeded(answer) else "model calls failed")

    def snapshot(self) -> None:
        answer = self.client.post("snapshot", f"/leases/{self.lease}/snapshots")
        if answer.code != "no_snapshot" or self.workspace.acknowledged:
            self._require_known(answer)

    def fork(self) -> None:
        """Fork the lease, verify the copy, write to it and release it. The agent goes on with the first lease."""
        source, ledger = self.lease, self.workspace
        try:
            self.lease, self.workspace = self._fork(source), ledger.copy()
            self.read()
            self.write()
            self.read()
            self._release(self.lease)
        except LeaseEnded as ended:
            if self.lease == source:
                raise
            self.ended[self.lease] = str(ended)
        except BudgetExhausted:
            if self.lease != source:
                with suppress(LeaseEnded):
                    self._release(self.lease)
            raise
        finally:
            self.lease, self.workspace = source, ledger

    # --- requests -----------------------------------------------------------------------------------------------------

    def _exec(self, kind: str, script: str, stdin: str = "") -> Answer:
        body: dict[str, Any] = {"argv": ["sh", "-c", script], "timeout_seconds": COMMAND_TIMEOUT_SECONDS, "stdin": stdin}
        answer = self.client.post(kind, f"/leases/{self.lease}/exec", body)
        self._require_known(answer)
        return answer

    def _settle(self, answer: Answer, line: str, *ledgers: Ledger) -> None:
        is_acknowledged = _has_succeeded(answer)
        self.findings.count("writes acknowledged" if is_acknowledged else "writes uncertain")
        if is_acknowledged and answer.body.get("note"):
            self.findings.count("writes acknowledged with a warning")
        for ledger in ledgers:
            (ledger.acknowledged if is_acknowledged else ledger.uncertain).add(line)

    def _fork(self, source: str) -> str:
        body = {"environment_id": self._name_environment(), **CLOCKS}
        return str(self._expect(self.client.post("fork", f"/leases/{source}/fork", body))["id"])

    def _release(self, lease: str) -> None:
        self._expect(self.client.post("release", f"/leases/{lease}/release"))
        self.ended[lease] = "released"

    def _name_environment(self) -> str:
        self.environments += 1
        return f"{self.name}-e{self.environments}"

    def _next_line(self) -> str:
        self.lines += 1
        return f"{self.name}-{self.lines}"

    def _expect(self, answer: Answer) -> dict[str, Any]:
        if not answer.ok:
            raise RuntimeError(f"{self.lease}: {answer}")
        return dict(answer.body)

    def _require_known(self, answer: Answer) -> None:
        """Record an answer that a client does not expect."""
        if not answer.ok and answer.code not in UNKNOWN_CODES:
            self._note(self.findings.unexpected, f"{self.name} {self.lease}: {answer}")

    def _note(self, findings: list[str], text: str) -> None:
        with self.findings.lock:
            findings.append(text)


def _has_succeeded(answer: Answer) -> bool:
    return answer.ok and answer.body["exit_code"] == 0
