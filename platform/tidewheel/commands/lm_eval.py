"""`tidewheel lm-eval`: lm-evaluation-harness with our models."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from tidewheel.errors import ConfigError


def lm_eval(
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True, help="Arguments of `lm_eval`, such as --model "
                                         "tidewheel --model_args run=runs/demo --tasks hellaswag.")],
) -> int:
    """Run lm-evaluation-harness, which knows runs and checkpoints as its model `tidewheel`.

    It needs the package: pip install 'tidewheel[lm-eval]'. Everything after `lm-eval` is its own: `tidewheel lm-eval
    run --help` shows its options.
    """
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        raise ConfigError("lm-evaluation-harness is not installed", where="tidewheel lm-eval",
                          fix="pip install 'tidewheel[lm-eval]'") from None
    import tidewheel.inference.lm_eval_model  # registers the model

    assert tidewheel.inference.lm_eval_model.NAME
    sys.argv = ["lm_eval", *arguments]
    cli_evaluate()
    return 0
