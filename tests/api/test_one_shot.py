"""One-shot runs through the API."""

import base64
import io
import tarfile
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import F

from leases.models import IdempotentRequest, Lease
from sandboxes.models import Pool, Run, Sandbox
from sandboxes.providers.base import Rejected, Unavailable
from sandboxes.providers.memory import MemoryProvider
from tests.api.conftest import ADA, BOB, ApiClient, assert_refused
from tests.conftest import SimulatedCrash
from tests.unit.leases.test_one_shot import assert_nothing_is_left, pack_tar, unpack_tar

pytestmark = pytest.mark.django_db


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
    assert (result["cleaned_up"], result["workspace"]) == (True, None)
    assert Lease.objects.get(pk=result["lease_id"]).environment_id == f"run-{result['run_id']}"
    assert_nothing_is_left(pool, memory)


@pytest.mark.parametrize(
    ("argv", "outcome"),
    [(["true"], "ok"), (["false"], "failed"), (["sleep", "3600"], "timeout"), (["oom"], "oom_killed")],
)
def test_each_outcome_is_named_in_the_response_and_by_get(ada: ApiClient, body, argv: list[str], outcome: str) -> None:
    result = ada.post("runs", body(*argv, limits={"timeout_seconds": 60})).json()
    assert result["outcome"] == outcome
    del result["workspace"]
    assert ada.get(f"runs/{result['run_id']}").json() == result


def test_a_sandbox_that_does_not_start_is_a_result(ada: ApiClient, body, pool, memory: MemoryProvider) -> None:
    memory.fail("create", Rejected("no such image"))
    result = ada.post("runs", body()).json()
    assert (result["outcome"], result["exit_code"], result["cleaned_up"]) == ("container_failed", None, True)
    assert "no such image" in result["note"]
    assert ada.get(f"runs/{result['run_id']}").json()["outcome"] == "container_failed"
    assert_nothing_is_left(pool, memory)


def test_a_workspace_is_unpacked_and_returned(ada: ApiClient, body) -> None:
    payload = body("sh", "-c", "cat a; echo new >b", workspace=encode_tar(a="1"), return_workspace=True)
    result = ada.post("runs", payload).json()
    assert (result["outcome"], result["stdout"]) == ("ok", "1")
    assert unpack_tar(io.BytesIO(base64.b64decode(result["workspace"]))) == {"a": "1", "b": "new\n"}


def test_bytes_survive_in_base64(ada: ApiClient, body) -> None:
    raw = bytes(range(256))
    result = ada.post("runs?encoding=base64", body("cat", stdin=base64.b64encode(raw).decode())).json()
    assert base64.b64decode(result["stdout"]) == raw


def test_memory_type_and_environment_are_as_requested(ada: ApiClient, body) -> None:
    payload = body("printenv", "WORD", env={"WORD": "s3cret"}, limits={"memory_mib": 64}, environment_type="coding")
    result = ada.post("runs", payload).json()
    assert result["stdout"] == "s3cret\n"
    assert (Sandbox.objects.get().memory_mib, Lease.objects.get().environment_type_id) == (64, "coding")
    assert "s3cret" not in str(Run.objects.values("argv", "env_names", "note"))


def encode_device_tar() -> str:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        device = tarfile.TarInfo("null")
        device.type = tarfile.CHRTYPE
        tar.addfile(device)
    return base64.b64encode(out.getvalue()).decode()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"agent_did": None}, "agent_did"), ({"agent_did": "ada"}, "agent_did"), ({"argv": []}, "argv"),
        ({"argv": "true"}, "argv"), ({"argv": ["a\0"]}, "argv"), ({"stdin": 5}, "stdin"), ({"env": {"A=": "x"}}, "env"),
        ({"env": {"LEASEHOLD_RUN": "x"}}, "env"), ({"cwd": "here"}, "cwd"), ({"pool": "no-such-pool"}, "pool"),
        ({"environment_type": "chess"}, "environment_type"), ({"return_workspace": "yes"}, "return_workspace"),
        ({"workspace": 5}, "workspace"), ({"workspace": "?"}, "workspace"), ({"workspace": ""}, "workspace"),
        ({"workspace": "AAAA"}, "workspace"), ({"workspace": encode_tar(**{"../out": "x"})}, "workspace"),
        ({"workspace": encode_tar(**{"/out": "x"})}, "workspace"), ({"workspace": encode_device_tar()}, "workspace"),
        ({"limits": 5}, "limits"),
        *[({"limits": {"timeout_seconds": value}}, "limits.timeout_seconds") for value in (0, -1, "60", True, 1.5, 3601)],
        *[({"limits": {"memory_mib": value}}, "limits.memory_mib") for value in (0, 15, -1, "64", True, 4097, 10**400)],
    ],
    ids=lambda value: repr(value)[:60],
)  # fmt: skip
def test_invalid_input_names_the_field_and_nothing_runs(
    ada: ApiClient, body, memory, fields: dict[str, Any], field: str
) -> None:
    assert_refused(ada, "POST", "runs", body(**fields), 400, field.partition(".")[0])
    assert ada.post("runs", body(**fields)).json()["field"] == field
    assert memory.calls == []


def test_a_body_that_is_too_large_is_refused(ada: ApiClient, body) -> None:
    assert_refused(ada, "POST", "runs", body(stdin="x" * (32 << 20)), 413)


def test_a_key_runs_for_its_own_agents_only(ada: ApiClient, bob: ApiClient, operator: ApiClient, body) -> None:
    assert_refused(ada, "POST", "runs", body(agent_did=BOB), 403)
    result = bob.post("runs", body(agent_did=BOB)).json()
    assert ada.get(f"runs/{result['run_id']}").status_code == 404
    assert operator.get(f"runs/{result['run_id']}").json()["outcome"] == "ok"


def test_a_lease_that_is_no_run_is_not_found(ada: ApiClient, lease) -> None:
    assert ada.get(f"runs/{lease['id']}").status_code == 404
    assert ada.get(f"runs/{uuid.uuid4()}").status_code == 404


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


@pytest.mark.parametrize("argv", [["echo", "hi"], ["false"]])
def test_a_repeated_idempotency_key_runs_once(ada: ApiClient, body, memory, argv: list[str]) -> None:
    first, again = (ada.post("runs", body(*argv), idempotency_key="k1") for _ in range(2))
    assert (again.content, again["Idempotent-Replayed"]) == (first.content, "true")
    assert [verb for verb, _ in memory.calls].count("exec") == Lease.objects.count() == 1


def test_a_run_that_may_have_started_is_not_repeated(ada: ApiClient, body, memory) -> None:
    memory.fail("exec", Unavailable("timed out"), times=1)
    first, again = (ada.post("runs", body(), idempotency_key="k1") for _ in range(2))
    assert (first.json()["outcome"], again.content) == ("container_failed", first.content)
    assert [verb for verb, _ in memory.calls].count("exec") == 1


@pytest.mark.parametrize("step", ["run opened", "command ended", "run answered", "run released", "destroy claimed", "acted"])
def test_a_run_of_a_dead_process_is_not_repeated_and_can_be_read(
    ada: ApiClient, body, at_checkpoint, step: str, memory
) -> None:
    def die() -> None:
        raise SimulatedCrash

    at_checkpoint(step, die)
    with pytest.raises(SimulatedCrash):
        ada.post("runs", body(), idempotency_key="k1")
    IdempotentRequest.objects.update(deadline_at=F("deadline_at") - timedelta(hours=1))
    response = ada.post("runs", body(), idempotency_key="k1")
    assert (response.status_code, response.json()["code"]) == (409, "outcome_unknown")
    assert [verb for verb, _ in memory.calls].count("exec") <= 1
    assert ada.get(f"runs/{response.json()['run_id']}").status_code == 200
    assert Lease.objects.count() == 1


def test_a_real_command_runs_on_the_process_provider(ada: ApiClient, body, pool: Pool) -> None:
    Pool.objects.filter(pk=pool.pk).update(provider="process")
    script = 'cat a; echo "$WORD"; mkdir d; echo new >d/b; ls -A'
    payload = body("sh", "-c", script, env={"WORD": "there"}, workspace=encode_tar(a="1\n"), return_workspace=True)
    result = ada.post("runs", payload).json()
    assert (result["outcome"], result["stdout"], result["cleaned_up"]) == ("ok", "1\nthere\n.home\na\nd\n", True)
    assert unpack_tar(io.BytesIO(base64.b64decode(result["workspace"]))) == {"a": "1\n", "d/b": "new\n"}
