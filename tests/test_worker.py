"""What a worker keeps of requests that had to give way."""

from pathlib import Path

import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.engine import Engine


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    found = LLM(str(tiny_model), max_batch=1).engine
    assert isinstance(found, Engine)
    return found


@pytest.mark.parametrize("stops", [True, False])
def test_it_forgets_those_that_end_while_they_wait(unoptimised, engine: Engine, monkeypatch, stops: bool):
    """By a stop string, which the host finds after they gave way, or because they are called off."""

    def give_way() -> None:
        row, running = engine.scheduler.preempt()
        running.saved = "its name"
        engine.device.save(row, running.saved)

    stop = engine.tokenizer.decode([4])
    params = SamplingParams(max_tokens=9, ignore_eos=True, stop=[stop] if stops else [], logit_bias={4: 100.0})
    engine.add("it", "the sea", params)
    engine.step()  # starts it
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_dispatch", give_way)
        news = engine.step()
    assert [delta.finished is not None for delta in news] == [stops]
    assert engine.has_work is not stops
    engine.abort("it")
    assert engine.device._saved == {}
