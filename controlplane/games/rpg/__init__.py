"""Role-playing campaign of two to four characters. docs/rpg.md has the rules."""
