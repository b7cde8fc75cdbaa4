"""What distillation needs: divergences of two distributions, and sums of them with few logits in memory at a time."""
