"""KubeRay manifests: render them through kustomize with a run's configuration, and check them before they are applied.

`k8s/` holds the manifests. `render` composes an overlay, components and a job. `lint` checks the result against closed
schemas (`schemas`), the operator's rules and ours (`rules/`). Neither needs a cluster.
"""
