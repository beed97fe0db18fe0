"""Messages with text of services outside: vendors, forges, git, repository servers, stores.

Such text is redacted and quoted where it is received. Operators read it in the console and the log. Agents get the message
without it, and the code of the cause: a service may say more about the installation than they may know."""

import re
from functools import lru_cache

from django.conf import settings

from sandboxes.redaction.streams import SecretRedactor

OPENING, CLOSING = "\N{MATHEMATICAL LEFT DOUBLE ANGLE BRACKET}", "\N{MATHEMATICAL RIGHT DOUBLE ANGLE BRACKET}"
QUOTATION = re.compile(rf"[\s:]*{OPENING}[^{CLOSING}]*(?:{CLOSING}|\Z)")  # a stored message may be cut off within one
MAX_QUOTED_CHARS = 300
MAX_READ_CHARS = 10_000


def redact(text: str, *secrets: str) -> str:
    """Return a text without the secrets of the settings and `secrets`, in the forms of `list_forms`. Its length stays."""
    redactor = _build_redactor((*settings.SECRETS, *secrets))
    return redactor.redact(text.encode(errors="surrogatepass")).decode(errors="surrogatepass")


def quote_answer(text: object, *secrets: str) -> str:
    """Return the beginning of a text from outside as a quotation, redacted. Cut off last: a part of a secret is none."""
    shown = redact(str(text)[:MAX_READ_CHARS], *secrets)[:MAX_QUOTED_CHARS].strip()
    return f"{OPENING}{shown.translate({ord(OPENING): '<', ord(CLOSING): '>'})}{CLOSING}"


def omit_answers(text: str) -> str:
    """Return a message without its quotations, for agents."""
    return QUOTATION.sub("", text) if OPENING in text else text


@lru_cache(maxsize=32)
def _build_redactor(secrets: tuple[str, ...]) -> SecretRedactor:
    return SecretRedactor(*secrets)
