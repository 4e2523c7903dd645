"""The TOML file of a run: what it may say, and one line about what it may not."""

from pathlib import Path

import pytest

from jaxspec.errors import ConfigError
from train_medusa.__main__ import main
from train_medusa.config import read_config

LEAST = 'output = "runs/one"\n[data]\nfiles = ["a.jsonl"]\n'


@pytest.fixture
def write(tmp_path: Path):
    def to_file(text: str) -> Path:
        (tmp_path / "run.toml").write_text(text)
        return tmp_path / "run.toml"

    return to_file


def test_little_needs_to_be_said(write) -> None:
    config = read_config(write(LEAST))
    assert (config.model, config.output, config.data.files) == ("smollm2-135m", "runs/one", ["a.jsonl"])
    assert (config.heads.count, config.train.method, config.train.decay) == (4, "medusa-1", 0.8)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "missing required field `output`"),
        ('output = "a"', "missing required field `data`"),
        ('output = ""\n[data]\nfiles = ["a"]', "output must name a folder"),
        ('output = "a"\n[data]', "[data] names no texts"),
        (LEAST + "rows = 3", "unknown field `rows`"),
        (LEAST + "row = 3", "[data] row must be 4 or more, not 3"),
        (LEAST + "held_out = 1.0", "[data] held_out must be in [0, 1), not 1.0"),
        (LEAST + 'hidden = "both"', "Invalid enum value 'both'"),
        (LEAST + "[heads]\ncount = 0", "[heads] count must be 1 or more, not 0"),
        (LEAST + "[heads]\nvocab = 0", "[heads] vocab must be 1 or more, not 0"),
        (LEAST + "[train]\nlr = -1e-3", "[train] lr must be above 0, not -0.001"),
        (LEAST + "[train]\nlr = nan", "[train] lr must be above 0, not nan"),
        (LEAST + '[train]\nbatch = "8"', "Expected `int`, got `str`"),
        (LEAST + "[train]\nwarmup = 2.0", "[train] warmup must be in [0, 1], not 2.0"),
        (LEAST + "[train]\nweight_decay = -1.0", "[train] weight_decay must be 0 or more, not -1.0"),
        (LEAST + '[train]\nmethod = "medusa-2"', 'set [data] hidden = "computed"'),
        ("output = ", "Invalid value"),
    ],
)
def test_what_cannot_be_is_one_line_that_names_the_file(write, capsys, text: str, what: str) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as raised:
        read_config(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert what in str(raised.value)
    assert main([str(path)]) == 2
    assert capsys.readouterr().err == f"error: {' '.join(str(raised.value).split())}\n"


def test_a_missing_file(capsys, tmp_path: Path) -> None:
    assert main([str(tmp_path / "none.toml")]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("error: ")
    assert "none.toml" in err
    assert err.count("\n") == 1


def test_an_unknown_option_points_to_the_help(capsys) -> None:
    assert main(["run.toml", "--again"]) == 2
    assert "see python -m train_medusa --help" in capsys.readouterr().err


def test_help_teaches_with_a_config(capsys) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for word in ("[data]", "[heads]", "[train]", "hidden", "conditioned", "--restart"):
        assert word in out


def test_where_and_how_often_it_saves_is_not_decisive(write) -> None:
    one, other, another = (
        read_config(write(LEAST + f"[train]\n{line}")).decisive()
        for line in ("checkpoint_every = 5", "checkpoint_every = 7", "lr = 2e-3")
    )
    assert one == other
    assert one != another
