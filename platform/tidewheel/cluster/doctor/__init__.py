"""`tidewheel doctor`: find what is missing or wrong on this machine or on every node of a cluster, with a fix."""

from tidewheel.cluster.doctor.check import Check
from tidewheel.cluster.doctor.examine import diagnose

__all__ = ["Check", "diagnose"]
