"""Random histories of model calls: answers in the vendors' formats, the egress proxy without sockets, and expected costs.

The expected costs import nothing of the product's pricing."""
