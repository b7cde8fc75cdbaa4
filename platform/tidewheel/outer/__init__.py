"""Groups of a DiLoCo run: outer gradients, outer states and rounds, over storage."""
