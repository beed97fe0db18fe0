"""Files of model prices: formats, comparison with the rates in force, and the public list prices of this release.

Imports nothing from billing or leases."""
