"""Catan skill: prompt, analysis and heuristic policy. Standard library only; copied to the sandbox image."""
