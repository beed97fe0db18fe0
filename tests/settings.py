"""The settings under test: ours, with a state directory of this run's own and no .env file."""

import atexit
import os
import shutil
import tempfile
from dataclasses import replace
from datetime import timedelta

HERE = tempfile.mkdtemp(prefix="lh-test-")
atexit.register(shutil.rmtree, HERE, ignore_errors=True)
os.environ["LEASEHOLD_ENV_FILE"] = ""
os.environ.setdefault("SECRET_KEY", "for-tests-only-0123456789abcdef0123456789abcdef")
os.environ.setdefault("LEASEHOLD_ALLOW_UNISOLATED", "1")
os.environ.setdefault("LEASEHOLD_STATE_DIR", HERE)
os.environ.setdefault("LEASEHOLD_RUNTIME_DIR", os.path.join(HERE, "run"))
os.environ.setdefault("DATABASE_URL", f"sqlite:///{HERE}/leasehold.sqlite3")
os.environ.setdefault("LEASEHOLD_LOG_LEVEL", "WARNING")
os.environ.setdefault("LEASEHOLD_MIN_FREE_DISK", "0")  # tests mount disks of a few KiB
os.environ.setdefault("LEASEHOLD_PARKED_NETWORKS", "0")  # no containers beside those of the test
os.environ.setdefault("LEASEHOLD_SECOND_FACTOR", "enrolled")  # installs its apps; off below

from controlplane.settings import *  # noqa: E402, F403

DATABASES = DATABASES  # type: ignore[name-defined]  # noqa: F405
if not ON_POSTGRES:  # type: ignore[name-defined]  # noqa: F405
    DATABASES["default"]["TEST"] = {"NAME": os.path.join(HERE, "test.sqlite3")}  # a file: threads share it as processes do
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
WHITENOISE_AUTOREFRESH = True  # otherwise each test client stats all static files at its first request
SIGN_IN = replace(SIGN_IN, second_factor="off")  # type: ignore[name-defined]  # noqa: F405
DATABASE_IDLE = timedelta(0)  # a database with idle connections cannot be dropped
HEALTH_REPORT_SECONDS = 0.0  # tests change what is reported
