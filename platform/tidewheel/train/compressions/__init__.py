"""The built-in compressions of gradients, one module each, and their registry. None imports torch before it is used."""

from __future__ import annotations

from typing import Annotated

from tidewheel.parts import Chosen, Kind
from tidewheel.train.compression import Compression
from tidewheel.train.compressions.one_bit import OneBit as OneBit
from tidewheel.train.compressions.power_sgd import PowerSGD as PowerSGD
from tidewheel.train.compressions.quantised import Quantised as Quantised
from tidewheel.train.compressions.randomk import RandomK as RandomK
from tidewheel.train.compressions.topk import TopK as TopK

KIND = Kind("compression", Compression, __name__, "tidewheel.compressions")
ChosenCompression = Annotated[Compression, Chosen(KIND)]
