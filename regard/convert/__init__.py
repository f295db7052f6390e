"""Converting trained models to fewer key/value heads or another mechanism, by surgery, distillation and uptraining.

Start reading at `run.py`, which does one stage after another. `surgery.py` builds the new model, `distil.py` trains it.
"""

from regard.convert.run import convert, resume
from regard.convert.settings import ConvertConfig
from regard.convert.surgery import ConvertError, converted

__all__ = ["ConvertConfig", "ConvertError", "convert", "converted", "resume"]
