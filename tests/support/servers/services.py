"""Servers that .ci/services starts and names in environment variables."""

import os

from tests.conftest import skip_or_fail


def require_environment(*names: str) -> list[str]:
    """Return the values of environment variables. Skips the test, or fails it, if one is not set."""
    values = [os.environ.get(name, "") for name in names]
    if not all(values):
        skip_or_fail(f"{names[0]} is not set: .ci/services starts the server and sets the variable")
    return values


def require_s3(url: str = "TEST_S3_URL") -> list[str]:
    """Return URL, bucket, access key id and secret of the S3 server whose URL is in this variable."""
    return require_environment(url, "TEST_BUCKET", "TEST_S3_ACCESS_KEY_ID", "TEST_S3_SECRET_ACCESS_KEY")
