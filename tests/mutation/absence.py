"""Mutants of the rules by which an object counts as absent: sandboxes at vendors and engines, and stored state."""

from tests.mutation.mutant import Mutant

ABSENCE, ANSWERS = "sandboxes/providers/remote/absence.py", "sandboxes/providers/remote/errors.py"
DOCKER_ENGINE = "sandboxes/providers/docker/engine.py"
MISSING_SNAPSHOTS, WORKSPACE = "sandboxes/state/missing_snapshots.py", "sandboxes/state/workspace.py"
TEST_ABSENCE = "tests/unit/sandboxes/remote/test_absence.py"
TEST_ANSWERS = "tests/unit/sandboxes/remote/test_vendor_answers.py"
TEST_DOCKER, TEST_SNAPSHOTS = (
    "tests/unit/sandboxes/docker/test_engine_errors.py",
    "tests/unit/sandboxes/state/test_missing_snapshots.py",
)
WHOLE_PROOF = f"{TEST_ABSENCE}::test_absence_is_known_only_by_the_whole_proof"

ABSENCE_MUTANTS = (
    Mutant(
        name="absence-by-one-document",
        path=ABSENCE,
        before="    except NotFound:\n        pass\n",
        after="    except NotFound as error:\n        raise Missing(str(error)) from error\n",
        tests=[WHOLE_PROOF],
    ),
    Mutant(
        name="absence-without-the-list",
        path=ABSENCE,
        before="    if is_listed():",
        after="    if False:",
        tests=[WHOLE_PROOF],
    ),
    Mutant(
        name="absence-by-a-page",
        path=ANSWERS,
        before="    if message is None:\n        text",
        after="    if message is None and status == 404:\n        return NotFound(text)\n    if message is None:\n        text",
        tests=[f"{TEST_ANSWERS}::test_answer_without_a_document_is_unavailable_whatever_its_status"],
    ),
    Mutant(
        name="absence-by-an-unknown-route",
        path=ANSWERS,
        before="status == 404 and form.absence.search(message)",
        after="status == 404",
        tests=[f"{TEST_ANSWERS}::test_404_is_a_document_of_absence_only_in_the_form_of_the_vendor"],
    ),
    Mutant(
        name="absence-by-a-page-before-docker",
        path=DOCKER_ENGINE,
        before="(status == 404 and not ABSENCE_PATTERN.search(message))",
        after="False",
        tests=[f"{TEST_DOCKER}::test_answer_of_another_server_is_unavailable"],
    ),
    Mutant(
        name="absence-snapshot-lost-at-once",
        path=MISSING_SNAPSHOTS,
        before="missing_since__lte=now - LOSS_TIMEOUT",
        after="missing_since__lte=now",
        tests=[f"{TEST_SNAPSHOTS}::test_stored_state_that_stays_missing_ends_the_lease_as_lost_with_an_event"],
    ),
    Mutant(
        name="absence-snapshot-lost-in-another-store",
        path=MISSING_SNAPSHOTS,
        before="return is_due and _is_own_store() and",
        after="return is_due and",
        tests=[f"{TEST_SNAPSHOTS}::test_missing_state_that_the_store_does_not_confirm_is_never_lost"],
    ),
    Mutant(
        name="absence-snapshot-lost-although-listed",
        path=MISSING_SNAPSHOTS,
        before=' and get_store().is_empty(f"{snapshot.key}/")',
        after="",
        tests=[f"{TEST_SNAPSHOTS}::test_missing_state_that_the_store_does_not_confirm_is_never_lost"],
    ),
    Mutant(
        name="absence-older-snapshot-in-place-of-a-missing-one",
        path=WORKSPACE,
        before="if error.absent and not missing_snapshots.is_lost(candidate, now=now):",
        after="if False:",
        tests=[f"{TEST_SNAPSHOTS}::test_older_snapshot_replaces_a_missing_one_only_once_that_is_lost"],
    ),
)
