"""Provider on which the crash, race and simulation suites run: LEASEHOLD_TEST_PROVIDER, by default `memory`."""

import os

import pytest

TEST_PROVIDER = os.environ.get("LEASEHOLD_TEST_PROVIDER", "memory")


def without_vendors(reason: str) -> pytest.MarkDecorator:
    """Mark a test that cannot run on a vendor's provider, with the reason. It runs on the memory provider and on Kubernetes."""
    return pytest.mark.skipif(TEST_PROVIDER not in ("memory", "kubernetes"), reason=f"not on vendors: {reason}")
