"""One-shot runs through the API."""

import base64
import io
import tarfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import F
from django.utils import timezone

from leases.models import IdempotentRequest, Lease
from sandboxes.models import Pool, Run, Sandbox
from sandboxes.providers.errors import Unavailable
from sandboxes.sweeps import passes
from tests.api.conftest import ADA, BOB, ApiClient, assert_refused
from tests.support.storage.tars import other, pack
from tests.unit.leases.test_one_shot import assert_nothing_is_left, pack_tar, unpack_tar

pytestmark = pytest.mark.django_db
DEVICE_TAR = base64.b64encode(pack(other("null", tarfile.CHRTYPE)).getvalue()).decode()


@pytest.fixture
def body(pool: Pool) -> Callable[..., dict[str, Any]]:
    def make(*argv: str, **fields: Any) -> dict[str, Any]:
        return {"agent_did": ADA, "argv": list(argv or ["true"]), "pool": pool.name} | fields

    return make


def encode_tar(**files: str) -> str:
    return base64.b64encode(pack_tar(**files).getvalue()).decode()


def test_a_run_returns_its_result_and_leaves_nothing(ada: ApiClient, body, pool, memory) -> None:
    response = ada.post("runs", body("sh", "-c", "cat; echo oops >&2; exit 3", stdin="in"))
    result = response.json()
    assert (response.status_code, result["outcome"], result["exit_code"]) == (200, "failed", 3)
    assert (result["stdout"], result["stderr"], result["truncated"], result["note"]) == ("in", "oops\n", False, "")
    assert (result["cleaned_up"], result.pop("workspace")) == (True, None)
    assert ada.get(f"runs/{result['run_id']}").json() == result
    assert Lease.objects.get(pk=result["lease_id"]).environment_id == f"run-{result['run_id']}"
    assert_nothing_is_left(pool, memory)


def test_input_limits_and_workspace_are_passed_on_and_bytes_survive_in_base64(ada: ApiClient, body) -> None:
    raw = bytes(range(256))
    payload = body(
        "sh", "-c", "cat; cat a; printenv WORD; echo oops >&2; echo new >b", stdin=base64.b64encode(raw).decode(),
        env={"WORD": "s3cret"}, limits={"memory_mib": 64}, environment_type="coding", workspace=encode_tar(a="1"),
        return_workspace=True,
    )  # fmt: skip
    result = ada.post("runs?encoding=base64", payload).json()
    assert [base64.b64decode(result[name]) for name in ("stdout", "stderr")] == [raw + b"1s3cret\n", b"oops\n"]
    assert unpack_tar(io.BytesIO(base64.b64decode(result["workspace"]))) == {"a": "1", "b": "new\n"}
    assert (Sandbox.objects.get().memory_mib, Lease.objects.get().environment_type_id) == (64, "coding")
    assert "s3cret" not in str(Run.objects.values("argv", "env_names", "note"))


@pytest.mark.parametrize(
    ("llm_proxy", "expected"), [(None, True), ({}, True), ({"enabled": True}, True), ({"enabled": False}, False)]
)
def test_a_run_is_started_with_or_without_the_model_proxy(ada: ApiClient, body, llm_proxy: Any, expected: bool) -> None:
    assert ada.post("runs", body(llm_proxy=llm_proxy)).status_code == 200
    assert Sandbox.objects.get().llm_enabled is expected


def test_the_account_and_the_attempt_of_model_calls_are_not_the_callers(ada: ApiClient, body, memory) -> None:
    for name, value in {"billing_account": "acme", "attempt": 0, "enabled": "no"}.items():
        assert_refused(ada, "POST", "runs", body(llm_proxy={name: value}), 400, f"llm_proxy.{name}")
    assert memory.calls == []


@pytest.mark.parametrize("workspace", [encode_tar(**{"../out": "x"}), encode_tar(**{"/out": "x"}), DEVICE_TAR])
def test_an_unsafe_workspace_is_refused_and_nothing_runs(ada: ApiClient, body, memory, workspace: str) -> None:
    assert_refused(ada, "POST", "runs", body(workspace=workspace), 400, "workspace")
    assert memory.calls == []


def test_a_key_runs_for_its_own_agents_only(ada: ApiClient, bob: ApiClient, operator: ApiClient, body, lease) -> None:
    assert_refused(ada, "POST", "runs", body(agent_did=BOB), 403)
    result = bob.post("runs", body(agent_did=BOB)).json()
    assert operator.get(f"runs/{result['run_id']}").json()["outcome"] == "ok"
    assert ada.get(f"runs/{result['run_id']}").status_code == 404
    assert ada.get(f"runs/{lease['id']}").status_code == 404  # a lease that is no run


def test_without_capacity_a_run_is_refused_and_can_be_sent_again(ada: ApiClient, body, pool, memory) -> None:
    Pool.objects.filter(pk=pool.pk).update(capacity=0)
    response = ada.post("runs", body(), idempotency_key="k1")
    assert (response.status_code, response.json()["code"]) == (503, "capacity_exhausted")
    assert int(response["Retry-After"]) > 0
    Pool.objects.filter(pk=pool.pk).update(capacity=1)
    assert ada.post("runs", body(), idempotency_key="k1").json()["outcome"] == "ok"
    assert_nothing_is_left(pool, memory)


def test_new_runs_are_limited_as_new_leases_are(ada: ApiClient, body, settings) -> None:
    settings.CREATES_PER_MINUTE = 1
    assert ada.post("runs", body()).status_code == 200
    assert (ada.post("runs", body()).status_code, Lease.objects.count()) == (429, 1)


@pytest.mark.parametrize(("argv", "answers"), [("echo hi", True), ("false", True), ("true", False)])
def test_a_repeated_idempotency_key_runs_once(ada: ApiClient, body, memory, argv: str, answers: bool) -> None:
    if not answers:
        memory.fail("exec", Unavailable("timed out"), times=1)  # the command may have started
    first, again = (ada.post("runs", body(*argv.split()), idempotency_key="k1") for _ in range(2))
    assert (again.content, again["Idempotent-Replayed"]) == (first.content, "true")
    assert [verb for verb, _ in memory.calls].count("exec") == Lease.objects.count() == 1


@pytest.mark.parametrize("step", ["run opened", "command ended", "run answered", "run released", "destroy claimed", "acted"])
def test_a_run_of_a_dead_process_is_not_repeated_and_can_be_read(ada: ApiClient, body, crash_at, step: str, memory) -> None:
    with crash_at(step):
        ada.post("runs", body("echo", "hi"), idempotency_key="k1")
    IdempotentRequest.objects.update(deadline_at=F("deadline_at") - timedelta(hours=1))
    if step in ("run opened", "command ended", "run answered"):
        assert ada.post("runs", body("echo", "hi"), idempotency_key="k1").json()["code"] == "idempotency_in_progress"
        Run.objects.update(released=True)  # as the start of the next process does
        passes.recover_stalled(now=timezone.now())
        ada.post(f"leases/{Lease.objects.get().pk}/release")  # as the end of its lifetime does
    response = ada.post("runs", body("echo", "hi"), idempotency_key="k1")
    if step == "run opened":
        assert (response.status_code, response.json()["code"]) == (409, "outcome_unknown")
    else:
        assert (response.status_code, response.json()["stdout"], response.json()["outcome"]) == (200, "hi\n", "ok")
    assert [verb for verb, _ in memory.calls].count("exec") <= 1
    assert ada.get(f"runs/{response.json()['run_id']}").status_code == 200
    assert Lease.objects.count() == 1
