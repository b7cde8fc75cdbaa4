"""Job files of schedulers: Slurm, SkyPilot and Anyscale start a Ray cluster and a training run on it."""
