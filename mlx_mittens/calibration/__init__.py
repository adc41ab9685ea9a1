"""Measurements of this machine: for a call, the plan that won, or that mx did.

The package reads the file when it is imported, so this module and `store` import nothing that takes time.
"""

from .loading import load, loaded, status
from .store import Calibration, CalibrationError, Row

__all__ = ["Calibration", "CalibrationError", "Row", "load", "loaded", "status"]
