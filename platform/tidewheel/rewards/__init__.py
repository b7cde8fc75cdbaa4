"""The built-in rewards, one module each, and their registry: `tw.rewards.Gsm8k(last_number=True)`."""

from __future__ import annotations

from tidewheel.parts import Kind
from tidewheel.rewards.arithmetic import Arithmetic as Arithmetic
from tidewheel.rewards.exact_match import ExactMatch as ExactMatch
from tidewheel.rewards.gsm8k import Gsm8k as Gsm8k
from tidewheel.rewards.json_object import JsonObject as JsonObject
from tidewheel.rewards.json_schema import JsonSchema as JsonSchema
from tidewheel.rewards.python_tests import PythonTests as PythonTests
from tidewheel.rewards.regex import Regex as Regex
from tidewheel.rewards.scoring import base
from tidewheel.rewards.scoring.base import Reward

KIND = Kind("reward", Reward, __name__, "tidewheel.rewards", base.FunctionReward.of)
