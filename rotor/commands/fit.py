"""``rotor fit``: the largest batch under a limit, and the one of best throughput."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from rotor.commands import add_options, add_output, examples, give, tell
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
)


def add(commands: Any) -> None:
    """Add ``fit`` to the commands of a parser."""
    sub = commands.add_parser(
        "fit",
        help="the largest batch under a limit, and the one of best throughput",
        usage="%(prog)s FACTORY --input SHAPE [--limit BYTES] [options]",
        description="Find the largest batch whose training step fits in a limit, and the one of "
        "best throughput, beside plain PyTorch's. Sizes are planned; the answers are run, but not "
        "for another machine (--profile). The "
        "first size of the inputs is the batch; the given batch only serves to read their other "
        "sizes.",
        epilog=examples(
            "fit resnet18 --input 8,3,224,224 --limit 2GiB",
            "fit resnet50 --input 8,3,224,224 --limit 8GiB --untimed --points 1",
            "fit train.py:make_model --input 8,512 --dtype int64 --high 1000 --multiple-of 8",
            "fit train.py:make_model --input 8,128 --dtype int64 --high 1000 --limit 1GiB "
            "--lengths lognormal:90,0.5,16,256",
        ),
    )
    add_model(sub)
    options = {
        **PROFILE,
        **MESH,
        **OFFLOAD,
        "--limit BYTES": f"limit of a step, {LIMIT} (default: 90%%)",
        "--total BYTES": TOTAL,
        "--multiple-of N": "try multiples of N only",
        "--max-batch N": "try no larger batch (65536)",
        "--points N": "sizes to run with rotor at most (5)",
        "--untimed": "run stages and operations once instead of timing them: faster, with the same "
        "answer on memory; best with --points 1",
        "--lengths FILE|DIST": "instead, tell what batches of these lengths cost beside plain "
        "PyTorch: a file of whole numbers, uniform:LEAST,MOST, normal:MEAN,SPREAD,LEAST,MOST or "
        "lognormal:MEDIAN,SIGMA,LEAST,MOST; the second size of the inputs is the length",
        "--table": "show every size that was tried",
    }
    add_options(sub, options, multiple_of=1, max_batch=65536, points=5)
    add_output(sub)
    sub.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    logger = logging.getLogger("rotor")
    before = logger.level
    try:
        return _fit(arguments)
    finally:
        logger.setLevel(before)


def _fit(arguments: argparse.Namespace) -> int:
    limit = limit_of(arguments)
    from rotor.commands.factories import likely_loss
    from rotor.fit.search import largest_batch

    subject = Subject(arguments)
    subject.check()
    limit = within_total(arguments, subject, limit)
    # A terminal shows a bar instead of the messages that each of many batches would log.
    tell(arguments, "trying batches")
    logging.getLogger("rotor").setLevel(logging.WARNING)
    remark = "" if subject.knows_loss() else f"\nwith {UNKNOWN}"
    options: dict[str, Any] = {
        "loss_fn": subject.loss or likely_loss,
        "engine": subject.engine,
        "points": arguments.points,
        **({} if arguments.effort is None else {"effort": arguments.effort}),
        **({} if subject.profile is None else {"profile": subject.profile}),
        **subject.offload,
    }
    if arguments.lengths is not None:
        if subject.profile is not None:
            raise ValueError("--lengths runs steps, and --profile is of another machine")
        from rotor.fit.distributions import lengths_of
        from rotor.fit.lengths import cost_of_lengths

        lengths = lengths_of(arguments.lengths, arguments.seed)
        cost = cost_of_lengths(subject.model, subject.sample, lengths, limit, **options)
        give(arguments, subject.described() | cost.to_dict(), f"{cost}{remark}")
        return 0
    with subject.mode:
        found = largest_batch(
            subject.model,
            subject.sample,
            limit,
            multiple_of=arguments.multiple_of,
            max_batch=arguments.max_batch,
            timed=not arguments.untimed,
            **options,
        )
    text = f"{found}{remark}"
    if arguments.table:
        text += f"\n\n{found.display()}"
    figures = {k: v for k, v in found.to_dict().items() if k not in ("format", "version")}
    give(arguments, subject.described() | figures, text)
    return 0
