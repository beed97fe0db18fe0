"""Projects: the tenants of an installation, to which agents, API keys, environments and repositories belong.

Imports no API and no admin. `verbs` creates projects and moves agents; who may enter an environment is in environments."""
