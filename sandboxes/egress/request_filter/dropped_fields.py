"""Count and log of the unknown fields that are dropped from requests of one process.

A field that a new release of a CLI sends appears here before its users notice a difference."""

from dataclasses import dataclass, field

import structlog

from sandboxes.egress.request_filter.requests import SanitizedRequest

log = structlog.get_logger(__name__)
MAX_LOGGED_NAMES = 200  # of a process: a sandbox chooses the names
COUNT_NAME = "request fields dropped"


@dataclass
class DroppedFields:
    """Number of dropped fields since the start. The first request with a name is logged."""

    count: int = 0
    _logged: set[tuple[str, str]] = field(default_factory=set)

    def add(self, path: str, request: SanitizedRequest) -> None:
        self.count += request.dropped_count
        new = [name for name in sorted(request.dropped_names) if (path, name) not in self._logged]
        new = new[: MAX_LOGGED_NAMES - len(self._logged)]
        if new:
            self._logged.update((path, name) for name in new)
            log.info("unknown request fields dropped", path=path, fields=new)

    def read_counts(self) -> dict[str, int]:
        return {COUNT_NAME: self.count}
