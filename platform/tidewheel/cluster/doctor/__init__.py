"""What is missing or wrong, here or on every node of a cluster, and how to mend it: `tidewheel doctor`."""

from tidewheel.cluster.doctor.check import Check
from tidewheel.cluster.doctor.examine import diagnose

__all__ = ["Check", "diagnose"]
