"""What the objectives of preference pairs share: log-probabilities of answers, and losses as functions of them."""
