"""Namespaced identifiers of AT Protocol: names of methods and of record collections."""

DOMAIN_LABEL_PATTERN = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
NSID_PATTERN = rf"(?=[A-Za-z]){DOMAIN_LABEL_PATTERN}(\.{DOMAIN_LABEL_PATTERN})+\.[A-Za-z][A-Za-z0-9]{{0,62}}"
NSID_DESCRIPTION = "an NSID such as com.atproto.sync.subscribeRepos"
MAX_NSID_LENGTH = 317  # characters
