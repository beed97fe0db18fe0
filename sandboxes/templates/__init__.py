"""Image templates: sandbox images that operators build from a base and commands, or from a Dockerfile."""
