"""The built-in adapters, one module each, and their registry. Nothing imports torch before a model is built."""

from __future__ import annotations

from typing import Annotated

from tidewheel.models.adapter import Adapter
from tidewheel.models.adapters.bottleneck import Bottleneck as Bottleneck
from tidewheel.models.adapters.dora import Dora as Dora
from tidewheel.models.adapters.ia3 import Ia3 as Ia3
from tidewheel.models.adapters.lora import Lora as Lora
from tidewheel.models.adapters.prefix_tuning import PrefixTuning as PrefixTuning
from tidewheel.models.adapters.prompt_tuning import PromptTuning as PromptTuning
from tidewheel.parts import Chosen, Kind

KIND = Kind("adapter", Adapter, __name__, "tidewheel.adapters")
ChosenAdapter = Annotated[Adapter, Chosen(KIND)]
