"""Mutants: one small defect each, with the tests that are expected to fail because of the defect.

Paths of sources and tests are constants, so that a renamed file is one
changed line. Ordered by area: pool, lifecycle, runs, queue of runs, sweeps, image templates, eviction, suspension, leasing,
metering, pricing, budgets, API keys, egress."""

from tests.mutation.absence import ABSENCE_MUTANTS
from tests.mutation.mutant import Mutant

# Sources.
POOL, STARTS = "sandboxes/pool/allocation.py", "sandboxes/pool/starts.py"
LIFECYCLE, RUNS, RUN_FAILURES = "sandboxes/lifecycle.py", "sandboxes/runs/operations.py", "sandboxes/runs/failures.py"
EVICTION, DESTRUCTION, WORKSPACE = "sandboxes/eviction.py", "sandboxes/destruction.py", "sandboxes/state/workspace.py"
ADMISSION_QUEUE = "sandboxes/pool/admission_queue.py"
RUN_QUEUE, ATTEMPTS, RECORDER = "leases/queue/queue.py", "leases/queue/attempts.py", "leases/agent_runs/recorder.py"
RUN_ENDS = "sandboxes/runs/ends.py"
ABANDONED_RUNS, TEMPLATE_BUILDS = "sandboxes/runs/abandoned.py", "sandboxes/templates/builds.py"
AGENT_RUNS, SWEEP_LOG, END_WATCH = (
    "leases/agent_runs/lifecycle.py",
    "sandboxes/sweep_log.py",
    "sandboxes/sweeps/end_watch.py",
)
BACKGROUND, CLAIMS, TEST_BACKGROUND = (
    "sandboxes/background.py",
    "sandboxes/claims.py",
    "tests/unit/sandboxes/test_background.py",
)
SANDBOX_AGENT = "sandboxes/image/agent/main.py"
SUSPENSION, TEST_SUSPENSION = "sandboxes/suspension.py", "tests/unit/sandboxes/test_suspension.py"
ALLOW_LISTS, IDEMPOTENCY = "leases/allow_lists.py", "leases/api/base/idempotency.py"
RENEWAL, TEST_RENEWAL = "leases/renewal.py", "tests/unit/leases/test_renewal.py"
LEASING, AUTHENTICATION, API_KEYS = "leases/leasing.py", "leases/api/base/authentication.py", "leases/api_keys.py"
METERING, INTERVALS, PRICING = "billing/metering.py", "billing/intervals.py", "billing/pricing.py"
BUDGET_ADMISSION, BUDGET_RESERVATION, BUDGET_UPDATES = (
    "billing/budgets/admission.py",
    "billing/budgets/reservation.py",
    "billing/budgets/updates.py",
)
TEST_HOSTS = "tests/unit/sandboxes/test_hosts.py"
TEST_CALL_ADMISSION = "tests/unit/billing/test_call_admission.py"
TEST_BUDGET_TOKENS = "tests/unit/billing/test_budget_tokens.py"
AUTHORIZATION, REDACTION = "sandboxes/egress/authorization.py", "sandboxes/redaction/streams.py"
REQUEST_FILTER, REQUEST_CLEANING, RESPONSES_SHAPES = (
    "sandboxes/egress/request_filter/requests.py",
    "sandboxes/egress/request_filter/cleaning.py",
    "sandboxes/egress/request_filter/responses.py",
)
REQUEST_VALUES, ANTHROPIC_SHAPES, CHAT_SHAPES = (
    "sandboxes/egress/request_filter/values.py",
    "sandboxes/egress/request_filter/anthropic.py",
    "sandboxes/egress/request_filter/chat.py",
)
TEST_REQUEST_REFUSALS = "tests/unit/sandboxes/egress/request_filter/test_refusals.py"

# Tests.
TEST_POOL, TEST_LIFECYCLE = "tests/unit/sandboxes/test_pool.py", "tests/unit/sandboxes/test_lifecycle.py"
TEST_OUTSIDE_STOPS = "tests/unit/sandboxes/test_stops.py"
TEST_LEASING, TEST_TURNS = "tests/unit/leases/test_leasing.py", "tests/unit/leases/test_turns.py"
TEST_STATE_LOSS, TEST_EXECUTION = "tests/races/test_state_loss.py", "tests/unit/leases/test_execution.py"
TEST_CRASHES, TEST_RACES = "tests/races/test_crashes.py", "tests/races/test_races.py"
TEST_WEBHOOKS = "tests/unit/sandboxes/webhooks/test_webhook_delivery.py"
TEST_METERING, TEST_USE = "tests/unit/billing/test_metering.py", "tests/unit/billing/test_use.py"
TEST_PRICING, TEST_RATES = "tests/unit/billing/test_pricing.py", "tests/unit/billing/test_rates.py"
TEST_BUDGETS, TEST_ADMISSION = "tests/unit/billing/test_budgets.py", "tests/unit/billing/test_budget_admission.py"
TEST_KEYS, TEST_LEASES_API = "tests/api/test_keys.py", "tests/api/leases/test_leases.py"
TEST_ALLOW_LISTS, TEST_API_KEYS = "tests/unit/leases/test_allow_lists.py", "tests/unit/leases/test_api_keys.py"
TEST_IDEMPOTENCY, TEST_QUEUE = "tests/api/test_idempotency.py", "tests/unit/leases/test_admission.py"
TEST_RUN_QUEUE, TEST_AGENT_RUNS = "tests/races/test_queue.py", "tests/api/sandbox/test_agent_runs.py"
TEST_PLACEMENT, TEST_PENDING = "tests/unit/leases/test_placement.py", "tests/unit/sandboxes/test_pending_starts.py"
TEST_LONG_WORK = "tests/races/test_long_work.py"
TEST_ABANDONED = "tests/unit/sandboxes/test_abandoned_runs.py"
TEST_TEMPLATE_BUILDS = "tests/unit/sandboxes/remote/test_templates.py"
TEST_TEMPLATES, TEST_STOPS = "tests/unit/sandboxes/test_templates.py", "tests/unit/sandboxes/test_suspension_by_stop.py"
TEST_RETAINED_RESULTS = "tests/unit/sandboxes/image/test_result_retention.py"
TEST_EGRESS, TEST_REDACTION = (
    "tests/unit/sandboxes/egress/test_egress_server.py",
    "tests/unit/sandboxes/redaction/test_streams.py",
)


MUTANTS = (
    # --- pool ---
    Mutant(
        name="pool-capacity-off-by-one",
        path=POOL,
        before="NOT draining AND used < capacity - %s",
        after="NOT draining AND used <= capacity - %s",
        tests=[f"{TEST_POOL}::test_refusal_of_a_full_pool_states_a_remedy"],
    ),
    Mutant(
        name="pool-place-of-a-waiting-request",
        path=POOL,
        before="return take_place(request.pool, ahead=position.ahead)",
        after="return take_place(request.pool)",
        tests=[f"{TEST_QUEUE}::test_free_place_goes_to_those_who_wait"],
    ),
    Mutant(
        name="pool-prewarmed-sandbox-of-a-waiting-request",
        path=POOL,
        before="            if position.ahead:\n                transaction",
        after="            if False:\n                transaction",
        tests=[f"{TEST_QUEUE}::test_prewarmed_sandbox_is_not_claimed_before_those_who_wait"],
    ),
    Mutant(
        name="pool-lease-without-a-place",
        path=POOL,
        before="transaction.set_rollback(True)  # undoes a lease",
        after="pass  # undoes a lease",
        tests=[f"{TEST_QUEUE}::test_wait_without_a_place_ends_with_the_position_and_holds_nothing"],
    ),
    Mutant(
        name="pool-evicts-an-unused-sandbox-for-the-queue",
        path=POOL,
        before="spare_unused=full.position.is_queued",
        after="spare_unused=False",
        tests=[f"{TEST_QUEUE}::test_sandbox_of_an_admitted_request_is_not_evicted_before_its_first_use"],
    ),
    Mutant(
        name="queue-counts-abandoned-requests",
        path=ADMISSION_QUEUE,
        before='filter(expires_at__gt=now).order_by("enqueued_at", "pk")',
        after='order_by("enqueued_at", "pk")',
        tests=[f"{TEST_QUEUE}::test_crash_while_waiting_leaves_nothing_and_delays_others_for_seconds"],
    ),
    Mutant(
        name="queue-forgets-who-was-served",
        path=ADMISSION_QUEUE,
        before="places, quota.admitted_at or earliest, arrival",
        after="places, earliest, arrival",
        tests=[f"{TEST_QUEUE}::test_one_agent_with_many_requests_does_not_starve_another"],
    ),
    Mutant(
        name="pool-place-while-draining",
        path=POOL,
        before="NOT draining AND used < capacity - %s",
        after="used < capacity - %s",
        tests=[f"{TEST_POOL}::test_draining_pool_refuses_new_sandboxes_and_existing_leases_go_on"],
    ),
    Mutant(
        name="pool-quota-off-by-one",
        path=POOL,
        before="(most IS NULL OR used < most)",
        after="(most IS NULL OR used <= most)",
        tests=[f"{TEST_POOL}::test_quota_limits_the_sandboxes_of_an_agent"],
    ),
    Mutant(
        name="pool-claim-ignores-stored-state",
        path=POOL,
        before="if not request.pool.warm_target or (not request.is_new_holder and workspace.find_latest(request.holder)):",
        after="if not request.pool.warm_target:",
        tests=[f"{TEST_POOL}::test_holder_with_stored_state_gets_no_prewarmed_sandbox"],
    ),
    Mutant(
        name="pool-late-create-not-discarded",
        path=STARTS,
        before="        _discard(provider, sandbox)\n        raise _build_overtaken_error(sandbox)\n",
        after="        raise _build_overtaken_error(sandbox)\n",
        tests=[f"{TEST_CRASHES}::test_create_that_finishes_after_its_row_was_destroyed_leaves_nothing"],
    ),
    Mutant(
        name="pool-moves-a-sandbox-woken-since",
        path=POOL,
        before="unchanged = Q(incarnation=sandbox.incarnation)",
        after="unchanged = Q()",
        tests=[f"{TEST_PLACEMENT}::test_cold_sandbox_that_another_request_has_woken_since_is_not_given_up"],
    ),
    Mutant(
        name="pool-pending-start-of-another-process",
        path=STARTS,
        before="state=WARMING, claim__isnull=True, pending_since__isnull=False,",
        after="state=WARMING, pending_since__isnull=False,",
        tests=[f"{TEST_PENDING}::test_pending_start_is_awaited_by_one_process_at_a_time"],
    ),
    Mutant(
        name="pool-wakes-with-the-incarnation-of-another",
        path=STARTS,
        before="unchanged = Q(incarnation=sandbox.incarnation, holder=sandbox.holder)",
        after="unchanged = Q(holder=sandbox.holder)",
        tests=[f"{TEST_STATE_LOSS}::test_each_wake_has_an_incarnation_of_its_own"],
    ),
    # --- lifecycle ---
    Mutant(
        name="lifecycle-advance-from-any-state",
        path=LIFECYCLE,
        before="rows = Sandbox.objects.filter(guard or Q(), pk=pk, state=was)",
        after="rows = Sandbox.objects.filter(guard or Q(), pk=pk)",
        tests=[f"{TEST_LIFECYCLE}::test_second_advance_along_the_same_edge_returns_false"],
    ),
    Mutant(
        name="lifecycle-advance-without-guard",
        path=LIFECYCLE,
        before="rows = Sandbox.objects.filter(guard or Q(), pk=pk, state=was)",
        after="rows = Sandbox.objects.filter(pk=pk, state=was)",
        tests=[f"{TEST_LIFECYCLE}::test_advance_with_a_failing_guard_moves_nothing"],
    ),
    Mutant(
        name="lifecycle-run-of-another-holder",
        path=LIFECYCLE,
        before='"WHERE id = %s AND holder = %s AND state = %s"',
        after='"WHERE id = %s AND %s IS NOT NULL AND state = %s"',
        tests=[f"{TEST_LIFECYCLE}::test_run_of_another_holder_is_not_started"],
    ),
    Mutant(
        name="lifecycle-finish-of-another-incarnation",
        path=LIFECYCLE,
        before="\"WHERE id = %s AND state = 'running' AND incarnation = %s\"",
        after="\"WHERE id = %s AND state = 'running' AND incarnation <> -%s\"",
        tests=[f"{TEST_LIFECYCLE}::test_finish_run_of_an_earlier_incarnation_changes_nothing"],
    ),
    # --- runs ---
    Mutant(
        name="runs-close-twice",
        path=RUN_ENDS,
        before='SET {changes} WHERE id = %s AND ended_at IS NULL"',
        after='SET {changes} WHERE id = %s"',
        tests=[f"{TEST_RACES}::test_release_during_a_run_closes_it_and_refuses_the_late_result"],
    ),
    Mutant(
        name="runs-counted-out-by-each-close",
        path=LIFECYCLE,
        before="        if closed:\n            sql.update_then",
        after="        if True:\n            sql.update_then",
        tests=[f"{TEST_LIFECYCLE}::test_sandbox_is_running_exactly_while_runs_are_open"],
    ),
    Mutant(
        name="runs-abandoned-run-not-killed",
        path=ABANDONED_RUNS,
        before="if sandbox.state not in GONE_STATES and sandbox.incarnation == run.incarnation:",
        after="if sandbox.state in GONE_STATES and sandbox.incarnation == run.incarnation:",
        tests=[f"{TEST_CRASHES}::test_command_of_an_abandoned_run_is_killed_before_its_sandbox_is_waiting"],
    ),
    Mutant(
        name="runs-workspace-limit-ignores-new-size",
        path="sandboxes/runs/workspace_limit.py",
        before="(size := measure_workspace(provider, sandbox, now=now)) > limit:",
        after="(size := measure_workspace(provider, sandbox, now=now)) > 0:",
        tests=[f"{TEST_POOL}::test_workspace_over_its_limit_refuses_execs_until_files_are_deleted"],
    ),
    Mutant(
        name="runs-deadline-without-grace",
        path=RUNS,
        before="deadline_at=now + command.timeout + KILL_GRACE,",
        after="deadline_at=now + command.timeout,",
        tests=[f"{TEST_TURNS}::test_a_failed_turn_is_skipped_with_the_reason"],
    ),
    Mutant(
        name="runs-lost-sandbox-not-marked",
        path=RUNS,
        before="        eviction.mark_lost(opened.sandbox, str(failed), now=now)\n",
        after="",
        tests=[f"{TEST_LEASING}::test_a_lost_sandbox_ends_its_lease_as_lost"],
    ),
    Mutant(
        name="runs-stopped-sandbox-is-missing",
        path=RUNS,
        before="    if isinstance(failed, Missing):\n        note =",
        after="    if isinstance(failed, ProviderError):\n        note =",
        tests=[f"{TEST_OUTSIDE_STOPS}::test_sandbox_that_stops_during_a_command_keeps_its_lease_and_files"],
    ),
    Mutant(
        name="runs-kill-in-a-stopped-sandbox",
        path=RUN_FAILURES,
        before="    if isinstance(failed, Stopped):\n        return False\n",
        after="",
        tests=[f"{TEST_OUTSIDE_STOPS}::test_sandbox_that_stops_during_a_command_keeps_its_lease_and_files"],
    ),
    Mutant(
        name="runs-recovery-without-a-note",
        path=RUNS,
        before="filter(None, [recovered, refused, opened.note, unsaved])",
        after="filter(None, [refused, opened.note, unsaved])",
        tests=[f"{TEST_OUTSIDE_STOPS}::test_next_command_says_once_that_the_sandbox_was_restarted"],
    ),
    Mutant(
        name="runs-extended-run-closed-as-abandoned",
        path=ABANDONED_RUNS,
        before="claim=run.claim, deadline_at=run.deadline_at, ended_at__isnull=True",
        after="claim=run.claim, ended_at__isnull=True",
        tests=[f"{TEST_ABANDONED}::test_run_that_is_extended_or_claimed_while_a_sweep_looks_at_it_is_left_alone"],
    ),
    Mutant(
        name="runs-abandoned-run-claimed-twice",
        path=ABANDONED_RUNS,
        before="pk=run.pk, claim=run.claim, deadline_at=run.deadline_at",
        after="pk=run.pk, deadline_at=run.deadline_at",
        tests=[f"{TEST_ABANDONED}::test_run_that_is_extended_or_claimed_while_a_sweep_looks_at_it_is_left_alone"],
    ),
    Mutant(
        name="runs-agent-drops-a-recent-result",
        path=SANDBOX_AGENT,
        before="if run.shim_gone and run.ended_at < oldest:",
        after="if run.shim_gone:",
        tests=[f"{TEST_RETAINED_RESULTS}::test_result_makes_room_for_a_run_only_once_it_is_older_than_ten_minutes"],
    ),
    Mutant(
        name="runs-agent-run-recorded-without-its-token",
        path=RECORDER,
        before="AgentRun.objects.filter(pk=row.pk, recorder_deadline=previous, ended_at__isnull=True)",
        after="AgentRun.objects.filter(pk=row.pk, ended_at__isnull=True)",
        tests=[f"{TEST_AGENT_RUNS}::test_recorder_that_was_replaced_changes_nothing"],
    ),
    Mutant(
        name="runs-agent-run-recorded-by-two-sweeps",
        path=AGENT_RUNS,
        before="AgentRun.objects.filter(pk=row.pk, recorder_deadline=previous, ended_at__isnull=True)",
        after="AgentRun.objects.filter(pk=row.pk, ended_at__isnull=True)",
        tests=[f"{TEST_AGENT_RUNS}::test_agent_run_that_another_sweep_has_claimed_since_is_left_to_it"],
    ),
    Mutant(
        name="claims-heartbeat-ends-with-an-unexpected-error",
        path=CLAIMS,
        before='            except Exception:\n                log.exception("claim not extended"',
        after='            except RecursionError:\n                log.exception("claim not extended"',
        tests=[f"{TEST_BACKGROUND}::test_the_heartbeat_outlives_a_claim_that_fails"],
    ),
    Mutant(
        name="claims-dead-thread-taken-for-a-running-one",
        path=BACKGROUND,
        before="self._thread is not None and self._thread.is_alive()",
        after="self._thread is not None",
        tests=[f"{TEST_BACKGROUND}::test_a_thread_that_has_died_is_started_again"],
    ),
    # --- queue of runs ---
    Mutant(
        name="run-queue-finish-of-another-attempt",
        path=RUN_QUEUE,
        before="QueuedRun.objects.filter(pk=row.pk, attempt=row.attempt, state=STATE.STARTED)\n",
        after="QueuedRun.objects.filter(pk=row.pk, state=STATE.STARTED)\n",
        tests=[f"{TEST_RUN_QUEUE}::test_late_end_of_an_attempt_does_not_end_the_next_one"],
    ),
    Mutant(
        name="run-queue-requeue-of-another-attempt",
        path=RUN_QUEUE,
        before="QueuedRun.objects.filter(pk=row.pk, attempt=row.attempt, state=STATE.STARTED, interrupted_at__isnull=True)",
        after="QueuedRun.objects.filter(pk=row.pk, state=STATE.STARTED, interrupted_at__isnull=True)",
        tests=[f"{TEST_RUN_QUEUE}::test_late_end_of_an_attempt_does_not_end_the_next_one"],
    ),
    Mutant(
        name="run-queue-takes-a-renewed-row",
        path=ATTEMPTS,
        before="filter(runner=row.runner, runner_deadline=row.runner_deadline)",
        after="filter(runner=row.runner)",
        tests=[f"{TEST_RUN_QUEUE}::test_runner_that_renews_its_lease_while_another_takes_over_keeps_its_other_rows"],
    ),
    Mutant(
        name="run-queue-starts-an-interrupted-run",
        path=RUN_QUEUE,
        before="claimed = QueuedRun.objects.filter(pk=row.pk, state=STATE.QUEUED).update(",
        after="claimed = QueuedRun.objects.filter(pk=row.pk).update(",
        tests=[f"{TEST_RUN_QUEUE}::test_run_that_is_interrupted_while_it_is_claimed_does_not_start"],
    ),
    Mutant(
        name="run-queue-attempt-of-a-replaced-runner",
        path=ATTEMPTS,
        before="state = %s AND attempt = %s AND runner = %s",
        after="state = %s AND attempt = %s AND runner <> -%s",
        tests=[f"{TEST_RUN_QUEUE}::test_runner_whose_row_is_being_taken_over_executes_nothing"],
    ),
    # --- starts and runs that were given up ---
    Mutant(
        name="given-up-start-ends-its-lease",
        path=STARTS,
        before="code=code, reason=reason, actor=actor, guard=own):",
        after="code=code, reason=reason, actor=actor):",
        tests=[f"{TEST_LONG_WORK}::test_an_overtaken_start_whose_copy_was_replaced_meanwhile_loses_nothing"],
    ),
    Mutant(
        name="given-up-run-ends-its-lease",
        path=RUNS,
        before="if not eviction.is_lost(opened.sandbox):",
        after="if False:",
        tests=[f"{TEST_LONG_WORK}::test_a_command_whose_sandbox_was_put_to_sleep_after_its_run_was_given_up_loses_nothing"],
    ),
    Mutant(
        name="agent-run-after-its-close",
        path=AGENT_RUNS,
        before="            raise AgentRunClosed()",
        after="            pass",
        tests=[f"{TEST_AGENT_RUNS}::test_run_that_was_closed_during_its_start_executes_nothing"],
    ),
    Mutant(
        name="agent-run-begins-with-the-deadline-of-its-request",
        path=AGENT_RUNS,
        before="        self.row.recorder_deadline = now + RECORDER_TTL\n",
        after="",
        tests=[f"{TEST_AGENT_RUNS}::test_sweep_that_has_read_a_run_before_its_command_began_closes_nothing"],
    ),
    # --- sweeps ---
    Mutant(
        name="sweeps-pass-changes-another-hosts-claim",
        path=SWEEP_LOG,
        before="Sweep.objects.filter(pk=row.pk, claim=token)",
        after="Sweep.objects.filter(pk=row.pk)",
        tests=[f"{TEST_HOSTS}::test_a_pass_that_outlasted_its_claim_neither_extends_nor_ends_the_claim_of_another_host"],
    ),
    Mutant(
        name="sweeps-failed-pass-ends-another-hosts-claim",
        path=SWEEP_LOG,
        before='update(last_error=redact(f"{type(failed).__name__}: {failed}"))',
        after='update(last_error=redact(f"{type(failed).__name__}: {failed}"), running_until=None)',
        tests=[f"{TEST_HOSTS}::test_a_pass_that_outlasted_its_claim_neither_extends_nor_ends_the_claim_of_another_host"],
    ),
    Mutant(
        name="sweeps-failed-pass-keeps-its-claim",
        path=SWEEP_LOG,
        before="            running.end()\n            raise\n",
        after="            raise\n",
        tests=[f"{TEST_HOSTS}::test_a_failed_pass_records_its_error_and_ends_its_claim"],
    ),
    Mutant(
        name="sweeps-pass-ends-without-its-token",
        path=SWEEP_LOG,
        before="self._own.update(running_until=None, claim=None)",
        after="self._own.update(running_until=None)",
        tests=[f"{TEST_HOSTS}::test_a_pass_that_ends_while_the_heartbeat_extends_its_claim_leaves_none"],
    ),
    Mutant(
        name="sweeps-watch-of-a-watched-host",
        path=END_WATCH,
        before="Host.objects.filter(free, pk=host.pk)",
        after="Host.objects.filter(pk=host.pk)",
        tests=[f"{TEST_HOSTS}::test_an_engine_is_watched_by_one_process_at_a_time"],
    ),
    Mutant(
        name="sweeps-watch-ends-its-successors-claim",
        path=END_WATCH,
        before="filter(pk=host.pk, watched_until=now + CLAIM_TIME)",
        after="filter(pk=host.pk)",
        tests=[f"{TEST_HOSTS}::test_a_watch_that_outlasted_its_claim_does_not_end_that_of_its_successor"],
    ),
    # --- image templates ---
    Mutant(
        name="templates-build-recorded-without-its-claim",
        path=TEMPLATE_BUILDS,
        before="rows = ImageTemplate.objects.filter(pk=pk, claim=token)",
        after="rows = ImageTemplate.objects.filter(pk=pk)",
        tests=[f"{TEST_TEMPLATE_BUILDS}::test_build_that_outlasts_its_claim_records_nothing_over_its_successor"],
    ),
    Mutant(
        name="templates-built-twice",
        path=TEMPLATE_BUILDS,
        before="state=TemplateState.BUILDING, claim__isnull=True)",
        after="state=TemplateState.BUILDING)",
        tests=[f"{TEST_TEMPLATES}::test_template_is_built_by_one_process_at_a_time"],
    ),
    Mutant(
        name="templates-extended-build-queued-again",
        path=TEMPLATE_BUILDS,
        before="filter(pk=template.pk, state=TemplateState.BUILDING, deadline_at__lte=now)",
        after="filter(pk=template.pk, state=TemplateState.BUILDING)",
        tests=[f"{TEST_TEMPLATES}::test_build_that_goes_on_while_a_sweep_looks_at_it_keeps_its_claim"],
    ),
    Mutant(
        name="templates-rebuilt-while-being-removed",
        path=TEMPLATE_BUILDS,
        before="filter(_build_idle_filter(now), pk=template.pk, state__in=ended)",
        after="filter(pk=template.pk, state__in=ended)",
        tests=[f"{TEST_TEMPLATES}::test_template_that_is_being_removed_is_neither_rebuilt_nor_removed_by_another_process"],
    ),
    Mutant(
        name="templates-removed-by-two-processes",
        path=TEMPLATE_BUILDS,
        before="filter(_build_idle_filter(now), pk=template.pk).exclude(",
        after="filter(pk=template.pk).exclude(",
        tests=[f"{TEST_TEMPLATES}::test_template_that_is_being_removed_is_neither_rebuilt_nor_removed_by_another_process"],
    ),
    # --- eviction and destruction ---
    Mutant(
        name="eviction-guarantee-off-by-one",
        path=EVICTION,
        before='guaranteed__gt=0, used__lte=F("guaranteed")',
        after='guaranteed__gt=0, used__lt=F("guaranteed")',
        tests=[f"{TEST_POOL}::test_guarantee_protects_against_other_agents"],
    ),
    Mutant(
        name="destruction-guarantee-not-checked-again",
        path=DESTRUCTION,
        before='quota = quota.filter(used__gt=F("guaranteed"))',
        after='quota = quota.filter(used__gte=F("guaranteed"))',
        tests=[f"{TEST_POOL}::test_guarantee_raised_during_an_eviction_keeps_the_place"],
    ),
    Mutant(
        name="eviction-most-recently-used-first",
        path=EVICTION,
        before='candidates.order_by("tier", "last_used_at")',
        after='candidates.order_by("tier", "-last_used_at")',
        tests=[f"{TEST_POOL}::test_least_recently_used_sandbox_of_a_tier_is_evicted"],
    ),
    Mutant(
        name="eviction-postponed-although-used",
        path=LIFECYCLE,
        before="persisted = FALSE, persist_failures = 0",
        after="persisted = FALSE",
        tests=[f"{TEST_POOL}::test_sandbox_used_after_a_failed_eviction_is_a_candidate_again"],
    ),
    Mutant(
        name="eviction-stored-twice",
        path=WORKSPACE,
        before="return not sandbox.persisted and Run.objects",
        after="return Run.objects",
        tests=[f"{TEST_POOL}::test_failed_destroy_after_storing_is_repeated_without_storing_twice"],
    ),
    Mutant(
        name="eviction-unsaved-state-destroyed-as-stalled",
        path="sandboxes/sweeps/passes.py",
        before="if sandbox.tries >= settings.DESTROY_TRIES and not workspace.has_unsaved_state(sandbox):",
        after="if sandbox.persist_failures >= settings.DESTROY_TRIES:",
        tests=[f"{TEST_STATE_LOSS}::test_a_sandbox_whose_state_is_not_stored_is_never_destroyed_as_stalled"],
    ),
    Mutant(
        name="eviction-run-keeps-the-stored-mark",
        path=LIFECYCLE,
        before="persisted = FALSE, persist_failures = 0",
        after="persist_failures = 0",
        tests=[f"{TEST_STATE_LOSS}::test_a_snapshot_counts_only_if_no_run_began_after_it"],
    ),
    Mutant(
        name="destroy-gives-up-state-in-the-first-try",
        path=DESTRUCTION,
        before="if not quiescence.is_last_try(sandbox):",
        after="if sandbox.lost_at:",
        tests=["tests/unit/leases/test_withheld_state.py"],
    ),
    Mutant(
        name="eviction-reads-state-beside-commands",
        path=EVICTION,
        before="    quiescence.quiesce(sandbox, provider, now=clock())\n",
        after="",
        tests=["tests/unit/leases/test_withheld_state.py::test_nothing_is_lost_if_a_verb_of_an_eviction_fails_once"],
    ),
    Mutant(
        name="eviction-pointer-moved-without-the-claim",
        path=WORKSPACE,
        before="claimed = claim.update(workspace_bytes=size, measured_at=clock(), persisted=True, unreadable_tries=0)",
        after="claimed = claim.update(workspace_bytes=size, measured_at=clock(), persisted=True, unreadable_tries=0) or True",
        tests=[f"{TEST_STATE_LOSS}::test_overtaken_worker_does_not_store_over_its_successor"],
    ),
    Mutant(
        name="pool-ready-without-the-claim",
        path=STARTS,
        before="guard=Q(claim=sandbox.claim, incarnation=sandbox.incarnation)",
        after="guard=Q(incarnation=sandbox.incarnation)",
        tests=[f"{TEST_STATE_LOSS}::test_start_whose_claim_was_taken_over_does_not_make_the_sandbox_ready"],
    ),
    Mutant(
        name="lifecycle-concurrent-run-of-another-holder",
        path=LIFECYCLE,
        before="\"WHERE id = %s AND holder = %s AND state = 'running'\"",
        after="\"WHERE id = %s AND (holder = %s OR TRUE) AND state = 'running'\"",
        tests=[f"{TEST_STATE_LOSS}::test_run_does_not_join_a_running_sandbox_of_another_holder"],
    ),
    Mutant(
        name="eviction-guaranteed-place-chosen",
        path=EVICTION,
        before="        ~Exists(guaranteed), ~postponed, ~in_transition,",
        after="        ~postponed, ~in_transition,",
        tests=[f"{TEST_STATE_LOSS}::test_guarantee_is_checked_when_a_victim_is_chosen_and_when_its_place_is_taken"],
    ),
    Mutant(
        name="leasing-run-after-the-end-of-the-lease",
        path="leases/guard.py",
        before="AND status = %s AND expires_at > %s",
        after="AND (status = %s OR expires_at > %s)",
        tests=[
            f"{TEST_EXECUTION}::test_lease_that_ends_while_its_sandbox_starts_runs_nothing",
            f"{TEST_EXECUTION}::test_lease_that_ends_while_its_process_is_suspended_runs_nothing",
        ],
    ),
    Mutant(
        name="eviction-of-a-lost-sandbox",
        path=EVICTION,
        before="evictable = Q(holder__isnull=False, incarnation=sandbox.incarnation, lost_at__isnull=True)",
        after="evictable = Q(holder__isnull=False, incarnation=sandbox.incarnation)",
        tests=[f"{TEST_POOL}::test_lost_sandbox_is_not_evicted"],
    ),
    Mutant(
        name="destruction-quarantine-off-by-one",
        path=DESTRUCTION,
        before="sandbox.tries, sandbox.tries >= settings.DESTROY_TRIES",
        after="sandbox.tries, sandbox.tries > settings.DESTROY_TRIES",
        tests=[f"{TEST_LEASING}::test_a_failed_destroy_is_retried_with_backoff_and_then_quarantined"],
    ),
    # --- suspension ---
    Mutant(
        name="suspension-run-in-a-frozen-sandbox",
        path=LIFECYCLE,
        before='f" AND incarnation = %s AND frozen = %s AND open_runs',
        after='f" AND incarnation = %s AND %s IS NOT NULL AND open_runs',
        tests=[f"{TEST_SUSPENSION}::test_exec_that_read_its_sandbox_before_a_suspension_resumes_it"],
    ),
    Mutant(
        name="suspension-claim-of-another-worker-ignored",
        path=LIFECYCLE,
        before=" AND (deadline_at IS NULL OR deadline_at < %s)",
        after=" AND (deadline_at IS NULL OR %s IS NOT NULL)",
        tests=[f"{TEST_SUSPENSION}::test_claimed_suspension_is_left_to_its_worker"],
    ),
    Mutant(
        name="suspension-late-worker-leaves-a-run-frozen",
        path=SUSPENSION,
        before="    recover_frozen(sandbox, provider)  #",
        after="    #",
        tests=[f"{TEST_SUSPENSION}::test_worker_that_outlasts_its_claim_leaves_nothing_frozen"],
    ),
    Mutant(
        name="suspension-confirmed-without-its-claim",
        path=SUSPENSION,
        before="Sandbox.objects.filter(own_claim, pk=sandbox.pk, state=SUSPENDED)",
        after="Sandbox.objects.filter(pk=sandbox.pk, state=SUSPENDED)",
        tests=[f"{TEST_SUSPENSION}::test_worker_that_outlasts_its_claim_does_not_end_that_of_its_successor"],
    ),
    Mutant(
        name="suspension-failed-without-its-claim",
        path=SUSPENSION,
        before="actor=actor, guard=own_claim,",
        after="actor=actor, guard=Q(),",
        tests=[f"{TEST_SUSPENSION}::test_worker_that_outlasts_its_claim_does_not_end_that_of_its_successor"],
    ),
    Mutant(
        name="suspension-of-an-earlier-time-continued",
        path=SUSPENSION,
        before="Sandbox.objects.filter(unchanged, filter_unclaimed(now), pk=",
        after="Sandbox.objects.filter(filter_unclaimed(now), pk=",
        tests=[f"{TEST_SUSPENSION}::test_suspension_of_a_sandbox_that_was_used_and_suspended_since_is_not_continued"],
    ),
    Mutant(
        name="suspension-of-a-living-worker-continued",
        path=SUSPENSION,
        before="Sandbox.objects.filter(unchanged, filter_unclaimed(now), pk=",
        after="Sandbox.objects.filter(unchanged, pk=",
        tests=[f"{TEST_SUSPENSION}::test_suspension_with_a_living_worker_is_not_continued"],
    ),
    Mutant(
        name="suspension-stored-without-its-claim",
        path=SUSPENSION,
        before="rows = Sandbox.objects.filter(pk=sandbox.pk, claim=token, state=SUSPENDED)",
        after="rows = Sandbox.objects.filter(pk=sandbox.pk, state=SUSPENDED)",
        tests=[f"{TEST_STOPS}::test_worker_whose_claim_was_taken_over_stores_and_stops_nothing"],
    ),
    Mutant(
        name="suspension-resumes-another-incarnation",
        path=SUSPENSION,
        before="same_incarnation = Sandbox.objects.filter(pk=sandbox.pk, incarnation=sandbox.incarnation)",
        after="same_incarnation = Sandbox.objects.filter(pk=sandbox.pk)",
        tests=[f"{TEST_SUSPENSION}::test_earlier_incarnation_found_frozen_is_not_resumed_in_a_later_one"],
    ),
    Mutant(
        name="suspension-late-resume-recorded",
        path=SUSPENSION,
        before="    rows.filter(state_since=since).update(",
        after="    rows.update(",
        tests=[f"{TEST_SUSPENSION}::test_late_resume_of_a_sandbox_that_was_suspended_again_leaves_it_frozen"],
    ),
    Mutant(
        name="suspension-memory-charged-twice",
        path="sandboxes/usage/readings.py",
        before="    since = max(since, _find_last_resume(sandbox) or since)\n",
        after="",
        tests=[f"{TEST_USE}::test_suspended_time_is_charged_by_its_own_item_alone"],
    ),
    # --- leasing ---
    Mutant(
        name="leasing-end-twice",
        path=LEASING,
        before="ended_now = Lease.objects.filter(pk=pk, status=LeaseStatus.ACTIVE).update(",
        after="ended_now = Lease.objects.filter(pk=pk).update(",
        tests=[f"{TEST_LEASING}::test_release_is_idempotent"],
    ),
    Mutant(
        name="leasing-expiry-off-by-one",
        path=LEASING,
        before="    if now < lease.expires_at:\n",
        after="    if now <= lease.expires_at:\n",
        tests=[f"{TEST_LEASING}::test_renew_after_expiry_is_refused_even_before_a_sweep"],
    ),
    Mutant(
        name="leasing-renewal-of-an-ended-lease",
        path=LEASING,
        before="last_activity_at = %s WHERE id = %s AND status = 'active' \"",
        after='last_activity_at = %s WHERE id = %s "',
        tests=[f"{TEST_RACES}::test_release_during_a_run_closes_it_and_refuses_the_late_result"],
    ),
    Mutant(
        name="leasing-renewal-past-max-ttl",
        path=LEASING,
        before="return min(renewed_at + ttl, max_expires_at)",
        after="return max(renewed_at + ttl, max_expires_at)",
        tests=[f"{TEST_LEASING}::test_a_lease_ends_at_the_earliest_of_its_clocks"],
    ),
    Mutant(
        name="renewal-by-a-revoked-key",
        path=RENEWAL,
        before="AND key.prefix = %(prefix)s AND key.revoked_at IS NULL ",
        after="AND key.prefix = %(prefix)s ",
        tests=[f"{TEST_RENEWAL}::test_a_key_that_may_not_renew_changes_nothing"],
    ),
    Mutant(
        name="renewal-for-another-agent",
        path=RENEWAL,
        before="AND {may_act} AND {scope} RETURNING",
        after="AND {scope} RETURNING",
        tests=[f"{TEST_RENEWAL}::test_a_key_that_may_not_renew_changes_nothing"],
    ),
    Mutant(
        name="renewal-in-a-batch-of-an-ended-lease",
        path=RENEWAL,
        before="\"leases_lease.status = 'active' AND leases_lease.expires_at > %(now)s",
        after='"leases_lease.expires_at > %(now)s',
        tests=[f"{TEST_RENEWAL}::test_a_batch_renews_in_one_statement_and_reports_each_lease"],
    ),
    Mutant(
        name="leasing-elapsed-lease-still-held",
        path=LEASING,
        before="if basis.held and not check_held(request, basis.held, now=now):",
        after="if basis.held:",
        tests=[f"{TEST_LEASING}::test_an_elapsed_lease_can_be_acquired_again_before_a_sweep"],
    ),
    # --- metering ---
    Mutant(
        name="metering-clock-jumps-back",
        path=INTERVALS,
        before="            at = max(at, last[3])\n",
        after="",
        tests=[f"{TEST_METERING}::test_clock_jump_back_neither_adds_nor_removes_time"],
    ),
    Mutant(
        name="metering-whole-last-day",
        path=INTERVALS,
        before="yield began.date(), began, min(end, ended)",
        after="yield began.date(), began, end",
        tests=[f"{TEST_METERING}::test_intervals_are_split_at_utc_midnight"],
    ),
    Mutant(
        name="metering-runs-overwritten",
        path=METERING,
        before="each.calls += before.calls",
        after="each.calls = before.calls",
        tests=[f"{TEST_USE}::test_each_run_counts_once_on_its_start_day"],
    ),
    Mutant(
        name="metering-parts-rounded-each",
        path=INTERVALS,
        before="return amount * last // duration - amount * first // duration",
        after="return amount * (last - first) // duration",
        tests=[f"{TEST_USE}::test_adjacent_prorated_parts_add_up_to_the_whole"],
    ),
    Mutant(
        name="metering-refused-calls-count",
        path="billing/token_records.py",
        before="return call.kind == LlmCall.Kind.LLM and call.outcome != LlmCall.Outcome.REFUSED",
        after="return call.kind == LlmCall.Kind.LLM",
        tests=[f"{TEST_METERING}::test_calls_of_a_lease_and_model_are_summed_exactly_by_day"],
    ),
    # --- pricing ---
    Mutant(
        name="pricing-half-rounded-down",
        path=PRICING,
        before="(2 * amount.numerator * 10**places + amount.denominator) //",
        after="(2 * amount.numerator * 10**places + amount.denominator - 1) //",
        tests=[f"{TEST_PRICING}::test_amounts_are_rounded_half_up"],
    ),
    Mutant(
        name="pricing-allowance-never-used-up",
        path=PRICING,
        before="free = min(quantity, max(allowance - taken, 0))",
        after="free = min(quantity, max(allowance, 0))",
        tests=[f"{TEST_PRICING}::test_allowances_are_used_up_in_order"],
    ),
    Mutant(
        name="pricing-rate-begins-late",
        path=PRICING,
        before="rate.valid_from <= at",
        after="rate.valid_from < at",
        tests=[f"{TEST_RATES}::test_rate_applies_from_its_start"],
    ),
    Mutant(
        name="pricing-newest-before-most-specific",
        path=PRICING,
        before="key=lambda rate: (rate.instance_type, rate.valid_from)",
        after="key=lambda rate: (rate.valid_from, rate.instance_type)",
        tests=[f"{TEST_PRICING}::test_rate_for_an_instance_type_precedes_a_general_one"],
    ),
    # --- budgets ---
    Mutant(
        name="budgets-reservation-off-by-one",
        path=BUDGET_ADMISSION,
        before="spent + (active_leases + 1) * get_minimum_reservation(budget.unit) <= limit",
        after="spent + active_leases * get_minimum_reservation(budget.unit) <= limit",
        tests=[f"{TEST_ADMISSION}::test_grant_reserves_the_minimum_until_its_lease_ends"],
    ),
    Mutant(
        name="budgets-spent-in-an-earlier-period",
        path=BUDGET_RESERVATION,
        before=(
            "    if budget.exhausted_for != get_period_bounds(budget, now)[0]:\n"
            "        return False\n"
            "    spent = get_spent(budget, now)\n"
        ),
        after="    spent = budget.spent\n",
        tests=[f"{TEST_BUDGETS}::test_daily_budget_resets_at_midnight_before_the_next_sweep"],
    ),
    Mutant(
        name="budgets-grace-off-by-one",
        path=BUDGET_ADMISSION,
        before="if now >= get_grace_deadline(budget)]",
        after="if now > get_grace_deadline(budget)]",
        tests=[f"{TEST_ADMISSION}::test_file_access_is_refused_after_the_grace_period"],
    ),
    Mutant(
        name="budgets-late-sum-accepted",
        path=BUDGET_UPDATES,
        before='(*SUMMED_FIELDS, "spent_at")',
        after="SUMMED_FIELDS",
        tests=[f"{TEST_BUDGETS}::test_late_sum_does_not_reopen_an_exhausted_budget"],
    ),
    # --- API keys ---
    Mutant(
        name="keys-revoked-key-accepted",
        path=API_KEYS,
        before='"leases_agentkey.prefix = %s AND leases_agentkey.revoked_at IS NULL"',
        after='"leases_agentkey.prefix = %s"',
        tests=[f"{TEST_KEYS}::test_a_revoked_key_is_refused_at_once"],
    ),
    Mutant(
        name="keys-token-off-by-one",
        path=API_KEYS,
        before="AND {level} >= 1",
        after="AND {level} > 1",
        tests=[f"{TEST_LEASES_API}::test_concurrent_requests_refill_the_bucket_once"],
    ),
    Mutant(
        name="keys-bucket-filled-twice",
        path=API_KEYS,
        before="THEN tokens_at ELSE %s END",
        after="THEN tokens_at ELSE COALESCE(tokens_at, %s) END",
        tests=[f"{TEST_LEASES_API}::test_concurrent_requests_refill_the_bucket_once"],
    ),
    Mutant(
        name="keys-lease-of-another-agent",
        path=AUTHENTICATION,
        before="if lease is None or not self.may_act_for(lease.agent_did):",
        after="if lease is None:",
        tests=[f"{TEST_KEYS}::test_another_agents_lease_does_not_exist"],
    ),
    Mutant(
        name="keys-list-of-all-leases",
        path=AUTHENTICATION,
        before="return leases if self.key.operator else leases.filter(agent_did__in=self.key.dids)",
        after="return leases",
        tests=[f"{TEST_KEYS}::test_a_list_has_only_leases_visible_to_the_key"],
    ),
    Mutant(
        name="keys-empty-list-allows-restricted-rows",
        path=ALLOW_LISTS,
        before="return row.name in names if names else not row.restricted",
        after="return row.name in names if names else True",
        tests=[f"{TEST_ALLOW_LISTS}::test_a_restricted_type_or_pool_needs_an_entry_in_the_list"],
    ),
    Mutant(
        name="keys-pool-of-the-type-beside-the-list",
        path=ALLOW_LISTS,
        before="(not self.pools and row.pk == environment_type.pool_id)",
        after="row.pk == environment_type.pool_id",
        tests=[f"{TEST_ALLOW_LISTS}::test_the_restricted_pool_of_an_allowed_type_is_allowed_unless_the_pools_are_listed"],
    ),
    Mutant(
        name="keys-expired-key-accepted-at-its-expiry",
        path=API_KEYS,
        before="row.expires_at is not None and row.expires_at <= now",
        after="row.expires_at is not None and row.expires_at < now",
        tests=[f"{TEST_API_KEYS}::test_a_key_is_refused_from_its_expiry_on"],
    ),
    Mutant(
        name="keys-second-rotation-ends-the-overlap",
        path=API_KEYS,
        before="    if overlap:\n",
        after="    if not overlap:\n",
        tests=[f"{TEST_API_KEYS}::test_a_second_rotation_waits_for_the_overlap_or_ends_all_earlier_secrets"],
    ),
    Mutant(
        name="keys-read-scope-writes",
        path=AUTHENTICATION,
        before="if reads and scope == KeyScope.LEASES",
        after="if scope == KeyScope.LEASES",
        tests=[f"{TEST_KEYS}::test_an_operation_needs_its_scope"],
    ),
    Mutant(
        name="keys-freed-although-the-commit-may-have-succeeded",
        path=IDEMPOTENCY,
        before="is_refusal = isinstance(failed, REFUSALS)",
        after="is_refusal = True",
        tests=[f"{TEST_IDEMPOTENCY}::test_a_request_whose_commit_was_not_answered_acts_once"],
    ),
    Mutant(
        name="keys-run-id-changes-with-a-rotation",
        path=IDEMPOTENCY,
        before="{holder.first_digest or holder.digest} {row.pk}",
        after="{holder.digest} {row.pk}",
        tests=[f"{TEST_IDEMPOTENCY}::test_an_interrupted_exec_keeps_its_run_across_a_rotation_of_the_key"],
    ),
    Mutant(
        name="agents-outdated-unnamed",
        path="sandboxes/agent/addresses.py",
        before="is not None and not is_spoken(self.refused_version)",
        after="is not None and False",
        tests=["tests/unit/sandboxes/agent/test_remote.py::test_agent_of_another_version_is_named_to_every_process"],
    ),
    # --- egress ---
    Mutant(
        name="authorization-without-lease",
        path=AUTHORIZATION,
        before="sandbox.holder is None or sandbox.state not in ALIVE_STATES or",
        after="sandbox.holder is None or",
        tests=[f"{TEST_EGRESS}::test_call_from_a_sandbox_without_a_lease_is_refused"],
    ),
    Mutant(
        name="authorization-slot-of-another-host",
        path=AUTHORIZATION,
        before="sandbox.state not in ALIVE_STATES or _is_elsewhere(sandbox):",
        after="sandbox.state not in ALIVE_STATES:",
        tests=[f"{TEST_HOSTS}::test_the_egress_proxy_of_another_host_does_not_take_a_slot_for_the_sandboxs"],
    ),
    Mutant(
        name="hosts-missing-from-another-engine",
        path="sandboxes/hosts/bound_provider.py",
        before="""        except ProviderError as error:
            self._check_error(error)
            raise
        if name""",
        after="""        except ProviderError:
            raise
        if name""",
        tests=[f"{TEST_HOSTS}::test_a_missing_sandbox_counts_only_if_the_engine_is_still_its_own"],
    ),
    Mutant(
        name="hosts-destroy-by-another-engine",
        path="sandboxes/hosts/bound_provider.py",
        before='frozenset({"create", "destroy"})',
        after='frozenset({"create"})',
        tests=[f"{TEST_HOSTS}::test_a_destroy_that_reached_another_engine_is_not_confirmed"],
    ),
    Mutant(
        name="authorization-concurrency-off-by-one",
        path=AUTHORIZATION,
        before="if caller.calls_in_flight >= policy.most_calls_at_once:",
        after="if caller.calls_in_flight > policy.most_calls_at_once:",
        tests=[f"{TEST_EGRESS}::test_calls_are_limited_per_minute_and_in_flight"],
    ),
    Mutant(
        name="authorization-refusals-count-as-calls",
        path=AUTHORIZATION,
        before='started_at > %s AND outcome <> \'refused\'"""',
        after='started_at > %s"""',
        tests=[f"{TEST_EGRESS}::test_refused_calls_do_not_count_against_the_rate_limit"],
    ),
    Mutant(
        name="spend-limit-off-by-one",
        path="sandboxes/egress/spending.py",
        before="if spent < limit and spent + needed <= limit:",
        after="if spent < limit and spent + needed < limit:",
        tests=[f"{TEST_CALL_ADMISSION}::test_spend_limit_counts_each_call_at_its_rate_when_it_ends"],
    ),
    Mutant(
        name="token-limit-in-usd",
        path="sandboxes/egress/spending.py",
        before="_sum_lease(holder, unit)",
        after='_sum_lease(holder, "usd")',
        tests=[f"{TEST_CALL_ADMISSION}::test_token_limit_counts_calls_in_flight_and_metered_ones_once"],
    ),
    Mutant(
        name="spend-limit-without-calls-in-flight",
        path="billing/call_measures.py",
        before='owed=(("cost",), ("reserved",))',
        after='owed=(("cost",),)',
        tests=[f"{TEST_CALL_ADMISSION}::test_spend_limit_counts_calls_in_flight_with_their_estimate"],
    ),
    Mutant(
        name="budget-counts-a-changed-price-twice",
        path="billing/budgets/call_sums.py",
        before=" - COALESCE({measure.metered}, 0)",
        after="",
        tests=[f"{TEST_CALL_ADMISSION}::test_sum_is_exact_after_every_step_of_a_random_history"],
    ),
    Mutant(
        name="kept-sum-outlives-its-usage-records",
        path="billing/budgets/call_sums.py",
        before="CASE WHEN mark = %s THEN",
        after="CASE WHEN 0 <= %s THEN",
        tests=[f"{TEST_CALL_ADMISSION}::test_metered_calls_are_not_summed_again_until_their_usage_changes"],
    ),
    Mutant(
        name="kept-sum-outlives-a-membership",
        path="billing/models/accounts.py",
        before="    Budget.objects.filter(scope=Scope.ACCOUNT).update(calls_metered_mark=None)",
        after="",
        tests=[f"{TEST_CALL_ADMISSION}::test_calls_of_an_agent_leave_the_kept_sum_with_its_membership"],
    ),
    Mutant(
        name="budget-in-tokens-without-calls-in-flight",
        path="billing/call_measures.py",
        before='("reserved_tokens",), ',
        after="",
        tests=[f"{TEST_BUDGET_TOKENS}::test_calls_without_a_price_are_counted_and_refused"],
    ),
    Mutant(
        name="lost-call-without-tokens",
        path="sandboxes/egress/settlement.py",
        before='tokens=Coalesce("tokens", "reserved_tokens"),',
        after="",
        tests=[f"{TEST_BUDGET_TOKENS}::test_lost_call_counts_its_reservation"],
    ),
    Mutant(
        name="budget-in-tokens-ends-leases",
        path="billing/budgets/admission.py",
        before='model="", unit__in=[Unit.USD, Unit.HOURS])',
        after='model="")',
        tests=[f"{TEST_BUDGET_TOKENS}::test_exhausted_budget_in_tokens_refuses_no_start_and_ends_no_lease"],
    ),
    Mutant(
        name="lost-call-for-nothing",
        path="sandboxes/egress/settlement.py",
        before='cost=Coalesce("cost", "reserved"),',
        after="",
        tests=[f"{TEST_CALL_ADMISSION}::test_lost_call_costs_its_estimate_and_frees_its_place_at_once"],
    ),
    Mutant(
        name="recorded-price-overwritten",
        path="sandboxes/egress/settlement.py",
        before='f"{name} = CASE WHEN recorded_at IS NULL THEN %s ELSE {name} END"',
        after='f"{name} = %s"',
        tests=[f"{TEST_EGRESS}::test_call_is_settled_once_and_an_earlier_record_keeps_its_price"],
    ),
    Mutant(
        name="redaction-shortest-prefix-retained",
        path=REDACTION,
        before="at for at in range(longest)",
        after="at for at in reversed(range(longest))",
        tests=[f"{TEST_REDACTION}::test_secret_that_repeats_its_beginning_is_redacted_at_every_split"],
    ),
    Mutant(
        name="redaction-prefix-off-by-one",
        path=REDACTION,
        before="longest = min(len(self._forms[0]) - 1, len(content))",
        after="longest = min(len(self._forms[0]) - 2, len(content))",
        tests=[f"{TEST_REDACTION}::test_secret_in_base64_and_with_escapes_is_redacted_wherever_it_stands"],
    ),
    Mutant(
        name="requests-unknown-fields-forwarded",
        path=REQUEST_CLEANING,
        before="                self._drop((None, name))\n",
        after="                result[name] = value\n",
        tests=[f"{TEST_EGRESS}::test_billing_identity_of_the_sandbox_is_overwritten"],
    ),
    Mutant(
        name="requests-unknown-urls-dropped",
        path=REQUEST_CLEANING,
        before="        if has_reference(name, value):\n",
        after="        if False:\n",
        tests=[f"{TEST_REQUEST_REFUSALS}::test_unknown_field_of_a_tool_is_refused_and_named"],
    ),
    Mutant(
        name="requests-url-in-a-value-forwarded",
        path=REQUEST_CLEANING,
        before="        case Leaf.VALUE if is_string and is_url(value):",
        after="        case Leaf.VALUE if False:",
        tests=[f"{TEST_REQUEST_REFUSALS}::test_option_with_a_url_or_an_unknown_object_is_refused"],
    ),
    Mutant(
        name="requests-url-after-data-prefix-forwarded",
        path=REQUEST_VALUES,
        before="BASE64_PATTERN.fullmatch(text, prefix.end() if prefix else 0) is not None",
        after="prefix is not None or BASE64_PATTERN.fullmatch(text) is not None",
        tests=[f"{TEST_REQUEST_REFUSALS}::test_content_with_a_url_or_a_file_id_is_refused"],
    ),
    Mutant(
        name="requests-file-id-forwarded",
        path=CHAT_SHAPES,
        before="file_id=Leaf.REFUSED",
        after="file_id=Leaf.VALUE",
        tests=[f"{TEST_REQUEST_REFUSALS}::test_content_with_a_url_or_an_id_has_its_own_code_and_names_the_field"],
    ),
    Mutant(
        name="requests-item-id-forwarded",
        path=RESPONSES_SHAPES,
        before='"id": Leaf.IGNORED, "call_id"',
        after='"id": Leaf.VALUE, "call_id"',
        tests=[f"{TEST_REQUEST_REFUSALS}::test_ids_of_items_are_not_forwarded"],
    ),
    Mutant(
        name="requests-item-without-content-forwarded",
        path=RESPONSES_SHAPES,
        before='.requiring("role", "content")',
        after="",
        tests=[f"{TEST_REQUEST_REFUSALS}::test_item_that_refers_to_a_stored_object_is_refused"],
    ),
    Mutant(
        name="requests-provider-tools-forwarded",
        path=ANTHROPIC_SHAPES,
        before='"bash_20*": NAMED_TOOL',
        after='"*": NAMED_TOOL',
        tests=[f"{TEST_REQUEST_REFUSALS}::test_tool_executed_by_the_provider_is_refused"],
    ),
    Mutant(
        name="requests-responses-stored-upstream",
        path=REQUEST_FILTER,
        before='allowed["store"] = False',
        after='allowed["store"] = True',
        tests=[f"{TEST_EGRESS}::test_response_is_not_stored_upstream"],
    ),
    Mutant(
        name="webhooks-two-senders-to-one-receiver",
        path="sandboxes/webhooks/delivery.py",
        before="return Webhook.objects.filter(is_ready, ~Exists(in_progress))",
        after="return Webhook.objects.filter(is_ready)",
        tests=[f"{TEST_WEBHOOKS}::test_a_receiver_gets_one_attempt_at_a_time_from_all_workers"],
    ),
    *ABSENCE_MUTANTS,
)
