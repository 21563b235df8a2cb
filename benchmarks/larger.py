"""Compares streaming of whole blocks with plans, where parameters and Adam's states exceed a limit.

A GPT-like model and a ResNet train on the simulated accelerator of the tests, on the clock that
`tier_rivals.py` describes; parameters, gradients and states have their homes in the host's memory,
where AdamW updates them. The speed of a link is the number of times that it moves the bytes of all
parameters in the time of a forward; "one way" marks a link that moves in one direction at a time. A
limit is a share of what plain PyTorch has at most in a step, parameters included.

"streaming" has whole blocks in memory: a block is fetched while the one before it runs, forward and
backward, and goes after it; a gradient leaves when it is complete. "checkpointed" also runs every
block again in the backward. Neither takes a limit: a cell has the time, and the peak as a share.

Columns: the limit as a share; bytes of parameters and states over it; the speed; a step's time over
plain's, without the update: rotor's, measured and (predicted), and those of streaming; bytes moved
over those of the parameters; the hidden share of the transfers' time; measured peak over the limit.
The exit code is 1 where rotor passed a limit, or was slower than a way of streaming that fits in
it.

    python benchmarks/larger.py [--speeds .5 1 2] [--shares .5 .33 .2] [--quick]
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from tier_rivals import LATENCY_NS, Blocks, Subject, gpt, line_of, resnet, sim, start_clock
from torch import nn
from torch.utils.checkpoint import checkpoint

import rotor
from rotor.graph import Program
from rotor.tier import HostTier

SPEEDS = (0.5, 1.0, 2.0)
SHARES = (0.5, 0.33, 0.2)
WARM_STEPS = 6


class OneWay(HostTier):
    """Memory of the host over a link that moves bytes in one direction at a time."""

    duplex = False


@dataclass
class Figures:
    """Peak of steps, with what stays between them; seconds of the last, and of its waits."""

    peak_bytes: int
    seconds: float
    waited: float = 0.0
    moving: float = 0.0


def measured(run: Callable[[], None], update: Callable[[], None], tier: Any = None) -> Figures:
    """The figures of a step after some others."""
    peaks, found = [], Figures(0, 0.0)
    for _ in range(WARM_STEPS):
        sim.synchronize()
        sim.reset_peak_memory_stats()
        before = None if tier is None else tier.traffic.copy()
        began = sim.clock_ns()
        run()
        sim.synchronize()
        found.seconds = (sim.clock_ns() - began) / 1e9
        if before is not None:
            traffic = tier.traffic.since(before)
            found.waited = traffic.waited_ns / 1e9
            found.moving = (traffic.writing_ns + traffic.reading_ns) / 1e9
        update()
        peaks.append(sim.max_memory_allocated())
    # The first steps measure the operations and the link.
    found.peak_bytes = max(peaks[2:])
    return found


class Streaming:
    """Training of blocks whose parameters are on the host, two of them in memory at a time."""

    def __init__(self, model: Blocks, *, again: bool) -> None:
        self.model = model
        self.units = [model.first, *model.blocks, model.last]
        self.reading, self.writing = torch.Stream("sim"), torch.Stream("sim")
        self.homes = {
            p: p.detach().cpu().pin_memory() for p in model.parameters() if p.requires_grad
        }
        self.copies = {p: nn.Parameter(home) for p, home in self.homes.items()}
        self.arrived: dict[int, torch.Event] = {}
        self.leaving: list[tuple[torch.Event, torch.Tensor]] = []
        self.is_backward = False
        for number, unit in enumerate(self.units):
            for parameter in unit.parameters():
                parameter.register_post_accumulate_grad_hook(self._leave)
                parameter.untyped_storage().resize_(0)
            unit.register_forward_pre_hook(lambda *_, k=number: self._enter(k))
            unit.register_forward_hook(lambda *given, k=number: self._leave_forward(k, given[2]))
        if again:
            model.run = lambda block, x: checkpoint(block, x, use_reentrant=False)

    def _begin(self, number: int) -> None:
        """Begin to fetch a unit, if it is not here."""
        if number in self.arrived or not 0 <= number < len(self.units):
            return
        for parameter in self.units[number].parameters():
            parameter.untyped_storage().resize_(parameter.nbytes)
        self.reading.wait_stream(torch.accelerator.current_stream())
        with self.reading:
            for parameter in self.units[number].parameters():
                # Of the storage: autograd must not see a change.
                home = self.homes[parameter].untyped_storage()
                parameter.untyped_storage().copy_(home, non_blocking=True)
        self.arrived[number] = self.reading.record_event()

    def _enter(self, number: int) -> None:
        """Wait for a unit, and begin to fetch the next one; those behind it go."""
        direction = -1 if self.is_backward else 1
        for behind in list(self.arrived):
            if (behind - number) * direction < 0:
                self._drop(behind)
        self._begin(number)
        torch.accelerator.current_stream().wait_event(self.arrived[number])
        self._begin(number + direction)

    def _leave_forward(self, number: int, output: torch.Tensor) -> None:
        """Drop a unit after its forward, which may be one in the backward."""
        if not self.is_backward:
            self._drop(number)
            output.register_hook(lambda _: self._enter_backward(number))

    def _enter_backward(self, number: int) -> None:
        self.is_backward = True
        self._enter(number)

    def _drop(self, number: int) -> None:
        if self.arrived.pop(number, None) is not None:
            for parameter in self.units[number].parameters():
                parameter.untyped_storage().resize_(0)

    def _leave(self, parameter: torch.Tensor) -> None:
        """Move a gradient to the host; the one before the last is there by now."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        self.writing.wait_stream(torch.accelerator.current_stream())
        with self.writing:
            moved = torch.empty_like(gradient, device="cpu", pin_memory=True)
            moved.copy_(gradient, non_blocking=True)
        self.copies[parameter].grad = moved
        self.leaving.append((self.writing.record_event(), gradient))
        while sum(g.nbytes for _, g in self.leaving[:-1]) > self._largest():
            event, _ = self.leaving.pop(0)
            torch.accelerator.current_stream().wait_event(event)

    def _largest(self) -> int:
        """Bytes of gradients that may be on their way: those of a unit."""
        return max(sum(p.nbytes for p in unit.parameters()) for unit in self.units)

    def finish(self) -> None:
        """Wait for what is on its way."""
        self.is_backward = False
        for number in list(self.arrived):
            self._drop(number)
        for event, _ in self.leaving:
            torch.accelerator.current_stream().wait_event(event)
        self.leaving.clear()


def mean_square(output: torch.Tensor) -> torch.Tensor:
    """Return the loss."""
    return output.square().mean()


def subjects(quick: bool) -> list[Subject]:
    """Models of both kinds; a small one if quick."""
    if quick:
        return [Subject("GPT, 3 blocks", partial(gpt, 96, 3), (2, 128, 96))]
    return [
        Subject("GPT, 6 blocks", gpt, (4, 128, 192)),
        Subject("ResNet, 6 blocks", partial(resnet, 96), (8, 3, 16, 16)),
    ]


def level() -> int:
    """Bytes of the device, once nothing waits to be freed."""
    gc.collect()
    sim.synchronize()
    return int(sim.memory_allocated())


def plain(model: Blocks, x: torch.Tensor) -> tuple[Figures, float]:
    """The figures of plain PyTorch, and the seconds of a forward."""
    began = sim.clock_ns()
    loss = mean_square(model(x))
    sim.synchronize()
    forward = (sim.clock_ns() - began) / 1e9
    loss.backward()
    model.zero_grad()
    return measured(lambda: mean_square(model(x)).backward(), model.zero_grad), forward


def streamed(model: Blocks, x: torch.Tensor, *, again: bool) -> Figures:
    """The figures of streaming, with the bytes beside those of the batch."""
    beside = level()
    made = Streaming(copy.deepcopy(model).to("sim"), again=again)
    optimizer = torch.optim.AdamW(made.copies.values())

    def update() -> None:
        made.finish()
        optimizer.step()
        optimizer.zero_grad()

    found = measured(lambda: mean_square(made.model(x)).backward(), update)
    found.peak_bytes -= beside
    return found


def wrapped(model: nn.Module, limit: int, **settings: Any) -> Any:
    """A model with a limit."""
    return rotor.Checkpointable(
        model,
        mem_limit=limit,
        engine="graph",
        loss_fn=mean_square,
        planning="before",
        verbosity=-1,
        **settings,
    )


def captured(model: Blocks, x: torch.Tensor) -> Figures:
    """The figures of the captured step without a limit."""
    model = copy.deepcopy(model).to("sim")
    chk = wrapped(model, 1 << 40)
    return measured(lambda: chk(x, targets=()).backward(), model.zero_grad)


def ours(
    model: Blocks, x: torch.Tensor, limit: int, tier: HostTier
) -> tuple[Figures, Program] | None:
    """Rotor's figures under a limit, and its program; None where no plan fits."""
    beside = level()
    model = copy.deepcopy(model).to("sim")
    optimizer = torch.optim.AdamW(model.parameters())
    chk = wrapped(model, limit, offload=tier, offload_state=optimizer)
    chk.measure(x, targets=())
    try:
        chk.compute_sequence()
    except rotor.InfeasibleError:
        return None

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    found = measured(lambda: chk(x, targets=()).backward(), update, tier)
    found.peak_bytes -= beside
    return found, chk.plan.program


def line(given: Sequence[str]) -> str:
    """A row in columns."""
    return line_of(given, (16, 5, 5, 12, 15, 12, 12, 8, 6, 6), left=(0, 3))


def rows_of(
    subject: Subject, shares: Sequence[float], speeds: Sequence[float], links: Sequence[bool]
) -> Iterator[tuple[str, bool]]:
    """The rows of a subject, and whether each is as it should be; `links` are duplex if true."""
    torch.manual_seed(0)
    model = subject.make()
    x = torch.randn(subject.batch, device="sim")
    size = sum(p.nbytes for p in model.parameters())
    beside = level()
    usual, forward = plain(copy.deepcopy(model).to("sim"), x)
    whole = usual.peak_bytes - beside
    free = captured(model, x)
    print(
        f"{subject.name}: parameters {size / 1e6:.2f} MB, plain {whole / 1e6:.2f} MB and "
        f"{1e3 * usual.seconds:.2f} ms; captured, without a limit, "
        f"{free.seconds / usual.seconds:.3f}",
        flush=True,
    )
    for speed, is_duplex in product(speeds, links):
        sim.set_link(speed * size / forward / 1e9, LATENCY_NS, is_duplex)
        ways = [streamed(model, x, again=again) for again in (False, True)]
        for share in shares:
            limit = int(share * whole)
            head = [subject.name, f"{share:.2f}", f"{3 * size / limit:.2f}"]
            head.append(f"{speed:g}" + ("" if is_duplex else ", one way"))
            cells = [f"{w.seconds / usual.seconds:.3f} {w.peak_bytes / whole:.2f}" for w in ways]
            tier = HostTier() if is_duplex else OneWay()
            made = ours(model, x, limit, tier)
            if made is None:
                yield line([*head, "no plan", *cells]), False
                continue
            found, program = made
            mine = f"{found.seconds / usual.seconds:.3f} ({program.makespan / usual.seconds:.3f})"
            moved = (program.fetched_bytes + program.offloaded_bytes) / size
            last = [f"{moved:.2f}", f"{1 - found.waited / found.moving:.0%}"]
            last.append(f"{found.peak_bytes / limit:.3f}")
            rivals = [w for w in ways if w.peak_bytes <= limit]
            is_right = found.peak_bytes <= limit and all(found.seconds <= w.seconds for w in rivals)
            yield line([*head, mine, *cells, *last]), is_right


def main(arguments: argparse.Namespace) -> int:
    """Print the table; 1 where a row is not as it should be."""
    warnings.simplefilter("ignore")
    start_clock()
    heads = ("model", "limit", "state", "speed", "rotor", "streaming", "checkpointed")
    found = []
    for number, subject in enumerate(subjects(arguments.quick)):
        print(line((*heads, "moved", "hidden", "peak")))
        links = (True,) if number else (True, False)
        for row, is_right in rows_of(subject, arguments.shares, arguments.speeds, links):
            print(row, flush=True)
            found.append(is_right)
    return 0 if all(found) else 1


def parsed(given: list[str]) -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--speeds", type=float, nargs="+", default=list(SPEEDS))
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    parser.add_argument("--quick", action="store_true", help="a small model")
    return parser.parse_args(given)


if __name__ == "__main__":
    raise SystemExit(main(parsed(sys.argv[1:])))
