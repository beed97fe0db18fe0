"""A Kubernetes cluster of one node for the tests, of the real programs."""
