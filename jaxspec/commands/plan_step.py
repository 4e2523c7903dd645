"""What `jaxspec plan` and `jaxspec plan ladder` do once their options are read."""

import json
from typing import Any

from rich.console import Console

from jaxspec.errors import ConfigError
from jaxspec.plan.fit import fits, largest_batch, remedies, smallest_slice
from jaxspec.plan.held import held
from jaxspec.plan.ladder import Demand, ladder
from jaxspec.plan.setup import Setup, set_up
from jaxspec.plan.speed import Luck, check_luck, speed_of
from jaxspec.plan.step_report import GB, GIB, Plan, ladder_fields, ladder_report, make_step_fields, make_step_report


def plan_step(
    options: dict[str, Any], luck: Luck, efficiency: float, fit: str | None, compiles: bool, as_json: bool
) -> int:
    """Print the plan of these options of `set_up`."""
    setup = _fitted(set_up(**options), fit)
    luck = check_luck(setup, luck)
    compiled = _compiled(setup) if compiles else None
    plan = Plan(setup, luck, held(setup), speed_of(setup, luck, efficiency), remedies(setup), compiled)
    _print(make_step_fields(plan) if as_json else None, make_step_report(plan))
    return 0


def plan_ladder(demand: Demand, as_json: bool) -> int:
    """Print the ladder."""
    rungs = ladder(demand)
    _print(ladder_fields(demand, rungs) if as_json else None, ladder_report(demand, rungs))
    return 0


def _fitted(setup: Setup, fit: str | None) -> Setup:
    if fit is None:
        return setup
    if fit == "slice":
        return setup.changed(slice=smallest_slice(setup))
    batch = largest_batch(setup)
    if not batch:
        raise ConfigError(f"not one sequence of {setup.context} tokens fits: {_weights_of(setup)}")
    return setup.changed(batch=batch)


def _compiled(setup: Setup) -> Any:
    if setup.slice.has_switch:
        raise ConfigError(f"compile is for TPUs: {setup.slice.topology} has a roofline only")
    if held(setup).weights > setup.slice.usable_bytes:
        raise ConfigError(f"nothing to compile: {_weights_of(setup)}")
    if not fits(setup):
        raise ConfigError("nothing to compile: this does not fit; without --compile it is told what would")
    from jaxspec.plan.compiled import compile_steps

    return compile_steps(setup)


def _weights_of(setup: Setup) -> str:
    """What they take of a slice."""
    size, devices = held(setup).weights, setup.share
    return (
        f"the weights of {setup.shape.name} in {setup.weights} take {size * devices / GB:.0f} GB, {size / GIB:.1f} GiB "
        f"on each of {devices} devices of {setup.slice.topology}, which have {setup.slice.usable_bytes / GIB:g} GiB"
    )


def _print(fields: dict[str, Any] | None, report: Any) -> None:
    if fields is not None:
        print(json.dumps(fields, indent=1))
        return
    console = Console(highlight=False)
    for part in report:
        console.print(part)
