"""Converting trained models: fewer key/value heads or another mechanism, taught back by distillation."""

from regard.convert.run import ConvertConfig, convert, resume
from regard.convert.surgery import ConvertError, converted

__all__ = ["ConvertConfig", "ConvertError", "convert", "converted", "resume"]
