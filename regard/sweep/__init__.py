"""Sweeps: many trainings of one recipe, with all settings of a grid or those chosen by a search."""

from regard.sweep.run import Sweep
from regard.sweep.settings import SweepConfig, asked, configure_sweep
from regard.sweep.study import SweepError

__all__ = ["Sweep", "SweepConfig", "SweepError", "asked", "configure_sweep"]
