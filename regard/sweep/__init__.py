"""Sweeps: many trainings of one recipe, all of a grid or what a search draws."""

from regard.sweep.run import Sweep
from regard.sweep.settings import SweepConfig, asked, configure_sweep
from regard.sweep.study import SweepError

__all__ = ["Sweep", "SweepConfig", "SweepError", "asked", "configure_sweep"]
