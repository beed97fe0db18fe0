"""State diagram in README.md: equal to the one rendered from lifecycle.EDGES."""

import re
from pathlib import Path

from sandboxes.lifecycle import EDGES, render_state_diagram

README = Path(__file__).resolve().parents[3] / "README.md"
HINT = "Render it with: manage.py shell -v 0 -c 'from sandboxes.lifecycle import render_state_diagram as draw; print(draw())'"


def test_diagram_has_every_edge_once() -> None:
    drawn = re.findall(r"^    (\w+) --> (\w+): (.+)$", render_state_diagram(), re.MULTILINE)
    assert drawn == [(was.value, to.value, ", ".join(reasons)) for (was, to), reasons in EDGES.items()]


def test_readme_shows_the_diagram() -> None:
    fence = re.search(r"<!-- states -->\n```mermaid\n(.*?)\n```\n<!-- /states -->", README.read_text(), re.DOTALL)
    assert fence, f"README.md has no mermaid fence between <!-- states --> and <!-- /states -->; {HINT}"
    assert fence.group(1) == render_state_diagram(), HINT
