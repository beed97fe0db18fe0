"""Console pages of environments: agents, board and play-by-play, which htmx updates while the environment is open."""

import json
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib.admin.utils import quote, unquote
from django.db.models import Count, Q
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import path, reverse
from django.utils.decorators import method_decorator
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe
from django.views.decorators.cache import never_cache
from unfold.decorators import display

from billing.admin.formatting import format_money, format_money_aligned
from leases import leasing
from leases.admin.coding_panel import build_coding_panel
from leases.admin.environment_actions import (
    END_ACTION,
    OPEN_ACTION,
    PARTICIPANTS_ACTION,
    PHASE_ACTION,
    RESTRICT_ACTION,
    START_ACTION,
    OutcomeForm,
)
from leases.admin.environment_creation import CREATE_ENVIRONMENT_ACTION
from leases.admin.environment_secrets import ISSUE_SECRET_ACTION, build_secret_fields
from leases.admin.lease_grants import GRANT_IN_ENVIRONMENT_ACTION
from leases.admin.leases import render_lease_end
from leases.admin.stop_actions import STOP_ENVIRONMENT_ACTION
from leases.admin.timeline import render_turn_status
from leases.atproto.models import AtprotoRecord, RecordStatus
from leases.environments import boards, play
from leases.environments.boards.base import Board, Player, UnreadableState
from leases.environments.models import Environment
from leases.models import Lease, LeaseStatus, Turn
from leases.projects.models import DEFAULT_PROJECT_ID
from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_changelist_url,
    format_duration,
    render_admin_link,
    render_badge,
    render_time_ago,
    render_timestamp,
    render_two_lines,
)
from sandboxes.admin.base.model_admin import ReadOnlyModelAdmin, build_all_fields_fieldset
from sandboxes.db import database_time

MAX_MOVES = 60  # on one page of the play-by-play
MAX_SHOWN_PARTICIPANTS = 5
MAX_COLOURED_MEMBERS = 12  # whose player is read from the state of a turn
STOP_POLLING = 286  # status on which htmx stops
STATUS_BADGES = {"created": "cold", "open": "active", "ended": "expired"}


@dataclass(frozen=True)
class MoveRow:
    """Line of the play-by-play."""

    number: int
    href: str
    turn_href: str
    at: datetime
    agent: str
    player: Player | None
    action: str
    skip_reason: str
    duration: str
    cost: str
    in_progress: bool
    shown: bool  # its state is on the board


@dataclass(frozen=True)
class AgentRow:
    """Agent with a lease of the environment, past ones included."""

    agent: str
    did: str
    player: Player | None
    lease: SafeString
    turns: play.TurnTotals
    cost: str


@admin.register(Environment)
class EnvironmentAdmin(ReadOnlyModelAdmin):
    list_display = ["name", "status_badge", "agents", "lasted", "started"]
    list_filter = ["type", "project"]
    list_select_related = ["type", "project"]
    search_fields = ["pk__startswith"]
    search_help_text = "Environment (prefix)"
    ordering = ["-created_at", "-pk"]
    list_tabs = {
        "open": ListTab(
            "Open",
            "No open environments. Create one, or the first lease of an agent in an environment creates it.",
            lambda now: Q(ended_at__isnull=True),
        ),
        "ended": ListTab("Ended", "No ended environments yet.", lambda now: Q(ended_at__isnull=False)),
        "all": ListTab("All", "No environments yet. Create one, or the first lease of an agent in an environment creates it."),
    }
    fieldsets = build_all_fields_fieldset(
        "id", "type", "phase", "created_at", "started_at", "ended_at", "end_reason", "project", "open_to_project"
    )
    change_form_outer_before_template = "admin/leases/environment/page.html"
    row_actions = {
        "grant_lease": GRANT_IN_ENVIRONMENT_ACTION,
        "start": START_ACTION, "set_phase": PHASE_ACTION, "participants": PARTICIPANTS_ACTION,
        "open_to_project": OPEN_ACTION, "restrict": RESTRICT_ACTION, "issue_secret": ISSUE_SECRET_ACTION,
        "stop": STOP_ENVIRONMENT_ACTION, "end": replace(END_ACTION, form=OutcomeForm),
    }  # fmt: skip
    bulk_actions = {"end_all": END_ACTION}
    create_actions = {"create": CREATE_ENVIRONMENT_ACTION}

    @display(description="Environment")
    def name(self, row: Environment) -> SafeString:
        return render_two_lines(row.pk, row.type_id)

    @display(description="State")
    def status_badge(self, row: Environment) -> SafeString:
        return render_two_lines(render_status(row), row.phase if row.status == "open" else row.end_reason)

    @display(description="Agents")
    def agents(self, row: Environment) -> str:
        return ", ".join(getattr(row, "agent_dids", [])) or "–"

    @display(description="Duration")
    def lasted(self, row: Environment) -> str:
        return _format_lasted(row, database_time.now())

    @display(description="Created")
    def started(self, row: Environment) -> SafeString | str:
        return render_time_ago(row.created_at)

    def annotate_rows(self, rows: list[Environment]) -> None:
        agents: dict[str, list[str]] = {}
        leases = Lease.objects.filter(environment_id__in=[row.pk for row in rows]).order_by("agent_did")
        for environment_id, did in leases.values_list("environment_id", "agent_did").distinct()[:1000]:
            agents.setdefault(environment_id, []).append(did)
        for row in rows:
            row.agent_dids = agents.get(row.pk, [])  # type: ignore[attr-defined]

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Environment | None:
        # PostgreSQL refuses NUL in a parameter.
        return None if "\0" in object_id else super().get_object(request, object_id, from_field)

    def get_row_url(self, row: Any) -> str:
        return reverse("admin:leases_environment_change", args=[quote(row.pk)])

    def get_urls(self) -> list[Any]:
        live = path("<path:object_id>/live/", self.admin_site.admin_view(self.live_fragment), name="leases_environment_live")
        return [live, *super().get_urls()]

    @method_decorator(never_cache)
    def live_fragment(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Render the part of the page that changes, which htmx fetches. On status 286 htmx stops polling."""
        row = self.get_object(request, unquote(object_id))
        if row is None or not self.has_view_permission(request, row):
            raise Http404
        context = self.get_page_context(request, row)
        status = STOP_POLLING if row.ended_at else 200
        return render(request, "admin/leases/environment/live.html", context, status=status)

    def get_page_context(self, request: HttpRequest, row: Environment) -> dict[str, Any]:
        return build_page(row, parse_turn(request, "turn"), parse_turn(request, "until"), now=database_time.now())


def build_page(row: Environment, turn_id: int | None, until_id: int | None, *, now: datetime) -> dict[str, Any]:
    """Build the context of an environment's page: totals, board, agents, play-by-play."""
    members = play.list_members(Lease.objects.all(), row.pk)
    shown = play.find_shown_turn(members, turn_id)
    until = Turn.objects.filter(pk=until_id, lease__in=members).first() if until_id else None
    moves = play.list_moves(members, limit=MAX_MOVES + 1, until=until)
    players = _find_players(row, members)
    url = reverse("admin:leases_environment_change", args=[quote(row.pk)])
    live_url = reverse("admin:leases_environment_live", args=[quote(row.pk)])
    query = f"?{urlencode(chosen)}" if (chosen := {k: v for k, v in (("turn", turn_id), ("until", until_id)) if v}) else ""
    counts, costs = play.count_turns(members), play.calculate_costs(members)
    return {
        "facts": _build_facts(row, members, counts, costs, now=now),
        "live_url": f"{live_url}{query}",
        "is_live": row.ended_at is None,
        "page_url": url,
        "moves": [_build_move_row(row, move, players, shown, url) for move in moves[:MAX_MOVES]],
        "older": f"{url}?until={moves[MAX_MOVES].turn.pk}" if len(moves) > MAX_MOVES else "",
        "is_past": bool(turn_id or until_id),
        "agents": [_build_agent_row(lease, players, counts, costs, now=now) for lease in members],
        "coding": build_coding_panel(row),
        **_build_board(row, shown, members, url),
    }


def _build_facts(
    row: Environment, members: list[Lease], counts: dict[Any, play.TurnTotals], costs: dict[Any, play.Costs], *, now: datetime
) -> list[SummaryField]:
    turns = sum(each.turns for each in counts.values())
    skipped = sum(each.skipped for each in counts.values())
    total = play.sum_costs(costs)
    active = sum(lease.status == LeaseStatus.ACTIVE and lease.expires_at > now for lease in members)
    return [
        SummaryField("State", render_status(row), note=row.end_reason.replace("condition:", "condition ") or row.phase),
        SummaryField(
            "Environment type", render_admin_link("leases_environmenttype", row.type.pk, row.type_id),
            note="" if row.project_id == DEFAULT_PROJECT_ID else f"project {row.project}",
        ),
        _build_access_field(row),
        *build_secret_fields(row, now=now),
        SummaryField("Duration", _format_lasted(row, now), note=render_timestamp(row.started_at or row.created_at)),
        SummaryField(
            "Agents", len({lease.agent_did for lease in members}), note=f"{active} active",
            href=build_changelist_url("leases_lease", slice="history", q=row.pk),
        ),
        SummaryField(
            "Turns", f"{turns:,}", note=format_html('<span class="lh-alarm">{} skipped</span>', skipped) if skipped else ""
        ),
        SummaryField(
            "Playing time", format_duration(play.measure_playing_time(members)) if turns else "–", note="first to last turn"
        ),
        SummaryField("Model calls", f"{format_money(total.model_calls)} USD", note="up to now"),
        SummaryField(
            "Total cost", f"{format_money(total.total)} USD", note=str(total.uncertainty) or "cost records, derived hourly"
        ),
        *_build_record_fact(row),
        *([SummaryField("Outcome", _format_outcome(row))] if row.outcome is not None else []),
    ]  # fmt: skip


def _build_access_field(row: Environment) -> SummaryField:
    if row.open_to_project:
        return SummaryField("Access", "every agent", note=f"of the project {row.project}")
    agents = list(row.participants.values_list("agent_did", flat=True)[: MAX_SHOWN_PARTICIPANTS + 1])
    more = " and more" if len(agents) > MAX_SHOWN_PARTICIPANTS else ""
    listed = ", ".join(agents[:MAX_SHOWN_PARTICIPANTS])
    return SummaryField("Access", "participants only", note=f"{listed}{more}" if agents else "none yet: add an agent")


def _build_record_fact(row: Environment) -> list[SummaryField]:
    if not row.type.turn_collection:
        return []
    found = AtprotoRecord.objects.filter(lease__environment_id=row.pk).order_by()
    counts = dict(found.values_list("status").annotate(Count("pk")))
    others = ", ".join(f"{counts[name]:,} {name}" for name in (RecordStatus.PENDING, RecordStatus.FAILED) if name in counts)
    url = build_changelist_url("leases_atprotorecord", slice="all", environment=row.pk)
    return [SummaryField("Records created", f"{counts.get(RecordStatus.CREATED, 0):,}", note=others, href=url)]


def _format_outcome(row: Environment) -> str:
    outcome = row.outcome
    return boards.truncate(outcome if isinstance(outcome, str) else json.dumps(outcome, ensure_ascii=False))


def _build_board(row: Environment, turn: Turn | None, members: list[Lease], url: str) -> dict[str, Any]:
    if turn is None:
        return {"shown": None}
    before, after = play.find_neighbours(members, turn)
    board, outline = draw_turn(row.type_id, turn)
    return {
        "shown": turn,
        "shown_action": boards.describe_action(row.type_id, turn.action) if turn.answer and not turn.skipped else "",
        "shown_status": render_turn_status(turn),
        "board": board,
        "board_svg": mark_safe(board.svg) if board else "",  # noqa: S308 - serialized by xml.etree, see Board
        "outline": outline,
        "previous": f"{url}?turn={before}" if before else "",
        "next": f"{url}?turn={after}" if after else "",
    }


def draw_turn(environment_type: str, turn: Turn) -> tuple[Board | None, str]:
    """Return the board of a turn's state, or the state as text if its environment type has no renderer that reads it."""
    if not turn.state:
        return None, ""
    state = json.loads(turn.state)
    renderer = boards.find_renderer(environment_type)
    try:
        return (renderer.draw(state, turn.action), "") if renderer else (None, boards.outline(state))
    except UnreadableState:
        return None, boards.outline(state)


def _find_players(row: Environment, members: list[Lease]) -> dict[Any, Player]:
    """Return the player of each member by lease, from the state of one turn of the lease."""
    renderer = boards.find_renderer(row.type_id)
    if renderer is None:
        return {}
    found = {}
    for lease in members[:MAX_COLOURED_MEMBERS]:
        state = Turn.objects.filter(lease=lease).exclude(state="").order_by("number").values_list("state", flat=True).first()
        if state and (player := renderer.find_player(json.loads(state))):
            found[lease.pk] = player
    return found


def _build_move_row(row: Environment, move: play.Move, players: dict[Any, Player], shown: Turn | None, url: str) -> MoveRow:
    turn = move.turn
    return MoveRow(
        number=turn.number,
        href=f"{url}?turn={turn.pk}",
        turn_href=reverse("admin:leases_turn_change", args=[turn.pk]),
        at=turn.started_at,
        agent=format_agent(move.lease.agent_did),
        player=players.get(move.lease.pk),
        action="" if turn.skipped or not turn.answer else boards.describe_action(row.type_id, turn.action),
        skip_reason=boards.truncate(move.skip_reason or "no reason") if turn.skipped else "",
        duration=format_duration(move.duration) if move.duration is not None else "",
        cost=format_money_aligned(move.model_cost) if move.model_cost else "",
        in_progress=turn.ended_at is None,
        shown=shown is not None and shown.pk == turn.pk,
    )


def _build_agent_row(
    lease: Lease, players: dict[Any, Player], counts: dict[Any, play.TurnTotals], costs: dict[Any, play.Costs], *, now: datetime
) -> AgentRow:
    leasing.apply_elapsed_clock(lease, now)
    spent = costs[lease.pk]
    return AgentRow(
        agent=format_agent(lease.agent_did),
        did=lease.agent_did,
        player=players.get(lease.pk),
        lease=render_two_lines(
            render_admin_link("leases_lease", lease.pk, render_badge(lease.status)),
            format_html("{} {} {}", "" if lease.ended_at else "ends", render_lease_end(lease, now), _format_reason(lease)),
        ),
        turns=counts.get(lease.pk, play.TurnTotals()),
        cost=_format_cost(max(spent.total, spent.model_calls)),
    )


def _format_reason(lease: Lease) -> str:
    return lease.end_reason.replace("condition:", "by ")


def _format_cost(amount: Decimal) -> str:
    return format_money_aligned(amount) if amount else "–"


def _format_lasted(row: Environment, now: datetime) -> str:
    if row.started_at is None:
        return "not started"
    return format_duration(max((row.ended_at or now) - row.started_at, timedelta(0)))


def format_agent(did: str) -> str:
    """Shorten a DID to its last part, for lines that name the agent many times."""
    return did.rpartition(":")[2]


def render_status(row: Environment) -> SafeString:
    return render_badge(STATUS_BADGES[row.status], row.status)


def parse_turn(request: HttpRequest, name: str) -> int | None:
    text = request.GET.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None
