"""KubeRay manifests: rendered through kustomize with a run's configuration put in, and checked before they are applied.

`k8s/` holds the manifests; `render` composes an overlay, components and a job; `lint` checks what came out against
closed schemas (`schemas`), the operator's own rules and ours (`rules/`). No cluster is needed, and none is asked.
"""
