"""Hosts of the control plane: their engines, directories and capacity."""
