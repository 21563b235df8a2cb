"""Figures and reports of a wrapped model's plan."""

from __future__ import annotations

import os
from typing import Any

import torch

from rotor._pytorch import devices
from rotor.meter import history
from rotor.report import plans as views
from rotor.report.about import About
from rotor.report.plot import plot_timeline
from rotor.report.text import Text
from rotor.tier.layered import LayeredTier
from rotor.units import format_bytes, format_seconds
from rotor.wrapper.driver import Driver
from rotor.wrapper.transparent import TransparentModule


class ReportingModule(TransparentModule):
    """Wrapper that shows its plan as figures, text, page and drawing."""

    _driver: Driver

    def get_expected_memory(self) -> int:
        """Return the predicted peak of a step above the level at its start; ValueError: no plan."""
        return int(self._driver.planned().predicted_bytes)

    def get_expected_makespan(self) -> float:
        """Return the predicted seconds of a step, forward and backward; ValueError: no plan."""
        return float(self._driver.planned().makespan)

    def display(self) -> str:
        """Return a table of the model's parts and the plan for each; ValueError: no plan.

        Under the dynamic engine, return a table of the latest steps.
        """
        return _with_remarks(self._driver, views.tabulate(self._driver.planned()))

    def report(self, path: str | os.PathLike[str] | None = None, *, snapshot: bool = False) -> str:
        """Return limit, predicted and measured peak, and time, as text.

        Parameters
        ----------
        path
            File to write too. ``.html``: a self-contained page with the live bytes over
            time, predicted and measured, and the kept, dropped and recomputed values. ``.json`` or
            ``.json.gz``: the same as a trace, which https://ui.perfetto.dev and chrome://tracing
            open.
        snapshot
            True to save the snapshot of CUDA's allocator beside that file, in ``.pickle``, for
            https://pytorch.org/memory_viz. It holds the history recorded by
            `rotor.memory.record_history`.

        Returns
        -------
        str
            A table, the parts of a step, and remarks.

        Raises
        ------
        ValueError
            No plan exists; the path ends otherwise; a trace is wanted of a model that runs
            without a plan, and no step was metered.
        RuntimeError
            A snapshot is wanted, and CUDA is missing.
        """
        plan = self._driver.planned()
        text = _with_remarks(self._driver, views.describe(plan))
        if path is None:
            if snapshot:
                raise ValueError("snapshot=True saves a file beside the report: give it a path")
            return text
        file = views.checked_path(path)
        if snapshot:
            history.save_snapshot(file.with_name(file.name.split(".")[0] + ".pickle"))
        views.write(plan, file, _about(self._driver, plan))
        return text

    def plot_timeline(self, ax: Any = None) -> Any:
        """Draw the live bytes of a step with matplotlib: predicted, measured, and the limit.

        The measured bytes belong to the latest metered step, brought to the clock of the
        prediction: forward, loss and backward each. On CUDA only their peak is known.

        Parameters
        ----------
        ax
            Axes to draw on; by default the axes of a new figure.

        Returns
        -------
        matplotlib.axes.Axes
            The axes of the drawing.

        Raises
        ------
        ImportError
            matplotlib is not installed; the message names the extra that installs it.
        ValueError
            No plan exists; or the plan predicts nothing, and no step was metered.
        """
        return plot_timeline(self._driver.planned(), ax)


def _about(driver: Driver, plan: Any) -> About:
    """Return the model, shapes, device and date of a plan's page."""
    device = devices.name_of(plan.device)
    if plan.device.type == "cpu":
        threads = torch.get_num_threads()
        device = f"CPU, {threads} {'thread' if threads == 1 else 'threads'}"
    module = driver.settings.module
    return About.now(type(module).__name__, _shapes(plan), device, len(driver.context.plans))


def _with_remarks(driver: Driver, text: Text) -> Text:
    """Return a text on the plan of the latest step with the shapes that it is for, and remarks."""
    plan, count = driver.planned(), len(driver.context.plans)
    remarks = list(driver.engines[0].remarks)
    offload = driver.settings.offload
    if offload is not None and isinstance(offload.tier, LayeredTier):
        remarks = [Text(str(offload.tier)), *remarks]
    room = driver.limits.room
    if room is not None and room.latest is not None:
        remarks = [Text(str(room.latest)), *remarks]
    if driver.settings.away is not None:
        remarks = [Text(_homes(driver)), *remarks]
    shapes = _shapes(plan)
    if shapes:
        others = f", one of {count} plans (model.plans)" if count > 1 else ""
        remarks = [Text(f"for inputs {shapes}{others}"), *remarks]
    return Text("\n\n".join([text, *remarks])) if remarks else text


def _homes(driver: Driver) -> str:
    """Return the sum of a model whose parameters are in a second tier."""
    assert driver.settings.away is not None
    assert driver.settings.offload is not None
    found, link = driver.settings.away.bytes_by_name(), driver.settings.offload.link
    shown = {name: format_bytes(size) for name, size in found.items()}
    text = (
        f"in the second tier: {shown['parameters']} parameters, {shown['gradients']} gradients, "
        f"{shown['states']} states\nin memory beside a step: {shown['resident']}, counted by the "
        "limit of the model"
    )
    if found["update_reads"]:
        text += f"\nan update reads {shown['update_reads']}, writes {shown['update_writes']}"
        if link is not None:
            seconds = found["update_reads"] / link.read_bytes_per_s
            seconds += found["update_writes"] / link.write_bytes_per_s
            text += f": {format_seconds(seconds)} on the link"
    return text


def _shapes(plan: Any) -> str:
    """Return the shapes of a plan's inputs."""
    return "" if plan.key is None else plan.key.shapes
