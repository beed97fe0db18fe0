"""Patterns of budgets for models, by the names under which a call may have a rate (sandboxes.egress.model_pricing).

A pattern matches a whole name: `*` stands for any text, and `?` for one character. It is tried with the name of the call, also
without everything up to the last "/", without the region and vendor of Bedrock, without a version suffix and without a date.
Beyond these names, `claude-v2` also matches `claude-v2:1`.
The check of a call and the sums of calls use one regular expression, so that both always agree."""

import re

from django.db.models import Q

from sandboxes.db import dialect
from sandboxes.db.sql import Statement

WILDCARDS = {"*": ".*", "?": "."}
# The expressions are valid in Python and in PostgreSQL. The look-ahead of VENDOR lets it take all parts, and not some of them.
PATH = r"(?:.*/(?=[^/]*$))?"
VENDOR_PART = r"(?:[a-z-]+|ai21)\."
VENDOR = rf"(?:(?:{VENDOR_PART})+(?=[a-zA-Z])(?!{VENDOR_PART}[a-zA-Z]))?"
DATE = r"(?:[-@](?:20\d\d-[01]\d-[0-3]\d|20\d\d[01]\d[0-3]\d))?"
VERSION = r"(?:(?:-v\d+)?:\d+)?"


def build_regex(pattern: str) -> str:
    """Build the regular expression of a pattern."""
    name = "".join(WILDCARDS.get(char, re.escape(char)) for char in pattern)
    return f"^{PATH}{VENDOR}{name}{DATE}{VERSION}$"


def is_model_match(pattern: str, model: str) -> bool:
    """Return whether a budget's pattern matches the name of a model. The empty pattern matches all."""
    return not pattern or re.search(build_regex(pattern), model) is not None


def build_model_filter(pattern: str) -> Q:
    """Match usage records of model calls, or model calls, by the name of their model."""
    return Q(model__regex=build_regex(pattern)) if pattern else Q()


def build_model_condition(pattern: str) -> Statement:
    """Build the condition of `build_model_filter` in SQL, for rows with the column `model`."""
    return Statement(f"model {dialect.regex_operator()} %s", (build_regex(pattern),))
