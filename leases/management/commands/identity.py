"""manage.py identity: signing keys of agents. Private keys are read from stdin and never printed."""

import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass
from getpass import getpass
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from leases import shells
from leases.atproto import accounts
from leases.coding import repositories
from leases.environments import signing as environment_signing
from leases.management.base import parse_did, report_errors
from leases.models import Agent
from leases.queue import sealing
from sandboxes import audit, process_restarts
from sandboxes.db import database_time
from sandboxes.db.encryption import ReencryptionResult
from sandboxes.egress.allow_list import credentials as egress_credentials
from sandboxes.formatting import pluralize
from sandboxes.identity import curves, signing
from sandboxes.identity.curves import PrivateKey
from sandboxes.models import SigningKey
from sandboxes.webhooks import subscriptions

MAX_PRIVATE_KEY_CHARS = 1000  # limit of the read from stdin; every supported format is shorter


class Command(BaseCommand):
    help = "Manage the signing keys of agents. An agent has at most one active key. Private keys are stored encrypted."

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        actions.add_parser("list", help="list all keys, newest first")
        create = actions.add_parser("create", help="create a key for an agent without an active one")
        import_ = actions.add_parser(
            "import", help="like create, with a private key from stdin: 64 hexadecimal digits, or multibase"
        )
        rotate = actions.add_parser("rotate", help="replace the active key; the old one is retired")
        rotate.add_argument(
            "--import", action="store_true", dest="imported", help="read the private key from stdin instead of generating it"
        )
        revoke = actions.add_parser(
            "revoke", help="revoke the active key; nothing is signed for the agent until a new key is created"
        )
        show = actions.add_parser("show", help="print the did:key and the verification method for the DID document")
        for subparser in (create, import_, rotate, revoke, show):
            subparser.add_argument("agent", metavar="AGENT")
        for subparser in (create, import_, rotate):
            default = "algorithm of the old key" if subparser is rotate else "ES256K, or the algorithm of the imported key"
            subparser.add_argument("--algorithm", choices=list(curves.CURVES), default="", help=f"default: {default}")
        actions.add_parser("reencrypt", help="encrypt every stored secret under the first of LEASEHOLD_IDENTITY_KEYS")

    def handle(self, *args: Any, action: str, verbosity: int, **options: Any) -> None:
        with report_errors(verbosity):
            getattr(self, f"_{action}")(**{name: value for name, value in options.items() if name in OPTION_NAMES})

    def _list(self) -> None:
        for key in SigningKey.objects.all():
            ended_at = key.retired_at or key.revoked_at
            state = "active" if not ended_at else f"{'retired' if key.retired_at else 'revoked'} {ended_at:%Y-%m-%dT%H:%M:%SZ}"
            self.stdout.write(f"{key.agent_did} {key.did_key} {key.algorithm} {key.created_at:%Y-%m-%dT%H:%M:%SZ} {state}")

    def _create(self, agent: str, algorithm: str) -> None:
        self._create_key(agent, curves.generate_key(algorithm or SigningKey.Algorithm.ES256K))

    def _import(self, agent: str, algorithm: str) -> None:
        self._create_key(agent, _read_private_key(algorithm))

    def _create_key(self, agent: str, private: PrivateKey) -> None:
        key = signing.create_key(parse_did(agent), now=database_time.now(), actor=audit.COMMAND_LINE, private=private)
        Agent.objects.get_or_create(did=agent)
        self._print_key(key, "signs with")

    def _rotate(self, agent: str, algorithm: str, imported: bool) -> None:
        private = _read_private_key(algorithm) if imported else curves.generate_key(algorithm) if algorithm else None
        self._print_key(
            signing.rotate_key(agent, now=database_time.now(), actor=audit.COMMAND_LINE, private=private), "now signs with"
        )

    def _revoke(self, agent: str) -> None:
        key = signing.revoke_active_key(agent, now=database_time.now(), actor=audit.COMMAND_LINE)
        self.stdout.write(f"{agent}: {key.did_key} is revoked")

    def _show(self, agent: str) -> None:
        key = signing.get_active_key(agent)
        self.stdout.write(key.did_key)
        self.stdout.write(json.dumps(signing.build_verification_method(key), indent=2))

    def _reencrypt(self) -> None:
        row, now = audit.get_installation_row(), database_time.now()
        with audit.record_order(row, "Encrypt secrets again", actor=audit.COMMAND_LINE, now=now) as order:
            results = [(secret, secret.reencrypt()) for secret in STORED_SECRETS]
            failed = sum(len(result.undecryptable) for _, result in results)
            order.result = f"{sum(result.changed for _, result in results)} encrypted again, {failed} not decrypted"
        undecryptable = []
        for secret, result in results:
            if secret.always_printed or result.changed or result.current:
                changed = pluralize(result.changed, secret.singular, secret.plural)
                self.stdout.write(f"{changed} re-encrypted, {result.current} already current")
            if result.undecryptable:
                names = ", ".join(secret.describe(row) for row in result.undecryptable)
                undecryptable.append(f"None of LEASEHOLD_IDENTITY_KEYS decrypts the {secret.owned_by} {names}.")
        if undecryptable:
            raise CommandError(" ".join(undecryptable))

    def _print_key(self, key: SigningKey, verb: str) -> None:
        self.stdout.write(f"{key.agent_did} {verb} {key.did_key} ({key.algorithm}): publish the output of `identity show`")


OPTION_NAMES = {"agent", "algorithm", "imported"}


@dataclass(frozen=True)
class StoredSecret:
    """One kind of secret that is stored encrypted. `owned_by` and `describe` name the rows that no key decrypts."""

    reencrypt: Callable[[], ReencryptionResult[Any]]
    singular: str
    plural: str
    owned_by: str
    describe: Callable[[Any], str]
    always_printed: bool = False


STORED_SECRETS = (
    StoredSecret(
        signing.reencrypt_keys, "private key", "private keys", "private key of", lambda row: row.agent_did, always_printed=True
    ),
    StoredSecret(
        lambda: subscriptions.reencrypt_secrets(now=database_time.now()), "webhook's secret", "webhooks' secrets", "secret of",
        lambda row: row.url,
    ),
    StoredSecret(
        shells.reencrypt_shells, "shell's variables", "shells' variables", "variables of the shells",
        lambda row: f"{row.name} of lease {row.lease_id}",
    ),
    StoredSecret(
        sealing.reencrypt, "queued run's secrets", "queued runs' secrets", "secrets of the queued runs", lambda row: str(row.pk)
    ),
    StoredSecret(
        environment_signing.reencrypt, "game server's secret", "game servers' secrets", "secrets of the environments",
        lambda row: row.environment_id,
    ),
    StoredSecret(
        egress_credentials.reencrypt, "egress credential", "egress credentials", "egress credentials",
        lambda row: f"{row.domain} of policy {row.policy}",
    ),
    StoredSecret(
        repositories.reencrypt, "repository's credentials", "repositories' credentials", "credentials of the repositories",
        lambda row: row.name,
    ),
    StoredSecret(
        process_restarts.reencrypt_env, "process's variables", "processes' variables", "variables of the processes",
        lambda row: str(row.pk),
    ),
    StoredSecret(
        accounts.reencrypt, "AT Protocol password", "AT Protocol passwords", "AT Protocol password of",
        lambda row: row.agent_did
    ),
)  # fmt: skip


def _read_private_key(algorithm: str) -> PrivateKey:
    text = getpass("Private key: ") if sys.stdin.isatty() else sys.stdin.read(MAX_PRIVATE_KEY_CHARS)
    try:
        return curves.parse_private_key(text.strip(), algorithm)
    except ValueError as error:
        raise CommandError(str(error)) from None
