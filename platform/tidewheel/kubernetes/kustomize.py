"""Build kustomizations with kustomize if it is installed, else with the part of it that k8s/ needs.

`build` runs `kustomize build` or `kubectl kustomize`. Without either, `build_here` supports resources, components,
configMapGenerator, patches (JSON 6902, and deletion), replacements, namespace, labels, images and nameReference, and
refuses anything else. tests/k8s compares the two, object by object, for every overlay with every component.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidewheel.errors import ConfigError
from tidewheel.kubernetes.documents import manifests, read
from tidewheel.kubernetes.problem import Manifest, get, name_of

WHERE_TO_GET = ("https://kubectl.docs.kubernetes.io/installation/kustomize/ (kustomize 5, one file), or any kubectl "
                "from 1.27 on")
KNOWN = {"apiVersion", "kind", "resources", "components", "configMapGenerator", "patches", "replacements", "namespace",
         "labels", "images", "configurations"}
ORDER = ("Namespace", "ResourceQuota", "StorageClass", "CustomResourceDefinition", "ServiceAccount", "Role",
         "ClusterRole", "RoleBinding", "ClusterRoleBinding", "ConfigMap", "Secret", "Service", "LimitRange",
         "PriorityClass", "Deployment", "StatefulSet", "CronJob", "PodDisruptionBudget")
TIMEOUT_SECONDS = 60.0


def command() -> list[str] | None:
    """Return the command of the installed kustomize; None without one."""
    if path := shutil.which("kustomize"):
        return [path, "build"]
    if path := shutil.which("kubectl"):
        return [path, "kustomize"]
    return None


def build(folder: Path) -> list[Manifest]:
    """Return the objects of a kustomization, built by kustomize if it is installed.

    Raises:
        ConfigError: the kustomization is wrong, or needs kustomize, which is not installed.
    """
    tool = command()
    return build_here(folder) if tool is None else build_with(tool, folder)


def build_with(tool: list[str], folder: Path) -> list[Manifest]:
    """Return the objects of a kustomization, built by the program `tool`.

    Raises:
        ConfigError: the program refuses the kustomization.
    """
    done = subprocess.run([*tool, str(folder)], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    if done.returncode:
        message = re.sub(r'^.* err="', "", done.stderr.strip().rpartition("\n")[2])  # without the prefix of its log
        raise ConfigError(f"{Path(tool[0]).name} says: {message or 'nothing'}", where=str(folder),
                          fix="correct the kustomization, or the component it names")
    return manifests(done.stdout, str(folder))


def build_here(folder: Path) -> list[Manifest]:
    """Return the objects of a kustomization, built by this module.

    Raises:
        ConfigError: the kustomization is wrong, or needs kustomize itself.
    """
    state = _State()
    _accumulate(folder.resolve(), state)
    _add_hashes(state)
    ordered = sorted(state.objects, key=lambda manifest: (
        ORDER.index(manifest["kind"]) if manifest["kind"] in ORDER else len(ORDER), manifest["apiVersion"],
        manifest["kind"], manifest["metadata"]["name"]))
    return ordered


@dataclass
class _State:
    objects: list[Manifest] = field(default_factory=list)
    hashed: list[Manifest] = field(default_factory=list)
    """Generated ConfigMaps that get a suffix."""
    references: list[tuple[str, str, str]] = field(default_factory=list)
    """(kind referred to, kind that refers, path)."""

    def targets(self, select: dict[str, Any]) -> list[Manifest]:
        """Return the objects that a target selects: its kind and name are regular expressions."""
        return [manifest for manifest in self.objects
                if re.fullmatch(select.get("kind", ".*"), manifest["kind"])
                and re.fullmatch(select.get("name", ".*"), manifest["metadata"]["name"])]


def _accumulate(folder: Path, state: _State) -> None:
    path = folder / "kustomization.yaml"
    if not path.is_file():
        raise ConfigError("no kustomization.yaml", where=str(folder), fix="name a folder of k8s/ that has one")
    spec = read(path.read_text(), str(path))[0]
    if unknown := sorted(set(spec) - KNOWN):
        raise ConfigError(f"{', '.join(unknown)} needs kustomize, which is not installed", where=str(path),
                          fix=f"install it: {WHERE_TO_GET}")
    _stay_inside(folder, spec)
    for name in spec.get("configurations", []):
        for reference in read((folder / name).read_text(), str(folder / name))[0].get("nameReference", []):
            state.references += [(reference["kind"], fields["kind"], fields["path"])
                                 for fields in reference["fieldSpecs"]]
    inner = _State(references=state.references)
    for name in spec.get("resources", []):
        if (folder / name).is_dir():
            _accumulate(folder / name, inner)
        elif (folder / name).is_file():
            inner.objects += manifests((folder / name).read_text(), str(folder / name))
        else:
            raise ConfigError(f"resource {name!r} does not exist", where=str(path), fix="correct the path")
    if spec.get("kind") == "Component":  # changes the objects so far, and those that it adds
        state.objects += inner.objects
        state.hashed += inner.hashed
        inner = state
    for name in spec.get("components", []):
        _accumulate(folder / name, inner)
    for generator in spec.get("configMapGenerator", []):
        _generate(folder, generator, inner)
    for patch in spec.get("patches", []):
        _patch(patch, inner, str(path))
    if namespace := spec.get("namespace"):
        _namespace(inner.objects, namespace)
    for label in spec.get("labels", []):
        for manifest in inner.objects:
            manifest["metadata"].setdefault("labels", {}).update(label["pairs"])
    for image in spec.get("images", []):
        _image(inner.objects, image)
    for replacement in spec.get("replacements", []):
        _replace(replacement, inner, str(path))
    if inner is not state:
        state.objects += inner.objects
        state.hashed += inner.hashed
    names = [(manifest["apiVersion"], name_of(manifest)) for manifest in state.objects]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{twice[1]} occurs twice", where=str(path), fix="name each resource once")


def _stay_inside(folder: Path, spec: dict[str, Any]) -> None:
    """Refuse files outside the folder, as kustomize does; folders may be anywhere."""
    names = [*spec.get("configurations", []), *spec.get("resources", [])]
    names += [entry.rpartition("=")[2] for generator in spec.get("configMapGenerator", [])
              for entry in generator.get("files", [])]
    for name in names:
        if not (folder / name).is_dir() and not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"the file {name!r} is outside of the folder", where=str(folder / "kustomization.yaml"),
                              fix="move it here, or turn its folder into a kustomization and refer to that")


def _generate(folder: Path, spec: dict[str, Any], state: _State) -> None:
    data = {}
    for entry in spec.get("files", []):
        key, _, file = entry.rpartition("=")
        data[key or Path(file).name] = (folder / file).read_text()
    options = spec.get("options", {})
    manifest: Manifest = {"apiVersion": "v1", "data": dict(sorted(data.items())), "kind": "ConfigMap",
                          "metadata": {"name": spec["name"]}}
    if options.get("labels"):
        manifest["metadata"]["labels"] = dict(options["labels"])
    state.objects.append(manifest)
    if not options.get("disableNameSuffixHash"):
        state.hashed.append(manifest)


def _add_hashes(state: _State) -> None:
    for manifest in state.hashed:
        if not any(manifest is present for present in state.objects):
            continue  # deleted by a patch
        name = manifest["metadata"]["name"]
        manifest["metadata"]["name"] = suffixed = f"{name}-{content_suffix(manifest)}"
        for kind, referring, path in state.references:
            for other in state.objects:
                if kind == "ConfigMap" and other["kind"] == referring:
                    _rename(other, path.split("/"), name, suffixed)


def content_suffix(manifest: Manifest) -> str:
    """Return the ten characters that kustomize appends to the name of a ConfigMap that it generates."""
    text = json.dumps({"data": manifest["data"], "kind": "ConfigMap", "name": ""},  # kustomize hashes an empty name
                      sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":  # as Go's encoding/json
        text = text.replace(character, f"\\u{ord(character):04x}")
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    return digest.translate(str.maketrans("013ae", "ghkmt"))  # kustomize avoids vowels and similar characters


def _rename(value: Any, path: list[str], old: str, new: str) -> None:
    if isinstance(value, list):
        for inner in value:
            _rename(inner, path, old, new)
    elif isinstance(value, dict) and path[0] in value:
        if len(path) > 1:
            _rename(value[path[0]], path[1:], old, new)
        elif value[path[0]] == old:
            value[path[0]] = new


def _patch(spec: dict[str, Any], state: _State, where: str) -> None:
    documents = read(spec.get("patch", ""), where)
    if set(spec) - {"target", "patch"} or "target" not in spec or len(documents) != 1:
        raise ConfigError("a patch without a target, or not inline, needs kustomize itself", where=where,
                          fix=f"install it: {WHERE_TO_GET}")
    patch, targets = documents[0], state.targets(spec["target"])
    if isinstance(patch, dict):
        if patch.get("$patch") != "delete":
            raise ConfigError("a strategic-merge patch needs kustomize itself", where=where,
                              fix=f"write it as JSON 6902, or install kustomize: {WHERE_TO_GET}")
        state.objects[:] = [manifest for manifest in state.objects if not any(manifest is target for target in targets)]
        return
    for manifest in targets:
        for operation in patch:
            apply_operation(manifest, operation, where=f"{where}: {name_of(manifest)}")


def apply_operation(document: Any, operation: dict[str, Any], *, where: str) -> None:
    """Apply one operation of a JSON patch (RFC 6902: add, remove, replace, test) to `document`, in place.

    Args:
        document: the object to change.
        operation: the operation.
        where: name of the object and the patch, for errors.

    Raises:
        ConfigError: the path does not exist, or a test fails.
    """
    kind = operation["op"]
    pointer = operation["path"]
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
    try:
        for part in parents:
            document = document[int(part)] if isinstance(document, list) else document[part]
        key: Any = last
        if isinstance(document, list):
            key = len(document) if last == "-" else int(last)
        if kind != "add":
            document[key]
        if kind == "remove":
            del document[key]
        elif kind == "add" and isinstance(document, list):
            document.insert(key, copy.deepcopy(operation["value"]))
        elif kind in ("add", "replace"):
            document[key] = copy.deepcopy(operation["value"])
        elif kind == "test" and document[key] != operation["value"]:
            raise ConfigError(f"{pointer} is {document[key]!r}, a patch is for {operation['value']!r}", where=where,
                              fix="the list has changed: correct the indices of the patch")
        elif kind != "test":
            raise ConfigError(f"operation {kind!r} is not supported", where=where, fix="add, remove, replace, test")
    except (KeyError, IndexError, ValueError, TypeError):
        raise ConfigError(f"{pointer} does not exist", where=where, fix="correct the path of the patch") from None


def _namespace(objects: list[Manifest], namespace: str) -> None:
    accounts = {manifest["metadata"]["name"] for manifest in objects if manifest["kind"] == "ServiceAccount"}
    for manifest in objects:
        if manifest["kind"] == "Namespace":
            manifest["metadata"]["name"] = namespace
            continue
        if manifest["kind"] in ("ClusterRole", "ClusterRoleBinding", "PriorityClass", "StorageClass"):
            continue
        before, manifest["metadata"]["namespace"] = manifest["metadata"].get("namespace"), namespace
        for subject in manifest.get("subjects", []):
            if subject.get("name") in accounts and subject.get("namespace") in (None, before):
                subject["namespace"] = namespace


def _image(value: Any, image: dict[str, Any]) -> None:
    for containers in _containers(value):
        for container in containers:
            name, _, tag = split_image(container.get("image", ""))
            if name == image["name"]:
                container["image"] = image.get("newName", name) + f":{image.get('newTag', tag)}"


def split_image(image: str) -> tuple[str, str, str]:
    """Return name, separator, and tag or digest of a container image; a registry's port belongs to the name."""
    if "@" in image:
        name, _, digest = image.partition("@")
        return name, "@", digest
    head, slash, last = image.rpartition("/")
    name, colon, tag = last.partition(":")
    return head + slash + name, colon, tag


def _containers(value: Any) -> Iterator[list[dict[str, Any]]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("containers", "initContainers") and isinstance(inner, list):
                yield inner
            else:
                yield from _containers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _containers(inner)


def _replace(spec: dict[str, Any], state: _State, where: str) -> None:
    source = dict(spec["source"])
    path = source.pop("fieldPath").split(".")
    matches = [manifest for manifest in state.objects
             if manifest["kind"] == source["kind"] and manifest["metadata"]["name"] == source["name"]]
    if len(matches) != 1 or (value := get(matches[0], *path)) is None:
        raise ConfigError(f"nothing to copy: {source['kind']} {source['name']} has no {'.'.join(path)}", where=where,
                          fix="put the component after the resource that it copies from")
    for target in spec["targets"]:
        for manifest in state.targets(target["select"]):
            for field_path in target["fieldPaths"]:
                *parents, last = field_path.split(".")
                node = manifest
                for part in parents:
                    node = node.setdefault(part, {})
                node[last] = copy.deepcopy(value)
