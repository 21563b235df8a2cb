"""Headings of pages: the subject of a plan, and the command that made the page."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_NO_COMMANDS = ("", "-c", "-m", "-", "ipykernel_launcher.py", "__mp_main__")


@dataclass(frozen=True)
class About:
    """Subject of a plan, as the heading of its page."""

    model: str = ""
    inputs: str = ""
    """Shapes and types of the inputs."""
    device: str = ""
    moment: str = ""
    command: str = ""
    plans: int = 1
    """Number of plans of the model, one for each kind of inputs."""

    @classmethod
    def now(cls, model: str = "", inputs: str = "", device: str = "", plans: int = 1) -> About:
        """Return a heading with the date, the time, and the command of this process."""
        moment = datetime.now().strftime("%Y-%m-%d %H:%M")
        return cls(model, inputs, device, moment, command_line(), plans)

    def title(self, limit: str) -> str:
        """Return the title of a page on a plan within a limit."""
        return f"{self.model or 'A training step'} within {limit}" if limit else self.model

    @property
    def facts(self) -> list[str]:
        """Parts of the line below the title."""
        plans = f"one of {self.plans} plans of this model" if self.plans > 1 else ""
        inputs = f"inputs {self.inputs}" if self.inputs else ""
        return [part for part in (inputs, self.device, plans, self.moment) if part]


def command_line() -> str:
    """Return the command of this process; empty in a notebook or at a prompt."""
    program, *rest = sys.argv or [""]
    path = Path(program)
    if path.name in _NO_COMMANDS:
        return ""
    if path.name == "__main__.py":
        return shlex.join(["python", "-m", path.parent.name, *rest])
    start = ["python"] if path.suffix == ".py" else []
    return shlex.join([*start, path.name, *rest])
