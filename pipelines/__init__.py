"""Pipeline definitions to start from: YAML for `tidewheel data run`, Python that composes the SDK."""
