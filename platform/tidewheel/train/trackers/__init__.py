"""The built-in trackers, one module each, and their registry."""

from __future__ import annotations

from typing import Annotated

from tidewheel.parts import Chosen, Kind
from tidewheel.train.metrics.tracker import Tracker
from tidewheel.train.trackers.prometheus import Prometheus as Prometheus
from tidewheel.train.trackers.tensorboard import TensorBoard as TensorBoard
from tidewheel.train.trackers.wandb import WeightsAndBiases as WeightsAndBiases

KIND = Kind("tracker", Tracker, __name__, "tidewheel.trackers")
DEFAULT: tuple[Tracker, ...] = (TensorBoard(), Prometheus())
ChosenTracker = Annotated[Tracker, Chosen(KIND)]
