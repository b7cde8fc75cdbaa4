"""Make schemas.json.gz, the closed schemas that `tidewheel k8s lint` checks manifests against.

    python -m tidewheel.kubernetes.vendor --crds FOLDER --core FOLDER

`--crds` holds CustomResourceDefinitions as their projects publish them. `--core` is a folder `v1.NN.0-local-strict` of
the package kubernetes-validate. SOURCES.md lists the sources of the file in the repository. The schemas allow only
known fields, as `kubectl apply --validate=strict` does. Descriptions are left out; repeated schemas are stored once.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from tidewheel import yaml_text

FILE = Path(__file__).parent / "schemas.json.gz"
CORE_KINDS = {
    "v1/Namespace": "namespace-v1", "v1/ServiceAccount": "serviceaccount-v1", "v1/ConfigMap": "configmap-v1",
    "v1/Secret": "secret-v1", "v1/Service": "service-v1", "v1/PersistentVolumeClaim": "persistentvolumeclaim-v1",
    "v1/ResourceQuota": "resourcequota-v1", "v1/LimitRange": "limitrange-v1",
    "apps/v1/Deployment": "deployment-apps-v1", "apps/v1/StatefulSet": "statefulset-apps-v1",
    "batch/v1/Job": "job-batch-v1", "batch/v1/CronJob": "cronjob-batch-v1",
    "networking.k8s.io/v1/NetworkPolicy": "networkpolicy-networking-v1",
    "policy/v1/PodDisruptionBudget": "poddisruptionbudget-policy-v1",
    "rbac.authorization.k8s.io/v1/Role": "role-rbac-v1",
    "rbac.authorization.k8s.io/v1/RoleBinding": "rolebinding-rbac-v1",
    "rbac.authorization.k8s.io/v1/ClusterRole": "clusterrole-rbac-v1",
    "rbac.authorization.k8s.io/v1/ClusterRoleBinding": "clusterrolebinding-rbac-v1",
    "scheduling.k8s.io/v1/PriorityClass": "priorityclass-scheduling-v1",
}
KEPT = ("type", "properties", "required", "items", "additionalProperties", "enum", "pattern", "format", "minimum",
        "maximum", "minLength", "maxLength", "minItems", "maxItems", "anyOf", "oneOf", "allOf", "not", "$ref",
        "x-kubernetes-list-map-keys")
WORTH_SHARING = 200
"""Least length, in characters of JSON, of a repeated schema that is stored once."""

Schema = dict[str, Any]


def closed(schema: Any) -> Any:
    """Return a CustomResourceDefinition's OpenAPI v3 schema as a JSON schema that allows only known fields."""
    if not isinstance(schema, dict):
        return schema
    result: Schema = {key: schema[key] for key in KEPT if key in schema}
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("anyOf", None)
        result["type"] = ["integer", "string"]
    if schema.get("nullable") and isinstance(result.get("type"), str):
        result["type"] = [result["type"], "null"]
    properties = result.get("properties")
    if properties is not None:
        result["properties"] = {name: closed(inner) for name, inner in properties.items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            result.setdefault("additionalProperties", False)
        needed = [name for name in result.pop("required", []) if "default" not in properties.get(name, {})]
        if needed:
            result["required"] = needed
    for key in ("items", "additionalProperties", "not"):
        if isinstance(result.get(key), dict):
            result[key] = closed(result[key])
    for key in ("anyOf", "oneOf", "allOf"):  # they restrict what the schema beside them has closed
        if key in result:
            result[key] = [_restriction(inner) for inner in result[key]]
    if result.get("pattern") and "(?i)" in result["pattern"]:  # Go allows the flag in the middle, Python does not
        result.pop("pattern")
    return result


def _restriction(schema: Any) -> Any:
    restriction = closed(schema)
    if isinstance(restriction, dict):
        restriction.pop("additionalProperties", None)
    return restriction


def custom_resources(folder: Path, metadata: Schema) -> dict[str, Schema]:
    """Return the schema of every served version of the definitions in a folder, by apiVersion/kind."""
    schemas = {}
    for path in sorted(folder.glob("*.yaml")):
        spec = yaml_text.load_all(path.read_text())[0]["spec"]
        for version in spec["versions"]:
            if not version["served"]:
                continue
            schema = closed(version["schema"]["openAPIV3Schema"])
            schema["properties"] |= {"metadata": metadata, "apiVersion": {"type": "string"}, "kind": {"type": "string"}}
            schema["properties"].pop("status", None)
            schema["required"] = sorted({"apiVersion", "kind", "metadata", *schema.get("required", [])})
            schemas[f"{spec['group']}/{version['name']}/{spec['names']['kind']}"] = schema
    return schemas


def core(folder: Path) -> dict[str, Schema]:
    """Return the schemas of `CORE_KINDS` by apiVersion/kind, with references replaced by their content."""
    definitions = json.loads((folder / "_definitions.json").read_text())["$defs"]

    def inlined(schema: Any, above: tuple[str, ...] = ()) -> Any:
        if isinstance(schema, list):
            return [inlined(inner, above) for inner in schema]
        if not isinstance(schema, dict):
            return schema
        if "$ref" in schema:
            name = schema["$ref"].rsplit("/", 1)[-1]
            if name in above:
                return {}
            return _quantity(name) or inlined(definitions[name], (*above, name))
        return {key: value if key == "enum" else {name: inlined(inner, above) for name, inner in value.items()}
                if key == "properties" else inlined(value, above) for key, value in schema.items()
                if key in KEPT}

    schemas = {}
    for kind, name in CORE_KINDS.items():
        schema = inlined(json.loads((folder / f"{name}.json").read_text()))
        schema["properties"].pop("status", None)
        schema["required"] = sorted({"apiVersion", "kind", "metadata", *schema.get("required", [])})
        schemas[kind] = schema
    return schemas


def _quantity(name: str) -> Schema | None:
    return {"type": ["string", "integer", "number"]} if name.endswith("resource.Quantity") else None


def shared(schemas: dict[str, Schema]) -> dict[str, Any]:
    """Return "schemas" and "definitions", to which repeated schemas are moved."""
    counts: Counter[str] = Counter()

    def count(value: Any) -> None:
        if isinstance(value, dict):
            text = json.dumps(value, sort_keys=True)
            counts[text] += 1
            if counts[text] == 1 or len(text) < WORTH_SHARING:
                for inner in value.values():
                    count(inner)
        elif isinstance(value, list):
            for inner in value:
                count(inner)

    count(list(schemas.values()))
    definitions: dict[str, Any] = {}

    def place(value: Any, is_schema: bool) -> Any:
        if isinstance(value, list):
            return [place(inner, is_schema) for inner in value]
        if not isinstance(value, dict):
            return value
        text = json.dumps(value, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:12]
        if not is_schema or counts[text] < 2 or len(text) < WORTH_SHARING:
            return {key: place(inner, key != "properties") for key, inner in value.items()}
        if name not in definitions:
            definitions[name] = {}
            definitions[name] = {key: place(inner, key != "properties") for key, inner in value.items()}
        return {"$ref": f"#/definitions/{name}"}

    placed = {kind: {key: place(inner, key != "properties") for key, inner in schema.items()}
              for kind, schema in schemas.items()}
    return {"schemas": placed, "definitions": definitions}


def main() -> None:
    """Write schemas.json.gz; the same input gives the same bytes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crds", type=Path, required=True)
    parser.add_argument("--core", type=Path, required=True)
    given = parser.parse_args()
    kinds = core(given.core)
    metadata = kinds["v1/ConfigMap"]["properties"]["metadata"]
    made = shared(kinds | custom_resources(given.crds, metadata))
    data = gzip.compress(json.dumps(made, sort_keys=True, separators=(",", ":")).encode(), 9, mtime=0)
    FILE.write_bytes(data)
    print(f"{FILE}: {len(made['schemas'])} kinds, {len(made['definitions'])} shared parts, {len(data):,} bytes")


if __name__ == "__main__":
    main()
