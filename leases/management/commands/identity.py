"""manage.py identity: signing keys of agents. Private keys are read from stdin and never printed."""

import json
import sys
from argparse import ArgumentParser
from getpass import getpass
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone

from leases import shells
from leases.coding import repositories
from leases.environments import signing as environment_signing
from leases.management.base import parse_did, report_errors
from leases.models import Agent
from leases.queue import queue
from sandboxes import process_restarts
from sandboxes.egress.allow_list import credentials as egress_credentials
from sandboxes.formatting import pluralize
from sandboxes.identity import curves, signing
from sandboxes.identity.curves import PrivateKey
from sandboxes.models import SigningKey
from sandboxes.webhooks import subscriptions

ACTOR = "command line"
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
        key = signing.create_key(parse_did(agent), now=timezone.now(), actor=ACTOR, private=private)
        Agent.objects.get_or_create(did=agent)
        self._print_key(key, "signs with")

    def _rotate(self, agent: str, algorithm: str, imported: bool) -> None:
        private = _read_private_key(algorithm) if imported else curves.generate_key(algorithm) if algorithm else None
        self._print_key(signing.rotate_key(agent, now=timezone.now(), actor=ACTOR, private=private), "now signs with")

    def _revoke(self, agent: str) -> None:
        key = signing.revoke_active_key(agent, now=timezone.now(), actor=ACTOR)
        self.stdout.write(f"{agent}: {key.did_key} is revoked")

    def _show(self, agent: str) -> None:
        key = signing.get_active_key(agent)
        self.stdout.write(key.did_key)
        self.stdout.write(json.dumps(signing.build_verification_method(key), indent=2))

    def _reencrypt(self) -> None:
        keys = signing.reencrypt_keys()
        self._print_reencrypted(pluralize(keys.changed, "private key", "private keys"), keys.current)
        webhooks = subscriptions.reencrypt_secrets(now=timezone.now())
        if webhooks.changed or webhooks.current:
            self._print_reencrypted(pluralize(webhooks.changed, "webhook's secret", "webhooks' secrets"), webhooks.current)
        variables = shells.reencrypt_shells()
        if variables.changed or variables.current:
            self._print_reencrypted(pluralize(variables.changed, "shell's variables", "shells' variables"), variables.current)
        runs = queue.reencrypt()
        if runs.changed or runs.current:
            self._print_reencrypted(pluralize(runs.changed, "queued run's secrets", "queued runs' secrets"), runs.current)
        servers = environment_signing.reencrypt()
        if servers.changed or servers.current:
            self._print_reencrypted(
                pluralize(servers.changed, "game server's secret", "game servers' secrets"), servers.current
            )
        credentials = egress_credentials.reencrypt()
        if credentials.changed or credentials.current:
            self._print_reencrypted(
                pluralize(credentials.changed, "egress credential", "egress credentials"), credentials.current
            )
        tokens = repositories.reencrypt()
        if tokens.changed or tokens.current:
            self._print_reencrypted(
                pluralize(tokens.changed, "repository's credentials", "repositories' credentials"), tokens.current
            )
        processes = process_restarts.reencrypt_env()
        if processes.changed or processes.current:
            self._print_reencrypted(
                pluralize(processes.changed, "process's variables", "processes' variables"), processes.current
            )
        if keys.undecryptable:
            agents = ", ".join(key.agent_did for key in keys.undecryptable)
            raise CommandError(f"None of LEASEHOLD_IDENTITY_KEYS decrypts the private key of {agents}.")
        if webhooks.undecryptable:
            urls = ", ".join(row.url for row in webhooks.undecryptable)
            raise CommandError(f"None of LEASEHOLD_IDENTITY_KEYS decrypts the secret of {urls}.")
        if variables.undecryptable:
            names = ", ".join(f"{row.name} of lease {row.lease_id}" for row in variables.undecryptable)
            raise CommandError(f"None of LEASEHOLD_IDENTITY_KEYS decrypts the variables of the shells {names}.")
        if runs.undecryptable:
            ids = ", ".join(str(row.pk) for row in runs.undecryptable)
            raise CommandError(f"None of LEASEHOLD_IDENTITY_KEYS decrypts the secrets of the queued runs {ids}.")
        if servers.undecryptable:
            names = ", ".join(str(row) for row in servers.undecryptable)
            raise CommandError(f"None of LEASEHOLD_IDENTITY_KEYS decrypts the {names}.")
        if credentials.undecryptable:
            names = ", ".join(f"{row.domain} of policy {row.policy}" for row in credentials.undecryptable)
            raise CommandError(f"None of LEASEHOLD_IDENTITY_KEYS decrypts the egress credentials {names}.")
        if tokens.undecryptable:
            names = ", ".join(row.name for row in tokens.undecryptable)
            raise CommandError(f"None of LEASEHOLD_IDENTITY_KEYS decrypts the credentials of the repositories {names}.")
        if processes.undecryptable:
            ids = ", ".join(str(row.pk) for row in processes.undecryptable)
            raise CommandError(f"None of LEASEHOLD_IDENTITY_KEYS decrypts the variables of the processes {ids}.")

    def _print_reencrypted(self, changed: str, already: int) -> None:
        self.stdout.write(f"{changed} re-encrypted, {already} already current")

    def _print_key(self, key: SigningKey, verb: str) -> None:
        self.stdout.write(f"{key.agent_did} {verb} {key.did_key} ({key.algorithm}): publish the output of `identity show`")


OPTION_NAMES = {"agent", "algorithm", "imported"}


def _read_private_key(algorithm: str) -> PrivateKey:
    text = getpass("Private key: ") if sys.stdin.isatty() else sys.stdin.read(MAX_PRIVATE_KEY_CHARS)
    try:
        return curves.parse_private_key(text.strip(), algorithm)
    except ValueError as error:
        raise CommandError(str(error)) from None
