"""What makes a manifest wrong although its schema allows it: rules by subject, each a function of the whole set."""
