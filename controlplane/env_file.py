"""The file with the variables of an installation: `.env` beside manage.py, or the file that LEASEHOLD_ENV_FILE names.

A line is empty, a comment that begins with #, or NAME=VALUE, with `export` before the name if the shell reads the file as
well. No message shows a line: it may have a secret."""

import re
from io import StringIO
from pathlib import Path

from django.core.exceptions import ImproperlyConfigured
from environ import Env

LINE_PATTERN = re.compile(r"(?:export )?[A-Za-z_0-9]+=.*")  # that Env.read_env accepts


def read_env_file(path: Path, *, is_required: bool) -> None:
    """Set the variables of a file that the process does not have. A file that is not required may be absent.

    Raise ImproperlyConfigured for a file that cannot be read, and for a malformed line, with its number."""
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if not is_required:
            return
        raise ImproperlyConfigured(
            f"LEASEHOLD_ENV_FILE: the file {path} does not exist. It takes the path of a file of lines NAME=VALUE; set it to "
            "nothing to read no file."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ImproperlyConfigured(f"The file {path} with environment variables cannot be read: {reason}.") from None
    lines = content.splitlines()
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#") and not LINE_PATTERN.fullmatch(line):
            raise ImproperlyConfigured(
                f"{path}, line {number} is not accepted. It takes NAME=VALUE, without spaces before and after the name, or a "
                "comment that begins with #."
            )
    assignments = [line for line in lines if LINE_PATTERN.fullmatch(line)]
    Env.read_env(StringIO("\n".join(assignments)), overwrite=False)
