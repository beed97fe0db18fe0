"""Inventory: everything that engines and vendors list, joined with the rows of sandboxes; adoption and removal of the rest."""
