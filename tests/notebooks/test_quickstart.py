"""The notebook's cells run in order, as in a fresh session."""

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "quickstart.ipynb"


@pytest.mark.model
@pytest.mark.slow
def test_every_cell_runs(capsys):
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict = {}
    for cell in cells:
        assert not cell["outputs"], "outputs are not committed"
        exec(compile("".join(cell["source"]), str(NOTEBOOK), "exec"), names)  # noqa: S102 - its cells are ours
    assert "tokens a second" in capsys.readouterr().out
