"""What engines are made of."""
