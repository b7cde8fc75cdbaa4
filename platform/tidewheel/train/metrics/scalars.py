"""Name the numbers of a record by group: train/loss, speed/mfu, validation/web/loss, tasks/arc/acc."""

from __future__ import annotations

from tidewheel.train.metrics.sinks import Record

GROUPS = {
    "speed": ("tokens_per_second", "tokens_per_second_per_worker", "mfu", "step_seconds", "data_wait_seconds",
              "world_size"),
    "memory": ("host_resident_bytes", "device_allocated_bytes", "device_reserved_bytes", "device_peak_bytes"),
    "gpu": ("least_clock_mhz", "highest_temperature_c", "throttled_gpus"),
    "checkpoint": ("failed_saves", "kept_step", "keep_waits", "skipped_keeps")}
"""Names of each group; all others are in the group "train"."""
_GROUP = {name: group for group, names in GROUPS.items() for name in names}
_NO_CURVE = frozenset({"step", "time", "generation", "validation_loss"})


def scalars(record: Record) -> dict[str, float]:
    """Return {tag: value} of a record's numbers, by group."""
    values = {f"{_GROUP.get(name, 'train')}/{name}": float(value) for name, value in record.items()
              if isinstance(value, int | float) and name not in _NO_CURVE}
    values |= {f"objective/{name}": float(value) for name, value in record.get("objective", {}).items()
               if isinstance(value, int | float)}
    values |= {f"sources/{name}/loss": float(figures["loss"]) for name, figures in record.get("sources", {}).items()
               if figures["loss"] is not None}
    for domain, figures in record.get("validation", {}).items():
        prefix = f"validation/{domain}/" if domain else "validation/"
        values |= {f"{prefix}{name}": float(value) for name, value in figures.items() if isinstance(value, int | float)}
    for task, figures in record.get("tasks", {}).items():
        values |= {f"tasks/{task}/{name}": float(value) for name, value in figures.items()}
    return values
