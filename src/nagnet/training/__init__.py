"""Training: optimizers by role, schedules, the loop, and matched comparisons."""
