"""Tests of the rules for migrations (tests/lint). No other test imports them."""
