"""Plans as plain text: figures are rows of name and value, tables have their head first."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rotor.graph.assembly import fastest_of
from rotor.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rotor.chain import Chain
    from rotor.dtr.recall import Stats
    from rotor.engines.chain.plan import Plan
    from rotor.engines.dynamic.engine import DynamicPlan, StepFigures
    from rotor.engines.graph.code.offloading import Layout
    from rotor.engines.graph.planned import GraphPlan
    from rotor.engines.parts.plan import PartsPlan, PartsTier
    from rotor.engines.plain import PlainPlan
    from rotor.graph.graph import Graph
    from rotor.graph.program import Program
    from rotor.meter.step_meter import Metered
    from rotor.tier.interface import Tier


class Text(str):
    """Text that a prompt or a notebook shows unquoted, line by line."""

    def __repr__(self) -> str:
        return str(self)


_COLUMNS, _NARROWEST = 1 << 20, 20


def table(rows: Sequence[Sequence[str]]) -> Text:
    """Return rows of text in columns; the first row is the head, the first column left-aligned.

    Cells of the widest column fold where a line would be wider than the terminal, if one is known.
    """
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    over = sum(widths) + 2 * len(widths) - 2 - shutil.get_terminal_size((_COLUMNS, 1)).columns
    widest = widths.index(max(widths))
    if over > 0:
        least = max(len(rows[0][widest]), min(widths[widest], _NARROWEST))
        widths[widest] = max(widths[widest] - over, least)
    lines = []
    for row in rows:
        folded = textwrap.wrap(row[widest], widths[widest]) if over > 0 else [row[widest]]
        for number, part in enumerate(folded or [""]):
            cells = [part if k == widest else "" if number else row[k] for k in range(len(row))]
            lines.append(
                "  ".join(
                    cell.ljust(width) if k == 0 else cell.rjust(width)
                    for k, (cell, width) in enumerate(zip(cells, widths, strict=True))
                ).rstrip()
            )
    lines.insert(1, "  ".join("-" * width for width in widths))
    return Text("\n".join(lines))


def chain_rows(chain: Chain) -> list[list[str]]:
    """Return names, times, and bytes of the output and of the kept values, of each stage."""
    rows = [["stage", "forward", "backward", "output", "kept by Fe"]]
    for i in range(len(chain)):
        times = (chain.forward_time[i], chain.backward_time[i])
        sizes = (chain.x_bytes[i + 1], chain.xbar_bytes[i])
        name = chain.names[i] if chain.names else str(i)
        rows.append([name, *map(format_seconds, times), *map(format_bytes, sizes)])
    return rows


def stage_rows(plan: Plan) -> list[list[str]]:
    """Return the table of the stages: costs, number of runs, whether plain autograd runs it."""
    head, *rows = chain_rows(plan.chain)
    forwards = plan.sequence.count_forwards()
    for i, row in enumerate(rows):
        is_plain = not plan.schedule.head <= i < plan.schedule.tail
        how = "kept" if is_plain or plan.chain.once[i] else "scheduled"
        row += [str(forwards[i]), "recomputed" if i in plan.schedule.recomputed else how]
    return [[*head, "runs", "how"], *rows]


def operation_rows(graph: Graph, chosen: Iterable[int]) -> list[list[str]]:
    """Return phase, module, time and bytes of operations, the head first."""
    rows = [["operation", "phase", "module", "time", "makes", "workspace"]]
    for operation in (graph.operations[k] for k in chosen):
        made = sum(graph.storages[s].bytes for s in operation.outputs)
        rows.append([operation.name, operation.phase, operation.module])
        rows[-1].append(format_seconds(operation.cost_ns / 1e9))
        rows[-1] += [format_bytes(made), format_bytes(operation.workspace_bytes)]
    return rows


def program_rows(plan: GraphPlan) -> list[list[str]]:
    """Return the table of the operations, with the number of runs."""
    rows = operation_rows(plan.graph, range(len(plan.graph)))
    runs = ["runs", *map(str, plan.program.runs.tolist())]
    return [[*row, count] for row, count in zip(rows, runs, strict=True)]


def plan_figures(plan: Any) -> list[list[str]]:
    """Return the figures of a plan with a program, of a chain or a graph, by name."""
    rows = [*_peak_rows(plan), *reserved_rows(plan)]
    rows += [["peak without recomputation", format_bytes(plan.unlimited_bytes)], *seen_rows(plan)]
    again = ["stages recomputed", f"{plan.recomputed} of {len(plan.program.graph) // 2}"]
    detail = []
    if plan.engine == "graph":
        if plan.budget_bytes is not None:
            rows.insert(0, ["budget, gradients aside", format_bytes(plan.budget_bytes)])
        rows.append(["lower bound of any plan", format_bytes(plan.lower_bound_bytes)])
        again = ["operations run again", f"{plan.recomputed} of {len(plan.graph)}"]
        alike, detail = plan.step.capture.alike, offload_rows(plan)
        detail += [["marked in the model", plan.marks]] if plan.marks else []
        detail += [["alike layers", alike]] if alike else []
    planning = getattr(plan, "planning", None)
    return [
        *rows,
        ["step, predicted", format_seconds(plan.makespan)],
        ["recomputation", f"{plan.recomputation:+.1%}"],
        again,
        *detail,
        ["set aside after metering", format_bytes(plan.reserve_bytes)],
        *aside_rows(plan),
        *loss_rows(plan),
        *([] if planning is None else [["planning", planning.text]]),
        ["proof", plan.proof],
    ]


def stage_notes(plan: Plan) -> list[str]:
    """Return a sentence on each stage of a chain that is never recomputed."""
    names = plan.chain.names or []
    return [
        f"stage {names[i]} is never recomputed: {why}" for i, why in plan.inspection.reasons.items()
    ]


def _peak_rows(plan: Any, predicted: str = "") -> list[list[str]]:
    measured = "not yet" if plan.measured_bytes is None else format_bytes(plan.measured_bytes)
    return [
        ["limit", format_bytes(plan.limit_bytes)],
        ["peak, predicted", predicted or format_bytes(plan.predicted_bytes)],
        ["peak, measured", measured],
    ]


_DAY = 86400


def offload_rows(plan: GraphPlan) -> list[list[str]]:
    """Return rows on the values that a plan moves to a second tier and back."""
    if plan.step.offload is None:
        return []
    return _tier_rows(plan.step.offload.tier, plan.layout, plan.program, plan.makespan)


def _tier_rows(
    tier: Tier, layout: Layout | None, program: Program | PartsTier, makespan: float
) -> list[list[str]]:
    if layout is None:
        return [["offloaded", f"nothing: keeping and recomputing is faster than {tier!r}"]]
    steps = layout.waits.steps
    waited = layout.waited_ns() / max(steps, 1) / 1e9
    written = program.offloaded_bytes
    rows = [
        ["second tier", repr(tier)],
        ["written in a step", format_bytes(written)],
        ["fetched in a step", format_bytes(program.fetched_bytes)],
        ["most on the tier", format_bytes(layout.nbytes)],
        ["transfers, predicted", format_seconds(program.link_time)],
        ["waits for the tier, predicted", format_seconds(program.waited)],
        ["waits for the tier, measured", format_seconds(waited) if steps else "not yet"],
    ]
    if tier.wears_out:
        daily = round(written * _DAY / makespan) if makespan else 0
        rows.append(["written in a day of such steps", f"{format_bytes(daily)}: disks wear out"])
    return rows


def parts_tier_rows(plan: PartsPlan[Any]) -> list[list[str]]:
    """Return rows on the values that the parts of a model move to a second tier and back."""
    if plan.tier is None:
        return []
    if not plan.parts.may_offload():
        return [["offloaded", f"nothing: no part has a graph for {plan.tier.offload.tier!r}"]]
    return _tier_rows(plan.tier.offload.tier, plan.tier.whole, plan.tier, plan.makespan)


def reserved_rows(plan: GraphPlan) -> list[list[str]]:
    """Return rows on allocated bytes and slack where the limit counts reserved bytes."""
    if plan.reserving is None:
        return []
    return [
        ["counted", "reserved bytes, taken by the allocator from the device"],
        ["allocated of them, predicted", format_bytes(plan.program.peak_bytes)],
        ["slack of the allocator", format_bytes(plan.executor_bytes)],
        [
            "in a private pool",
            "nothing" if plan.pool is None else format_bytes(plan.pool.pool_bytes),
        ],
    ]


def seen_rows(plan: Metered) -> list[list[str]]:
    """Return a row on the range of measured peaks, if it is wider than rounding."""
    least, most = plan.least_bytes_seen, plan.most_bytes_seen
    if not least or format_bytes(least) == format_bytes(most):
        return []
    return [["peaks seen", f"{format_bytes(least)} to {format_bytes(most)}"]]


def aside_rows(plan: Plan | GraphPlan) -> list[list[str]]:
    """Return a row on the bytes that a plan sets aside for a loss outside of it."""
    size = plan.loss_room_bytes
    if size is None:
        return []
    known = "" if plan.measured_bytes is not None else ", unknown until a step has run"
    return [["set aside for the loss", f"{format_bytes(size)}{known}"]]


def loss_rows(plan: Metered) -> list[list[str]]:
    """Return a row on the loss if less is set aside for it than it is assumed to need."""
    if not plan.short_bytes or plan.measured_bytes is not None:
        return []
    return [["assumed for the loss, not set aside", format_bytes(plan.short_bytes)]]


_COUNTED = (
    *("operations", "evictions", "operations run again"),
    *("in operations", "in running again", "in choosing"),
)


def _counted(stats: Stats) -> list[str]:
    """Return the numbers and the times of a step under the dynamic runtime, as of `_COUNTED`."""
    counts = stats.operations, stats.evictions, stats.rematerializations
    times = stats.base_ns, stats.remat_ns, stats.search_ns
    return [*map(str, counts), *(format_seconds(ns / 1e9) for ns in times)]


def dynamic_figures(plan: DynamicPlan) -> list[list[str]]:
    """Return the figures of a model whose memory is decided while it runs, and of its last step."""
    predicted = "none: no graph was captured" if plan.reason else "none"
    lines = [*_peak_rows(plan, predicted), *seen_rows(plan)]
    if plan.latest:
        step = plan.last
        stats = step.stats
        lines += [
            ["peak, counted", format_bytes(stats.peak_bytes)],
            ["peak without eviction, counted", format_bytes(stats.held_peak_bytes)],
            ["room for the loss", format_bytes(step.room_bytes)],
            *map(list, zip(_COUNTED, _counted(stats), strict=True)),
        ]
        if plan.offload is not None:
            lines += _moved_rows(step)
        if stats.overflows:
            lines.append(["times over the limit", str(stats.overflows)])
    lines.append(["set aside after metering", format_bytes(plan.reserve_bytes)])
    lines.append(["steps", str(plan.steps)])
    lines.append(["proof", plan.proved.text(plan.verify)])
    return lines


def plain_figures(plan: PlainPlan) -> list[list[str]]:
    """Return the figures of a model that runs as plain PyTorch."""
    limit = ["limit, which nothing keeps", format_bytes(plan.limit_bytes)]
    return [limit, _peak_rows(plan, "none")[-1], *seen_rows(plan)]


def why_rows(plan: Metered) -> list[list[str]]:
    """Return the table of the engines that were asked."""
    rows = [[name, (reason.splitlines() or [""])[0]] for name, reason in plan.why.items()]
    return [["engine", "why it does not run the step"], *rows]


def _moved_rows(step: StepFigures) -> list[list[str]]:
    """Return what the second tier has done in a step that was not planned."""
    stats = step.stats
    return [
        [
            "written to the second tier",
            f"{format_bytes(stats.written_bytes)}, {stats.writes} values",
        ],
        ["fetched from it", f"{format_bytes(stats.fetched_bytes)}, {stats.fetches} values"],
        ["waited for it", format_seconds(stats.waited_ns / 1e9)],
    ]


def step_rows(plan: DynamicPlan) -> list[list[str]]:
    """Return the table of the last steps."""
    rows = [["step", "peak", "operations", "evictions", "run again", "base", "again", "choosing"]]
    first = plan.steps - len(plan.latest)
    for number, step in enumerate(plan.latest, start=first + 1):
        rows.append([str(number), format_bytes(step.stats.peak_bytes), *_counted(step.stats)])
    return rows


def pieces_figures(plan: PartsPlan[Any]) -> list[list[str]]:
    """Return the figures of a model whose captured parts are planned together."""
    known = "measured" if plan.parts.is_measured else "estimated"
    return [
        *_peak_rows(plan),
        *seen_rows(plan),
        ["peak without recomputation", format_bytes(plan.unlimited_bytes)],
        ["least peak possible", format_bytes(plan.least_bytes)],
        [f"{plan.parts.label} planned", plan.parts.described()],
        ["parts, predicted", format_seconds(plan.makespan)],
        ["recomputation in them", f"{plan.recomputation:+.1%}"],
        ["between them", f"{known}, at most {format_bytes(max(plan.parts.bases.between))}"],
        *parts_tier_rows(plan),
        ["set aside after metering", format_bytes(plan.reserve_bytes)],
        ["proof", plan.proof],
    ]


def part_rows(plan: PartsPlan[Any]) -> list[list[str]]:
    """Return the table of the captured parts: kept bytes, peaks, time."""
    rows = [["part", "kept", "kept unplanned", "peak, forward", "peak, backward", "time", "slower"]]
    tier = plan.tier
    if tier is not None:
        rows[0] += ["written", "fetched"]
    parts = zip(plan.parts.names(plan.choice), plan.parts.options(), plan.choice, strict=True)
    for k, (name, options, number) in enumerate(parts):
        best = options[fastest_of(options)]
        chosen = options[number]
        slower = chosen.time_ns / best.time_ns - 1 if best.time_ns else 0.0
        rows.append(
            [
                name,
                format_bytes(chosen.kept_bytes),
                format_bytes(best.kept_bytes),
                format_bytes(int(plan.simulation.forward[k])),
                format_bytes(int(plan.simulation.backward[k])),
                format_seconds(chosen.time_ns / 1e9),
                f"{slower:+.1%}",
            ]
        )
        if tier is not None:
            rows[-1] += [format_bytes(size) for size in tier.moved_bytes(k)]
    return rows
