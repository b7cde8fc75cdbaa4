"""`tidewheel data similar`: documents of a near-duplicate index that are like those in a file."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter

from tidewheel.commands.options import AsJson
from tidewheel.console import console, print_table


def similar(
    index: Annotated[str, Parameter(help="The folder near_index of an output written with dedup_near: "
                                         "{write_index: true}; s3://bucket/... too.")],
    file: Annotated[str, Parameter(help="Documents to compare with it: a JSONL, Parquet, text or other file that "
                                        "`tidewheel data run` reads.")],
    *,
    text: Annotated[str, Parameter(help="Field with a document's text.")] = "text",
    id: Annotated[str, Parameter(help="Field with a document's id. The id of a document without it is the hash of its "
                                      "text.")] = "id",
    min_jaccard: Annotated[float | None, Parameter(help="Minimum estimated similarity; default: that of the "
                                                        "index.")] = None,
    limit: Annotated[int, Parameter(help="Matches to print for each document of the file, the best first.")] = 5,
    as_json: AsJson = False,
) -> int:
    """Print the documents of a near-duplicate index that are like those in a file, with the estimated similarity.

    The similarity is the share of equal values in two MinHash signatures, computed with the settings of the index. The
    index also contains documents that near-deduplication dropped; the column `kept` is "no" for them.
    """
    from dataclasses import asdict

    from tidewheel.data.similar import SimilarityIndex

    opened = SimilarityIndex(index)
    threshold = opened.settings.min_jaccard if min_jaccard is None else min_jaccard
    signed = opened.sign_file(file, text=text, id=id)
    matches = opened.nearest(signed.signatures, min_jaccard=threshold, limit=limit)
    documents = list(zip(signed.ids, signed.lines, matches, strict=True))
    if as_json:
        results = [{"id": identity, "line": line, "matches": [asdict(match) for match in document_matches]}
                   for identity, line, document_matches in documents]
        print(json.dumps({"index": opened.uri, "indexed": len(opened), "min_jaccard": threshold,
                          "unusable": signed.unusable, "documents": results}, indent=2))
        return 0
    rows = [{"document": identity, "line": line, "like": match.id, "similarity": f"{match.similarity:.4f}",
             "kept": "yes" if match.kept else "no"}
            for identity, line, document_matches in documents for match in document_matches]
    if rows:
        print_table(rows)
    alike = sum(bool(document_matches) for document_matches in matches)
    print(f"{alike:,} of {len(documents):,} documents are like one of the {len(opened):,} in the index "
          f"(similarity {threshold:g} or more)")
    if signed.unusable:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in signed.unusable.items())
        console.print(f"records left out: {reasons}", markup=False)
    return 0
