"""Secrets in text, by the patterns of detect-secrets. Its entropy and keyword detectors are left out: most of their findings in
source code are no secrets."""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Protocol

from detect_secrets.plugins import (
    artifactory,
    aws,
    azure_storage_key,
    cloudant,
    discord,
    github_token,
    gitlab_token,
    ibm_cos_hmac,
    mailchimp,
    npm,
    openai,
    private_key,
    pypi_token,
    sendgrid,
    slack,
    square_oauth,
    stripe,
    telegram_token,
    twilio,
)  # fmt: skip

PIECE_LENGTH = 20_000  # characters of a line that are searched at once
OVERLAP_LENGTH = 1_000  # characters of the next piece that are searched again; a secret is shorter
OWN_KEY = re.compile(r"\blh_[0-9a-f]{8}_[A-Za-z0-9_-]{43}|\bwhsec_[A-Za-z0-9+/=_-]{32}")
ANTHROPIC_KEY = re.compile(r"\bsk-ant-[A-Za-z0-9_-]{20,}")


class _Detector(Protocol):
    secret_type: str

    def analyze_string(self, string: str) -> Iterable[str]: ...


@cache
def _list_detectors() -> tuple[_Detector, ...]:
    return (
        artifactory.ArtifactoryDetector(),
        aws.AWSKeyDetector(),
        azure_storage_key.AzureStorageKeyDetector(),
        cloudant.CloudantDetector(),
        discord.DiscordBotTokenDetector(),
        github_token.GitHubTokenDetector(),
        gitlab_token.GitLabTokenDetector(),
        ibm_cos_hmac.IbmCosHmacDetector(),
        mailchimp.MailchimpDetector(),
        npm.NpmDetector(),
        openai.OpenAIDetector(),
        private_key.PrivateKeyDetector(),
        pypi_token.PypiTokenDetector(),
        sendgrid.SendGridDetector(),
        slack.SlackDetector(),
        square_oauth.SquareOAuthDetector(),
        stripe.StripeDetector(),
        telegram_token.TelegramBotTokenDetector(),
        twilio.TwilioKeyDetector(),
    )


def find_secrets(text: str, *, known: str = "") -> Iterator[tuple[int, str]]:
    """Yield the line number and the type of each secret. Lines that `known` contains too are skipped."""
    known_lines = set(known.splitlines())
    for number, line in enumerate(text.splitlines(), 1):
        if line in known_lines:
            continue
        pieces = (line[start : start + PIECE_LENGTH] for start in range(0, len(line), PIECE_LENGTH - OVERLAP_LENGTH))
        if kind := next(filter(None, map(_identify_secret, pieces)), ""):
            yield number, kind


def _identify_secret(line: str) -> str:
    if OWN_KEY.search(line):
        return "Leasehold key"
    if ANTHROPIC_KEY.search(line):
        return "Anthropic key"
    return next((str(each.secret_type) for each in _list_detectors() if any(each.analyze_string(line))), "")
