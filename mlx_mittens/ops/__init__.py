"""The ops, by family. They come with this machine's calibration and the ops that are switched off."""

from .. import calibration as _calibration
from .. import switches as _switches
from . import attention, cache, moe, norm, recurrence, recurrent_layers, sampling
from . import matmul as _matmul  # an op has the family's name
from .attention import *
from .cache import *
from .matmul import *
from .moe import *
from .norm import *
from .recurrence import *
from .recurrent_layers import *
from .sampling import *

__all__: list[str] = []
__all__ += attention.__all__
__all__ += cache.__all__
__all__ += _matmul.__all__
__all__ += moe.__all__
__all__ += norm.__all__
__all__ += recurrence.__all__
__all__ += recurrent_layers.__all__
__all__ += sampling.__all__

_calibration.load()

if _switches.disabled():
    from ..patching.targets import TARGETS as _TARGETS  # which imports the ops: they are all here

    _switches.check([*__all__, *(target.switch for target in _TARGETS)])
