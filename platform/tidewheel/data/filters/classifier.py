"""A filter that applies a quality classifier in fastText's format (DCLM: Li et al. 2024, arXiv:2406.11794)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from tidewheel.data.fasttext import HIGH_QUALITY
from tidewheel.data.filter import Batch, Filter, Limits, Verdicts
from tidewheel.versions import Version

REASON = "classifier_score"


class Classifier(Filter):
    """Keep documents to which a classifier gives a high score."""

    VERSION: ClassVar[Version | None] = Version("filter_classifier")
    ORDER: ClassVar[int] = 90
    WRITES: ClassVar[bool] = True
    FILES: ClassVar[tuple[str, ...]] = ("file",)

    file: str
    """The model; `tidewheel data train-classifier` trains one."""
    label: str = HIGH_QUALITY
    """Label whose probability is the score."""
    min_score: float = Field(default=0.018112, ge=0, le=1)
    """Minimum score. The default keeps about the best 10 % with DCLM's model; for your own model use the value that
    train-classifier prints, or look at the histogram."""
    as_quality: bool = False
    """Of duplicates, keep the one with the higher score; length and id decide only between equal scores."""

    def check(self) -> None:
        """Check the model and its label.

        Raises:
            ConfigError: the model cannot be used, or it does not have the label.
        """
        from tidewheel.data.fasttext import model
        from tidewheel.errors import ConfigError

        labels = model.layout(self.file).labels
        if self.label not in labels:
            raise ConfigError(f"the model has no label {self.label!r}; there are: {', '.join(labels[:8])}",
                              where="filter.classifier.label", fix="set it to the label of the documents to keep")

    def packages(self) -> dict[str, str]:
        """Return the version of the package that applies the model."""
        from tidewheel.data.fasttext import model

        return model.versions()

    def limits(self) -> Limits:
        """Return the minimum score."""
        return {"classifier_score": (self.min_score, None)}

    def apply(self, batch: Batch) -> Verdicts:
        """Judge documents.

        Returns:
            `REASON` for each dropped document; the statistic classifier_score, and with `as_quality` the quality.

        Raises:
            ConfigError: the model cannot be used.
            InputError: the file is missing.
        """
        import numpy as np

        from tidewheel.data.fasttext import model

        scores = model.load(self.file).scores(batch.texts.to_pylist(), self.label)
        reasons = [REASON if score < self.min_score else "" for score in scores.astype(np.float64).tolist()]
        return Verdicts(reasons, {"classifier_score": scores.astype(np.float64)},
                        quality=scores if self.as_quality else None)
