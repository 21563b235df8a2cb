"""``rotor plan``: the plan of a model under a limit, as text, as a file, as a page."""

from __future__ import annotations

import argparse
from typing import Any

from rotor.chain import write_json
from rotor.commands import add_options, add_output, add_pages, check_pages, examples, give, tell
from rotor.commands.model import (
    LIMIT,
    MESH,
    OFFLOAD,
    PROFILE,
    TOTAL,
    UNKNOWN,
    Subject,
    add_model,
    limit_of,
    within_total,
    wrapped,
)
from rotor.units import format_bytes, format_seconds


def add(commands: Any) -> None:
    """Add ``plan`` to the commands of a parser."""
    sub = commands.add_parser(
        "plan",
        help="kept, dropped and recomputed results under a limit",
        usage="%(prog)s FACTORY --input SHAPE [--limit BYTES] [--out FILE] [--html FILE] "
        "[--trace FILE] [options]",
        description="Measure a model and plan its training step under a limit, by default 90 % of "
        "the device's free memory.",
        epilog=examples(
            "plan resnet18 --input 8,3,224,224 --limit 400MiB",
            "plan train.py:make_model --input 8,128 --engine graph --limit 1GiB --out plan.json",
            "plan resnet50 --input 8,3,224,224 --limit 1GiB --html plan.html --table",
            "plan train.py:make_model --input 2,4096 --dtype int64 --high 9 --mesh dp=8,tp=4 "
            "--profile machine.json --limit 20GiB",
        ),
    )
    add_model(sub)
    options = {
        **PROFILE,
        **MESH,
        **OFFLOAD,
        "--limit BYTES": f"of a step, {LIMIT}",
        "--total BYTES": TOTAL,
        "--out FILE": "save the plan as JSON, for `rotor report` and for load_plan",
    }
    add_options(sub, options)
    add_pages(sub)
    add_options(sub, {"--table": "show each stage or operation and the plan's choice for it"})
    add_output(sub)
    sub.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    limit = limit_of(arguments)
    check_pages(arguments)
    from rotor.commands import running
    from rotor.fit.steps import has_single_plan
    from rotor.meter.room import step_limit, step_limit_there

    subject = Subject(arguments)
    subject.check()
    limit = within_total(arguments, subject, limit)
    if subject.profile is not None:
        limit = step_limit_there(subject.profile.free_bytes, limit)
    model = wrapped(subject, arguments, limit)
    plan = model.plan_step() if has_single_plan(model) else None
    schedule = None if plan is None else plan.result
    measured: dict[str, Any] = {}
    if schedule is not None:
        nbytes, seconds = model.get_expected_memory(), model.get_expected_makespan()
    else:
        if arguments.out is not None:
            raise ValueError(
                f"--out {arguments.out}: the model runs in parts or by the dynamic engine, without "
                "a single plan to be saved: leave --out out, the text and --html show steps"
            )
        limit = step_limit(subject.device, limit, module=subject.model)
        model, nbytes, seconds = running.measured_step(subject, model, limit)
        measured = {"measured_bytes": nbytes, "measured_seconds": seconds}
        tell(arguments, "the model has no single plan: steps were run within the limit")
    described = {
        "limit_bytes": model.mem_limit,
        "predicted_bytes": nbytes,
        "seconds": seconds,
        "engine": model.plan.engine,
        **subject.described(),
        **measured,
        **({} if model.homes is None else {"homes": model.homes}),
    }
    data = {"plan": described, "schedule": None if schedule is None else schedule.to_dict()}
    if arguments.out is not None and schedule is not None:
        write_json(schedule.to_dict() | {"plan": described}, arguments.out)
        tell(arguments, f"{arguments.out} has the plan")
    text: str = model.report(arguments.html)
    if measured:
        text += f"\na step, measured: {format_bytes(nbytes)}, {format_seconds(seconds)}"
        text += "" if subject.knows_loss() else f",\nwith {UNKNOWN}"
    has_aside = schedule is not None and subject.output is not None
    if has_aside and (aside := running.set_aside_bytes(subject)):
        text += (
            f"\nfor an unknown loss at most {format_bytes(aside)} are set aside, 4 x the output:\n"
            "--loss cross_entropy plans the loss itself"
        )
    if subject.loss_name is not None:
        zeros = ", its targets are zeros" if subject.loss_name in ("cross_entropy", "mse") else ""
        text += f"\nplanned with the loss {subject.loss_name} of the model's output{zeros}"
    if arguments.html is not None:
        tell(arguments, f"{arguments.html} has the page")
    if arguments.trace is not None:
        model.report(arguments.trace)
        tell(arguments, f"{arguments.trace} has the trace")
    give(arguments, data, f"{text}\n\n{model.display()}" if arguments.table else text)
    return 0
