"""Structured logging to stderr, one line per record.

Records carry no secrets: the values of environment variables, stdin and keys are never passed to a logger, and the texts of
services outside, which may repeat a secret, are redacted."""

from typing import Any

from controlplane.optional_imports import without_packages
from sandboxes.redaction.texts import redact

with without_packages("rich"):  # formats tracebacks of the development log, with 4 MiB
    import structlog


def _redact_values(logger: Any, method: str, record: Any) -> Any:
    """Remove the secrets of the settings from a record, tracebacks included."""
    return {name: redact(value) if isinstance(value, str) else value for name, value in record.items()}


def build_logging(format: str, level: str) -> dict[str, Any]:
    """Configure structlog and return the value of Django's LOGGING. `format` is "text" or "json"."""
    shared_processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: Any = (
        structlog.processors.JSONRenderer() if format == "json" else structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0)
    )
    structlog.configure(
        processors=[*shared_processors, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "structured": {
                "()": structlog.stdlib.ProcessorFormatter,
                "foreign_pre_chain": shared_processors,
                "processors": [
                    structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                    structlog.processors.format_exc_info,
                    _redact_values,
                    renderer,
                ],
            }
        },
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "structured"}},
        "root": {"handlers": ["stderr"], "level": level},
        "loggers": {
            "django-q": {"level": "WARNING"},  # at INFO it logs three lines per task
            **{name: {"level": "WARNING"} for name in ("mcp", "httpx", "httpx2")},  # at INFO they log each request
            "django.request": {"level": "ERROR"},
            "django.db.backends": {"level": "INFO"},
        },
    }
