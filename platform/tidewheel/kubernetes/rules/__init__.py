"""Rules beyond the schemas, by subject. Each is a function of all manifests."""
