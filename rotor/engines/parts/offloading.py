"""Second tier of a model's parts: one area for each step, in which every part has its places.

The transfers of a part begin with an idle link, and are over when its backward is. Values that a
part writes in its forward may be read back in its backward only, and stay in the tier until then,
together with those of all other parts: places of different parts do not overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from rotor.engines.graph.code.offloading import Layout, Placed, StepArea
from rotor.engines.graph.planned import follows_link
from rotor.graph.program import Program
from rotor.tier.offload import Offload


class PartsTier:
    """Use of a second tier by the parts of one plan; lists have ``None`` for the other parts."""

    def __init__(
        self,
        offload: Offload,
        programs: Sequence[Program | None],
        layouts: Sequence[Layout | None],
    ) -> None:
        self.offload = offload
        self._link = offload.link
        self.programs = [
            program if layout is not None else None
            for program, layout in zip(programs, layouts, strict=True)
        ]
        """Program of each part that moves values; ``None`` for other parts."""
        self.whole: Layout | None = None
        """Area of a step, its waits, and its traffic; ``None`` if nothing is offloaded."""
        self._layouts: list[Layout | None] = [None] * len(layouts)
        total = sum(layout.nbytes for layout in layouts if layout is not None)
        if not total:
            return
        self.whole = Layout(offload.tier, {}, {}, total)
        begin = 0
        for k, layout in enumerate(layouts):
            if layout is not None:
                offsets = {s: begin + offset for s, offset in layout.offsets.items()}
                self._layouts[k] = replace(layout, offsets=offsets, waits=self.whole.waits)
                begin += layout.nbytes

    def _moving(self) -> list[Program]:
        return [program for program in self.programs if program is not None]

    def moved_bytes(self, k: int) -> tuple[int, int]:
        """Return the bytes that part `k` writes in one step, and fetches."""
        program = self.programs[k]
        return (0, 0) if program is None else (program.offloaded_bytes, program.fetched_bytes)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that are written in one step."""
        return sum(program.offloaded_bytes for program in self._moving())

    @property
    def fetched_bytes(self) -> int:
        """Bytes that are fetched in one step."""
        return sum(program.fetched_bytes for program in self._moving())

    @property
    def link_time(self) -> float:
        """Seconds that the transfers of one step take."""
        return sum(program.link_time for program in self._moving())

    @property
    def waited(self) -> float:
        """Seconds of one step in which the parts wait for the tier."""
        return sum(program.waited for program in self._moving())

    def waited_ns(self) -> int:
        """Return the time of all waits of the plan's steps so far."""
        return 0 if self.whole is None else self.whole.waited_ns()

    def prepare(self) -> None:
        """Reserve the area of a step now, where a full disk can still be named."""
        if self.whole is not None:
            self.whole.prepare()

    def begin(self) -> PlacedStep:
        """Return the places of a new step."""
        return PlacedStep(self._layouts, None if self.whole is None else self.whole.begin_area())

    def learn(self, makespan: float) -> None:
        """Note another speed of the tier, if steps have shown one; the makespan is as planned."""
        if self.whole is not None and self._link is not None and not self.is_outdated:
            figures = (self.waited, self.link_time, makespan)
            follows_link(self.whole, self.offload, self._link, *figures)

    @property
    def is_outdated(self) -> bool:
        """True if the tier is known to have another speed than the plan counts on."""
        return self.offload.link != self._link

    def accept(self) -> None:
        """Continue with this plan at the latest speed, for which no plan was found."""
        self._link = self.offload.link


class PlacedStep:
    """Places of one step's values by part; the area stays for as long as a part needs it."""

    def __init__(self, layouts: Sequence[Layout | None] = (), area: StepArea | None = None) -> None:
        self._layouts = layouts
        self._area = area

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        area, self._area = self._area, None
        if area is not None:
            area.leave()

    def of(self, k: int) -> Placed | None:
        """Return the places of part `k` in this step; ``None`` without any."""
        layout = self._layouts[k] if self._area is not None else None
        return None if layout is None or self._area is None else Placed(layout, self._area)
