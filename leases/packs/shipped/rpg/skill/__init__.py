"""Role-playing skill: prompt, advice by role, character sheet, memory and heuristic policy. Standard library only."""
