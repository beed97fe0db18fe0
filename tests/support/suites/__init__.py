"""Provider on which the crash, race and simulation suites run: LEASEHOLD_TEST_PROVIDER, by default `memory`."""

import os

import pytest

TEST_PROVIDER = os.environ.get("LEASEHOLD_TEST_PROVIDER", "memory")


def memory_only(reason: str) -> pytest.MarkDecorator:
    """Mark a test that cannot run on another provider, with the reason."""
    return pytest.mark.skipif(TEST_PROVIDER != "memory", reason=f"memory provider only: {reason}")
