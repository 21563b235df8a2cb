"""Remarks and particulars of a wrapped model for its reports."""

from __future__ import annotations

from typing import Any

import torch

from rotor._pytorch import devices
from rotor.report.about import About
from rotor.report.text import Text
from rotor.wrapper.driver import Driver

__all__ = ["about", "with_remarks"]


def about(driver: Driver, plan: Any) -> About:
    """Return the model, shapes, device and date of a plan's page."""
    device = devices.name_of(plan.device)
    if plan.device.type == "cpu":
        threads = torch.get_num_threads()
        device = f"CPU, {threads} {'thread' if threads == 1 else 'threads'}"
    module = driver.settings.module
    return About.now(type(module).__name__, _shapes(plan), device, len(driver.context.plans))


def with_remarks(driver: Driver, text: Text) -> Text:
    """Return a text on the plan of the latest step with the shapes that it is for, and remarks."""
    plan, count = driver.planned(), len(driver.context.plans)
    remarks = driver.engines[0].remarks(plan, driver.context.latest_key)
    room = driver.limits.room
    if room is not None and room.latest is not None:
        remarks = [Text(str(room.latest)), *remarks]
    shapes = _shapes(plan)
    if shapes:
        others = f", one of {count} plans (model.plans)" if count > 1 else ""
        remarks = [Text(f"for inputs {shapes}{others}"), *remarks]
    return Text("\n\n".join([text, *remarks])) if remarks else text


def _shapes(plan: Any) -> str:
    """Return the shapes of a plan's inputs."""
    return "" if plan.key is None else plan.key.shapes
