"""``rotor measure``: time and bytes of a model's stages or operations."""

from __future__ import annotations

import argparse
from typing import Any

from rotor.chain import Chain
from rotor.commands import add_options, add_output, examples, give, tell
from rotor.commands.model import PROFILE, Subject, add_model, wrapped
from rotor.graph.graph import Graph
from rotor.report.text import chain_rows, operation_rows, table
from rotor.units import format_bytes, format_seconds

_MOST = 25


def add(commands: Any) -> None:
    """Add ``measure`` to the commands of a parser."""
    sub = commands.add_parser(
        "measure",
        help="times and bytes of a model's stages or operations",
        usage="%(prog)s FACTORY --input SHAPE [options]",
        description="Measure a model's stages, or its operations, one by one.",
        epilog=examples(
            "measure resnet18 --input 8,3,224,224",
            "measure gpt2 --input 4,256 --dtype int64 --high 50257 --arg layers=4 --out gpt.json",
            "measure train.py:make_model --input 32,128 --engine graph --save here.json",
        ),
    )
    add_model(sub)
    options = {
        **PROFILE,
        "--all": f"show all operations, not the {_MOST} longest",
        "--out FILE": "save the chain or the graph, as JSON; `rotor report` reads it",
        "--save FILE": "save this machine's measurements so far, and its speeds, to plan for it "
        "elsewhere with --profile; of graphs",
    }
    add_options(sub, options)
    add_output(sub)
    sub.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    subject = Subject(arguments)
    if arguments.save is not None and subject.is_one:
        raise ValueError("--save is of operations, not of stages: give --engine graph too")
    subject.check()
    from rotor.commands import running
    from rotor.fit.steps import has_single_plan
    from rotor.meter.room import step_limit

    model = wrapped(subject, arguments)
    if not has_single_plan(model):
        if arguments.out is not None or arguments.save is not None:
            raise ValueError(
                "--out and --save are of a chain or a graph, and the model has none: it runs in "
                "parts or by the dynamic engine; leave them out to see a step"
            )
        free = step_limit(subject.device, module=subject.model)
        runner, nbytes, seconds = running.measured_step(subject, model, free, ", what is free here")
        text = f"{runner.display()}\na step, measured: {format_bytes(nbytes)}"
        data = {"measured": None, "step": {"bytes": nbytes, "seconds": seconds}}
        give(arguments, subject.described() | data, f"{text}, {format_seconds(seconds)}")
        return 0
    found: Chain | Graph = model.cost_model()
    if isinstance(found, Chain):
        text = chain_text(found)
    else:
        text = graph_text(found, len(found) if arguments.all else _MOST)
    if arguments.out is not None:
        found.to_json(arguments.out)
        tell(arguments, f"{arguments.out} has the measurements")
    if arguments.save is not None:
        from rotor.graph import Machine, save_profile

        device = str(subject.device)
        save_profile(arguments.save, device, machine=Machine.measure(device))
        tell(arguments, f"{arguments.save} has the profile")
    data = subject.described() | {"measured": found.to_dict()}
    give(arguments, data, subject.heading() + text)
    return 0


def chain_text(chain: Chain) -> str:
    """Return a table of the stages of a chain."""
    rows = chain_rows(chain)
    rows[0] += ["temporary", "gradients"]
    for i, row in enumerate(rows[1:]):
        temporary = max(chain.forward_tmp_bytes[i], chain.backward_tmp_bytes[i])
        row += [format_bytes(temporary), format_bytes(chain.pgrad_bytes[i])]
    kept = format_bytes(sum(chain.xbar_bytes))
    return f"{table(rows)}\n{len(chain)} stages, {format_seconds(chain.ideal_time)}, {kept} kept"


def graph_text(graph: Any, most: int) -> str:
    """Return a table of the operations of a graph that take longest."""
    order = sorted(range(len(graph)), key=lambda k: (-graph.operations[k].cost_ns, k))
    chosen = order[:most] if most < len(graph) else range(len(graph))
    rows = operation_rows(graph, chosen)
    left = len(graph) - len(rows) + 1
    shown = f"; {left} shorter ones not shown (--all)" if left > 0 else ""
    total = format_seconds(graph.total_time)
    return f"{table(rows)}\n{len(graph)} operations, {total}{shown}"
