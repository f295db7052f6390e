"""Converting trained models: fewer key/value heads or another mechanism, taught back by distillation.

Begin with `run.py`, which does one stage after the other. `surgery.py` builds the new model, `distil.py` teaches it.
"""

from regard.convert.run import convert, resume
from regard.convert.settings import ConvertConfig
from regard.convert.surgery import ConvertError, converted

__all__ = ["ConvertConfig", "ConvertError", "convert", "converted", "resume"]
