"""Measuring a machine for `mpiflow calibrate`: what is timed, and how it becomes a file."""
