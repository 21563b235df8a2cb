"""``python -m rotor``: the command line."""

from __future__ import annotations

from rotor.commands.main import main

if __name__ == "__main__":
    raise SystemExit(main())
