"""The version of mpiflow; a plan runs on the version that made it."""

__version__ = "0.1.0"
