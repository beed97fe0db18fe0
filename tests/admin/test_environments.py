"""Pages of environments: board, play-by-play, members, live part and actions."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from django.test import Client

import leases.packs
from leases import turns
from leases.atproto.models import AtprotoRecord
from leases.coding.models import CodingTask, Repository
from leases.environments import lifecycle
from leases.environments.models import Environment
from leases.models import EnvironmentType, Lease, Turn
from tests.admin.conftest import NOW
from tests.conftest import MINUTE
from tests.support.console import MARKUP, WHY, count_queries, fetch, row_url

pytestmark = pytest.mark.django_db
EXAMPLE = Path(leases.packs.__file__).parent / "shipped" / "catan" / "examples" / "after-roll.json"


def play(lease: Lease, number: int, action: dict[str, object], state: dict[str, object] | None = None) -> Turn:
    EnvironmentType.objects.update(turn_argv=["echo", json.dumps(action)])
    return turns.take_turn(lease.pk, number, state or {"n": number}, now=NOW + number * MINUTE)


def load_state() -> dict[str, object]:
    content: dict[str, object] = json.loads(EXAMPLE.read_text())
    state = content.get("state", content)
    assert isinstance(state, dict)
    return state


def test_page_draws_the_board_and_tells_the_play(viewer: Client, lease: Lease) -> None:
    play(lease, 1, {"type": "BUILD_ROAD", "value": [3, 4]}, load_state())
    second = play(lease, 2, {"type": "END_TURN", "value": None}, load_state())
    EnvironmentType.objects.update(turn_argv=["sh", "-c", "echo '<b>no</b>' >&2; exit 3"])
    turns.take_turn(lease.pk, 3, load_state(), now=NOW + 3 * MINUTE)
    page = fetch(viewer, row_url(Environment.objects.get()))
    assert 'class="lh-board"' in page and "builds a road from 3 to 4" in page and "ends the turn" in page
    assert "The turn exited with code 3: &lt;b&gt;no&lt;/b&gt;" in page
    assert "<b>no</b>" not in page
    assert page.index("#3</a>") < page.index("#2</a>") < page.index("#1</a>")
    assert ">Turn 3, did:plc:ada<" in page
    assert ">Turn 2, did:plc:ada<" in fetch(viewer, f"{row_url(Environment.objects.get())}?turn={second.pk}")


def test_other_types_show_the_state_as_text(viewer: Client, grant: Callable[..., Lease]) -> None:
    lease = grant(environment="cave", environment_type="rpg")
    play(lease, 1, {"action": MARKUP}, {"room": MARKUP, "you": {"hp": 3}})
    page = fetch(viewer, row_url(Environment.objects.get(pk="cave")))
    assert "  hp: 3" in page
    assert MARKUP not in page


@pytest.mark.parametrize("state", [{"board": {}}, {"players": MARKUP}])
def test_state_that_is_no_board_is_shown_as_text(viewer: Client, lease: Lease, state: dict[str, object]) -> None:
    play(lease, 1, {}, state)
    page = fetch(viewer, row_url(Environment.objects.get()))
    assert "lh-board" not in page and 'class="lh-output"' in page


def test_live_part_is_fetched_until_the_end(viewer: Client, lease: Lease) -> None:
    row, url = Environment.objects.get(), "/admin/leases/environment/game-1/live/"
    assert f'hx-get="{url}"' in fetch(viewer, row_url(row))
    play(lease, 1, {"type": "ROLL", "value": None})
    shown = viewer.get(url)
    assert (shown.status_code, b"rolls the dice" in shown.content, b"<html" in shown.content) == (200, True, False)
    lifecycle.end("game-1", outcome="ada wins", now=NOW + MINUTE)
    ended = viewer.get(url)
    assert (ended.status_code, b"ada wins" in ended.content) == (286, True)
    assert 'hx-get="/admin/leases/environment' not in fetch(viewer, row_url(row))


def test_live_part_needs_the_permission(as_role: Callable[..., Client], lease: Lease) -> None:
    assert as_role("None").get("/admin/leases/environment/game-1/live/").status_code == 404
    assert as_role("Viewer").get("/admin/leases/environment/game-2/live/").status_code == 404


def test_operator_ends_an_environment_with_an_outcome(operator: Client, lease: Lease) -> None:
    row = Environment.objects.get()
    operator.post(row_url(row, "set_phase"), {**WHY, "phase": "trade"})
    operator.post(row_url(row, "end"), {**WHY, "outcome": "draw"})
    row.refresh_from_db()
    assert (row.phase, row.status, row.outcome, row.end_reason) == ("trade", "ended", "draw", "operator")
    lease.refresh_from_db()
    assert lease.end_reason == "condition:environment.ended"


def test_page_takes_the_same_queries_for_any_number_of_turns(viewer: Client, lease: Lease) -> None:
    url = row_url(Environment.objects.get())
    for number in (1, 2, 3):
        play(lease, number, {"type": "ROLL", "value": None})
    few = count_queries(viewer, url)
    for number in range(4, 9):
        play(lease, number, {"type": "ROLL", "value": None})
    assert count_queries(viewer, url) == few <= 30


def test_long_play_is_paged(viewer: Client, lease: Lease) -> None:
    Turn.objects.bulk_create(
        Turn(lease=lease, number=number, started_at=NOW + number * MINUTE, deadline_at=NOW, ended_at=NOW, answer="{}")
        for number in range(70)
    )
    url = row_url(Environment.objects.get())
    context = viewer.get(url).context
    assert [move.number for move in context["moves"]] == [*range(69, 9, -1)]
    assert [move.number for move in viewer.get(context["older"]).context["moves"]] == [*range(9, -1, -1)]


def create_coding_task(lease: Lease, **fields: object) -> CodingTask:
    repository = Repository.objects.create(name="calc", clone_url="/srv/git/calc.git")
    return CodingTask.objects.create(
        environment_id=lease.environment_id, repository=repository, title="Fix add", base_branch="main",
        branch="leasehold/task-1-ab12", **fields,
    )  # fmt: skip


def test_page_shows_the_coding_task_and_links_its_pull_request(viewer: Client, grant: Callable[..., Lease]) -> None:
    lease = grant(environment="task-1", environment_type="coding")
    create_coding_task(
        lease, status="proposed", head_commit="c0ffee" * 6, submissions=2, submitted_at=NOW, description=MARKUP,
        pull_request_number=7, pull_request_url="https://forge.example/owner/calc/pull/7",
    )  # fmt: skip
    page = fetch(viewer, row_url(Environment.objects.get(pk="task-1")))
    assert '<a class="lh-link" href="https://forge.example/owner/calc/pull/7" rel="noreferrer">#7</a>' in page
    assert "Fix add" in page and "leasehold/task-1-ab12" in page and "proposed" in page and MARKUP not in page


def test_page_lists_the_refusals_and_links_no_other_scheme(viewer: Client, grant: Callable[..., Lease]) -> None:
    lease = grant(environment="task-1", environment_type="coding")
    create_coding_task(
        lease, status="pushed", head_commit="c0ffee" * 6, refusals=[MARKUP, "a.py: too large"], next_poll_at=NOW,
        pull_request_url="javascript:alert(1)",
    )  # fmt: skip
    page = fetch(viewer, row_url(Environment.objects.get(pk="task-1")))
    assert "a.py: too large" in page and MARKUP not in page
    assert "javascript:alert(1)" in page and 'href="javascript' not in page


def test_page_counts_the_records_of_the_turns(viewer: Client, lease: Lease) -> None:
    EnvironmentType.objects.update(turn_collection="org.example.action")
    play(lease, 1, {"type": "END_TURN", "value": None})
    page = fetch(viewer, row_url(Environment.objects.get()))
    assert "Records created" in page and "1 pending" in page
    listing = fetch(viewer, f"/admin/leases/atprotorecord/?slice=all&environment={lease.environment_id}")
    assert "org.example.action" in listing
    record = fetch(viewer, row_url(AtprotoRecord.objects.get()))
    assert "END_TURN" in record and "org.example.action" in record
