"""manage.py identity: the keys that agents sign with. A private key goes in on stdin and never comes out."""

import json
import sys
from argparse import ArgumentParser
from getpass import getpass
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone

from leases.errors import InvalidRequest
from leases.management.base import report_errors
from leases.models import DID_DESCRIPTION, Agent, validate_did
from sandboxes.formatting import pluralize
from sandboxes.identity import curves, signing
from sandboxes.identity.curves import PrivateKey
from sandboxes.models import SigningKey
from sandboxes.webhooks import subscriptions

ACTOR = "command line"
MAX_PRIVATE_KEY_CHARS = 1000  # characters of stdin: no private key is longer


class Command(BaseCommand):
    help = "The keys that agents sign with: each has one at most. Private keys are stored encrypted and never shown."

    def add_arguments(self, parser: ArgumentParser) -> None:
        acts = parser.add_subparsers(dest="act", required=True, metavar="ACT")
        acts.add_parser("list", help="every key, the newest first")
        create = acts.add_parser("create", help="the agent's first key, or its next one after a revoked one")
        bring = acts.add_parser("import", help="the same with a private key from stdin: 64 hexadecimal digits, or multibase")
        rotate = acts.add_parser("rotate", help="another key from now on; nothing is signed with the old one any more")
        rotate.add_argument("--import", action="store_true", dest="given", help="a private key from stdin, not a new one")
        revoke = acts.add_parser("revoke", help="no key: nothing is signed for the agent until it has another one")
        show = acts.add_parser("show", help="its did:key, and what its DID document has to say of it")
        for each in (create, bring, rotate, revoke, show):
            each.add_argument("agent", metavar="AGENT")
        for each in (create, bring, rotate):
            default = "that of the old one" if each is rotate else "ES256K, or what the imported text says"
            each.add_argument("--algorithm", choices=list(curves.CURVES), default="", help=f"default: {default}")
        acts.add_parser("reencrypt", help="encrypt every stored secret under the first of LEASEHOLD_IDENTITY_KEYS")

    def handle(self, *args: Any, act: str, verbosity: int, **given: Any) -> None:
        with report_errors(verbosity):
            getattr(self, f"_{act}")(**{name: value for name, value in given.items() if name in OPTION_NAMES})

    def _list(self) -> None:
        for key in SigningKey.objects.all():
            ended = key.retired_at or key.revoked_at
            state = "active" if not ended else f"{'retired' if key.retired_at else 'revoked'} {ended:%Y-%m-%dT%H:%M:%SZ}"
            self.stdout.write(f"{key.agent_did} {key.did_key} {key.algorithm} {key.created_at:%Y-%m-%dT%H:%M:%SZ} {state}")

    def _create(self, agent: str, algorithm: str) -> None:
        self._begin(agent, curves.generate_key(algorithm or SigningKey.Algorithm.ES256K))

    def _import(self, agent: str, algorithm: str) -> None:
        self._begin(agent, _read_private_key(algorithm))

    def _begin(self, agent: str, private: PrivateKey) -> None:
        key = signing.create_key(_parse_did(agent), now=timezone.now(), actor=ACTOR, private=private)
        Agent.objects.get_or_create(did=agent)
        self._said(key, "signs as")

    def _rotate(self, agent: str, algorithm: str, given: bool) -> None:
        private = _read_private_key(algorithm) if given else curves.generate_key(algorithm) if algorithm else None
        self._said(signing.rotate_key(agent, now=timezone.now(), actor=ACTOR, private=private), "signs from now on as")

    def _revoke(self, agent: str) -> None:
        key = signing.revoke_active_key(agent, now=timezone.now(), actor=ACTOR)
        self.stdout.write(f"{agent} signs nothing any more: {key.did_key} is revoked")

    def _show(self, agent: str) -> None:
        key = signing.get_active_key(agent)
        self.stdout.write(key.did_key)
        self.stdout.write(json.dumps(signing.build_verification_method(key), indent=2))

    def _reencrypt(self) -> None:
        done = signing.reencrypt_keys()
        self._reencrypted(pluralize(done.changed, "private key", "private keys"), done.already)
        webhooks = subscriptions.reencrypt_secrets(now=timezone.now())
        if webhooks.changed or webhooks.already:
            self._reencrypted(pluralize(webhooks.changed, "webhook's secret", "webhooks' secrets"), webhooks.already)
        if done.unopened:
            agents = ", ".join(key.agent_did for key in done.unopened)
            raise CommandError(f"Not one of LEASEHOLD_IDENTITY_KEYS decrypts the private key of {agents}.")
        if webhooks.unopened:
            urls = ", ".join(row.url for row in webhooks.unopened)
            raise CommandError(f"Not one of LEASEHOLD_IDENTITY_KEYS decrypts the secret of {urls}.")

    def _reencrypted(self, changed: str, already: int) -> None:
        self.stdout.write(f"{changed} encrypted anew, {already} were so before")

    def _said(self, key: SigningKey, what: str) -> None:
        self.stdout.write(f"{key.agent_did} {what} {key.did_key} ({key.algorithm}): publish what `identity show` prints")


OPTION_NAMES = {"agent", "algorithm", "given"}


def _read_private_key(algorithm: str) -> PrivateKey:
    text = getpass("Private key: ") if sys.stdin.isatty() else sys.stdin.read(MAX_PRIVATE_KEY_CHARS)
    try:
        return curves.parse_private_key(text.strip(), algorithm)
    except ValueError as wrong:
        raise CommandError(str(wrong)) from None


def _parse_did(text: str) -> str:
    try:
        validate_did(text)
    except ValidationError:
        raise InvalidRequest("agent", f"{text[:80]!r} is not {DID_DESCRIPTION}.") from None
    return text
