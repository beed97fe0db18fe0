"""Decision on whether a grant is alive: by the present state of the API key or console user that has issued the grant."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Group, User

from leases import api_keys
from leases.errors import GrantEnded
from leases.grants import issuers
from leases.grants.issuers import Issuer, Right
from leases.models import AgentKey
from tests.conftest import MINUTE, NOW
from tests.support.billing import ADA, BOB
from tests.support.grants import KEY_ENDS

pytestmark = pytest.mark.django_db
HOUR = timedelta(hours=1)


@pytest.fixture
def issued() -> tuple[AgentKey, str]:
    return api_keys.issue_key([ADA], now=NOW)


@pytest.fixture
def right(issued: tuple[AgentKey, str]) -> Right:
    """Right to work with a lease of Ada, bound to the secret of the key."""
    row, text = issued
    return Right(Issuer.of_key(row.pk, text), agent_did=ADA)


@pytest.fixture
def user() -> User:
    user = User.objects.create_user("olga", password="first", is_staff=True)
    user.groups.add(Group.objects.get(name="Operator"))
    return user


@pytest.mark.parametrize("change", KEY_ENDS)
def test_grant_ends_with_the_right_of_its_key(right: Right, change: dict[str, Any]) -> None:
    assert issuers.is_grant_alive(right, now=NOW)
    issuers.require_alive(right, now=NOW)
    AgentKey.objects.update(**change)
    assert not issuers.is_grant_alive(right, now=NOW)
    assert issuers.find_key(right, now=NOW) is None
    with pytest.raises(GrantEnded):
        issuers.require_alive(right, now=NOW)


def test_grant_ends_at_the_expiry_of_its_key(right: Right) -> None:
    AgentKey.objects.update(expires_at=NOW + HOUR)
    assert issuers.is_grant_alive(right, now=NOW + HOUR - MINUTE)
    assert not issuers.is_grant_alive(right, now=NOW + HOUR)


def test_right_to_read_needs_less_than_the_right_to_change(issued: tuple[AgentKey, str]) -> None:
    issuer = Issuer.of_key(issued[0].pk)
    reading, working = Right(issuer, ("leases", "read"), ADA), Right(issuer, ("leases",), ADA)
    assert issuers.find_alive([reading, working], now=NOW) == {reading, working}
    AgentKey.objects.update(scopes=["read"])
    assert issuers.find_alive([reading, working], now=NOW) == {reading}


def test_operators_key_has_the_right_to_every_agent(right: Right) -> None:
    AgentKey.objects.update(dids=[], operator=True)
    assert issuers.is_grant_alive(right, now=NOW)


def test_key_that_does_not_exist_has_no_right(right: Right) -> None:
    assert not issuers.is_grant_alive(Right(Issuer.of_key(right.issuer.pk + 1)), now=NOW)


def test_rotation_is_no_revocation_as_long_as_the_previous_secret_is_accepted(right: Right) -> None:
    unbound = Right(Issuer.of_key(right.issuer.pk), agent_did=ADA)
    text = api_keys.rotate_key(right.issuer.pk, overlap=HOUR, now=NOW)
    renewed = Right(Issuer.of_key(right.issuer.pk, text), agent_did=ADA)
    assert issuers.find_alive([right, unbound, renewed], now=NOW + HOUR - MINUTE) == {right, unbound, renewed}
    assert issuers.find_alive([right, unbound, renewed], now=NOW + HOUR) == {unbound, renewed}


def test_rotation_without_an_overlap_ends_what_earlier_secrets_have_opened(right: Right) -> None:
    during = Right(Issuer.of_key(right.issuer.pk, api_keys.rotate_key(right.issuer.pk, overlap=HOUR, now=NOW)), agent_did=ADA)
    unbound = Right(Issuer.of_key(right.issuer.pk), agent_did=ADA)
    api_keys.rotate_key(right.issuer.pk, overlap=timedelta(0), now=NOW)
    assert issuers.find_alive([right, during, unbound], now=NOW) == {unbound}


def deactivate(user: User) -> None:
    User.objects.filter(pk=user.pk).update(is_active=False)


def take_staff_status(user: User) -> None:
    User.objects.filter(pk=user.pk).update(is_staff=False)


def take_role(user: User) -> None:
    user.groups.clear()


def change_password(user: User) -> None:
    user.set_password("second")
    user.save()


def delete(user: User) -> None:
    user.delete()


@pytest.mark.parametrize("change", [deactivate, take_staff_status, take_role, change_password, delete])
def test_grant_ends_with_the_right_of_its_user(user: User, change: Callable[[User], None]) -> None:
    right = Right(Issuer.of_user(user), agent_did=ADA)
    assert issuers.is_grant_alive(right, now=NOW)
    change(user)
    assert not issuers.is_grant_alive(right, now=NOW)


def test_grant_of_a_user_outlives_a_change_of_the_secret_key_with_a_fallback(user: User, settings: Any) -> None:
    right = Right(Issuer.of_user(user), agent_did=ADA)
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "another key", [settings.SECRET_KEY]
    assert issuers.is_grant_alive(right, now=NOW)
    settings.SECRET_KEY_FALLBACKS = []
    assert not issuers.is_grant_alive(right, now=NOW)


def test_key_and_user_with_one_id_are_two_issuers(issued: tuple[AgentKey, str]) -> None:
    user = User.objects.create_user("same", id=issued[0].pk, is_staff=True)
    assert issuers.is_grant_alive(Right(Issuer.of_key(issued[0].pk), agent_did=ADA), now=NOW)
    assert not issuers.is_grant_alive(Right(Issuer.of_user(user), agent_did=ADA), now=NOW)


def test_any_number_of_keys_is_checked_by_one_query(django_assert_num_queries: Any) -> None:
    keys = [api_keys.issue_key([did], now=NOW)[0] for did in (ADA, BOB, ADA)]
    rights = [Right(Issuer.of_key(key.pk), agent_did=ADA) for key in keys]
    with django_assert_num_queries(1):
        assert issuers.find_alive(rights, now=NOW) == {rights[0], rights[2]}
