"""App with a table and two migrations of its own, for tests of manage.py migrate."""
