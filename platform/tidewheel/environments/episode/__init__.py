"""What environments are made of."""
