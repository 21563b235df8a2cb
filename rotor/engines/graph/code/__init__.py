"""Code of programs: actions, emitted Python, gradients that leave early, transfers."""
