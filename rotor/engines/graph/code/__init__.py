"""Code of programs: actions, emitted Python, Inductor's, gradients that leave early, transfers."""
