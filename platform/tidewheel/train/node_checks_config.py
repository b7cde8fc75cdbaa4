"""Settings of the tests that a node must pass, and of what its earlier failures mean. Nothing here imports torch."""

from __future__ import annotations

from pydantic import Field

from tidewheel.config import Config


class NodeChecksConfig(Config):
    """Test nodes before they take part, and leave out nodes that fail again and again."""

    at_start: bool = True
    """Test each worker process before it takes part: a matrix product with a known result, memory, disk and clock; with
    the package nvidia-ml-py also the GPU's memory errors, fatal Xid errors and throttling. It takes a fraction of a
    second."""
    clock_seconds: float = Field(default=60.0, ge=0, allow_inf_nan=False)
    """Leave out a node whose clock is off by more than this; 0: any clock will do."""
    slow_link_factor: float = Field(default=4.0, ge=0, allow_inf_nan=False)
    """With a memory tier, nodes test their links to two neighbours each before they take part. A link is slow if it has
    less than the usual rate divided by this, or a round trip longer than the usual one times this. A node that most
    slow links have in common is left out; 0: test no links."""
    failures: int = Field(default=2, ge=0)
    """Leave out a node on which this many failures happened within `within_seconds`, also in earlier runs; 0: never.
    Drains, stops on request, spot nodes, errors of the run itself and losses of many nodes at once do not count."""
    within_seconds: float = Field(default=86_400.0, gt=0, allow_inf_nan=False)
    """See `failures`."""
    exclude_seconds: float = Field(default=3_600.0, gt=0, allow_inf_nan=False)
    """Leave such a node out for this long after its last failure. Twice the failures, twice the time."""
    give_up_share: float = Field(default=0.1, ge=0, lt=1)
    """Use such a node all the same if the run had fewer workers without it than this share below its largest number: a
    standby node replaces it, or the rest is nearly as fast."""
    history: str = ""
    """Folder of the nodes' history, `node_history.jsonl`; default: the folder of runs, so that all runs share it."""
