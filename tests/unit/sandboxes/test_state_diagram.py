"""The README's picture of the states is the one that the code follows."""

import re
from pathlib import Path

from sandboxes.lifecycle import EDGES, render_state_diagram

README = Path(__file__).resolve().parents[3] / "README.md"
AGAIN = "make it again: manage.py shell -v 0 -c 'from sandboxes.lifecycle import render_state_diagram as draw; print(draw())'"


def test_the_diagram_has_every_edge_once() -> None:
    drawn = re.findall(r"^    (\w+) --> (\w+): (.+)$", render_state_diagram(), re.MULTILINE)
    assert drawn == [(was.value, to.value, ", ".join(reasons)) for (was, to), reasons in EDGES.items()]


def test_the_readme_shows_it() -> None:
    found = re.search(r"<!-- states -->\n```mermaid\n(.*?)\n```\n<!-- /states -->", README.read_text(), re.DOTALL)
    assert found, f"README.md has no mermaid fence between <!-- states --> and <!-- /states -->; {AGAIN}"
    assert found.group(1) == render_state_diagram(), AGAIN
