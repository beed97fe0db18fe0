"""Removal of secrets from responses, messages and logs, and quotation of text from services outside.

Imports nothing of Leasehold."""
