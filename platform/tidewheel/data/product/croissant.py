"""`croissant.json` of a product: a machine-readable description in MLCommons' Croissant 1.0 (JSON-LD on schema.org)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tidewheel.data.product.card import header
from tidewheel.data.product.formats import FOLDERS, SUFFIXES
from tidewheel.data.product.rows import SCHEMA

_CONTEXT = {
    "@language": "en", "@vocab": "https://schema.org/", "citeAs": "cr:citeAs", "column": "cr:column",
    "conformsTo": "dct:conformsTo", "cr": "http://mlcommons.org/croissant/", "rai": "http://mlcommons.org/croissant/RAI/",
    "equivalentProperty": "cr:equivalentProperty", "samplingRate": "cr:samplingRate",
    "data": {"@id": "cr:data", "@type": "@json"}, "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/", "examples": {"@id": "cr:examples", "@type": "@json"}, "extract": "cr:extract",
    "field": "cr:field", "fileProperty": "cr:fileProperty", "fileObject": "cr:fileObject", "fileSet": "cr:fileSet",
    "format": "cr:format", "includes": "cr:includes", "isLiveDataset": "cr:isLiveDataset", "jsonPath": "cr:jsonPath",
    "key": "cr:key", "md5": "cr:md5", "parentField": "cr:parentField", "path": "cr:path", "recordSet": "cr:recordSet",
    "references": "cr:references", "regex": "cr:regex", "repeated": "cr:repeated", "replace": "cr:replace",
    "sc": "https://schema.org/", "separator": "cr:separator", "source": "cr:source", "subField": "cr:subField",
    "transform": "cr:transform"}
_MEDIA = {"parquet": "application/x-parquet", "jsonl": "application/zstd", "arrow": "application/vnd.apache.arrow.file",
          "mds": "application/octet-stream", "megatron": "application/octet-stream"}


def render(manifest: Mapping[str, Any]) -> str:
    """Return the description, a function of the manifest alone."""
    files = [{"@type": "cr:FileObject", "@id": file["name"], "name": file["name"], "contentUrl": file["name"],
              "contentSize": f"{file['bytes']} B", "encodingFormat": _MEDIA[file["format"]], "sha256": file["sha256"]}
             for file in manifest["files"]]
    card_header = header(manifest)
    parquet = sorted({file["split"] for file in manifest["files"] if file["format"] == "parquet"})
    value = {
        "@context": _CONTEXT, "@type": "sc:Dataset", "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": manifest["name"], "version": "1.0.0", "license": card_header["license"],
        "description": f"{manifest['documents']} documents, {manifest['bytes']} bytes of text, written by Tidewheel "
                       f"with the recipe {manifest['recipe_hash']}; README.md says what was done.",
        "inLanguage": card_header.get("language", []), "distribution": [*files, *map(_file_set, parquet)],
        "recordSet": [_records(split) for split in parquet]}
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def _file_set(split: str) -> dict[str, Any]:
    return {"@type": "cr:FileSet", "@id": f"parquet-{split}", "name": f"parquet-{split}",
            "encodingFormat": _MEDIA["parquet"], "includes": f"{FOLDERS['parquet']}/{split}-*{SUFFIXES['parquet']}"}


def _records(split: str) -> dict[str, Any]:
    """Return the description of the columns of a split's Parquet files."""
    fields = [{"@type": "cr:Field", "@id": f"{split}/{name}", "name": name, "dataType": "sc:Text",
               "source": {"fileSet": {"@id": f"parquet-{split}"}, "extract": {"column": name}}}
              for name in SCHEMA.names]
    return {"@type": "cr:RecordSet", "@id": split, "name": split, "field": fields}
