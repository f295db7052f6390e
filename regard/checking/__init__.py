"""Tests the laws on mechanisms and functions, on regard's models, and on transformers' models."""

from regard.checking.check import DRAWS, MODEL_KINDS, check, check_model
from regard.checking.plugins import plugin
from regard.checking.shrinking import reproducer, shrink
from regard.checking.verdicts import Verdict, Verdicts

__all__ = ["DRAWS", "MODEL_KINDS", "Verdict", "Verdicts", "check", "check_model", "plugin", "reproducer", "shrink"]
