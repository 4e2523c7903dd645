"""What is compiled, what becomes of a compiler that dies, and how refusals are told."""

from pathlib import Path

import pytest

from jaxspec.bench import kernels
from jaxspec.bench.kernel_calls import Case, make_call
from jaxspec.bench.kernels import Row, make_cases, measure
from jaxspec.errors import ConfigError

CASE = Case("attention", "llama-70b-tp8", "bfloat16", "1", "v5e:2x4")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one, whatever is installed."""
    monkeypatch.setattr(kernels, "devices_of", lambda topology: [])


@pytest.mark.usefixtures("compiler")
def test_cases_are_all_combinations() -> None:
    cases = make_cases("v5e:2x4", ["append", "commit"], ["gemma", "smollm2"], ["int8"], ["1", "8", "prefill"])
    assert [(case.shape, case.queries, case.kernel) for case in cases] == [
        (shape, queries, kernel)
        for shape in ("gemma", "smollm2")
        for queries, names in (("1", ["append"]), ("8", ["append", "commit"]), ("prefill", ["append"]))
        for kernel in names  # nothing is drafted in decoding or in a prompt
    ]
    assert [case.width for case in cases[:4]] == [1, 8, 8, 64]
    assert cases[0].token_bytes == 2 * 256


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((["attend"], ["gemma"], ["int8"], ["1"]), "--kernels takes attention, append, .* not attend"),
        ((["append"], ["gpt"], ["int8"], ["1"]), "--shape takes llama-70b-tp8, .* not gpt"),
        ((["append"], ["gemma"], ["int2"], ["1"]), "--dtype takes float32, .* not int2"),
        ((["append"], ["gemma"], [], ["1"]), "--dtype takes float32, .* not nothing"),
        ((["append"], ["gemma"], ["int8"], ["65"]), "--queries takes numbers from 1 to 64 and prefill, not '65'"),
        ((["append"], ["gemma"], ["int8"], []), "--queries needs a number"),
        ((["commit"], ["gemma"], ["int8"], ["1"]), "commit moves drafts: --queries needs a number above 1"),
    ],
)
def test_unknown_names(options: tuple, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_cases("v5e:2x4", *options)


def test_attention_goes_over_whole_blocks() -> None:
    call = make_call(CASE)
    assert call.block % 128 == 0
    assert 8192 % call.block == 0
    assert call.passes == 1


def test_a_compiler_that_dies_costs_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying:
        begun = 0

        def __init__(self) -> None:
            Dying.begun += 1

        def figures(self, case: Case) -> Row | None:
            return None if case.queries == "4" else {"bundles": int(case.queries)}

        def last_words(self) -> str:
            return "the compiler died"

        def close(self) -> None: ...

    monkeypatch.setattr(kernels, "_Compiler", Dying)
    cases = [Case("attention", "gemma", "int8", queries, "v6e:2x4") for queries in ("1", "4", "8")]
    rows = list(measure(cases))
    assert [(row["queries"], row["bundles"], row["refused"]) for row in rows] == [
        (1, 1, None),
        (4, None, "the compiler died"),
        (8, 8, None),
    ]
    assert Dying.begun == 2
    assert [row["hbm_cycles"] for row in rows] == [round(8192 * 512 / 1640e9 * 1.75e9)] * 3


def test_a_process_that_is_killed() -> None:
    compiler = kernels._Compiler()
    try:
        compiler._process.kill()
        assert compiler.figures(CASE) is None
        assert compiler.last_words() == "the compiler died: it does not say why"
        said = "E1130 10:00:00.1 7 a.cc:1] no\nF1130 10:00:00.2 7 b.cc:2] Check failed: a == b\n*** stack\n"
        (Path(compiler._folder.name) / "stderr").write_text(said)
        assert compiler.last_words() == "the compiler died: Check failed: a == b"
    finally:
        compiler.close()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("bad block.  Spec for x at /some/where.py"), "bad block"),
        (ValueError("OOM:\n  needs 3.5 MiB"), "OOM: needs 3.5 MiB"),
        (KeyError(), "KeyError"),
    ],
)
def test_reasons_are_short(error: Exception, reason: str) -> None:
    assert kernels._reason(error) == reason
